"""Optimizers on local storage: `wrap` makes a torch optimizer update this rank's shards as plain tensors, fused."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import lru_cache
from operator import is_
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
    _shards: list[list[_Shard]]  # of each group, as the last step had them
    _local: defaultdict[Any, Any]  # their state, as the base class keeps it

    def bind(self, names: dict[int, str]) -> None:
        """Takes the names of the module's parameters by id."""
        self._names, self._shards, self._local = names, [], defaultdict(dict)
        for group in self.param_groups:
            for param in group["params"]:
                if id(param) not in names:
                    raise InputError(
                        f"a parameter of shape {list(param.shape)} is none of the module's",
                        fix="pass module.parameters(), or groups of them",
                    )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. On all shards of a group it is one call of the fused kernel.

        Shards, and their state as the base class has it, are kept from step to step; what is looked at of each
        parameter is whether its local tensor and the values of its state are the objects that they were.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups, state = self.param_groups, self.state
        self._look(groups)
        self.param_groups = [
            _local_group(group, mine, [shard.take_grad() for shard in mine])
            for group, mine in zip(groups, self._shards, strict=True)
        ]
        for group, mine in zip(self.param_groups, self._shards, strict=True):
            for shard in mine:
                shard.read(state.get(shard.param), bool(group.get("fused")), self._local)
        self.state = self._local
        try:
            _plain_step(self.base)(self)
        finally:
            self.param_groups, self.state = groups, state
            for mine in self._shards:
                for shard in mine:
                    shard.data.grad = None
        for mine in self._shards:
            for shard in mine:
                shard.write(self._local.get(shard.data), state)
        return loss

    def _look(self, groups: list[dict[str, Any]]) -> None:
        """Makes the shards anew where groups, parameters or their local tensors are not what they were."""
        if len(groups) == len(self._shards) and all(
            len(group["params"]) == len(mine) and all(map(_Shard.is_of, mine, group["params"]))
            for group, mine in zip(groups, self._shards, strict=True)
        ):
            return
        self._local = defaultdict(dict)
        self._shards = [[_Shard(p, self._names.get(id(p), "?")) for p in group["params"]] for group in groups]


class _Shard:
    """The local tensor of a parameter as a parameter in the same memory, and its state as that one has it."""

    def __init__(self, param: nn.Parameter, name: str) -> None:
        self.param, self.name = param, name
        self.local: Tensor = param._local_tensor  # type: ignore[attr-defined]
        self.data = nn.Parameter(self.local, requires_grad=self.local.is_floating_point() or self.local.is_complex())
        self.fuses = self.local.is_floating_point()
        self._dtype = self.local.dtype
        self._known: list[Any] = []  # what the parameter's state held when it was last read or written,
        self._left: list[Any] = []  # and what the shard's did

    def is_of(self, param: nn.Parameter) -> bool:
        """Whether it still is the shard of ``param``."""
        return self.param is param and param._local_tensor is self.local  # type: ignore[attr-defined]

    def take_grad(self) -> bool:
        """Takes the parameter's gradient; whether a fused kernel can take both."""
        grad: Any = self.param.grad
        if grad is None:
            return self.fuses
        if type(grad) is DTensor and grad._spec is self.param._spec:  # type: ignore[attr-defined]
            local = grad._local_tensor
        else:
            local = local_grad(self.name, self.param)
        same = local.dtype == self._dtype
        if not same:
            self.data.grad_dtype = local.dtype
        self.data.grad = local
        return self.fuses and same

    def read(self, state: dict[str, Any] | None, fused: bool, into: dict[Any, Any]) -> None:
        """The state of the parameter as the shard has it; a fused kernel wants the count of steps on its own device."""
        if not state:
            if self._known:
                into.pop(self.data, None)
                self._known, self._left = [], []
            return
        if _same(state, self._known):
            return
        mine = {key: x._local_tensor if isinstance(x, DTensor) else x for key, x in state.items()}
        step = state.get("step")
        if fused and isinstance(step, Tensor) and step.device != self.local.device:
            mine["step"] = step.to(self.local.device)
        into[self.data] = mine
        self._known, self._left = list(state.values()), []

    def write(self, mine: dict[str, Any] | None, states: dict[Any, Any]) -> None:
        """The state of the shard as the parameter has it; what is there already stays the same object."""
        if not mine or _same(mine, self._left):
            return
        state = states[self.param]
        for key, x in mine.items():
            state[key] = self._as_dtensor(key, x, state.get(key))
        self._known, self._left = list(state.values()), list(mine.values())

    def _as_dtensor(self, key: str, x: Any, known: Any) -> Any:
        if not isinstance(x, Tensor) or key in _NUMBERS or x.shape != self.local.shape:
            return x
        if isinstance(known, DTensor) and known._local_tensor is x:
            return known
        return like_parameter(x, self.param)


def _same(state: dict[str, Any], held: list[Any]) -> bool:
    """Whether ``state`` holds the very objects that it did."""
    return len(state) == len(held) and all(map(is_, state.values(), held))


def _local_group(group: dict[str, Any], shards: list[_Shard], fuses: list[bool]) -> dict[str, Any]:
    """The group with shards for parameters, to run fused if that can be and nothing else is asked for."""
    out = {**group, "params": [shard.data for shard in shards]}
    asked = any(group.get(name) for name in ("foreach", "differentiable", "capturable")) or group.get("fused") is False
    if "fused" in group and not asked and all(fuses):
        out["fused"] = True
    return out


def _plain_step(base: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """The step of ``base`` without torch's hooks around it, which run around ours."""
    step: Any = base.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step
