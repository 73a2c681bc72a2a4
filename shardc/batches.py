"""`shardc.batches`: this rank's part of every batch of a data loader; `data_parts`: what samplers have to deal out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DistributedSampler

from shardc._compat import pytree
from shardc.errors import InputError
from shardc.ir.layout import Layout
from shardc.plan.layout_spec import PerRank, read
from shardc.plan.ports import row_axes
from shardc.runtime.containers import from_dicts, to_dicts
from shardc.runtime.events import Event
from shardc.runtime.inputs import in_call, takes
from shardc.runtime.module import ShardedModule
from shardc.runtime.namespace import Namespace
from shardc.runtime.replicas import Turns, compare_inputs
from shardc.runtime.shards import flat_index
from shardc.runtime.sim.training import Simulation
from shardc.runtime.storage import local_indices, take
from shardc.runtime.uneven import gather
from shardc.validate import near, typed

Named = list[tuple[str, Tensor]]

_SAME = (
    "yield the same global batch on every rank (seed the generator of a sampler that shuffles alike), or each rank's "
    "own rows, with DistributedSampler(dataset, *shardc.data_parts(module)) or own_rows=True"
)


def data_parts(module: nn.Module) -> tuple[int, int]:
    """Returns (number of parts that the rows of a batch are split into, index of this rank's part).

    These are the ``num_replicas`` and ``rank`` of a sampler that deals out rows:
    ``DistributedSampler(dataset, *shardc.data_parts(module))``. Ranks that differ only along axes that do not split
    rows (tensor parallelism, a split sequence) have the same part.

    Raises:
        InputError: the module is not from `shardc.compile`, or the plan splits the rows of its inputs over different
            axes.
    """
    state = _state(module)
    axes = _row_axes(state)
    return prod(map(state.mesh.size, axes)), flat_index(state.mesh, axes, state.spec.rank)


def part_of_rank(module: nn.Module) -> dict[int, int]:
    """Return, for each rank of the process group, the index of the part of the rows that it takes (see
    `data_parts`).
    """
    state = _state(module)
    axes, groups = _row_axes(state), state.spec.groups
    if groups is None:
        return {rank: flat_index(state.mesh, axes, rank) for rank in range(state.mesh.ranks)}
    return {rank: flat_index(groups.whole.mesh, axes, at) for at, rank in enumerate(groups.whole.everyone())}


@typed()
def batches(
    loader: Iterable[Any],
    module: nn.Module | Simulation,
    *,
    own_rows: bool | None = None,
    pad: Mapping[str, int | float] | None = None,
) -> Batches:
    """Returns an iterable of this rank's parts of the batches of ``loader``, on the module's device.

    ``for batch in shardc.batches(loader, module): loss = module(*batch)``, or ``module(**batch)`` if batches are dicts,
    trains under any plan. A batch keeps its structure and classes (see ``module.shard_inputs``). All ranks iterate.

    Args:
        loader: yields batches, as ``torch.utils.data.DataLoader`` does.
        module: from `shardc.compile`. A `Simulation` gets global batches as they are.
        own_rows: False: batches are global, and the same on every rank; ranks compare the first ones. True: they
            hold the rows of this rank's part (`data_parts`), and the sequence as a whole. None: True if the loader has
            a ``DistributedSampler``, else False.
        pad: name of an input or of an argument of the loss -> the value to pad it with, if ranks' own batches differ
            in length. Dims from 1 on are padded at their end to the longest of the ranks. With it, ranks exchange sizes
            before each batch.

    Raises:
        InputError: a ``DistributedSampler`` that does not deal out the parts of the plan; while iterating, an input
            that `Namespace.shard_inputs` refuses, lengths that differ without a value to pad with.
        MeshError: while iterating, on all ranks: global batches differ, or a rank has more batches than another.

    >>> import shardc, torch
    >>> module = shardc.compile(torch.nn.Linear(4, 2), shardc.Mesh(dp=2), shardc.fsdp("dp"))
    >>> for (x,) in shardc.batches([(torch.ones(8, 4),)], module):
    ...     print(tuple(x.shape))
    (4, 4)
    """
    own_rows = _sampler(loader) is not None if own_rows is None else own_rows
    if isinstance(module, Simulation):
        if own_rows:
            raise InputError(
                "a simulation takes global batches, and this loader yields rows of one rank",
                fix="leave the DistributedSampler and own_rows= out",
            )
        return Batches(loader, None, False, {})
    state = _state(module)
    if own_rows:
        _check_sampler(loader, data_parts(module))
    return Batches(loader, state, own_rows, dict(pad or {}))


class Batches:
    """The iterable that `batches` returns. Each ``for`` loop over it starts a new epoch, as a loop over its loader
    does.

    Args:
        loader: yields the batches.
        state: ``module.shardc`` of the compiled module; None for a simulation.
        own_rows: whether batches hold rows of this rank only.
        pad: name of an input -> the value to pad it with.
    """

    def __init__(
        self, loader: Iterable[Any], state: Namespace | None, own_rows: bool, pad: dict[str, int | float]
    ) -> None:
        self.loader, self.own_rows = loader, own_rows
        self._state, self._pad, self._turns = state, pad, Turns()

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        state = self._state
        if state is None:
            yield from self.loader
            return
        for batch in self.loader:
            with state.shares_errors():
                part = self.part(batch)
            yield part
        if state.spec.groups is not None:  # a rank that has more calls the module, which raises on all ranks
            state.spec.groups.consistency.enter(Event((("event", f"the end of the batches of {state.name}"),)))

    def part(self, batch: Any) -> Any:
        """Returns this rank's part of ``batch``, in the same structure. All ranks call it; `__iter__` does for each
        batch.
        """
        if (state := self._state) is None:
            return batch
        plain = to_dicts(batch)
        args, kwargs = in_call(state.params.view, plain, state.spec.targets)
        # A list of tensors is several arguments, unless forward takes a list.
        several = isinstance(batch, list | tuple) and takes(state.params.view, batch, {}, state.spec.targets)
        args = tuple(plain) if several else args

        def cut(named: Named) -> list[Tensor]:
            parts = self._cut_own_rows(state, named) if self.own_rows else self._cut_global(state, named)
            return [x if x.is_meta else x.to(state.device, non_blocking=True) for x in parts]

        leaves = pytree.tree_leaves(state.map_inputs(args, kwargs, cut))  # in the order of the batch
        return from_dicts(batch, pytree.tree_unflatten(leaves, pytree.tree_structure(plain)))

    def _cut_global(self, state: Namespace, named: Named) -> list[Tensor]:
        """Returns this rank's shards of global inputs. In some calls, ranks also check that they passed equal
        inputs.
        """
        if state.spec.groups is not None and self._turns.due(""):
            whole = [(name, Layout.whole(state.mesh, x.shape)) for name, x in named]
            compare_inputs(state.name, whole, [x for _, x in named], (), state.spec.groups, _SAME)
        return state.cut_global(named)

    def _cut_own_rows(self, state: Namespace, named: Named) -> list[Tensor]:
        """Returns this rank's shards of inputs that hold its own rows. Their other dims are padded and cut."""
        if self._pad and state.spec.groups is not None:
            named = padded(state, named, self._pad)
        names = [name for name, _ in named]
        ranks, per_rank, axes = state.mesh.ranks, _per_rank(state, names), _row_axes(state)
        # The number of parts does not depend on the number of rows, if that divides.
        shapes = [(name, (max(x.shape[0], 1) * ranks, *x.shape[1:]) if x.dim() else ()) for name, x in named]
        layouts = state.cache.build.input_layouts(shapes)
        out = []
        for (name, x), layout in zip(named, layouts, strict=True):
            if not x.dim() or name in per_rank or isinstance(x, DTensor):
                out.append(x)
                continue
            over = layout.dim_axes(0)
            if over not in ((), axes) or any(digit.axis is None for digit in layout.dims[0][:-1]):
                raise InputError(
                    f"input {name!r} lies as {layout}, and the rows that a rank's loader yields are split over "
                    f"({', '.join(axes)})",
                    fix="pass global batches: own_rows=False, with a loader that yields the same on every rank",
                )
            part = x
            for dim in range(1, x.dim()):
                part = take(part, dim, local_indices(layout, layout.shape, dim, state.spec.rank))
            if not state.spec.uneven:
                rows = x.shape[0] * prod(map(state.mesh.size, over))
                state.cache.note_cut(name, tuple(part.shape), (rows, *x.shape[1:]))
            out.append(part.contiguous())
        return out


def _state(module: nn.Module) -> Namespace:
    """Returns ``module.shardc``; InputError if the module is not from `shardc.compile`."""
    if not isinstance(module, ShardedModule):
        raise InputError(f"{type(module).__name__} is not from shardc.compile", fix="pass what shardc.compile returned")
    return module.shardc


def _row_axes(state: Namespace) -> tuple[str, ...]:
    """Returns the axes that split the rows of inputs: as the plan's entries about inputs say, else the batch axes.
    Raises InputError if these entries name different axes.
    """
    build: Any = state.cache.build
    specs = [entry.spec for entry in build.plan.entries if getattr(entry, "kind", "") == "inputs"]
    dims = [read(spec).dims for spec in specs if isinstance(spec, str | tuple)]
    by_entry = {axes for first, *_ in filter(None, dims) if (axes := first.axes)}
    if len(by_entry) > 1:
        raise InputError(
            f"the plan splits rows of inputs over different axes: {', '.join(map(str, sorted(by_entry)))}",
            fix="pass global batches, with a loader that yields the same on every rank",
        )
    if by_entry:
        return by_entry.pop()
    return row_axes(build.plan, state.mesh)


def _per_rank(state: Namespace, names: Sequence[str]) -> set[str]:
    """Returns the names of the inputs that the plan marks as each rank's own (`shardc.per_rank`)."""
    build: Any = state.cache.build
    specs = {at: spec for entry in build.plan.entries for at, spec in entry.ports("inputs", names).items()}
    return {names[at] for at, spec in specs.items() if isinstance(spec, PerRank)}


def _sampler(loader: Any) -> DistributedSampler[Any] | None:
    """Returns the DistributedSampler that deals out the rows of a loader; None if it has none."""
    samplers = (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None))
    return next((sampler for sampler in samplers if isinstance(sampler, DistributedSampler)), None)


def _check_sampler(loader: Any, parts: tuple[int, int]) -> None:
    """Raises InputError if a DistributedSampler of the loader deals out other rows than the plan needs. ``parts`` is
    (number of parts, index of this rank's part).
    """
    sampler = _sampler(loader)
    if sampler is not None and (sampler.num_replicas, sampler.rank) != parts:
        raise InputError(
            f"the loader's DistributedSampler deals out part {sampler.rank} of {sampler.num_replicas}, and by the "
            f"plan this rank has part {parts[1]} of {parts[0]}",
            fix="make it with DistributedSampler(dataset, *shardc.data_parts(module))",
        )


def padded(state: Namespace, named: Named, pad: Mapping[str, int | float]) -> Named:
    """Returns inputs padded, at the end of every dim except dim 0, to the longest of all ranks; a collective.

    Raises:
        InputError: on all ranks, if sizes differ of an input that ``pad`` has no value for.
    """
    pad = _pad_by_input(pad, [name for name, _ in named], state.spec.targets or ())
    groups = state.spec.groups
    assert groups is not None
    dims = ", ".join(f"{name} of {x.dim()} dims" for name, x in named)
    groups.consistency.enter(Event((("event", f"sizes of a batch of {state.name}"), ("inputs", dims))))
    sizes = torch.tensor([n for _, x in named for n in x.shape[1:]], device=state.device)
    if not sizes.numel():
        return named
    table = torch.stack(gather(sizes, groups, groups.mesh.axes, "exchange of sizes"))
    longest = iter(table.amax(0).tolist())
    rows = iter(zip(*table.tolist(), strict=True))
    out = []
    for name, x in named:
        more: list[int] = []
        for dim in range(1, x.dim()):
            size, over_ranks = next(longest), next(rows)
            if len(set(over_ranks)) > 1 and name not in pad:
                least = min(over_ranks)
                short, long = (groups.everyone()[over_ranks.index(n)] for n in (least, size))
                raise InputError(
                    f"dim {dim} of input {name!r} is {least} on rank {short} and {size} on rank {long}",
                    fix=f"say what to pad it with: pad={{{name!r}: 0}}",
                )
            more = [0, size - x.shape[dim], *more]
        out.append((name, F.pad(x, more, value=pad[name]) if any(more) else x))
    return out


def _pad_by_input(
    pad: Mapping[str, int | float], names: Sequence[str], targets: Sequence[str]
) -> dict[str, int | float]:
    """Returns ``pad`` by the names of inputs: the arguments of the loss, ``targets``, are inputs called ``target``, or
    ``target0`` and so on if there are several.

    Raises:
        InputError: it has a name that is none of the inputs' ``names``.
    """
    numbered = ["target"] if len(targets) == 1 else [f"target{at}" for at in range(len(targets))]
    of_loss = dict(zip(targets, numbered, strict=True))
    by_input = {name if name in names else of_loss.get(name, name): value for name, value in pad.items()}
    if wrong := [name for name in by_input if name not in names]:
        raise InputError(f"pad= names an input {wrong[0]!r}, which a batch does not have", fix=near(wrong[0], names))
    return by_input
