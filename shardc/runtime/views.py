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

Op = Callable[[Any], PyTree]  # a view op: takes a tensor, or as `getitem` the results of an op such as ``split``
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
        """Applies the view ops to the source tensor ``x``. ``output`` says how one device returns the result."""
        if self.from_feed and self.output.itself:  # the output is the argument itself
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
        # Without ops the graph returns the values; `view_as` makes autograd take them for a view, as on one device.
        return x if self.ops or not self.output.view else x.view_as(x)


@dataclass(frozen=True)
class Base:
    """A tensor inside the model from which several outputs are made as views. The model does not return it.

    Args:
        of: positions of these outputs.
        places: sizes, strides and offset of each output in the base, which has one dim.
        differentiable: positions of these outputs that have gradients.
    """

    of: tuple[int, ...]
    places: tuple[Place, ...]
    differentiable: frozenset[int]

    def holding(self, outputs: Sequence[Any]) -> Tensor:
        """Returns a tensor of one dim (the base) that contains all elements of ``outputs``, so that the outputs can
        be made from it as views.

        It is a view of their own memory if they lie there as `places` says, else new memory.
        """
        values = [outputs[at] for at in self.of]
        first, size = values[0], max(map(_end, self.places))
        # Where the base starts in the memory of the first output, if all outputs lie there.
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
            if at in self.differentiable:
                part = left.as_strided(*place)
                yield at, part.clone(memory_format=torch.contiguous_format)
                part.zero_()  # its elements are counted: later outputs get 0 for them


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
            # An output with itself as source has its values from the graph.
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
    return _Search(program, half, differentiable, outputs, feed, dtensors).views_and_bases()


@dataclass
class _Search:
    """The search of `views_of`, whose arguments it has.

    Attributes:
        nodes: node of each output.
        position_of: index of an output of the model -> its position.
        returned: position of an output that is a tensor -> how one device returns it. An output that is returned twice
            is there once.
        argument_at: (kind, name) of an argument of the graph -> its position.
        axes: position of an output -> mesh axes of its layout.
        views, bases: those that the search has found so far.
        copies: positions of outputs that share memory with another tensor on one device and are no views here.
    """

    program: Executable
    half: Half
    differentiable: Collection[int]
    outputs: Sequence[Any]
    feed: Sequence[Any]
    dtensors: bool

    def __post_init__(self) -> None:
        """Makes the tables that the search looks positions up in. Its results are empty so far."""
        roles = self.program.outputs
        self.nodes: list[Any] = [node for _, node in ir.outputs(self.half.graph)][: len(roles)]
        self.position_of = {role.index: at for at, role in enumerate(roles) if role.kind == "output"}
        # How one device returns each output that is a tensor; of one that is returned twice (`same`), the first.
        all_returned = {at: self.program.returned[index] for index, at in self.position_of.items()}
        self.returned = {
            at: x for at, x in all_returned.items() if isinstance(self.outputs[at], Tensor) and x.same is None
        }
        self.argument_at = {(port.role.kind, port.role.name): at for at, port in enumerate(self.half.takes)}
        self.axes = {at: _axes(role.layout) for at, role in enumerate(roles)}
        self.views: dict[int, View] = {}
        self.bases: list[Base] = []  # tensors of which several outputs are views
        self.copies: set[int] = set()  # outputs that share memory on one device and are no views here

    def views_and_bases(self) -> Views:
        """Runs the search: sorts the outputs by whose memory they are in on one device (another output's, an
        argument's, or one that is not returned), tries to make each as a view, and marks as read-only what must be
        copied.
        """
        by_unreturned_memory: dict[int, list[int]] = {}  # outputs that share a memory that is no output or argument
        for at, aliasing in self.returned.items():
            if aliasing.of_output is not None:
                source = self.position_of[aliasing.of_output]
                detached = at not in self.differentiable and source in self.differentiable
                fits = self.axes[at] == self.axes[source]
                self._add_view(at, source, from_feed=False, detached=detached, fits=fits)
            elif aliasing.of is not None:
                self._add_view_of_argument(at, aliasing, aliasing.of)
            else:
                by_unreturned_memory.setdefault(aliasing.first, []).append(at)
        for group in by_unreturned_memory.values():
            self._add_views_of_unreturned(group)
        read_only = self._read_only()
        for at in self.copies - read_only:  # copies that overlap no other tensor may be written
            self.views[at] = View(at, source=at, from_feed=False, ops=(), output=self.returned[at])
        # A read-only output is the value that the graph returns, and not a view of an argument.
        views = {at: view for at, view in self.views.items() if at not in read_only or not view.from_feed}
        count = len(self.program.outputs)  # bases are numbered behind the outputs
        read_only |= {count + at for at, base in enumerate(self.bases) if read_only.intersection(base.of)}
        return Views(tuple(_ordered(views)), tuple(self.bases), frozenset(read_only))

    def _add_view(self, at: int, source: int, from_feed: bool, detached: bool, fits: bool) -> None:
        """Adds output ``at`` as a view of the tensor at ``source`` (see `View`), if the ops of the graph make it as one
        from this rank's shard of that tensor; else adds it to ``copies``.

        Args:
            at, source, from_feed, detached: as in `View`.
            fits: whether the layouts allow it: both tensors are split along the same mesh axes.
        """
        if from_feed:
            node, value = ir.placeholders(self.half.graph)[source], self.feed[source]
        else:
            node, value = self.nodes[source], self.outputs[source]
        ops = _path(self.nodes[at], node)
        view = View(at, source, from_feed, ops or (), self.returned[at], detached)
        if fits and ops is not None and not self.dtensors and _makes_view(view, value, self.outputs[at]):
            self.views[at] = view
        else:
            self.copies.add(at)

    def _add_view_of_argument(self, at: int, aliasing: Returned, name: str) -> None:
        """Adds output ``at``, which on one device is a view of the input, buffer, parameter or constant ``name``."""
        kind = next((kind for kind in ("input", "buffer", "param") if (kind, name) in self.argument_at), "constant")
        if kind in ("input", "buffer"):
            # Buffers are replicated: `_add_view` tries the ops.
            fits = kind == "buffer" or self.axes[at] == _axes(dict(self.program.inputs)[name])
            detached = at not in self.differentiable
            self._add_view(at, self.argument_at[kind, name], from_feed=True, detached=detached, fits=fits)
        elif kind == "constant" or self.dtensors or aliasing.itself:
            self.copies.add(at)
        # A view of a parameter stays as the graph returns it, if it is in the parameter's memory.
        elif memory_of(self.feed[self.argument_at[kind, name]]) != memory_of(self.outputs[at]):
            self.copies.add(at)

    def _add_views_of_unreturned(self, group: Sequence[int]) -> None:
        """Adds the outputs ``group``, which on one device share a memory that is not returned: a single one as a plain
        view, several as views of a common base.
        """
        if len(group) == 1:
            (at,) = group
            aliasing = self.returned[at]
            # As DTensors, only views that torch refuses to change in place (`part`) are made again.
            is_made_again = aliasing.part if self.dtensors else aliasing.view
            if is_made_again:
                self.views[at] = View(at, source=at, from_feed=False, ops=(), output=aliasing)
            return
        fits = len({self.axes[at] for at in group}) == 1 and not self.dtensors
        base = self._base(group) if fits else None
        if base is None:
            self.copies.update(group)
            return
        source = len(self.program.outputs) + len(self.bases)
        self.bases.append(base)
        for at, place in zip(group, base.places, strict=True):
            detached = at not in self.differentiable and bool(base.differentiable)
            ops = (partial(_strided_view, place),)
            self.views[at] = View(at, source, from_feed=False, ops=ops, output=self.returned[at], detached=detached)

    def _base(self, group: Sequence[int]) -> Base | None:
        """Returns the `Base`: a common tensor from which the outputs at positions ``group`` can be made as views. None
        if there is none.
        """
        # Each path goes up from the output to the node whose memory it is in; the first node on all paths is nearest.
        paths = [list(filter(ir.is_tensor, _view_chain(self.nodes[at]))) for at in group]
        common = next((node for node in paths[0] if all(node in path for path in paths)), None)
        values = [self.outputs[at] for at in group]
        if common is None or len({x.dtype for x in values}) > 1:
            return None
        if len({x.untyped_storage().data_ptr() for x in values}) > 1:  # the graph computed them separately
            # Strides and offsets are then found by the view ops, on a meta tensor in place of the common node.
            root = torch.empty(ir.value(common).shape, dtype=values[0].dtype, device="meta")
            through = [_through(self.nodes[at], common, root) for at in group]
            if [x.shape for x in through] != [x.shape for x in values]:
                return None
            values = through
        start = min(x.storage_offset() for x in values)
        places = tuple((tuple(x.shape), x.stride(), x.storage_offset() - start) for x in values)
        # An expanded output has one element at several places, and gradients are split by places.
        if any(n > 1 and step == 0 for sizes, strides, _ in places for n, step in zip(sizes, strides, strict=True)):
            return None
        return Base(tuple(group), places, frozenset(group).intersection(self.differentiable))

    def _read_only(self) -> set[int]:
        """Returns the positions of outputs that overlap an output in ``copies`` on one device: a write would not reach
        that one here, so it is refused.
        """
        firsts = {self.returned[at].first for at in self.copies}
        overlapping = {at for at, output in self.returned.items() if output.first in firsts and output.overlaps}
        # An output that is an input of the user is that tensor itself, and may be changed as on one device.
        return overlapping - {at for at, view in self.views.items() if view.from_feed and view.output.itself}


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
    """Yields the views such that each comes after its source. ``views`` are by position of their output."""
    left = dict(views)  # not yielded yet

    def of(view: View) -> Iterator[View]:
        """Yields ``view``, and before it the view that is its source, if they were not yielded yet."""
        if left.pop(view.at, None) is not None:
            if not view.from_feed and view.source in left:
                yield from of(left[view.source])
            yield view

    for view in views.values():
        yield from of(view)


def _view_chain(node: fx.Node | None) -> Iterator[fx.Node]:
    """Yields ``node``, the node that it is a view of, and so on up to a node that is no view. Among them are view ops
    with several results, such as ``split``.
    """
    while node is not None:
        yield node
        operand: Any = node.args[0] if node.args else None
        # A `getitem` takes one of several results: the op before it tells whether they are views.
        is_view = _is_view_op(operand) if node.target is getitem else _is_view_op(node)
        node = operand if is_view else None


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


def of_constant(node: fx.node.Argument) -> bool:
    """Whether ``node`` is a view of a constant of its graph."""
    return isinstance(node, fx.Node) and [*_view_chain(node)][-1].op == "get_attr"


def _path(node: fx.node.Argument, source: fx.Node) -> tuple[Op, ...] | None:
    """Returns the view ops that compute ``node`` from ``source``; None if ``node`` is not a view of ``source``."""
    ops: list[Op] = []
    for above in _view_chain(node) if isinstance(node, fx.Node) else ():
        if above is source:
            return tuple(reversed(ops))
        ops.append(partial(_applied, above.target, above.args[1:], above.kwargs))
    return None


def _makes_view(view: View, source: Tensor, value: Tensor) -> bool:
    """Whether applying the ops of ``view`` to ``source`` gives a tensor in the memory of ``source``, with the shape
    and dtype of ``value``.
    """
    with torch.no_grad():
        out = replace(view, detached=False)(source.detach())
    same = out.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
    return same and out.shape == value.shape and out.dtype == value.dtype


def _through(node: fx.Node, source: fx.Node, x: Tensor) -> Tensor:
    """Applies to ``x`` the view ops that make ``node`` from ``source``."""
    for op in _path(node, source) or ():
        x = op(x)
    return x


def _end(place: Place) -> int:
    """Returns the offset after the last element of ``place``, (sizes, strides, offset)."""
    sizes, strides, offset = place
    return offset + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True)) + 1 if all(sizes) else offset
