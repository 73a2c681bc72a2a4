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
    _shards: dict[nn.Parameter, _Shard]

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
        stepped = [[self._shard(param) for param in group["params"]] for group in groups]
        shards = [shard for mine in stepped for shard in mine]
        self.param_groups = [_local_group(group, mine) for group, mine in zip(groups, stepped, strict=True)]
        self.state = defaultdict(dict)
        for group, mine in zip(self.param_groups, stepped, strict=True):
            for shard in mine:
                if shard.param in state:
                    self.state[shard.data] = shard.read(state[shard.param], bool(group.get("fused")))
        try:
            _plain_step(self.base)(self)
            found = self.state
        finally:
            self.param_groups, self.state = groups, state
        for shard in shards:
            shard.data.grad = None
            if shard.data in found:
                shard.write(found[shard.data], state[shard.param])
        return loss

    def _shard(self, param: nn.Parameter) -> _Shard:
        """The shard of ``param``, with its gradient."""
        local = param._local_tensor  # type: ignore[attr-defined]
        shard = self._shards.get(param)
        if shard is None or shard.local is not local:
            shard = self._shards[param] = _Shard(param, local)
        if param.grad is not None:
            grad = local_grad(self._names.get(id(param), "?"), param)
            if grad.dtype != local.dtype:
                shard.data.grad_dtype = grad.dtype
            shard.data.grad = grad
        return shard


class _Shard:
    """The local tensor of a parameter as a parameter in the same memory, and its state as that one has it."""

    def __init__(self, param: nn.Parameter, local: Tensor) -> None:
        self.param, self.local = param, local
        self.data = nn.Parameter(local, requires_grad=local.is_floating_point() or local.is_complex())
        self._state: dict[str, Any] = {}
        self._known: list[int] = []  # the ids of the parameter's state that `_state` was read from,
        self._held: list[Any] = []  # and that state, so that no other object gets these ids
        self._left: list[int] = []  # the ids of what `_state` held when it was last written back

    def read(self, state: dict[str, Any], fused: bool) -> dict[str, Any]:
        """The state of the parameter as the shard has it; a fused kernel wants the count of steps on its own device."""
        ids = [id(x) for x in state.values()]
        if ids != self._known:
            self._state = {key: x._local_tensor if isinstance(x, DTensor) else x for key, x in state.items()}
            step = state.get("step")
            if fused and isinstance(step, Tensor) and step.device != self.local.device:
                self._state["step"] = step.to(self.local.device)
            self._known, self._held, self._left = ids, list(state.values()), []
        return self._state

    def write(self, mine: dict[str, Any], state: dict[str, Any]) -> None:
        """The state of the shard as the parameter has it; what is there already stays the same object."""
        ids = [id(x) for x in mine.values()]
        if ids == self._left:
            return
        for key, x in mine.items():
            state[key] = self._as_dtensor(key, x, state.get(key))
        self._state, self._left = mine, ids
        self._held = list(state.values())
        self._known = [id(x) for x in self._held]

    def _as_dtensor(self, key: str, x: Any, known: Any) -> Any:
        if not isinstance(x, Tensor) or key in _NUMBERS or x.shape != self.local.shape:
            return x
        if isinstance(known, DTensor) and known._local_tensor is x:
            return known
        return like_parameter(x, self.param)


def _local_group(group: dict[str, Any], shards: list[_Shard]) -> dict[str, Any]:
    """The group with shards for parameters, to run fused if that can be and nothing else is asked for."""
    mine = [shard.data for shard in shards]
    out = {**group, "params": mine}
    asked = any(group.get(name) for name in ("foreach", "differentiable", "capturable")) or group.get("fused") is False
    if "fused" in group and not asked and all(
        x.is_floating_point() and ((grad := x.grad) is None or grad.dtype == x.dtype) for x in mine
    ):  # fmt: skip
        out["fused"] = True
    return out


def _plain_step(base: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """The step of ``base`` without torch's hooks around it, which run around ours."""
    step: Any = base.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step
