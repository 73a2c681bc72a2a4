"""Optimizers on local storage: `wrap` makes a torch optimizer update this rank's shards as plain tensors, fused."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardc.errors import InputError
from shardc.runtime.module import ShardedModule
from shardc.runtime.norm import local_grad
from shardc.runtime.storage import like_parameter

# They compute each element from that element's own history, so that a shard's update is the shard of the update.
ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.ASGD, torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW,
    torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
)  # fmt: skip
# State that is one number a parameter, also where the parameter is one number.
_NUMBERS = ("step", "mu_product", "eta", "mu")


def wrap(
    optimizer_cls: type[torch.optim.Optimizer],
    module: nn.Module,
    params: Iterable[Any] | None = None,
    *,
    elementwise: bool = False,
    **options: Any,
) -> Any:
    """An optimizer of ``optimizer_cls`` for the parameters of ``module``, whose step runs on plain local tensors.

    The same updates as ``optimizer_cls(module.parameters(), **options)``, without DTensor's dispatch of each op, and by
    the class's fused kernel where it has one and ``options`` ask for no other. Outside it is an ordinary optimizer:
    ``param_groups`` hold the module's parameters, ``state`` and ``state_dict()`` hold DTensors laid out as the
    parameters are (in the same memory that the step writes), so that schedulers, hooks, ``clip_grad_norm_`` and
    `torch.distributed.checkpoint` work as they are, and checkpoints of one kind load into the other.

    Args:
        optimizer_cls: one of `ELEMENTWISE`, or a class derived from one of them.
        module: from `shardc.compile`, on a device mesh.
        params: parameters of ``module``, or groups of them, as torch takes them; by default all.
        elementwise: states that another class computes each element from its own history alone.
        options: of ``optimizer_cls``.

    Raises:
        InputError: ``module`` holds no shards, a parameter that is not the module's, or an optimizer that looks at a
            parameter as a whole.
    """
    if not isinstance(module, ShardedModule) or module.shardc.device_mesh is None:
        what = "was compiled for an abstract mesh" if isinstance(module, ShardedModule) else "is not from compile"
        raise InputError(f"the module {what} and holds no shards", fix="pass shardc.compile(model, device_mesh, plan)")
    if not elementwise and not issubclass(optimizer_cls, ELEMENTWISE):
        raise InputError(
            f"{optimizer_cls.__name__} is not known to compute each element by itself: run on shards, it may differ",
            fix=f"use it as it is, {optimizer_cls.__name__}(module.parameters(), ...), or pass elementwise=True",
        )
    kind: Any = optimizer_cls
    made = _on_shards(kind)(module.parameters() if params is None else params, **options)
    made.bind({id(param): name for name, param in module.named_parameters()})
    return made


@lru_cache(maxsize=64)
def _on_shards(base: Any) -> Any:
    return type(f"Sharded{base.__name__}", (_OnShards, base), {"base": base, "__module__": __name__})


class _OnShards(torch.optim.Optimizer):
    """Mixed in before the optimizer's class, ``base``."""

    base: Any
    _names: dict[int, str]
    _shards: dict[nn.Parameter, nn.Parameter]

    def bind(self, names: dict[int, str]) -> None:
        """Takes the names of the module's parameters by id."""
        self._names, self._shards = names, {}
        for group in self.param_groups:
            for param in group["params"]:
                if id(param) not in names:
                    raise InputError(
                        f"a parameter of shape {list(param.shape)} is none of the module's",
                        fix="pass module.parameters(), or groups of them",
                    )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. On all shards of a group it is one call of the fused kernel."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups, state = self.param_groups, self.state
        shards = {param: self._shard(param) for group in groups for param in group["params"]}
        self.param_groups = [_local_group(group, shards) for group in groups]
        fused = {shard for group in self.param_groups if group.get("fused") for shard in group["params"]}
        self.state = defaultdict(dict)
        for param, shard in shards.items():
            if param in state:
                self.state[shard] = {
                    key: _local(key, x, shard.device if shard in fused else None) for key, x in state[param].items()
                }
        try:
            _plain_step(self.base)(self)
            found = self.state
        finally:
            self.param_groups, self.state = groups, state
        for param, shard in shards.items():
            shard.grad = None
            if shard in found:
                kept = state[param]
                for key, x in found[shard].items():
                    kept[key] = _as_dtensor(key, x, param, kept.get(key))
        return loss

    def _shard(self, param: nn.Parameter) -> nn.Parameter:
        """The local tensor of ``param`` as a parameter in the same memory, with its gradient."""
        local = param._local_tensor  # type: ignore[attr-defined]
        shard = self._shards.get(param)
        if shard is None or not _same(shard, local):
            shard = self._shards[param] = nn.Parameter(local, requires_grad=param.requires_grad)
        if param.grad is not None:
            grad = local_grad(self._names.get(id(param), "?"), param)
            if grad.dtype != shard.dtype:
                shard.grad_dtype = grad.dtype
            shard.requires_grad_(True)
            shard.grad = grad
        return shard


def _same(shard: Tensor, local: Tensor) -> bool:
    """Whether both are the same memory, seen alike."""
    return (
        shard.data_ptr() == local.data_ptr()
        and shard.shape == local.shape
        and shard.stride() == local.stride()
        and shard.dtype == local.dtype
    )


def _local_group(group: dict[str, Any], shards: dict[nn.Parameter, nn.Parameter]) -> dict[str, Any]:
    """The group with shards for parameters, to run fused if that can be and nothing else is asked for."""
    mine = [shards[param] for param in group["params"]]
    out = {**group, "params": mine}
    asked = any(group.get(name) for name in ("foreach", "differentiable", "capturable")) or group.get("fused") is False
    plain = all(shard.is_floating_point() and (shard.grad is None or shard.grad.dtype == shard.dtype) for shard in mine)
    if "fused" in group and not asked and plain:
        out["fused"] = True
    return out


def _plain_step(base: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """The step of ``base`` without torch's hooks around it, which run around ours."""
    step: Any = base.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def _local(key: str, x: Any, fused: torch.device | None) -> Any:
    """State of a parameter as its shard has it; a fused kernel wants the count of steps on its own device."""
    if isinstance(x, DTensor):
        return x._local_tensor
    return x.to(fused) if key == "step" and fused is not None and isinstance(x, Tensor) else x


def _as_dtensor(key: str, x: Any, param: nn.Parameter, known: Any) -> Any:
    """State of a shard as its parameter has it; what is known already stays the same object."""
    local = param._local_tensor  # type: ignore[attr-defined]
    if not isinstance(x, Tensor) or key in _NUMBERS or x.shape != local.shape:
        return x
    if isinstance(known, DTensor) and known._local_tensor is x:
        return known
    return like_parameter(x, param)
