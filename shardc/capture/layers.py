"""Replaces layers, for a trace, that cannot be traced in their own form."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


@contextmanager
def other_layers(root: nn.Module) -> Iterator[None]:
    """Patches layers of ``root`` that cannot be traced; undoes it on exit.

    - Cumulative averages of a batch norm (``momentum=None``) weigh a batch by a counter, used as a tensor, not as a
      number.
    - `nn.SyncBatchNorm` would call collectives: a program computes on the global batch, so it becomes a batch norm.
    - A recurrent layer has a second list of its parameters: it is rebuilt from the traced ones.
    - Models of ``transformers`` record hidden states and attentions by hooks, which the first call that asks for some
      installs, under a lock that cannot be traced. A hook does nothing in a call that asks for none. Speech models mark
      a tensor inside as requiring a gradient, for the library's own checkpoints.
    """
    before = []
    library = sys.modules.get("transformers.utils.output_capturing")
    try:
        if library is not None:
            before = [(module, dict(vars(module))) for module in root.modules()]
            for module, _ in before:
                vars(module)["_forward_hooks"] = OrderedDict(module._forward_hooks)
                if "_requires_grad" in vars(module):
                    vars(module)["_requires_grad"] = False
            for module, _ in before:
                if library._CAN_RECORD_REGISTRY.get(module):
                    library.maybe_install_capturing_hooks(module)
        for module in root.modules():
            attributes = dict(vars(module))
            if isinstance(module, nn.RNNBase):
                module._init_flat_weights()
            elif isinstance(module, _BatchNorm) and "forward" not in attributes and (forward := _other_forward(module)):
                vars(module)["forward"] = MethodType(forward, module)
            else:
                continue
            before.append((module, attributes))
        yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)


def _other_forward(module: _BatchNorm) -> Callable[..., Tensor] | None:
    if module.training and module.track_running_stats and module.momentum is None and module.running_mean is not None:
        return _cumulative
    return _BatchNorm.forward if isinstance(module, nn.SyncBatchNorm) else None


def _cumulative(self: _BatchNorm, input: Tensor) -> Tensor:
    self._check_input_dim(input)
    count, mean, var = self.num_batches_tracked, self.running_mean, self.running_var
    assert count is not None and mean is not None and var is not None
    batch_mean, batch_var = torch.zeros_like(mean), torch.zeros_like(var)
    out = F.batch_norm(input, batch_mean, batch_var, self.weight, self.bias, True, 1.0, self.eps)
    with torch.no_grad():
        count.add_(1)
        mean.add_((batch_mean - mean) / count)
        var.add_((batch_var - var) / count)
    return out
