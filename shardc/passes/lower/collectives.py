"""Collectives: lowers every reshard to steps (collectives and local slices), and each step to ops of one rank.

`Collectives` writes one marker node per step. `lower_collective`, which `Localize` calls, lowers a marker to local aten
ops and functional collectives. There the local tensor is viewed with one dim for each local digit of the layout (see
`shardc.ir.layout`). Every collective acts on the leading dim, so the digits that it binds or unbinds are moved to the
front and back. The rank enters only through `Builder.coordinate`, so that one graph serves every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import torch
from torch import fx
from torch.fx.node import Argument

from shardc.cost.model import CostModel, Pricing
from shardc.cost.redistribute import Step, steps
from shardc.ir import ops
from shardc.ir.graph import info, layout, value
from shardc.ir.layout import Layout, refine, strides
from shardc.ir.rewriter import GraphRewriter, Inserter
from shardc.rules.rule import Builder

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


class BoundDigit(NamedTuple):
    """A digit (factor of a dim's size) at the finest division that a step needs. It has a radix, the axis that splits
    it before the step, and the axis that splits it after the step.
    """

    radix: int
    before: str | None
    after: str | None


def lower_collective(step: Step, x: object, builder: Builder) -> object:
    """Emits ``step`` on the local tensor ``x``, a shard at ``step.src``; returns the shard at ``step.dst``."""
    if step.src.numel == 0:  # no elements to send, but maybe another shape
        return builder.call(aten.new_empty.default, x, list(step.dst.local_shape))
    emit, _ = _LOWERINGS[step.kind]
    return emit(step, x, builder)


def bound_digits(src: Layout, dst: Layout) -> list[BoundDigit]:
    """Divides the dims of a tensor so finely that each digit is split by at most one axis both in ``src`` and in
    ``dst``; returns a `BoundDigit` for each digit, those of dim 0 first, major to minor.

    A dim (2@a 4) that becomes (4@b 2) has the digits (2, a, b:1x2), (2, None, b:2x2) and (2, None, None).
    """
    out = []
    for before, after in zip(src.dims, dst.dims, strict=True):
        # Each is cut at the strides at which the other has a boundary, so that digits correspond one to one.
        fine_before = refine(src.mesh, before, strides(after))
        assert fine_before is not None, f"{src} and {dst} have no common refinement"
        fine_after = refine(src.mesh, after, strides(fine_before))
        assert fine_after is not None, f"{src} and {dst} have no common refinement"
        out += [BoundDigit(b.radix, b.axis, a.axis) for b, a in zip(fine_before, fine_after, strict=True)]
    return out


def _reshape(builder: Builder, x: object, shape: Sequence[int]) -> object:
    """Returns ``x`` reshaped to ``shape``; ``x`` itself if it has that shape."""
    return x if tuple(builder.shape(x)) == tuple(shape) else builder.call(aten.reshape.default, x, list(shape))


def _wait(builder: Builder, x: object) -> object:
    """Emits the wait for the collective ``x``; returns its result."""
    return builder.call(c10d.wait_tensor.default, x)


def _to_front(step: Step, x: object, builder: Builder) -> object:
    """Rearranges the local tensor ``x`` for a collective that splits dims: the digits that ``step`` splits become its
    leading dims. Returns the result, which is viewed with one dim per local digit; ``x`` itself if they lead already.

    The leading dims are in mesh order, as ranks are numbered in a group; the other digits follow in their order.
    """
    digits = [slot for slot in bound_digits(step.src, step.dst) if slot.before is None]
    # The digits that were split before are not dims of the local tensor.
    leading = _in_mesh_order(step, {k: slot.after for k, slot in enumerate(digits) if slot.after})
    order = leading + [k for k in range(len(digits)) if k not in leading]
    if order == sorted(order):
        return x
    x = builder.call(aten.permute.default, _reshape(builder, x, [slot.radix for slot in digits]), order)
    return builder.call(aten.clone.default, x, memory_format=torch.contiguous_format)


def _in_mesh_order(step: Step, bound: Mapping[int, str]) -> list[int]:
    """Returns the keys of ``bound``, a dict from the position of a digit to its axis, sorted by the mesh order of the
    axes.
    """
    return sorted(bound, key=lambda k: step.src.mesh.order(bound[k]))


def _from_front(step: Step, x: object, builder: Builder) -> object:
    """Rearranges the result ``x`` of a collective that gathers dims: moves the digits that ``step`` unbinds, which lead
    in ``x`` in mesh order, to their places inside of the tensor's dims. Returns the local tensor after ``step``.
    """
    digits = [slot for slot in bound_digits(step.src, step.dst) if slot.after is None]
    # Digits that stay split are not dims of the local tensor.
    freed = _in_mesh_order(step, {k: slot.before for k, slot in enumerate(digits) if slot.before})
    order = freed + [k for k in range(len(digits)) if k not in freed]  # of the digits, as they lie in ``x``
    if order != sorted(order):
        x = _reshape(builder, x, [digits[k].radix for k in order])
        x = builder.call(aten.permute.default, x, [order.index(k) for k in range(len(order))])
    return _reshape(builder, x, step.dst.local_shape)


def _all_gather(step: Step, x: object, builder: Builder) -> object:
    """Emits an all-gather over the step's axes, which split ``x`` before it; returns the gathered tensor."""
    size, name = builder.group(step.axes)
    x = builder.call(c10d.all_gather_into_tensor.default, x, size, name)
    return _from_front(step, _wait(builder, x), builder)


def _reduce_scatter(step: Step, x: object, builder: Builder) -> object:
    """Emits a reduce-scatter of ``x`` along the factors of its dims that the step splits; returns this rank's shard."""
    size, name = builder.group(step.axes)
    x = _with_leading(builder, _to_front(step, x, builder), size)
    x = builder.call(c10d.reduce_scatter_tensor.default, x, step.op, size, name)
    return _reshape(builder, _wait(builder, x), step.dst.local_shape)


def _with_leading(builder: Builder, x: object, size: int) -> object:
    """Returns ``x`` with a first dim that ``size`` divides, as collectives need it: ``x`` itself, or ``x`` reshaped to
    [``size``, the rest].
    """
    # A collective cuts a tensor along its first dim: in equal runs of its elements, whichever of the shapes it has.
    shape = builder.shape(x)
    if shape and shape[0] % size == 0:
        return x
    return _reshape(builder, x, (size, prod(shape) // size))


def _all_reduce(step: Step, x: object, builder: Builder) -> object:
    """Emits an all-reduce of ``x`` by the step's reduce op; returns its result."""
    _, name = builder.group(step.axes)
    return _wait(builder, builder.call(c10d.all_reduce.default, x, step.op, name))


def _all_to_all(step: Step, x: object, builder: Builder) -> object:
    """Emits an all-to-all for a step in which axes stop splitting some dims (or factors of dims) and split others
    instead; returns this rank's shard after it.
    """
    size, name = builder.group(step.axes)
    x = _with_leading(builder, _to_front(step, x, builder), size)
    sizes = [builder.shape(x)[0] // size] * size
    x = builder.call(c10d.all_to_all_single.default, x, sizes, sizes, name)
    return _from_front(step, _wait(builder, x), builder)


def _permute_ranks(step: Step, x: object, builder: Builder) -> object:
    """Emits an exchange in which each rank sends its whole shard to another rank (`destinations`); returns the shard
    that this rank receives.
    """
    _, name = builder.group(step.axes)
    x = builder.call(torch.ops.shardc.permute_ranks.default, x, list(destinations(step)), name)
    return _reshape(builder, _wait(builder, x), step.dst.local_shape)


def destinations(step: Step) -> tuple[int, ...]:
    """Returns where each rank of a group sends its shard: a tuple from position in the group to position of the
    receiver. It is the same for all groups.

    Ranks that already hold the shard of ``step.dst`` keep it; the others are matched in order.
    """
    ranks = step.src.mesh.group(step.axes, 0)  # the group of rank 0 stands for all
    # A shard is identified by the global index of its first element. Several ranks may hold the same shard.
    have = [_origin(step.src, rank) for rank in ranks]
    want = [_origin(step.dst, rank) for rank in ranks]
    keeps = {k for k in range(len(ranks)) if have[k] == want[k]}
    takers: dict[tuple[int, ...], list[int]] = {}  # shard -> positions of the ranks that need and lack it
    for k in range(len(ranks)):
        if k not in keeps:
            takers.setdefault(want[k], []).append(k)
    return tuple(k if k in keeps else takers[have[k]].pop(0) for k in range(len(ranks)))


def _origin(layout: Layout, rank: int) -> tuple[int, ...]:
    """Returns the global index, one number per dim, of the first element that ``rank`` holds at ``layout``."""
    return tuple(
        sum(layout.mesh.index(d.axis, rank) * below for d, below in zip(digits, strides(digits), strict=True) if d.axis)
        for digits in layout.dims
    )


def _shard(step: Step, x: object, builder: Builder) -> object:
    """Emits the local slice of ``x`` that a step takes: ``x`` is viewed with one dim per digit, and of each digit that
    the step splits, this rank's index is selected. Returns the slice. Nothing is sent.
    """
    digits = [slot for slot in bound_digits(step.src, step.dst) if slot.before is None]
    # The digits that were split before are not dims of the local tensor.
    shape: list[int] = []
    runs: list[tuple[int, list[str]]] = []  # (dim of the view, the axes whose digits it joins)
    for at, slot in enumerate(digits):
        # Neighbouring digits of several axes are selected at once, by a joint coordinate.
        if slot.after and at and digits[at - 1].after:
            shape[-1] *= slot.radix
            runs[-1][1].append(slot.after)
            continue
        if slot.after:
            runs.append((len(shape), [slot.after]))
        shape.append(slot.radix)
    x = _reshape(builder, x, shape)
    for dim, axes in runs:
        x = builder.call(aten.index_select.default, x, dim, builder.coordinate(tuple(axes)))
    return _reshape(builder, x, step.dst.local_shape)


def _to_partial(step: Step, x: object, builder: Builder) -> object:
    """Emits and returns this rank's term of a partial value. For a sum or product, the first rank along the axes keeps
    ``x`` and the others get 0 or 1; for any other reduction all ranks keep ``x``.
    """
    if step.op not in ("sum", "product"):
        return x
    others = builder.call(aten.ne.Scalar, builder.coordinate(step.axes), 0)  # a mask of shape [1], which broadcasts
    if not step.dst.ndim:  # except to a scalar
        others = _reshape(builder, others, ())
    return builder.call(aten.masked_fill.Scalar, x, others, 0 if step.op == "sum" else 1)


# Kind of step -> (function that emits it, suffix of its marker's name).
_LOWERINGS: dict[str, tuple[Callable[[Step, object, Builder], object], str]] = {
    "all_gather": (_all_gather, "gathered"),
    "reduce_scatter": (_reduce_scatter, "scattered"),
    "all_reduce": (_all_reduce, "summed"),
    "all_to_all": (_all_to_all, "moved"),
    "permute_ranks": (_permute_ranks, "swapped"),
    "shard": (_shard, "shard"),
    "to_partial": (_to_partial, "term"),
}
REDUCING = ("reduce_scatter", "all_reduce", "to_partial")
STEPS = frozenset(ops.MARKERS[kind] for kind in _LOWERINGS)


@dataclass(frozen=True)
class Collectives:
    """Replaces each ``ops.reshard`` by the cheapest steps from its input's layout to its own.

        %w: f32[8@fsdp,4]                       %w: f32[8@fsdp,4]
        %w.at: f32[8,4] = reshard(%w)       ->  %w.full: f32[8,4] = all_gather(%w, axis="fsdp")

    A reshard between equal layouts is removed. Each new node is named after the reshard's input and keeps the reshard's
    origin; an all-gather that ends a reshard is called ``.full``.

    *Requires:* layouts agree at every use except that of a reshard (`Reshard`). *Ensures:* there are no reshards; every
    other node is as before.

    Args:
        cost: the cost model, which decides between sequences of steps.
        per_microbatch: reduce once per microbatch, to shards that are added up; otherwise add up, then reduce once.
    """

    cost: Pricing = CostModel()
    per_microbatch: bool = False
    name = "collectives"
    requires = ("reshard",)

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        reshards = dict.fromkeys(node for node in gm.graph.nodes if node.target is ops.reshard)
        rewriter = GraphRewriter(gm.graph, reusable=reshards)
        for node in reshards:
            self._lower(node, rewriter)
        gm.recompile()
        return gm

    def _lower(self, reshard: fx.Node, rewriter: GraphRewriter) -> None:
        """Replaces one reshard by its steps."""
        last = reshard.args[0]  # the value so far: the reshard's input, then the result of each step
        assert isinstance(last, fx.Node)
        record = replace(info(reshard), name=info(last).name)
        plan = self._steps(layout(last), layout(reshard), value(reshard).itemsize)
        for step in plan:
            _, suffix = _LOWERINGS[step.kind]
            suffix = "full" if step.kind == "all_gather" and step is plan[-1] else suffix
            target, result = ops.MARKERS[step.kind], replace(value(reshard), layout=step.dst)
            last = Inserter(rewriter, reshard, record, suffix).typed(result, target, last, **_options(step))
        rewriter.replace(reshard, last)

    def _steps(self, src: Layout, dst: Layout, itemsize: int) -> tuple[Step, ...]:
        """Returns the cheapest steps from ``src`` to ``dst``. With ``per_microbatch``, a pending sum over microbatches
        is done last if other steps split the value into shards: shards are added up then, not whole values.
        """
        time, pending = src.mesh.time, dict(src.partial)  # ``time``: the axis of microbatches
        is_split = bool(set(dst.bound) - set(src.bound))
        if not (self.per_microbatch and time in pending and is_split):
            return steps(src, dst, itemsize, self.cost)
        shards = dst.with_partial([time], pending[time])
        return (*steps(src, shards, itemsize, self.cost), Step("all_reduce", (time,), pending[time], shards, dst))


def _options(step: Step) -> dict[str, Argument]:
    """Returns the keyword arguments of a step's marker: ``axis``, and ``op`` if it reduces."""
    options: dict[str, Argument] = {"axis": ",".join(step.axes)}
    if step.kind in REDUCING:
        assert step.op is not None
        options["op"] = step.op
    return options


def step_of(node: fx.Node) -> Step:
    """Returns the `Step` (one collective or slice of a reshard) that a marker node stands for."""
    before = node.args[0]
    assert isinstance(before, fx.Node) and node.target in STEPS, f"{node} is not a step of a reshard"
    kind = node.target.__name__
    axes = tuple(axis for axis in str(node.kwargs["axis"]).split(",") if axis)
    op = str(node.kwargs.get("op", "sum")) if kind in REDUCING else None
    return Step(kind, axes, op, layout(before), layout(node))
