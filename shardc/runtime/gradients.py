"""Gradients of a compiled module: clipping by their global norm, and local sums of unreduced ones (`no_sync`)."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from shardc.errors import BackwardError, InputError, LayoutError
from shardc.ir.comm import group_name
from shardc.ir.deferred import NOTHING, Deferred
from shardc.ir.layout import Layout
from shardc.runtime.groups import Groups
from shardc.runtime.owned import OwnedLayout
from shardc.validate import near

_SMALL = (torch.float16, torch.bfloat16)


def clip_grad_norm_(
    module: nn.Module,
    storages: Mapping[str, Layout],
    groups: Groups,
    device: torch.device,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clips gradients like ``torch.nn.utils.clip_grad_norm_`` on one device, by one all-reduce of a scalar.

    Of a gradient's replicas, one is counted: that on the rank, in the owner's stage, whose coordinates on replicating
    axes are 0.

    Args:
        storages: storage layout of each parameter, as this rank has it.
        device: device of the returned norm.

    Returns:
        The norm before clipping, over all stages: a plain scalar, the same on all ranks, in the gradients' widest dtype
        (at least float32).

    Raises:
        LayoutError: a gradient's layout is not its parameter's.
        RuntimeError: the norm is not finite, under ``error_if_nonfinite``; gradients are unchanged then.
    """
    grads = {name: local_grad(name, param) for name, param in module.named_parameters() if param.grad is not None}
    total = _global_norm(grads, storages, groups, device, norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {total.item()}, so they cannot be clipped; "
            "to scale them all the same, pass error_if_nonfinite=False"
        )
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    # Converted once per device and dtype.
    factors = {(grad.device, grad.dtype): factor.to(grad.device, grad.dtype) for grad in grads.values()}
    for grad in grads.values():
        grad.mul_(factors[grad.device, grad.dtype])
    # A norm of complex numbers is real.
    dtypes = (grad.dtype.to_real() for grad in grads.values())
    return total.to(functools.reduce(torch.promote_types, dtypes, torch.float32))


def _global_norm(
    grads: Mapping[str, Tensor], storages: Mapping[str, Layout], groups: Groups, device: torch.device, order: float
) -> Tensor:
    """Returns the norm of all gradients over all ranks, in float64, from this rank's shards ``grads`` by parameter
    name. A collective. Of a gradient's replicas, one is counted (see `clip_grad_norm_`).
    """
    whole, largest = groups.whole, order == float("inf")
    # A zero is among the norms, so that ranks without gradients take part in the all-reduce.
    norms = [torch.zeros((), dtype=torch.float64, device=device)]
    for name, grad in grads.items():
        storage = storages[name]
        in_owner_stage = not isinstance(storage, OwnedLayout) or groups.stage == storage.owner
        # One replica: the group, along the axes that split the storage (`bound`), in which rank 0 is.
        if in_owner_stage and grad.numel() and groups.rank in groups.mesh.group(storage.bound, 0):
            wide = torch.float32 if grad.dtype in _SMALL else grad.dtype
            norms.append(torch.linalg.vector_norm(grad, order, dtype=wide).double().to(device))
    # A norm of norms is the norm of all elements.
    stacked = torch.stack(norms)
    total = stacked.max() if largest else stacked.pow(order).sum()
    if whole.mesh.ranks > 1:  # `whole`: over all pipeline stages
        name = whole.add([whole.mesh.axes])[group_name(whole.mesh.axes)]
        with groups.consistency.communicates("clip_grad_norm_()"):
            reduced = torch.ops._c10d_functional.all_reduce(total, "max" if largest else "sum", name)
            total = torch.ops._c10d_functional.wait_tensor(reduced)
    return total if largest else total.pow(1.0 / order)


def local_grad(name: str, param: nn.Parameter) -> Tensor:
    """Returns this rank's shard of the gradient of ``param``. Raises LayoutError unless the gradient has the
    parameter's placements.
    """
    grad = param.grad
    if not isinstance(grad, DTensor) or not isinstance(param, DTensor) or grad.placements != param.placements:
        raise LayoutError(
            f"the gradient of parameter {name!r} is not laid out as the parameter is",
            fix="leave the gradients that backward made, or assign DTensors with the parameter's placements",
        )
    return grad._local_tensor


Key = tuple[str, Layout]  # a parameter and the layout of its local sum


@dataclass(eq=False)
class Sync:
    """Holds which gradients of a module stay unreduced in a backward (by `no_sync` and like settings), and the local
    sums of unreduced gradients.

    Args:
        levels: FSDP level of each parameter (0 without an ``fsdp`` entry).
        paused: parameters whose gradients are not reduced (inside `pause`).
        unsynced: parameters whose gradients are not reduced if their level is 0 or 1; each rank sums them in full.
        over_shards: parameters whose gradients are reduced over the sharding axes and not over the replicating ones.
        sums: local sums, in padded stored shapes, until a backward reduces them.
        parameters: returns the module's parameters, by each of their names.
        replicated: storage layout of each parameter whose gradient is also reduced over axes that replicate it.
    """

    levels: Mapping[str, int]
    paused: frozenset[str] = frozenset()
    unsynced: frozenset[str] = frozenset()
    over_shards: frozenset[str] = frozenset()
    sums: dict[Key, Tensor] = field(default_factory=dict)
    parameters: Callable[[], Mapping[str, Tensor]] = dict
    replicated: Mapping[str, Layout] = field(default_factory=dict)

    def for_copy(self) -> Sync:
        """Returns these settings for a copy of the module. Local sums, and `pause` blocks that are active, are left
        out.
        """
        return Sync(self.levels, unsynced=self.unsynced, over_shards=self.over_shards, replicated=self.replicated)

    def unreduced(self) -> Deferred:
        """Returns the parameters whose gradients the next backward does not reduce at all, and those whose gradients
        it reduces over shards but not over replicas.
        """
        if not (self.paused or self.unsynced or self.over_shards):
            return NOTHING
        # At FSDP levels 2 and 3 no rank stores a full gradient, so all are reduced over shards.
        whole = self.paused | frozenset(name for name in self.unsynced if self.levels[name] <= 1)
        return Deferred(whole=whole, scattered=self.over_shards.intersection(self.replicated) - whole)

    def deferred(self) -> Deferred:
        """Returns the parameters whose gradients the next backward adds to local sums. These sums either stay local
        (`unreduced`), or contain earlier gradients and are then reduced.
        """
        accumulating = self.unreduced()
        if not self.sums:
            return accumulating
        # Parameter with a sum -> whether that is reduced over shards: its layout is the storage's, but for pending
        # reductions.
        is_scattered = {n: layout.without_partial() == self.replicated.get(n) for n, layout in self.sums}
        # Each parameter has one kind of gradient: that which `unreduced` says, or else that of its sum so far.
        whole_sums = frozenset(n for n, scattered in is_scattered.items() if not scattered)
        whole = accumulating.whole | whole_sums - accumulating.scattered
        return Deferred(whole, scattered=accumulating.scattered | frozenset(is_scattered) - whole)

    def add(self, name: str, layout: Layout, grad: Tensor) -> None:
        """Adds ``grad``, unreduced and in ``layout``, to the local sum for parameter ``name``. The first one becomes
        the sum, so its memory must not be shared.
        """
        key = name, layout
        if key in self.sums:
            self.sums[key].add_(grad)
        else:
            self.sums[key] = grad
        _optimizers.watch(self)

    def take(self, names: frozenset[str]) -> dict[Key, Tensor]:
        """Removes the local sums of unreduced gradients of parameters ``names``, and returns them to be reduced:
        (parameter name, layout) -> sum.
        """
        due = {key: self.sums.pop(key) for key in list(self.sums) if key[0] in names}
        if not self.sums:
            _optimizers.leave(self)
        return due

    def drop(self, names: frozenset[str] | None = None) -> None:
        """Drops unreduced gradient sums of parameters ``names`` (default: all), as ``zero_grad`` drops gradients."""
        self.take(frozenset(name for name, _ in self.sums) if names is None else names)

    def of(self, optimizer: Optimizer) -> frozenset[str]:
        """Returns the names of the parameters of ``optimizer`` that have local sums of unreduced gradients."""
        theirs = {id(param) for group in optimizer.param_groups for param in group["params"]}
        mine = self.parameters()
        return frozenset(name for name, _ in self.sums if name in mine and id(mine[name]) in theirs)

    def refuse(self, what: str, names: frozenset[str] | None = None) -> None:
        """Raises BackwardError if ``names``, parameters that have unreduced gradients (by default all that do), is not
        empty. ``what`` is the operation that cannot be done then.
        """
        pending = sorted({name for name, _ in self.sums} if names is None else names)
        if pending:
            more = f" and of {len(pending) - 1} more" if len(pending) > 1 else ""
            raise BackwardError(
                f"{what} while the gradient of {pending[0]!r}{more} is held back on each rank, by no_sync(), "
                "set_requires_grad_sync(False) or set_requires_all_reduce(False): it is not in .grad",
                fix="run the last backward of a step outside of no_sync(), which reduces what was held back; or drop "
                "that with module.zero_grad()",
            )

    def matching(self, glob: str) -> list[str]:
        """Returns the names of the parameters that ``glob`` matches. Raises InputError if it matches none, unless it
        is ``*``.
        """
        names = list(self.levels)
        matches = names if glob == "*" else fnmatch.filter(names, glob)
        if not matches and glob != "*":
            raise InputError(f"{glob!r} matches no parameter", fix=near(glob, names))
        return matches

    def sync(self, on: bool, names: Iterable[str]) -> None:
        """Sets whether backwards reduce the gradients of parameters ``names``; at FSDP levels 2 and 3 they always do.
        With ``on``, they are reduced over replicas again, too.
        """
        self.unsynced = _switched(self.unsynced, on=not on, changed=names)
        if on:
            self.all_reduce(True, names)

    def all_reduce(self, on: bool, names: Iterable[str]) -> None:
        """Sets whether backwards also reduce gradients of ``names`` over replicas (HSDP), besides over shards."""
        self.over_shards = _switched(self.over_shards, on=not on, changed=names)

    @contextlib.contextmanager
    def pause(self, names: Iterable[str]) -> Iterator[None]:
        """Context manager in which backwards do not reduce gradients of ``names``."""
        before = self.paused
        self.paused = before.union(names)
        try:
            yield
        finally:
            self.paused = before


def _switched(names: frozenset[str], on: bool, changed: Iterable[str]) -> frozenset[str]:
    """Returns ``names`` with the names ``changed`` added if ``on``, otherwise removed."""
    return names.union(changed) if on else names.difference(changed)


class _Optimizers:
    """Hooks all optimizers while some module has unreduced gradients: ``zero_grad`` drops their local sums, and
    ``step`` raises.
    """

    def __init__(self) -> None:
        self._holding: WeakSet[Sync] = WeakSet()  # those with local sums
        self._hook: RemovableHandle | None = None  # before each step of an optimizer; None while no module has sums
        self._plain: Any = None  # torch's ``Optimizer.zero_grad``
        self._ours: Callable[..., None] | None = None  # what replaces it

    def watch(self, sync: Sync) -> None:
        """Adds ``sync``, the `Sync` of a module, to those that hold sums of unreduced gradients. The first call also
        hooks the step and ``zero_grad`` of all optimizers.
        """
        self._holding.add(sync)
        if self._hook is not None:
            return
        self._hook = register_optimizer_step_pre_hook(self._before_step)
        plain = self._plain = Optimizer.zero_grad

        @functools.wraps(plain)
        def zero_grad(optimizer: Optimizer, *args: bool, **kwargs: bool) -> None:
            plain(optimizer, *args, **kwargs)
            for sync in list(self._holding):
                sync.drop(sync.of(optimizer))

        self._ours = zero_grad
        Optimizer.zero_grad = zero_grad  # type: ignore[method-assign, assignment]

    def leave(self, sync: Sync) -> None:
        """Removes ``sync``, which has no sums of unreduced gradients any more. If no module has any, the hooks of
        optimizers are removed too.
        """
        self._holding.discard(sync)
        if self._hook is not None and not self._holding:
            self._hook.remove()
            self._hook = None
            if Optimizer.zero_grad is self._ours:  # else somebody wrapped it, and ours does nothing more
                Optimizer.zero_grad = self._plain  # type: ignore[method-assign]

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        """Hook before an optimizer's step: raises BackwardError if gradients of the optimizer's parameters are still
        unreduced.
        """
        for sync in list(self._holding):
            sync.refuse(f"{type(optimizer).__name__}.step()", sync.of(optimizer))


_optimizers = _Optimizers()
