"""`wrap`: runs a torch optimizer on this rank's shards as plain tensors, with its fused kernel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from itertools import chain
from operator import attrgetter, is_
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adam import adam

from shardc import _compat
from shardc.errors import InputError
from shardc.runtime.gradients import local_grad
from shardc.runtime.module import ShardedModule
from shardc.runtime.storage import like_parameter
from shardc.validate import typed

# Elementwise optimizers: the update of a shard is the shard of the update.
ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.ASGD, torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW,
    torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
)  # fmt: skip
T = TypeVar("T")
# State that is a scalar per parameter, even if the parameter is one too.
_NUMBERS = ("step", "mu_product", "eta", "mu")


@typed()
def wrap(
    optimizer_cls: type[torch.optim.Optimizer],
    module: nn.Module,
    params: Iterable[Any] | None = None,
    *,
    elementwise: bool = False,
    **options: Any,
) -> Any:
    """Returns an optimizer of class ``optimizer_cls`` for ``module`` that updates plain local tensors.

    Updates equal those of ``optimizer_cls(module.parameters(), **options)``, without DTensor dispatch per op. It uses
    the class's fused kernel, unless ``options`` ask for another. From outside it is a plain optimizer: ``param_groups``
    hold the module's parameters, and ``state`` and ``state_dict()`` hold DTensors with the parameters' layouts, in the
    memory that the step writes. So schedulers, hooks, ``clip_grad_norm_`` and `torch.distributed.checkpoint` work, and
    checkpoints are interchangeable with the plain optimizer's.

    Args:
        optimizer_cls: one of `ELEMENTWISE`, or derived from one.
        module: from `shardc.compile`, on a device mesh.
        params: parameters of ``module``, or groups of them, as torch takes them; by default all.
        elementwise: promises that a class not in `ELEMENTWISE` computes each element from that element's history only.
        options: options of ``optimizer_cls``.

    Raises:
        InputError: ``module`` has no shards, a parameter is not the module's, or the optimizer may not be elementwise.
    """
    if not isinstance(module, ShardedModule) or module.shardc.spec.device_mesh is None:
        what = "was compiled for an abstract mesh" if isinstance(module, ShardedModule) else "is not from compile"
        raise InputError(f"the module {what} and holds no shards", fix="pass shardc.compile(model, device_mesh, plan)")
    if not elementwise and not issubclass(optimizer_cls, ELEMENTWISE):
        raise InputError(
            f"{optimizer_cls.__name__} may look at more than one element at a time: on shards its updates could differ",
            fix=f"use it as it is, {optimizer_cls.__name__}(module.parameters(), ...), or pass elementwise=True",
        )
    kind: Any = optimizer_cls
    optimizer = _on_shards(kind)(module.parameters() if params is None else params, **options)
    optimizer.bind({id(param): name for name, param in module.named_parameters()}, module.shardc.tells)
    return optimizer


@lru_cache(maxsize=64)
def _on_shards(base: type[torch.optim.Optimizer]) -> Any:
    """Returns a class derived from `_OnShards` and the optimizer class ``base``."""
    return type(f"Sharded{base.__name__}", (_OnShards, base), {"base": base, "__module__": __name__})


class _OnShards(torch.optim.Optimizer):
    """Mixin for a class derived from an optimizer class ``base``: runs the step of ``base`` on local tensors."""

    base: type[torch.optim.Optimizer]
    _names: dict[int, str]
    _tells: Callable[[], AbstractContextManager[None]]
    _shards: list[list[_Shard]]  # per group, as of the last step
    _tensors: list[tuple[list[nn.Parameter], list[Tensor]]]  # per group: parameters and local tensors
    _local: defaultdict[Tensor, Any]  # shard -> its state, as the base class keeps it
    _calls: list[_AdamCall] | None  # kernel calls of the last step, if they can be repeated without the base class
    _held: list[dict[str, object]]  # state of each parameter after the last step
    _values: list[object]  # all values in these states

    def bind(self, names: dict[int, str], tells: Callable[[], AbstractContextManager[None]]) -> None:
        """Sets the names of the module's parameters by id, and the context manager that shares errors between ranks."""
        self._tells, self._names, self._local, self._calls = tells, names, defaultdict(dict), None
        self._shards, self._tensors = [], []
        for group in self.param_groups:
            for param in group["params"]:
                if id(param) not in names:
                    raise InputError(
                        f"a parameter of shape {list(param.shape)} is none of the module's",
                        fix="pass module.parameters(), or groups of them",
                    )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Runs one step: a call of the fused kernel per parameter group.

        Shards and their state are kept between steps, while local tensors and state values remain the same objects.
        Adam's CPU kernel is then called directly; otherwise the step of the base class runs.
        """
        with self._tells():
            return self._step(closure)

    def _step(self, closure: Callable[[], T] | None) -> T | None:
        """Runs one step; returns the result of ``closure``, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups, state = self.param_groups, self.state
        if self._step_unchanged(groups, state):
            return loss
        self._look(groups)
        self.param_groups = local = [
            _local_group(group, mine, [shard.take_grad() for shard in mine])
            for group, mine in zip(groups, self._shards, strict=True)
        ]
        for group, mine in zip(self.param_groups, self._shards, strict=True):
            for shard in mine:
                shard.read(state.get(shard.param), bool(group.get("fused")), self._local)
        self.state = self._local
        calls = None
        # ``param_groups`` and ``state`` are those of the local tensors during the base class's step.
        try:
            _plain_step(self.base)(self)
            if _is_adam(self.base) and all(map(_AdamCall.can_be, local)):
                calls = [_AdamCall(mine, self._local) for mine in self._shards]
        finally:
            self.param_groups, self.state = groups, state
            for mine in self._shards:
                for shard in mine:
                    shard.data.grad = None
        for mine in self._shards:
            for shard in mine:
                shard.write(self._local.get(shard.data), state)
        self._calls = calls
        self._held = list(state.values())
        self._values = list(chain.from_iterable(map(dict.values, self._held)))
        return loss

    def _step_unchanged(self, groups: list[dict[str, Any]], state: Mapping[Tensor, dict[str, object]]) -> bool:
        """Repeats the kernel calls of the last step, with present gradients and options; returns False if it cannot."""
        scaled = getattr(self, "grad_scale", None) is not None or getattr(self, "found_inf", None) is not None
        if self._calls is None or scaled or not self._are_known(groups) or not self._has_same_state(state):
            return False
        gradients = [call.gradients(group) for call, group in zip(self._calls, groups, strict=True)]
        if any(grads is None for grads in gradients):
            return False
        with torch.no_grad():
            for call, group, grads in zip(self._calls, groups, gradients, strict=True):
                call(group, grads or [])
        return True

    def _has_same_state(self, state: Mapping[Tensor, dict[str, object]]) -> bool:
        """Whether ``state`` has the same objects as after the last step of the base class."""
        return (
            len(state) == len(self._held)
            and all(map(is_, state.values(), self._held))
            and sum(map(len, self._held)) == len(self._values)
            and all(map(is_, chain.from_iterable(map(dict.values, self._held)), self._values))
        )

    def _are_known(self, groups: list[dict[str, Any]]) -> bool:
        """Whether ``groups`` have the same parameters, with the same local tensors, as at the last step."""
        return len(groups) == len(self._tensors) and all(
            len(group["params"]) == len(params)
            and all(map(is_, group["params"], params))
            and all(map(is_, map(attrgetter("_local_tensor"), params), local))
            for group, (params, local) in zip(groups, self._tensors, strict=True)
        )

    def _look(self, groups: list[dict[str, Any]]) -> None:
        """Rebuilds the shards if groups, parameters or local tensors have changed."""
        if self._are_known(groups):
            return
        self._local = defaultdict(dict)
        self._shards = [[_Shard(p, self._names.get(id(p), "?")) for p in group["params"]] for group in groups]
        self._tensors = [([x.param for x in mine], [x.local for x in mine]) for mine in self._shards]


class _Shard:
    """A parameter's local tensor as a plain parameter in the same memory, with its optimizer state."""

    def __init__(self, param: nn.Parameter, name: str) -> None:
        self.param, self.name = param, name
        self.local: Tensor = param._local_tensor  # type: ignore[attr-defined]
        self.data = nn.Parameter(self.local, requires_grad=self.local.is_floating_point() or self.local.is_complex())
        self.fuses = self.local.is_floating_point()
        self.dtype = self.local.dtype
        self._known: list[object] = []  # values of the parameter's state at the last `read` or `write`
        self._left: list[object] = []  # values of the shard's state at the last `write`

    def take_grad(self) -> bool:
        """Sets the shard's gradient; returns whether a fused kernel can update the shard with it."""
        grad = self.param.grad
        if grad is None:
            return self.fuses
        local = self.gradient(grad)
        same = local.dtype == self.dtype
        if not same:
            self.data.grad_dtype = local.dtype
        self.data.grad = local
        return self.fuses and same

    def gradient(self, grad: Tensor) -> Tensor:
        """Returns the local tensor of ``grad``, the parameter's gradient."""
        if type(grad) is DTensor and grad._spec is self.param._spec:  # type: ignore[attr-defined]
            return grad._local_tensor
        return local_grad(self.name, self.param)

    def read(self, state: Mapping[str, object] | None, fused: bool, into: dict[Tensor, dict[str, object]]) -> None:
        """Copies the parameter's state to the shard, as local tensors.

        Args:
            fused: whether a fused kernel runs, which needs ``step`` on the shard's device.
            into: shard -> its state.
        """
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

    def write(self, mine: Mapping[str, object] | None, states: Mapping[Tensor, dict[str, object]]) -> None:
        """Copies the shard's state to the parameter, as DTensors; existing ones stay the same objects.

        Args:
            mine: state of the shard.
            states: parameter -> its state.
        """
        if not mine or _same(mine, self._left):
            return
        state = states[self.param]
        for key, x in mine.items():
            state[key] = self._as_dtensor(key, x, state.get(key))
        self._known, self._left = list(state.values()), list(mine.values())

    def _as_dtensor(self, key: str, x: object, dtensor: object) -> object:
        """Returns ``x``, a value of the shard's state, for the parameter's: as a DTensor if it has the shard's shape.

        Args:
            dtensor: the parameter's present value, returned if its local tensor is ``x``.
        """
        if not isinstance(x, Tensor) or key in _NUMBERS or x.shape != self.local.shape:
            return x
        if isinstance(dtensor, DTensor) and dtensor._local_tensor is x:
            return dtensor
        return like_parameter(x, self.param)


class _AdamCall:
    """The arguments of a call of Adam's fused CPU kernel for one parameter group, kept so that steps can repeat it.

    Args:
        shards: shards of the group.
        state: shard -> its state after the step.
    """

    def __init__(self, shards: list[_Shard], state: Mapping[Tensor, dict[str, Any]]) -> None:
        self._used = [shard for shard in shards if shard.data.grad is not None]
        self._unused = [shard for shard in shards if shard.data.grad is None]
        self._params: list[Tensor] = [shard.data for shard in self._used]
        states = [state[param] for param in self._params]
        self._averages, self._squares, self._steps = ([x[k] for x in states] for k in ("exp_avg", "exp_avg_sq", "step"))
        self._largest: list[Tensor] = [x["max_exp_avg_sq"] for x in states if "max_exp_avg_sq" in x]

    @staticmethod
    def can_be(group: dict[str, Any]) -> bool:
        """Whether an `_AdamCall` can do the step of ``group``: all its shards are on a CPU, and ``fused`` is true."""
        return bool(group["fused"]) and all(x.device.type == "cpu" for x in group["params"])

    def gradients(self, group: dict[str, Any]) -> list[Tensor] | None:
        """Returns the local gradients for a repeat of Adam's last fused call, in its order; None if there is none.

        Args:
            group: the parameter group as it is now: its options, or which parameters have gradients, may have changed.
        """
        if _asks_for_another(group) or (bool(group["amsgrad"]) != bool(self._largest) and self._params):
            return None
        if any(shard.param.grad is not None for shard in self._unused):
            return None
        grads = []
        for shard in self._used:
            grad = shard.param.grad
            if grad is None:
                return None
            local = shard.gradient(grad)
            if local.dtype is not shard.dtype or local.layout is not torch.strided:
                return None
            grads.append(local)
        return grads

    def __call__(self, group: dict[str, Any], grads: list[Tensor]) -> None:
        """Runs the kernel with the options of ``group``."""
        beta1, beta2 = group["betas"]
        numbers = {name: group[name] for name in ("amsgrad", "lr", "weight_decay", "eps", "maximize")}
        adam(
            self._params, grads, self._averages, self._squares, self._largest, self._steps, fused=True, beta1=beta1,
            beta2=beta2, decoupled_weight_decay=group["decoupled_weight_decay"], **numbers,
        )  # fmt: skip


def _is_adam(base: type[torch.optim.Optimizer]) -> bool:
    """Whether ``base`` inherits its step from torch's Adam."""
    plain = torch.optim.Adam
    return _plain_step(base) is _plain_step(plain) and _init_group(base) is _init_group(plain)


def _init_group(base: type[torch.optim.Optimizer]) -> object:
    """Returns the method ``_init_group`` of ``base``, unwrapped: torch.compile wraps those of torch's optimizers."""
    method = getattr(base, "_init_group", None)
    return getattr(method, _compat.COMPILED_OUT, method)


def _same(state: Mapping[str, object], values: Sequence[object]) -> bool:
    """Whether ``state`` has the same objects as ``values``."""
    return len(state) == len(values) and all(map(is_, state.values(), values))


def _local_group(group: dict[str, Any], shards: list[_Shard], fuses: list[bool]) -> dict[str, Any]:
    """Returns a copy of ``group`` with ``shards`` as parameters; fused if all can be and it asks for nothing else."""
    out = {**group, "params": [shard.data for shard in shards]}
    if "fused" in group and not _asks_for_another(group) and all(fuses):
        out["fused"] = True
    return out


def _asks_for_another(group: dict[str, Any]) -> bool:
    """Whether the options of a group ask for an implementation other than the fused kernel."""
    return any(group.get(name) for name in ("foreach", "differentiable", "capturable")) or group.get("fused") is False


def _plain_step(base: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """Returns the step of ``base`` without torch's hooks, which run around the wrapper's step."""
    step: Any = base.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step
