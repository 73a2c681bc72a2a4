"""Pad: if an axis of the plan does not divide the size of a dim, the dim grows to a size that the axis divides.

An op on padded operands also computes padded elements of its results. No true element of a result depends on these as
long as each element is computed from its own operands' elements. Before a reduction, the padding is set to the
reduction's identity: zero for an op that is linear in what it sums, the lowest value for a maximum, and so on. If the
reduction has no identity, the values are gathered and cut back to their true sizes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import getitem
from typing import Any

import torch
from torch import fx

from shardc._compat import FakeTensorMode, LazyGraphModule
from shardc.custom_ops.float8_ops import QUANTISE
from shardc.errors import LayoutError, ShardcWarning
from shardc.ir import graph as ir
from shardc.ir import ops
from shardc.ir.graph import Info
from shardc.ir.layout import (
    Layout,
    Padding,
    Run,
    Runs,
    axes_of,
    canonical_runs,
    is_padded,
    padded_size,
    share_out,
    true_size,
    unpadded,
)
from shardc.ir.mesh import Mesh
from shardc.ir.op_traits import CAST, RESHAPES
from shardc.ir.rewriter import erase_dead_code
from shardc.passes.op_calls import call_of, operands_of, with_operands
from shardc.passes.padded_values import Padded, PaddedValues, reduction_identity
from shardc.rules import contractions, factory, find_rule, pointwise, spec_of
from shardc.rules.rule import Call, Local
from shardc.rules.spec import Spec

aten = torch.ops.aten

Grow = Callable[[str, Sequence[int], Sequence[int]], Layout | None]


@dataclass(frozen=True)
class Pad:
    """Grows each dim that an axis splits but does not divide, to a size that the axis divides.

        %x: f32[10]                         %x.padded: f32[12@dp] = reshard(constant_pad_nd(%x, [0, 2]))
        %y: f32[] = sum(%x)             ->  %y: f32[] = sum(%x.padded)

    *Requires:* a seeded graph. *Ensures:* inputs and outputs keep their shapes: an input is padded, and split, at its
    first use. A graph in which all sizes divide is returned as it is.

    Args:
        mesh: the mesh of the layouts.
        inputs: position -> (layout at padded sizes, plan entry) of each tensor input whose sizes do not divide.
        params: name -> layout at padded sizes of each parameter that the plan splits for compute and whose sizes do not
            divide. The parameter has that layout, or a reshard of it has.
        grow: maps (tag name, its shape, its padded shape) to the layout of the padded value that the plan wants there;
            None if all sizes divide.
        fake_mode: mode of the captured graph's fake values.
        device: device of values without one.
    """

    mesh: Mesh
    inputs: Mapping[int, tuple[Layout, str]]
    params: Mapping[str, Layout]
    grow: Grow
    fake_mode: FakeTensorMode
    device: torch.device
    name = "pad"
    requires = ("seed",)

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        activations = ((x.kwargs["name"], ir.value(x).shape) for x in gm.graph.nodes if x.target is ops.tag)
        # `grow` takes the true and the padded shape, which are the same so far.
        if not (self.inputs or self.params) and all(self.grow(name, s, s) is None for name, s in activations):
            return gm
        return LazyGraphModule(gm, _Padder(self, gm.graph).run())


class _Padder(PaddedValues):
    """Builds the graph at padded sizes op by op, with padded and unpadded forms of its values.

    Attributes:
        several: node with several results -> (results, paddings of these, value in the padding).
    """

    def __init__(self, options: Pad, old: fx.Graph) -> None:
        super().__init__(old, options.fake_mode, options.device)
        self.options, self.old, self.mesh = options, old, options.mesh
        self.several: dict[fx.Node, tuple[Any, list[Padding | None], float | None]] = {}

    def run(self) -> fx.Graph:
        """Returns the graph at padded sizes."""
        started = False
        for node in self.old.nodes:
            # Reshards of inputs stand behind all placeholders.
            if node.op not in ("placeholder", "get_attr") and not started:
                started = True
                self._inputs()
            # Of the old node that is rewritten: new nodes get its record, and its operands' strides.
            self.record, self.traced = (ir.info(node) if node.op != "output" else Info("", None)), node
            if node.op == "output":
                output = self.graph.output(
                    tuple(self._output(role, x) if isinstance(x, fx.Node) else x for role, x in ir.outputs(self.old))
                )
                output.meta[ir.ROLES] = node.meta[ir.ROLES]
            elif node.op != "call_function":
                self.plain[node] = self._copy(node)
            elif node.target is getitem and node.args[0] in self.several:
                self._getitem(node)
            elif node.target is ops.tag:
                self._tag(node)
            elif node.target is ops.unpad:
                self._param(node)
            else:
                self._op(node)
        erase_dead_code(self.graph)
        self.graph.lint()
        return self.graph

    def _copy(self, node: fx.Node) -> fx.Node:
        """Returns a copy of the op ``node`` that reads unpadded operands."""
        copy = self.graph.node_copy(node, self.without_padding)
        with self.graph.inserting_before(copy):
            # Unpadded operands are slices, whose strides the kernel may not accept.
            copy.args, copy.kwargs = self.with_strides(copy.target, copy.args, copy.kwargs)
        return copy

    def _inputs(self) -> None:
        """Pads each input that an axis of the plan does not divide, and inserts the reshard to its layout."""
        tensors = [node for node in ir.placeholders(self.old, "input") if ir.is_tensor(node)]
        for at, (layout, cause) in self.options.inputs.items():
            node = tensors[at]
            self.record = ir.info(node)
            shape = ir.value(node).shape
            padding = _padding_of(layout, shape, have=ir.layout(node))
            grown = self.grown(self.plain[node], padding)
            record = replace(self.record, origin=replace(self.record.origin, cause=cause))
            value = replace(ir.value(grown), layout=layout)
            placed = self.rewriter.end(record, "placed").typed(value, ops.reshard, grown)
            placed.meta["val"] = grown.meta["val"]
            self.padded[node] = Padded(placed, padding, filling=0)

    def _param(self, node: fx.Node) -> None:
        """Copies the ``unpad`` node of a parameter. If ops compute with shards of the parameter, also records its
        padded form, which they use: the parameter, its cast or its reshard.
        """
        self.plain[node] = self._copy(node)
        # From the unpad back to the parameter: parameter -> cast, reshards -> unpad of each dim.
        chain: list[Any] = [node]
        while chain[-1].op == "call_function":
            chain.append(chain[-1].args[0])
        layout = self.options.params.get(ir.info(chain[-1]).name)
        # Each padded dim has an unpad; the last one in a chain stands for the parameter.
        if layout is None or any(user.target is ops.unpad for user in node.users):
            return
        # If a parameter is cast before its gather, ops use the cast.
        placed = next(x for x in chain if x.target in (CAST, QUANTISE) or ir.value(x).layout == layout)
        # Storage is padded with zeros.
        self.padded[node] = Padded(self.plain[placed], _padding_of(layout, ir.value(node).shape), filling=0)

    def _output(self, role: ir.Role, x: fx.Node) -> fx.Node:
        """Returns the node in the new graph that takes the place of the output ``x``: padded if it is the gradient of a
        padded parameter, else with true sizes.
        """
        layout = self.options.params.get(role.name) if role.kind == "grad" else None
        if layout is None:
            return self.without_padding(x)
        # `Seed` has padded the gradient to the stored shape, before its last cast. Its pads are left out, as the value
        # before them may be padded already.
        cast = x if x.target is aten._to_copy.default and x.args[0].target is ops.pad else None
        source = x if cast is None else cast.args[0]
        while source.target is ops.pad:
            (source,) = source.args
        self.record = replace(ir.info(source), role=None)
        # Zero, so that padded places of storage stay zero whatever the optimizer does.
        padded = self.padded_to(source, _padding_of(layout, ir.value(source).shape), 0)
        return padded if cast is None else self.call(cast.target, padded, **cast.kwargs)

    # --- ops

    def _tag(self, node: fx.Node) -> None:
        """Copies a tag (the marker of a named activation). If the plan's axes do not divide the activation's sizes, the
        new tag reads the padded activation.
        """
        source = node.args[0]
        assert isinstance(source, fx.Node)
        shape = ir.value(node).shape
        have = self.padded[source].padding if source in self.padded else unpadded(shape)  # runs of each dim
        layout = self.options.grow(node.kwargs["name"], shape, [padded_size(runs) for runs in have])
        # The pin may want more padding, at the end of a dim; a dim that is padded inside of it, too, keeps what it has.
        if layout is not None and all(len(runs) == 1 for runs in have):
            have = tuple(
                runs if size == padded_size(runs) else (Run(size, true_size(runs), layout.dim_axes(dim)),)
                for dim, (runs, size) in enumerate(zip(have, layout.shape, strict=True))
            )
        if not any(map(is_padded, have)):
            self.plain[node] = self._copy(node)
            return
        before = self.padded_to(source, have)
        tag = self.graph.call_function(ops.tag, (before,), dict(node.kwargs))
        tag.meta["val"] = self.val(before)
        ir.set_info(tag, replace(self.record, value=ir.value_of(tag.meta["val"])))
        self._record_padded(node, tag, have, self.padded[source].filling if source in self.padded else 0)

    def _op(self, node: fx.Node) -> None:
        """Emits an op on padded operands, as far as its rule allows, else on unpadded ones."""
        operands = operands_of(node)
        call = call_of(node) if hasattr(node.target, "_schema") else None
        spec = spec_of(call) if call is not None and any(x in self.padded for x in operands) else None
        if spec is None or call is None or len(spec.operands) != len(operands):
            self.plain[node] = self._copy(node)
            return
        # Padding is decided per factor (loop of the op), as all operands and results with the factor have to agree.
        padded_factors = self._factors_kept(node, call, spec, operands)
        if not padded_factors:
            self.plain[node] = self._copy(node)
            return
        grown_operands = [self._operand(x, call, spec, at, padded_factors) for at, x in enumerate(operands)]
        operand_paddings = [_padding_of_dims(spec, dims, padded_factors) for dims in spec.operands]
        result_paddings = [_padding_of_dims(spec, dims, padded_factors) for dims in spec.results]
        result = self._emit_padded(node, call, spec, grown_operands, operand_paddings, result_paddings)
        # What moves elements keeps the value in the padding; what other ops compute there is undefined.
        filling = self.padded[operands[0]].filling if spec.moves and operands[0] in self.padded else None
        # `_operand` pads what is quantised with zeros, which stay zero.
        filling = 0 if node.target is QUANTISE else filling
        if isinstance(ir.info(node).value, tuple):
            rest = iter(result_paddings)  # of the results that are tensors
            paddings = [None if v is None else next(rest) for v in ir.info(node).value]  # type: ignore[union-attr]
            self.several[node] = result, paddings, filling
        else:
            self._record_padded(node, result, result_paddings[0], filling)

    def _record_padded(self, node: fx.Node, result: fx.Node, padding: Padding, filling: float | None) -> None:
        """Records ``result`` as the padded form of ``node``, and its ``padding``; as its plain form if nothing is
        padded. ``filling``: the value in the padding; None if it is undefined.
        """
        if any(map(is_padded, padding)):
            self.padded[node] = Padded(result, padding, filling)
            if any(user.op == "output" for user in node.users):
                # An output leaves without padding, and has the strides of a run on one device: a slice has others.
                self.plain[node] = self.like(self.without_padding(node), node)
        else:
            self.plain[node] = result

    def _getitem(self, node: fx.Node) -> None:
        """Handles ``node``, a getitem that reads one result of an op with several: records the matching result of the
        padded op.
        """
        source, index = node.args
        results, paddings, filling = self.several[source]
        result = results[index] if isinstance(results, list | tuple) else self.call(getitem, results, index)
        padding = paddings[index]
        assert padding is not None
        self._record_padded(node, result, padding, filling)

    def _factors_kept(self, node: fx.Node, call: Call, spec: Spec, operands: list[fx.Node]) -> dict[str, Runs]:
        """Returns factor (loop of the op) -> padding, for the factors along which this op can compute with padded
        operands. Warns of operands that are padded along other factors and have to be cut back.
        """
        padded_factors: dict[str, Runs] = {}
        lost: dict[fx.Node, str] = {}  # operand that is cut back -> the reason
        # The numbers that a draw gives depend on its size, so it is not padded.
        drawn = find_rule(node.target) in factory.DRAWS.values()
        for x, dims in zip(operands, spec.operands, strict=True):
            if x not in self.padded:
                continue
            for runs, factors in zip(self.padded[x].padding, dims, strict=True):
                if not is_padded(runs):
                    continue
                # The dim is the product of ``factors``: which of them has the padding?
                shared = share_out(runs, [spec.size(f) for f in factors])
                if shared is None:
                    lost[x] = "its dim is cut elsewhere"
                    continue
                for factor, factor_runs in zip(factors, shared, strict=True):
                    if not is_padded(factor_runs) or drawn or not spec.splittable(factor):
                        continue
                    if (reason := _obstacle(call, spec, factor, factor_runs)) is not None:
                        lost[x] = reason
                    else:  # the first operand decides how, others follow
                        padded_factors.setdefault(factor, factor_runs)
        for x, reason in lost.items():
            self._warn(node, x, reason)
        return padded_factors

    def _warn(self, node: fx.Node, x: fx.Node, reason: str) -> None:
        """Warns that op ``node`` needs its padded operand ``x`` unpadded, for this ``reason``."""
        value, record = ir.value(x), ir.info(node)
        axes = ", ".join(axes_of(self.padded[x].padding))
        size = value.itemsize * prod(value.shape)
        text = (
            f"{ir.info(x).name} of shape {value.shape} is padded for axis {axes}, and {node.target} "
            f"({record.name}) needs it unpadded: {reason}; it is kept whole there, {size} bytes"
        )
        fix = f"use sizes that {axes} divides"
        warnings.warn(str(LayoutError(text, source=record.origin.source or None, fix=fix)), ShardcWarning, stacklevel=2)

    def _operand(self, x: fx.Node, call: Call, spec: Spec, at: int, padded_factors: Mapping[str, Runs]) -> fx.Node:
        """Returns operand number ``at`` of an op, padded along the factors in ``padded_factors``. Where the op reduces,
        the padding holds the reduction's identity. ``x``: the operand in the old graph.
        """
        dims = spec.operands[at]
        padding = _padding_of_dims(spec, dims, padded_factors)
        if not any(map(is_padded, padding)):
            return self.without_padding(x)
        padded_here = {factor for factors in dims for factor in factors if factor in padded_factors}
        # A factor that some result lacks is reduced. The others may have anything in the padding, except as below.
        fills = {reduction_identity(call, spec, factor) for factor in padded_here if not spec.carried_by_all(factor)}
        value = ir.value(x)
        if not fills and find_rule(call.target) in contractions.MATRIX_FUNCTIONS.values():
            name = [name for name, _ in call.named_operands()][at]
            fills = {1 if name in contractions.PIVOTS else 0}  # a valid matrix for every kernel; pivots count from 1
        elementwise = spec.moves or find_rule(call.target) in pointwise.TABLE.values()
        if not fills and not value.dtype.is_floating_point and not elementwise:
            fills = {0}  # it may be an index
        if call.target is QUANTISE:
            fills = {0}  # float8 has no masked_fill
        if spec.routed is not None and not spec.routed.moving and not value.dtype.is_floating_point:
            fills = {spec.size(spec.routed.owners)}  # the index behind the last expert: no expert is chosen
        filling = next(iter(fills), None)
        assert len(fills) <= 1, f"{call.name} reduces in two ways"
        return self.padded_to(x, padding, filling)

    def _emit_padded(
        self,
        node: fx.Node,
        call: Call,
        spec: Spec,
        operands: list[fx.Node],
        operand_paddings: list[Padding],
        result_paddings: list[Padding],
    ) -> Any:
        """Emits the op ``node`` at padded sizes, through its rule's localize function; returns its result, or a list of
        several.

        Args:
            call, spec: of the op at true sizes.
            operands: the padded operands.
            operand_paddings, result_paddings: the padding of each operand, and of each result.
        """
        rule = find_rule(node.target)
        assert rule is not None
        args, kwargs = with_operands(node, operands)
        # Padded sizes are to the rule what shards are: the op is localized for a mesh that splits nothing.
        operand_layouts, result_layouts = (
            tuple(Layout.whole(self.mesh, [padded_size(runs) for runs in padding]) for padding in paddings)
            for paddings in (operand_paddings, result_paddings)
        )
        # The rule's function may replace the op by others; an opaque op is kept until it is localized to shards.
        localize = Local.same if rule.opaque else rule.localize
        result = localize(Local(self, call, spec, operand_layouts, result_layouts, tuple(args), dict(kwargs)))
        if isinstance(result, fx.Node) and result.op == "call_function":
            # The sizes without padding, which its rule can ask for when the op is localized to shards.
            true_sizes = tuple(true_size(runs) for padding in operand_paddings for runs in padding)
            ir.update(result, name=self.record.name, true_sizes=true_sizes)
        return result


def _padding_of(layout: Layout, shape: Sequence[int], have: Layout | None = None) -> Padding:
    """Returns the padding by which a value of ``shape`` grows to the sizes of ``layout``. If its present layout,
    ``have``, splits a dim that grows, the dim is padded in every shard (2 x 8 rows to 2 x 9), so that no element moves
    to another rank.
    """
    padding: list[Runs] = []
    for dim, (size, true) in enumerate(zip(layout.shape, shape, strict=True)):
        split = () if have is None or size == true else have.dim_axes(dim)
        shards = prod(layout.mesh.size(axis) for axis in split)
        # Axes of the present layout split the first run (one place per shard), those that need the padding the second.
        axes = tuple(axis for axis in layout.dim_axes(dim) if axis not in split) if size != true else ()
        padding.append(canonical_runs([Run(shards, shards), Run(size // shards, true // shards, axes)]))
    return tuple(padding)


def _padding_of_dims(spec: Spec, dims: Sequence[tuple[str, ...]], padded_factors: Mapping[str, Runs]) -> Padding:
    """Returns the padding of each dim of an operand or result. ``dims``: the factors of each dim; ``padded_factors``:
    factor -> its padding.
    """
    return tuple(
        canonical_runs([run for f in factors for run in padded_factors.get(f, (Run(spec.size(f), spec.size(f)),))])
        for factors in dims
    )


def _obstacle(call: Call, spec: Spec, factor: str, runs: Runs) -> str | None:
    """Returns why an op cannot compute with ``factor`` padded by ``runs``, as text for a warning; None if it can."""
    # Several runs: padding lies between elements, and moves those behind it.
    if factor in spec.indexed and len(runs) > 1:
        return "its elements are found by their place"
    # Padding of a factor that shares a dim with another one lies between true elements, which only reshapes take.
    # And each result has the factor, or the op ignores the padding.
    alone = call.target in RESHAPES or _never_joined(spec, factor)
    ignored = spec.carried_by_all(factor) or reduction_identity(call, spec, factor) is not None
    return None if alone and ignored else "no filling is known that the op ignores"


def _never_joined(spec: Spec, factor: str) -> bool:
    """Returns whether ``factor`` is never joined with another factor in one dim."""
    return all(factors == (factor,) for one in (*spec.operands, *spec.results) for factors in one if factor in factors)
