"""A model as it is, to show that an error left it alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

# Where modules keep their hooks.
HOOKS = [name for name in nn.Module().__dict__ if "hook" in name]


def snapshot(model: nn.Module) -> Any:
    """Everything that a compiler could change: equal snapshots mean that nothing was."""
    return {
        name: (
            type(module),
            sorted(module.__dict__),
            module.training,
            {hooks: list(getattr(module, hooks).items()) for hooks in HOOKS if getattr(module, hooks)},
            list(module._modules.items()),
            {key: _tensor(x) for held in (module._parameters, module._buffers) for key, x in held.items()},
        )
        for name, module in model.named_modules(remove_duplicate=False)
    }


def _tensor(x: Tensor | None) -> Any:
    if x is None:
        return None
    local = x.to_local() if isinstance(x, DTensor) else x
    values = None if x.device.type == "meta" or isinstance(x.detach(), FakeTensor) else local.tolist()
    return id(x), type(x), x.dtype, tuple(x.shape), str(x.device), x.requires_grad, x.grad is None, x._version, values
