"""`wrap`: runs an optimizer on plain tensors: this rank's shards, or the whole parameters that this rank owns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from itertools import chain
from operator import attrgetter, is_
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from shardc import _compat
from shardc.errors import InputError
from shardc.runtime.groups import Groups
from shardc.runtime.module import ShardedModule
from shardc.runtime.owners import Owners, split_dims
from shardc.runtime.plain_params import Described, Shard, WholeParameter
from shardc.validate import typed

# Elementwise optimizers: the update of a shard is the shard of the update.
ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.ASGD, torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW,
    torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
)  # fmt: skip
# The update of a parameter is that of the whole, and no other parameter's values enter it.
PER_PARAMETER: tuple[type[torch.optim.Optimizer], ...] = (torch.optim.Adafactor, torch.optim.Muon)
T = TypeVar("T")
Select: TypeAlias = Callable[[str, nn.Parameter], bool]
pytree = _compat.pytree


@typed()
def wrap(
    optimizer_cls: type[torch.optim.Optimizer],
    module: nn.Module,
    params: Iterable[Any] | None = None,
    *,
    whole: bool | Select | None = None,
    **options: Any,
) -> Any:
    """Returns an optimizer of class ``optimizer_cls`` for ``module`` that updates plain tensors in place of DTensors.

    The plain tensors are this rank's shards if the optimizer updates each element by itself. Otherwise each parameter
    that is split has an owner among the ranks that hold it. The owners get parameters and gradients by an all-to-all,
    update whole tensors, and send the shards back by another. Their load is balanced by the costs of matrix products
    (`shardc.runtime.owners.update_cost`).

    From outside it is a plain optimizer: ``param_groups`` hold the module's parameters, and ``state`` and
    ``state_dict()`` DTensors. Those of elementwise optimizers have the parameters' layouts, in the memory that the step
    writes. Those of whole parameters lie on the owners. So schedulers, hooks, ``clip_grad_norm_`` and
    `torch.distributed.checkpoint` work, and checkpoints load on other meshes and into plain optimizers. With whole
    parameters, all ranks call ``state_dict()`` and ``load_state_dict()``. Between these calls, numbers in the ``state``
    of ranks that are not the owner are old.

    Args:
        optimizer_cls: the class of the optimizer.
        module: from `shardc.compile`, on a device mesh.
        params: parameters of ``module``, or groups of them, as torch takes them; by default all.
        whole: whether parameters are updated whole, or a function (name, parameter) -> bool. True promises that the
            class updates each parameter from its own history only, False that it updates each element so. By default
            it is False for classes in `ELEMENTWISE` and True for those in `PER_PARAMETER`.
        options: options of ``optimizer_cls``.

    Raises:
        InputError: ``module`` has no shards, a parameter is not the module's, ``whole`` is needed or selects nothing,
            or the optimizer looks at several parameters or sparse gradients.
    """
    if not isinstance(module, ShardedModule) or module.shardc.spec.device_mesh is None:
        what = "was compiled for an abstract mesh" if isinstance(module, ShardedModule) else "is not from compile"
        raise InputError(f"the module {what} and holds no shards", fix="pass shardc.compile(model, device_mesh, plan)")
    selects = _whole(optimizer_cls, whole)
    kind: Any = optimizer_cls
    optimizer = _on_shards(kind)(module.parameters() if params is None else params, **options)
    optimizer.bind(module, selects, must_select=callable(whole))
    return optimizer


def _whole(kind: type[torch.optim.Optimizer], whole: bool | Select | None) -> Select:
    """Returns a function of (name, parameter) that tells whether an optimizer of class ``kind`` updates the parameter
    whole instead of by shards.
    """
    name = kind.__name__
    if issubclass(kind, torch.optim.LBFGS):
        raise InputError(
            f"{name} takes all parameters for one vector, so no rank can update some of them by itself",
            fix=f"use it as it is: {name}(module.parameters(), ...)",
        )
    if issubclass(kind, torch.optim.SparseAdam):
        raise InputError(
            f"{name} takes sparse gradients, and a compiled module has dense ones",
            fix="use shardc.optim.wrap(torch.optim.Adam, module)",
        )
    if whole is None and not issubclass(kind, ELEMENTWISE + PER_PARAMETER):
        raise InputError(
            f"{name} may look at more than one element at a time: on shards its updates could differ",
            fix="pass whole=True if it updates each parameter from that parameter's own history (Shampoo, SOAP, LAMB), "
            f"whole=False if each element; else use it as it is, {name}(module.parameters(), ...)",
        )
    if callable(whole):
        return whole
    answer = issubclass(kind, PER_PARAMETER) if whole is None else whole
    return lambda name, param: answer


@lru_cache(maxsize=64)
def _on_shards(base: type[torch.optim.Optimizer]) -> Any:
    """Returns a class that runs the step of the optimizer class ``base`` on plain tensors: derived from the mixin
    `_OnShards` and from ``base``.
    """
    return type(f"Sharded{base.__name__}", (_OnShards, base), {"base": base, "__module__": __name__})


class _OnShards(torch.optim.Optimizer):
    """Mixin for a class derived from the optimizer class ``base``. Runs the step of ``base`` on plain tensors in place
    of DTensors.
    """

    base: type[torch.optim.Optimizer]
    _selects: Select  # whether a parameter is updated whole
    _groups: Groups
    _owners: Owners | None  # of the parameters that are updated whole; None without any
    _whole: list[WholeParameter]  # these, in the order of `_owners`
    _names: dict[int, str]
    _shares_errors: Callable[[], AbstractContextManager[None]]
    _shards: list[list[Shard]]  # per group, as of the last step
    _tensors: list[tuple[list[nn.Parameter], list[Tensor]]]  # per group: parameters and local tensors
    _local: defaultdict[Tensor, Any]  # shard -> its state, as the base class keeps it
    _calls: list[_AdamCall] | None  # kernel calls of the last step, if they can be repeated without the base class
    _held: list[dict[str, object]]  # state of each parameter after the last step
    _values: list[object]  # all values in these states

    def bind(self, module: ShardedModule, selects: Select, must_select: bool) -> None:
        """Sets the module of the optimizer, and which parameters it updates whole (not by shards). Raises InputError
        if ``must_select`` and ``selects`` chooses no parameter.
        """
        names = {id(param): name for name, param in module.named_parameters()}
        groups = module.shardc.spec.groups
        assert groups is not None, "a module on a device mesh has process groups"
        self._shares_errors, self._names = module.shardc.shares_errors, names
        self._groups, self._selects = groups.whole, selects
        self._local, self._calls = defaultdict(dict), None
        self._shards, self._tensors, self._whole, self._owners = [], [], [], None
        self._check(self.param_groups)
        params = _params(self.param_groups)
        if must_select and not any(selects(names[id(param)], param) for param in params):
            raise InputError(
                f"whole selects none of the optimizer's {len(params)} parameters",
                fix=f"select some by names such as {names[id(params[0])]!r}, or pass whole=True or whole=False",
            )

    def _check(self, groups: list[dict[str, Any]]) -> None:
        """Raises InputError if ``groups`` has a parameter that does not belong to the module."""
        for param in _params(groups):
            if id(param) not in self._names:
                raise InputError(
                    f"a parameter of shape {list(param.shape)} is none of the module's",
                    fix="pass module.parameters(), or groups of them",
                )

    def state_dict(self) -> dict[str, Any]:
        """Returns the state dict of the plain optimizer, with DTensors; with whole parameters, all ranks call it."""
        if self._owners is not None:
            with self._shares_errors():
                self._groups.consistency.meet(f"{self.base.__name__}.state_dict()")
                self._share()
                self._refuse_unshared()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of plain tensors, or of DTensors in any layout; all ranks call it."""
        with self._shares_errors():
            self._refresh(self.param_groups)
            super().load_state_dict(state_dict)
            self._place()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Runs one optimizer step on plain tensors: by a call of Adam's fused kernel per parameter group if possible,
        else by the base class.

        Shards and their state are kept between steps, while local tensors and state values remain the same objects.
        Adam's CPU kernel is then called directly; otherwise the step of the base class runs.
        """
        with self._shares_errors():
            return self._step_on_plain(closure)

    def _step_on_plain(self, closure: Callable[[], T] | None) -> T | None:
        """Runs one optimizer step on plain tensors. Returns the result of ``closure``, which is called first if it is
        given.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups, state = self.param_groups, self.state
        if self._step_unchanged(groups, state):
            return loss
        self._refresh(groups)
        whole = self._gather()
        local = [
            _local_group(group, [x for x in mine if x.is_local], [x.take_grad() for x in mine])
            for group, mine in zip(groups, self._shards, strict=True)
        ]
        for group, mine in zip(local, self._shards, strict=True):
            for shard in mine:
                shard.read(state.get(shard.param), bool(group.get("fused")), self._local)
        with self._on_local_tensors(local):
            _plain_step(self.base)(self)
            calls = self._repeatable_calls(local)
            self._scatter(whole)
        for shard in chain.from_iterable(self._shards):
            shard.write(self._local.get(shard.data), state)
        for group, changed in zip(groups, local, strict=True):
            group.update({key: x for key, x in changed.items() if key not in ("params", "fused")})
        if not all(x.shared for x in whole):
            self._share()
            for x in whole:
                x.shared = True
        self._calls = calls
        self._held = list(state.values())
        self._values = list(chain.from_iterable(map(dict.values, self._held)))
        return loss

    @contextmanager
    def _on_local_tensors(self, local: list[dict[str, Any]]) -> Iterator[None]:
        """Context manager of a step of the base class: the optimizer's groups are ``local``, of local tensors, and its
        state is theirs.
        """
        groups, state = self.param_groups, self.state
        self.param_groups, self.state = local, self._local
        try:
            yield
        finally:
            self.param_groups, self.state = groups, state
            for shard in chain.from_iterable(self._shards):
                shard.end_step()

    def _repeatable_calls(self, local: list[dict[str, Any]]) -> list[_AdamCall] | None:
        """Returns the kernel calls that repeat the step which the base class has just run on the groups ``local``. None
        if it is not Adam's fused step on this rank's shards.
        """
        if self._owners is None and _is_adam(self.base) and all(map(_AdamCall.can_be, local)):
            return [_AdamCall(mine, self._local) for mine in self._shards]
        return None

    def _gather(self) -> list[WholeParameter]:
        """Gathers the shards of each parameter and of its gradient on the rank that owns it, where the step then
        updates the whole tensor. Returns, on all ranks, the parameters that are updated so: those with gradients.
        """
        grads = [(x, x.param.grad) for x in self._whole]
        used = [x for x, grad in grads if grad is not None]
        if self._owners is None or not used:
            return []
        shards = [(x.at, x.local) for x in used]
        shards += [(x.at, x.gradient(grad)) for x, grad in grads if grad is not None]
        came = self._owners.gather(shards)
        for x, value, grad in zip(used, came[: len(used)], came[len(used) :], strict=True):
            x.take(value, grad)
        return used

    def _scatter(self, whole: list[WholeParameter]) -> None:
        """Sends the updated parameters ``whole`` back from their owners: on all ranks, the shards are overwritten in
        place.
        """
        if self._owners is not None and whole:
            with torch.no_grad():
                self._owners.scatter([(x.at, x.local, x.data.detach() if x.is_local else None) for x in whole])

    def _share(self) -> None:
        """Gives the ranks that do not own a parameter its optimizer state, for parameters that one rank updates whole.
        A collective.

        On these ranks its tensors have no rows, and its numbers are the owner's.

        Raises:
            InputError: on all ranks, if the options of their parameter groups differ.
        """
        assert self._owners is not None
        mine = {
            x.at: pytree.tree_map(Described.of, dict(self.state.get(x.param, {}))) for x in self._whole if x.is_local
        }
        everyone = self._owners.share((mine, [_numbers(group) for group in self.param_groups]))
        (_, first), *others = everyone.values()
        for numbers, theirs in chain.from_iterable(zip(first, other, strict=True) for _, other in others):
            if different := [key for key in numbers if numbers[key] != theirs.get(key)]:
                name = self.base.__name__
                raise InputError(
                    f"{name} has set {different[0]!r} of a group to different values on different ranks, each of which "
                    "updates some parameters: it looks at several at once",
                    fix=f"use it as it is: {name}(module.parameters(), ...)",
                )
        for x in self._whole:
            described = everyone[x.owner.rank][0][x.at]
            if described and not x.is_local:
                self.state[x.param] = pytree.tree_map_only(Described, x.described, described)
        # Where state is read, all ranks do it in one order: whole tensors are gathered.
        for param in _params(self.param_groups):
            if param in self.state:
                self.state[param] = self.state.pop(param)

    def _refuse_unshared(self) -> None:
        """Raises InputError if the state of a parameter that one rank updates whole holds an object that cannot be sent
        to the other ranks.
        """
        for x in self._whole:
            for key, value in self.state.get(x.param, {}).items():
                for leaf in pytree.tree_leaves(value):
                    described = leaf if isinstance(leaf, Described) else Described.of(leaf)
                    if isinstance(described, Described) and described.unshared:
                        raise InputError(
                            f"the optimizer's state {key!r} of parameter {x.name!r} has a value of class "
                            f"{described.unshared}, which only the rank has that updates the parameter",
                            fix=f"save what it holds by {self.base.__name__}'s own methods, on each rank",
                        )

    def _place(self) -> None:
        """Moves the tensors of the optimizer's state to the layouts that steps use; a collective if any are moved."""
        for shard in chain.from_iterable(self._shards):
            if state := self.state.get(shard.param):
                self.state[shard.param] = pytree.tree_map(shard.placed, state)

    def _step_unchanged(self, groups: list[dict[str, Any]], state: Mapping[Tensor, dict[str, object]]) -> bool:
        """Repeats the kernel calls of the last step with the present gradients and options. Returns False if they
        cannot be repeated, because something changed.
        """
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
        """Whether ``state`` still holds the objects that the last step of the optimizer class ``base`` left in it, so
        that its kernel calls can be repeated.
        """
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

    def _refresh(self, groups: list[dict[str, Any]]) -> None:
        """Rebuilds the list of shards that steps update, if parameter groups, parameters or local tensors have
        changed.
        """
        if self._are_known(groups):
            return
        self._check(groups)
        if self._owners is not None:
            self._share()  # owners may change
        whole = [x for x in _params(groups) if x.numel() and split_dims(x) and self._selects(self._names[id(x)], x)]
        self._owners = Owners(whole, self._groups) if whole else None
        owners = {} if self._owners is None else {id(x.param): (at, x) for at, x in enumerate(self._owners.owners)}
        self._local = defaultdict(dict)
        self._shards = [
            [
                WholeParameter(param, self._names[id(param)], *owners[id(param)])
                if id(param) in owners
                else Shard(param, self._names[id(param)])
                for param in group["params"]
            ]
            for group in groups
        ]
        self._whole = [x for mine in self._shards for x in mine if isinstance(x, WholeParameter)]
        self._tensors = [([x.param for x in mine], [x.local for x in mine]) for mine in self._shards]
        self._place()


class _AdamCall:
    """A call of Adam's fused CPU kernel for one parameter group. Its arguments are collected once, and later steps
    repeat the call.

    Args:
        shards: shards of the group.
        state: shard -> its state after the step.
    """

    def __init__(self, shards: list[Shard], state: Mapping[Tensor, dict[str, Any]]) -> None:
        self._used = [shard for shard in shards if shard.data.grad is not None]
        self._unused = [shard for shard in shards if shard.data.grad is None]
        self._params: list[Tensor] = [shard.data for shard in self._used]
        states = [state[param] for param in self._params]
        self._averages, self._squares, self._steps = ([x[k] for x in states] for k in ("exp_avg", "exp_avg_sq", "step"))
        self._largest: list[Tensor] = [x["max_exp_avg_sq"] for x in states if "max_exp_avg_sq" in x]

    @staticmethod
    def can_be(group: dict[str, Any]) -> bool:
        """Whether one call of the fused CPU Adam kernel (`_AdamCall`) can do the step of ``group``: ``fused`` is
        true, and all its shards are on a CPU.
        """
        return bool(group["fused"]) and all(x.device.type == "cpu" for x in group["params"])

    def gradients(self, group: dict[str, Any]) -> list[Tensor] | None:
        """Returns this rank's gradients, in the order of the kernel's arguments, with which Adam's last fused call can
        be repeated. None if options or gradients have changed so that it cannot be.

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
        """Repeat the kernel call with the present options of ``group`` and the gradients ``grads``; updates the shards
        in place.
        """
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
    """Returns the method ``_init_group`` of ``base`` without torch.compile's wrapper, which torch puts around it in its
    own optimizers.
    """
    method = getattr(base, "_init_group", None)
    return getattr(method, _compat.COMPILED_OUT, method)


def _params(groups: list[dict[str, Any]]) -> list[Any]:
    """Returns the parameters of ``groups``, in order."""
    return [param for group in groups for param in group["params"]]


def _local_group(group: dict[str, Any], shards: list[Shard], fuses: list[bool]) -> dict[str, Any]:
    """Returns a copy of the parameter group ``group`` with ``shards`` as its parameters.

    It is ``fused`` if all of ``fuses`` are true and no option asks for another implementation.
    """
    out = {**group, "params": [shard.data for shard in shards]}
    if "fused" in group and not _asks_for_another(group) and all(fuses):
        out["fused"] = True
    return out


def _numbers(group: dict[str, Any]) -> dict[str, list[object]]:
    """Returns the options of ``group`` that are numbers, each as a list: key -> numbers. A step may change these."""
    leaves = {key: pytree.tree_leaves(x) for key, x in group.items() if key != "params"}
    return {
        key: [x.item() if isinstance(x, Tensor) else x for x in values]
        for key, values in leaves.items()
        if all(isinstance(x, int | float) or (isinstance(x, Tensor) and not x.dim()) for x in values)
    }


def _asks_for_another(group: dict[str, Any]) -> bool:
    """Whether the options of a parameter group ask for another implementation than the fused kernel (``foreach=True``,
    ``fused=False``, ...).
    """
    return any(group.get(name) for name in ("foreach", "differentiable", "capturable")) or group.get("fused") is False


def _plain_step(base: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """Returns the ``step`` of the optimizer class ``base`` without torch's step hooks, which the wrapper's own ``step``
    runs.
    """
    step: Any = base.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step
