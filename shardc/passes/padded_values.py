"""Builders of graphs: `Calls` emits ops with fake values, `PaddedValues` also pads values at their first use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd, inf, prod
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Argument

from shardc._compat import FakeTensorMode
from shardc.ir import graph as ir
from shardc.ir import ops
from shardc.ir.comm_volume import arguments_of
from shardc.ir.graph import Info, NameScope
from shardc.ir.layout import Padding, Run, Runs, is_padded, padded_size
from shardc.ir.rewriter import GraphRewriter
from shardc.rules import strides_of
from shardc.rules.rule import ANY, CONTIGUOUS, TRACED, Call
from shardc.rules.spec import Spec

aten = torch.ops.aten


@dataclass(frozen=True)
class Padded:
    """The padded form of a value.

    Args:
        node: the padded value.
        padding: its padding: for each dim, the runs (sub-dims) of the dim with their sizes, true and padded.
        filling: the value of its padded elements; None if undefined.
    """

    node: fx.Node
    padding: Padding
    filling: float | None


class Calls:
    """Builder of a new graph: each op gets a fake value, and the record (`Info`) of the old node that it replaces.

    Args:
        old: the old graph, whose names the new one may not use; None for no graph.
        fake_mode, device: mode and device of fake values.

    Attributes:
        record: record of the old node that is being rewritten; new nodes get a copy.
        traced: the old node that is being rewritten: new calls of its target get operands with the strides of its
            trace.
    """

    def __init__(self, old: fx.Graph | None, fake_mode: FakeTensorMode, device: torch.device) -> None:
        self.graph = fx.Graph()
        self.rewriter = GraphRewriter(self.graph, fake_mode=fake_mode)
        self.names = self.rewriter.names = NameScope() if old is None else NameScope.of(old)
        self.device = device
        self.record = Info("", None)
        self.traced: fx.Node | None = None
        self._once: dict[object, object] = {}  # key -> result of `once`

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Returns ``make()``, evaluated at the first call with ``key`` only."""
        if key not in self._once:
            self._once[key] = make()
        return self._once[key]

    def call(self, target: Callable[..., object], *args: Argument, **kwargs: Argument) -> fx.Node:
        """Appends a call of ``target`` and returns its node; operands whose strides its kernel does not accept are
        copied first.
        """
        args, kwargs = self.with_strides(target, args, kwargs)
        fx.map_arg((args, kwargs), self.val)  # so that all operands have a fake value
        return self.rewriter.end(self.record).call(target, *args, **kwargs)

    def with_strides(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Prepares the arguments of a call of ``target``: returns (args, kwargs), with a copy in place of each tensor
        whose strides the kernel does not accept.
        """
        strides = strides_of(target)
        if strides == ANY:
            return args, kwargs
        names = [argument.name for argument in target._schema.arguments]
        old = self.traced
        # Strides in the trace are known for the arguments of the traced op only: name -> argument.
        traced = arguments_of(old) if old is not None and old.target is target else {}
        now = tuple(self._with_strides(x, traced.get(name), strides) for name, x in zip(names, args, strict=False))
        return now, {name: self._with_strides(x, traced.get(name), strides) for name, x in kwargs.items()}

    def _with_strides(self, x: Argument, old: object, strides: str) -> Argument:
        """Returns the argument ``x`` of a call, with copies of tensors whose strides the kernel does not accept.
        ``strides``: which it accepts (CONTIGUOUS, TRACED); ``old``: the argument in the trace, None if not known.
        """
        if isinstance(x, (list, tuple)):  # a list of tensors, each with its counterpart in the trace
            olds = old if isinstance(old, (list, tuple)) and len(old) == len(x) else [None] * len(x)
            return [self._with_strides(each, old_item, strides) for each, old_item in zip(x, olds, strict=True)]
        return self.like(x, old, strides) if isinstance(x, fx.Node) else x

    def like(self, x: fx.Node, old: object, strides: str = TRACED) -> fx.Node:
        """Returns ``x`` in the memory order (dims by stride) that ``old`` had in the trace: ``x`` itself or a copy. If
        the order is unknown, it is contiguous. ``strides`` CONTIGUOUS: a contiguous ``x`` is accepted, too.
        """
        val, traced = self.val(x), _traced(old)
        if not isinstance(val, Tensor) or (strides == CONTIGUOUS and val.is_contiguous()):
            return x
        if traced is not None and traced.ndim != val.ndim:
            traced = None  # its order says nothing about these dims
        if lies_like(val, traced):
            return x
        order = memory_order(traced)
        if order == sorted(order):
            return self.call(aten.clone.default, x, memory_format=torch.contiguous_format)
        # A contiguous copy with the dims in memory order, viewed with the dims as they were.
        turned = self.call(aten.permute.default, x, order)
        dense = self.call(aten.clone.default, turned, memory_format=torch.contiguous_format)
        return self.call(aten.permute.default, dense, [order.index(dim) for dim in range(len(order))])

    def val(self, node: fx.Node) -> Any:
        """Returns the fake tensor of ``node``. If the node has none, one is created from its recorded shape and
        dtype.
        """
        if "val" not in node.meta:
            value = ir.value(node)
            with self.rewriter.fake_mode:
                node.meta["val"] = torch.empty(value.shape, dtype=value.dtype, device=self.device)
        return node.meta["val"]

    def shape(self, x: fx.Node) -> tuple[int, ...]:
        """Returns the shape of ``x`` in the new graph, padding included."""
        return tuple(self.val(x).shape)

    # --- interface of `shardc.rules` builders: what a graph at global shapes cannot have

    def coordinate(self, axes: tuple[str, ...]) -> fx.Node:
        """Raises AssertionError: a graph at global shapes needs no coordinate of a rank."""
        raise AssertionError(f"a replicated value needs no coordinate along {axes}")

    def key(self) -> fx.Node:
        """Raises AssertionError: random draws are not padded."""
        raise AssertionError("random draws are not padded")

    def group(self, axes: tuple[str, ...]) -> tuple[int, str]:
        """Raises AssertionError: a graph at global shapes needs no process group."""
        raise AssertionError(f"a replicated value needs no group along {axes}")


def _traced(x: object) -> Tensor | None:
    """Returns the fake tensor that operand ``x`` had in the trace; None if it is not known. Markers are looked
    through.
    """
    while isinstance(x, fx.Node) and "val" not in x.meta and x.target in ops.MARKERS.values():
        x = x.all_input_nodes[0]
    val = x.meta.get("val") if isinstance(x, fx.Node) else None
    return val if isinstance(val, Tensor) else None


class PaddedValues(Calls):
    """Builder of a graph whose values may be padded; rules emit padded ops through it.

    Attributes:
        plain: old node -> its unpadded form.
        padded: old node -> its padded form, if it has one.
    """

    def __init__(self, old: fx.Graph, fake_mode: FakeTensorMode, device: torch.device) -> None:
        super().__init__(old, fake_mode, device)
        self.plain: dict[fx.Node, fx.Node] = {}
        self.padded: dict[fx.Node, Padded] = {}
        self._nodes: dict[tuple[object, ...], fx.Node] = {}  # padded forms and masks that exist already, by their key

    def without_padding(self, x: fx.Node) -> fx.Node:
        """Returns the unpadded form of the old node ``x``, which is created at the first call."""
        if x not in self.plain:
            padded = self.padded[x]
            self.plain[x] = self._map_runs(padded.node, padded.padding, self._slice)
        return self.plain[x]

    def padded_to(self, x: fx.Node, padding: Padding, filling: float | None = None) -> fx.Node:
        """Returns the node of the new graph for the old node ``x``, padded to ``padding``. If ``filling`` is not None,
        the padding holds this value.
        """
        key = (x, padding, filling)
        if key not in self._nodes:
            padded = self.padded.get(x)
            if padded is None or padded.padding != padding:
                grown = self.grown(self.without_padding(x), padding)  # with zeros
                self._nodes[key] = self._fill(grown, padding, now=0, wanted=filling)
            else:
                self._nodes[key] = self._fill(padded.node, padding, now=padded.filling, wanted=filling)
        return self._nodes[key]

    def _map_runs(self, x: fx.Node, padding: Padding, change: Callable[[fx.Node, int, Run], fx.Node]) -> fx.Node:
        """Returns ``x`` with each padded run (sub-dim) of its dims changed by ``change(value, dim of the run, run)``.
        For this, a dim is viewed with one dim for each of its runs; dims are changed one after another.
        """
        for dim, runs in enumerate(padding):
            if is_padded(runs):
                x = self._map_runs_of_dim(x, dim, runs, change)
        return x

    def _map_runs_of_dim(
        self, x: fx.Node, dim: int, runs: Runs, change: Callable[[fx.Node, int, Run], fx.Node]
    ) -> fx.Node:
        """Returns ``x`` with those of the ``runs`` (sub-dims) of ``dim`` that are padded changed by ``change``, as in
        `_map_runs`.
        """
        shape = list(self.shape(x))
        if len(runs) > 1:
            # ``x`` is padded if ``change`` removes or fills padding, and not yet if it adds padding.
            sizes = [run.size if shape[dim] == padded_size(runs) else run.true for run in runs]
            x = self.call(aten.view.default, x, [*shape[:dim], *sizes, *shape[dim + 1 :]])
        for at, run in enumerate(runs):
            if run.padded:
                x = change(x, dim + at, run)
        if len(runs) > 1:
            sizes_now, end = self.shape(x), dim + len(runs)
            x = self.call(aten.reshape.default, x, [*sizes_now[:dim], prod(sizes_now[dim:end]), *sizes_now[end:]])
        return x

    def _slice(self, x: fx.Node, dim: int, run: Run) -> fx.Node:
        """Returns ``x`` without the padding at the end of its dim ``dim``, which is the run (sub-dim) ``run``."""
        return self.call(aten.slice.Tensor, x, dim, 0, run.true)

    def grown(self, x: fx.Node, padding: Padding) -> fx.Node:
        """Pads the unpadded node ``x`` of the new graph to ``padding`` with zeros; returns the result."""

        def grow(node: fx.Node, dim: int, run: Run) -> fx.Node:
            # (before, behind) each dim, the last one first: as many elements behind ``dim`` as the run lacks.
            widths = [0, 0] * (len(self.shape(node)) - dim - 1) + [0, run.size - run.true]
            return self.call(aten.constant_pad_nd.default, node, widths, 0)

        return self._map_runs(x, padding, grow)

    def _fill(self, x: fx.Node, padding: Padding, now: float | None, wanted: float | None) -> fx.Node:
        """Returns ``x`` with its ``padding`` filled with ``wanted`` (None: any value will do); the padding holds
        ``now`` so far (None: undefined).
        """
        if wanted is None or wanted == now:
            return x

        def fill(node: fx.Node, dim: int, run: Run) -> fx.Node:
            mask = self._padding_mask(run, self.val(node).device, len(self.shape(node)) - dim - 1)
            return self.call(aten.masked_fill.Scalar, node, mask, _as_dtype(wanted, self.val(node).dtype))

        return self._map_runs(x, padding, fill)

    def _padding_mask(self, run: Run, device: torch.device, below: int) -> fx.Node:
        """Returns a bool mask, [size of ``run``, 1, ...], that is true at the padding of ``run`` (a sub-dim).
        ``below``: number of dims of size 1 at its end.
        """
        key = ("past", run.size, run.true, device, below)
        if key not in self._nodes:
            at = self.call(aten.arange.default, run.size, dtype=torch.int64, device=device)
            mask = self.call(aten.ge.Scalar, at, run.true)
            self._nodes[key] = self.call(aten.view.default, mask, [run.size, *[1] * below]) if below else mask
        return self._nodes[key]


def _as_dtype(filling: float, dtype: torch.dtype) -> float | int | bool:
    """Returns ``filling`` as a number of ``dtype``; infinities become the ends of an integer range."""
    if dtype.is_floating_point or dtype.is_complex:
        return filling
    if dtype == torch.bool:
        return filling > 0
    info = torch.iinfo(dtype)
    return int(min(max(filling, info.min), info.max))


# Reduction that combines elements, or products of them, as they are -> the value that does not change its result.
# Others (a norm) transform each element first.
PLAIN = {
    "aten.sum": 0.0,
    "aten.nansum": 0.0,
    "aten.count_nonzero": 0.0,
    "aten.amax": -inf,
    "aten.amin": inf,
    "aten.prod": 1.0,
    "shardc_float8.mm": 0.0,
    "aten.any": 0.0,
    "aten.all": 1.0,
}


def reduction_identity(call: Call, spec: Spec, factor: str) -> float | None:
    """Returns the value for padded elements along ``factor`` (a loop of the op) that does not change the op's result;
    None if no such value is known.

    It is zero if the op sums over the factor and is linear in some operand that has the factor: that operand is zero
    there, and so is its term of the sum.
    """
    if spec.routed is not None and factor == spec.routed.owners:
        return 0.0  # padded experts get no rows
    if factor in spec.in_turn:
        return 0.0  # there are no steps for it
    identity = PLAIN.get(call.name.rpartition(".")[0])  # by the op's name without its overload
    if identity is None and dict(spec.reduce).get(factor) == "sum":
        having = {at for at, dims in enumerate(spec.operands) if any(factor in factors for factors in dims)}
        # A group of one: the op is linear in this operand by itself. Where that is zero, so is the term.
        return 0.0 if any(len(group) == 1 and group <= having for group in spec.linear) else None
    return identity


# A kernel accepts the strides that were traced. A shard may have others: ops that do not accept any strides
# (`Rule.strides`) get a copy of it with the dims in the traced memory order.
_VECTOR = 16  # bytes: the width of vectorized loads, which kernels use if strides are multiples of it


def lies_like(x: Tensor, traced: Tensor | None) -> bool:
    """Returns whether the strides of ``x`` are acceptable to a kernel that accepts those of ``traced``. Both have the
    same number of dims; sizes may differ.

    If ``traced`` is contiguous (or None: unknown), ``x`` must be. Otherwise the dims must have the same memory order,
    a dim of stride 1 must keep it, strides must stay as aligned to vectors as they were, and no further dim may be
    expanded.
    """
    if traced is None or traced.is_contiguous() or not x.numel():
        return x.is_contiguous()
    order = memory_order(traced)
    if x.permute(order).is_contiguous():
        return True
    inner_stride, itemsize = 0, x.element_size()
    for dim in reversed(order):  # from the innermost dim in memory on
        stride, traced_stride = x.stride(dim), traced.stride(dim)
        # The stride of a single element, or of an element that the trace repeats, says nothing.
        if x.shape[dim] == 1 or traced_stride == 0:
            continue
        # Another order, or an expanded dim (stride 0); or no unit stride where the kernel may rely on it.
        if stride < max(inner_stride, 1) or (traced_stride == 1 and stride != 1):
            return False
        # Less aligned.
        if gcd(stride * itemsize, _VECTOR) < gcd(traced_stride * itemsize, _VECTOR):
            return False
        inner_stride = stride
    return True


def memory_order(traced: Tensor | None) -> list[int]:
    """Returns the dims of ``traced`` in memory order, the dim with the largest stride first; [] for None. Expanded dims
    (stride 0) stand where a copy would have them.
    """
    if traced is None:
        return []
    # Those of a copy, which is dense and has the dims in the same order.
    strides = torch.empty_like(torch.empty_strided(traced.shape, traced.stride(), device="meta")).stride()
    return sorted(range(traced.ndim), key=lambda dim: (-strides[dim], dim))
