"""Remakes outputs that are views on one device: of each other, of inputs and buffers, or of a tensor that is not
returned.

The graph returns the base, and torch's own ops make the views outside of it. So autograd tracks and refuses in-place
changes as on one device. This requires that a rank's shard of the view is a view of its shard of the base, by ops of
its graph. If not, an output that shares memory on one device is `ReadOnly`. So are all such outputs as DTensors, and
outputs that are parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from shardc._compat import PyTree
from shardc.ir import graph as ir
from shardc.ir.executable import Executable, Half
from shardc.ir.layout import Layout
from shardc.ir.returned import Returned

Op = Callable[[Tensor], PyTree]
Place = tuple[tuple[int, ...], tuple[int, ...], int]  # sizes, strides and offset within memory


@dataclass(frozen=True)
class View:
    """The view ops by which an output is made from another output, an input or a base tensor.

    Args:
        at: position of the output.
        source: position of the tensor among outputs and bases, or among the inputs of the graph if ``from_feed``. Equal
            to ``at`` if the graph returns the values.
        ops: the view ops between them.
        output: how one device returns the output.
        detached: whether the output has no gradient while its source has one.
    """

    at: int
    source: int
    from_feed: bool
    ops: tuple[Op, ...]
    output: Returned
    detached: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """Applies the view ops to the source tensor ``x``, and returns the output."""
        if self.from_feed and self.output.itself:
            return x
        # Either a view of the detached source, or (below) a detached tensor that is no view, as on one device.
        if self.detached and self.output.view:
            x = x.detach()
        for op in self.ops:
            x = op(x)
        if self.detached and not self.output.view:
            return x.detach()
        if self.output.part:
            return x.unsqueeze(0).unbind(0)[0]  # torch refuses in-place changes of a result of unbind
        return x if self.ops or not self.output.view else x.view_as(x)


@dataclass(frozen=True)
class Base:
    """A tensor inside the model from which several outputs are made as views. The model does not return it.

    Args:
        of: positions of these outputs.
        places: sizes, strides and offset of each output in the base, which has one dim.
        split: positions of these outputs that have gradients.
    """

    of: tuple[int, ...]
    places: tuple[Place, ...]
    split: frozenset[int]

    def holding(self, outputs: Sequence[Any]) -> Tensor:
        """Returns a tensor of one dim (the base) that contains all elements of ``outputs``, so that the outputs can
        be made from it as views.

        It is a view of their own memory if they lie there as `places` says, else new memory.
        """
        values = [outputs[at] for at in self.of]
        first, size = values[0], max(map(_end, self.places))
        start = first.storage_offset() - self.places[0][2]
        memory = {x.untyped_storage().data_ptr() for x in values}
        placed = [(tuple(x.shape), x.stride(), x.storage_offset() - start) for x in values]
        if len(memory) == 1 and start >= 0 and placed == list(self.places):
            return first.detach().as_strided((size,), (1,), start).detach()
        base = first.new_zeros(size)
        for x, place in zip(values, self.places, strict=True):
            base.as_strided(*place).copy_(x)
        return base

    def gradients(self, grad: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Splits ``grad``, the gradient of the base, among the outputs that are views of it. Yields (output position,
        gradient); an element in several outputs counts for the first.
        """
        left = grad.clone(memory_format=torch.contiguous_format)
        for at, place in zip(self.of, self.places, strict=True):
            if at in self.split:
                part = left.as_strided(*place)
                yield at, part.clone(memory_format=torch.contiguous_format)
                part.zero_()


@dataclass(frozen=True)
class Views:
    """Describes which outputs of a graph are views, and which can only be read. The views are made from other tensors
    after each run of the graph.

    Args:
        views: view ops of these outputs, each after its source.
        bases: the bases, whose positions follow those of the outputs.
        read_only: positions of outputs that share memory on one device and not here, and of their bases.
    """

    views: tuple[View, ...] = ()
    bases: tuple[Base, ...] = ()
    read_only: frozenset[int] = frozenset()

    def to_bases(self, outputs: list[Any]) -> list[Any]:
        """Returns ``outputs`` with None in place of views that `make` makes from other tensors, and with the base
        tensors (`Base`) of views appended.
        """
        bases = [base.holding(outputs) for base in self.bases]
        without_views = list(outputs)
        for view in self.views:
            if view.from_feed or view.source != view.at:
                without_views[view.at] = None
        return without_views + bases

    def make(self, outputs: list[Any], feed: Sequence[Any]) -> None:
        """Fills in those entries of ``outputs`` that are views, in place. Each is made from another output or from
        ``feed``, the arguments of forward; then the base tensors at the end of ``outputs`` are removed.
        """
        for view in self.views:
            outputs[view.at] = view(feed[view.source] if view.from_feed else outputs[view.source])
        if self.bases:
            del outputs[-len(self.bases) :]


def views_of(
    program: Executable,
    half: Half,
    differentiable: Collection[int],
    outputs: Sequence[Any],
    feed: Sequence[Any],
    dtensors: bool,
) -> Views:
    """Finds which outputs of a graph are views, from the results of its first run, and returns them as `Views`.

    Args:
        differentiable: positions of outputs that have gradients.
        outputs: results of the run.
        feed: inputs of the run.
        dtensors: whether outputs become DTensors, which are never views of each other.
    """
    nodes: list[fx.node.Argument] = [node for _, node in ir.outputs(half.graph)][: len(program.outputs)]
    at_index = {role.index: at for at, role in enumerate(program.outputs) if role.kind == "output"}
    returned = {
        at: program.returned[index]
        for index, at in at_index.items()
        if isinstance(outputs[at], Tensor) and program.returned[index].same is None
    }
    takes = {(port.role.kind, port.role.name): at for at, port in enumerate(half.takes)}
    placeholders = ir.placeholders(half.graph)
    layouts = dict(program.inputs)
    axes = {at: _axes(role.layout) for at, role in enumerate(program.outputs)}
    views: dict[int, View] = {}
    by_unreturned_memory: dict[int, list[int]] = {}  # outputs that share a memory that is no output or input
    stray: set[int] = set()

    def add(view: View, source: Tensor, fits: bool) -> None:
        """Adds ``view`` to ``views`` if ``fits`` is true, outputs are not DTensors, and the view ops of ``view`` also
        work on the local tensor ``source``. Otherwise adds the output to ``stray``, the outputs that are not views
        here.
        """
        if fits and not dtensors and _makes_view(view, source, outputs[view.at]):
            views[view.at] = view
        else:
            stray.add(view.at)

    # Views of another output, of an input or buffer, or of a tensor that is not returned (grouped below).
    for at, output in returned.items():
        if output.of_output is not None:
            source = at_index[output.of_output]
            ops = _path(nodes[at], nodes[source])
            detached = at not in differentiable and source in differentiable
            view = View(at, source, False, ops or (), output, detached)
            add(view, outputs[source], ops is not None and axes[at] == axes[source])
        elif output.of is None:
            by_unreturned_memory.setdefault(output.first, []).append(at)
        elif any((kind, output.of) in takes for kind in ("input", "buffer")):
            kind = "input" if ("input", output.of) in takes else "buffer"
            source = takes[kind, output.of]
            ops = _path(nodes[at], placeholders[source])
            view = View(at, source, True, ops or (), output, at not in differentiable)
            fits = ops is not None and (kind == "buffer" or axes[at] == _axes(layouts[output.of]))
            add(view, feed[source], fits)
        elif dtensors or output.itself or ("param", output.of) not in takes:  # a constant of the program
            stray.add(at)
        # A view of a parameter stays as the graph returns it, if it is in the parameter's memory.
        elif memory_of(feed[takes["param", output.of]]) != memory_of(outputs[at]):
            stray.add(at)
    bases: list[Base] = []
    # Outputs that share a memory that is not returned: a single one is a plain view, several need a common base.
    for group in by_unreturned_memory.values():
        if len(group) == 1:
            at = group[0]
            if returned[at].part if dtensors else returned[at].view:
                views[at] = View(at, at, False, (), returned[at])
            continue
        fits = len({axes[at] for at in group}) == 1 and not dtensors
        base = _base(group, nodes, outputs, differentiable) if fits else None
        if base is None:
            stray.update(group)
            continue
        source = len(program.outputs) + len(bases)
        bases.append(base)
        for at, place in zip(group, base.places, strict=True):
            ops = (partial(_strided_view, place),)
            detached = at not in differentiable and bool(base.split)
            views[at] = View(at, source, False, ops, returned[at], detached)
    # Copies here: if they overlap another output on one device, a write would not reach it, so it is refused.
    firsts = {returned[at].first for at in stray}
    read_only = {at for at, output in returned.items() if output.first in firsts and output.overlaps}
    # An output that is an input of the user is that tensor itself, and may be changed as on one device.
    read_only.difference_update(at for at, view in views.items() if view.from_feed and view.output.itself)
    for at in stray - read_only:  # they do not overlap
        views[at] = View(at, at, False, (), returned[at])
    # A read-only output is the value that the graph returns, and not a view of an input.
    views = {at: view for at, view in views.items() if at not in read_only or not view.from_feed}
    read_only_bases = {len(program.outputs) + at for at, base in enumerate(bases) if read_only.intersection(base.of)}
    return Views(tuple(_ordered(views)), tuple(bases), frozenset(read_only | read_only_bases))


def _strided_view(place: Place, base: Tensor) -> Tensor:
    """Returns a view of ``base`` with the sizes, strides and offset ``place``. The offset counts from the start of
    ``base``, which may be a view itself.
    """
    sizes, strides, offset = place
    return base.as_strided(sizes, strides, base.storage_offset() + offset)


def memory_of(x: object) -> int:
    """Returns the address of the storage of tensor ``x``, equal for tensors that share memory; 0 for other values."""
    x = x._local_tensor if isinstance(x, DTensor) else x
    return int(x.untyped_storage().data_ptr()) if isinstance(x, Tensor) else 0


def _axes(layout: Layout | None) -> frozenset[str]:
    """Returns the mesh axes along which ``layout`` splits dims or has pending reductions. Empty if ``layout`` is
    None.
    """
    return frozenset(layout.axes) if layout is not None else frozenset()


def _ordered(views: dict[int, View]) -> Iterator[View]:
    """Yields the views such that each comes after its source."""
    left = dict(views)

    def of(view: View) -> Iterator[View]:
        if left.pop(view.at, None) is not None:
            if not view.from_feed and view.source in left:
                yield from of(left[view.source])
            yield view

    for view in views.values():
        yield from of(view)


def _view_chain(node: fx.Node) -> Iterator[tuple[fx.Node, Op | None]]:
    """Walks from ``node`` up a chain of view ops. Yields (node, op) for each: ``op`` computes the node from the node
    that is yielded next; it is None for the last node.
    """
    while True:
        before = node.all_input_nodes[0] if node.op == "call_function" and node.all_input_nodes else None
        op: Op | None = None
        if before is None:
            pass
        elif node.target is getitem and before.op == "call_function" and _is_view_op(before):
            # An item of a view op with several results (`split`): the two nodes are one step.
            op = partial(_one_of, partial(_applied, before.target, before.args[1:], before.kwargs), node.args[1])
            before = before.args[0]
        elif _is_view_op(node):
            op = partial(_applied, node.target, node.args[1:], node.kwargs)
        yield node, op
        if op is None:
            return
        node = before


def _is_view_op(node: fx.Node) -> bool:
    """Whether ``node`` is a view op whose first argument is its only operand."""
    op = node.target
    is_op = isinstance(op, torch._ops.OpOverload) and op.is_view
    return is_op and node.all_input_nodes == [node.args[0]]


def _applied(op: Callable[..., PyTree], args: Sequence[object], kwargs: Mapping[str, object], x: Tensor) -> PyTree:
    """Calls ``op`` with ``x`` as its first argument, followed by ``args`` and ``kwargs``. `View.ops` holds partial
    calls of this function.
    """
    return op(x, *args, **kwargs)


def _one_of(op: Op, index: int, x: Tensor) -> Tensor:
    """Applies ``op``, which has several results, to ``x``; returns result number ``index``."""
    return op(x)[index]


def of_constant(node: fx.node.Argument) -> bool:
    """Whether ``node`` is a view of a constant of its graph."""
    return isinstance(node, fx.Node) and [x for x, _ in _view_chain(node)][-1].op == "get_attr"


def _path(node: fx.node.Argument, source: fx.Node) -> tuple[Op, ...] | None:
    """Returns the view ops that compute ``node`` from ``source``; None if ``node`` is not a view of ``source``."""
    ops: list[Op] = []
    for above, op in _view_chain(node) if isinstance(node, fx.Node) else ():
        if above is source:
            return tuple(reversed(ops))
        if op is not None:
            ops.append(op)
    return None


def _makes_view(view: View, source: Tensor, value: Tensor) -> bool:
    """Whether applying the ops of ``view`` to ``source`` gives a tensor in the memory of ``source``, with the shape
    and dtype of ``value``.
    """
    with torch.no_grad():
        out = replace(view, detached=False)(source.detach())
    same = out.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
    return same and out.shape == value.shape and out.dtype == value.dtype


def _base(
    group: Sequence[int], nodes: Sequence[fx.node.Argument], outputs: Sequence[Any], gradients: Collection[int]
) -> Base | None:
    """Returns the `Base`: a common tensor from which the outputs at positions ``group`` can be made as views. None if
    there is none.

    Args:
        group: positions of the outputs.
        nodes: node of each output.
        gradients: positions of outputs that have gradients.
    """
    paths = [[node for node, _ in _view_chain(nodes[at])] for at in group]
    common = next((node for node in paths[0] if all(node in path for path in paths)), None)
    values = [outputs[at] for at in group]
    if common is None or len({x.dtype for x in values}) > 1:
        return None
    if len({x.untyped_storage().data_ptr() for x in values}) > 1:  # the graph computed them separately
        root = torch.empty(ir.value(common).shape, dtype=values[0].dtype, device="meta")
        through = [_through(nodes[at], common, root) for at in group]
        if [x.shape for x in through] != [x.shape for x in values]:
            return None
        values = through
    start = min(x.storage_offset() for x in values)
    places = tuple((tuple(x.shape), x.stride(), x.storage_offset() - start) for x in values)
    # An expanded output has one element at several places, and gradients are split by places.
    if any(n > 1 and step == 0 for sizes, strides, _ in places for n, step in zip(sizes, strides, strict=True)):
        return None
    return Base(tuple(group), places, frozenset(group).intersection(gradients))


def _through(node: fx.Node, source: fx.Node, x: Tensor) -> Tensor:
    """Applies to ``x`` the view ops that make ``node`` from ``source``."""
    for op in _path(node, source) or ():
        x = op(x)
    return x


def _end(place: Place) -> int:
    """Returns the offset after the last element of ``place``, (sizes, strides, offset)."""
    sizes, strides, offset = place
    return offset + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True)) + 1 if all(sizes) else offset
