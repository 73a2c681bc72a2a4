"""`local_map` regions: derives their layouts, and emits their ops on one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from shardc.custom_ops.region import Ranks, Region, on_ranks
from shardc.custom_ops.region import region as region_of
from shardc.errors import RuleError
from shardc.ir import graph as ir
from shardc.ir.graph import Value
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.ir.rewriter import inline_graph
from shardc.passes.op_calls import operands_of
from shardc.passes.padded_values import Calls
from shardc.plan.layout_spec import to_layout
from shardc.rules.spec import Strategy

CALL, GRADIENT = torch.ops.shardc_region.call.default, torch.ops.shardc_region.gradient.default
OPS = (CALL, GRADIENT)


def strategy_of(node: fx.Node, mesh: Mesh) -> Strategy:
    """Returns the `Strategy` of a region (or of its gradient): the layouts of its operands and results.

    The gradient of an argument has the argument's layout, with a pending sum over the axes on which that is replicated:
    ranks that hold the same elements each have a term of their gradient.

    Raises:
        PlanError, LayoutError: a layout that does not fit the tensor, with the region's source.
        RuleError: a pending reduction in an argument.
    """
    region = _region(node)
    operand_values = [ir.value(x) for x in operands_of(node)]  # of the arguments; a gradient has tangents behind them
    count = len(region.inputs)
    arguments = tuple(
        _layout(region, "in", at, spec, mesh, operand_values[at]) for at, spec in enumerate(region.inputs)
    )
    for at, layout in enumerate(arguments):
        if layout.partial:
            fix = "take the argument whole, or split; the reduction is then done before the region"
            raise _error(region, f"in_layouts[{at}] is {layout}, with a pending reduction", fix)
    if node.target is CALL:
        results = ir.info(node).value
        assert isinstance(results, tuple)
        return Strategy(arguments, _result_layouts(region, mesh, results))
    # Only floating-point arguments have a gradient.
    floating = [at for at, value in enumerate(operand_values[:count]) if value.dtype.is_floating_point]
    tangents = _tangents(region, mesh, operand_values[count:])
    gradients = tuple(arguments[at].with_partial(_replicating_axes(arguments[at])) for at in floating)
    # The tangent of a result with a pending sum is the same for each term.
    return Strategy((*arguments, *(layout.without_partial() for layout in tangents)), gradients)


def _result_layouts(region: Region, mesh: Mesh, values: Sequence[Value | None]) -> tuple[Layout, ...]:
    """Returns the layout of each result of ``region``, given the results' types (None for no tensor). Raises RuleError
    if there are more or fewer out_layouts, or one with another pending reduction than a sum.
    """
    if len(values) != len(region.outputs):
        text = f"it returns {len(values)} tensors and has {len(region.outputs)} out_layouts"
        raise _error(region, text, "give one layout for each tensor that it returns")
    results = tuple(
        _layout(region, "out", at, region.outputs[at], mesh, v) for at, v in enumerate(values) if v is not None
    )
    for at, layout in enumerate(results):
        if any(op != "sum" for _, op in layout.partial):
            text = f"out_layouts[{at}] is {layout}, and only a sum may be left pending"
            raise _error(region, text, "do the reduction in the function, with shardc.local")
    return results


def emit(node: fx.Node, operands: Sequence[fx.Node], emitter: Calls) -> list[fx.Node]:
    """Traces the region's function on shards, emits its ops, and returns the result nodes.

    Args:
        node: the region's call or gradient.
        operands: the local operands, as nodes of the new graph.
        emitter: the builder of the new graph.

    Raises:
        RuleError: the function fails on shards, or returns a shard of a wrong shape.
    """
    region, mesh = _region(node), ir.layout(operands_of(node)[0]).mesh
    # In the memory order of the trace, on which views in the function may rely.
    operands = [emitter.like(x, old) for x, old in zip(operands, operands_of(node), strict=True)]
    fakes = [x.meta["val"] for x in operands]
    count = len(region.inputs)
    layouts = (
        _tangents(region, mesh, [ir.value(x) for x in operands_of(node)][count:]) if node.target is GRADIENT else []
    )

    def on_a_rank(tensors: list[Tensor], indices: list[Tensor]) -> list[Tensor]:
        """Returns the results of the region, or its gradients, on the shards ``tensors`` of the rank whose index along
        each axis is in ``indices``.
        """
        with on_ranks(Ranks(mesh, dict(zip(mesh.axes, indices, strict=True)))):
            if node.target is CALL:
                return region.run(tensors)
            # Ranks with the same part of a result each take a share of its gradient, as their terms are summed.
            return region.gradients(tensors[:count], list(map(_part, tensors[count:], layouts)))

    with emitter.rewriter.fake_mode:
        indices = [torch.zeros(1, dtype=torch.int64, device=emitter.device) for _ in mesh.axes]
        with _explained(region, fakes):
            traced = make_fx(on_a_rank)(fakes, indices)
    traced.graph.eliminate_dead_code()
    if traced.graph.find_nodes(op="get_attr"):
        fix = "pass it as an argument, with a layout"
        raise _error(region, "it uses a tensor that is none of its arguments", fix)
    index_inputs = ir.placeholders(traced.graph)[len(operands) :]
    # The rank's index along an axis is a coordinate of the graph, if the function reads it.
    coordinates = [
        emitter.coordinate((axis,)) if x.users else None for axis, x in zip(mesh.axes, index_inputs, strict=True)
    ]

    def emit_op(traced_op: fx.Node, args: Any, kwargs: Any) -> fx.Node:
        emitter.traced = traced_op  # operands whose strides its kernel did not get in this trace are copied
        return emitter.call(traced_op.target, *args, **kwargs)

    results = inline_graph(traced.graph, [*operands, *coordinates], emit_op)
    _check(region, node, results)
    return results


def _check(region: Region, node: fx.Node, results: Sequence[fx.Node]) -> None:
    """Raises RuleError if one of ``results``, which the region computed on a rank, has another shape than its
    out_layouts say.
    """
    values = ir.info(node).value
    assert isinstance(values, tuple)
    for at, (value, local) in enumerate(zip(values, results, strict=True)):
        if value is None or value.layout is None:
            continue
        shape, expected = tuple(local.meta["val"].shape), tuple(value.layout.local_shape)
        # A gradient has the shape of its argument in any case.
        if shape != expected and node.target is CALL:
            text = f"result {at} is {list(shape)} on a rank; of the whole {list(value.shape)} "
            text += f"a shard at {value.layout} is {list(expected)}"
            raise _error(
                region, text, f"return this rank's shard, or change out_layouts[{at}] = {region.outputs[at]!r}"
            )


@contextmanager
def _explained(region: Region, fakes: Sequence[Tensor]) -> Iterator[None]:
    """Context manager that turns an exception of the region's function into a `RuleError`, which names the function and
    the shapes of its arguments, ``fakes``.
    """
    try:
        yield
    except (TypeError, RuntimeError, ValueError, IndexError) as error:
        shapes = ", ".join(str(list(x.shape)) for x in fakes[: len(region.inputs)])
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        fix = "make it work on one rank's shards of its in_layouts as it does on whole tensors"
        raise _error(region, f"it fails on shards of shapes {shapes}: {reason}", fix) from error


def _error(region: Region, text: str, fix: str) -> RuleError:
    """Returns an error about ``region``, with the line of the user's code where it was made."""
    return RuleError(f"local_map of {region.name}: {text}", source=region.source, fix=fix)


def _region(node: fx.Node) -> Region:
    """Returns the region of ``node``, a region's call or gradient, which names it by number in its last argument."""
    number = node.args[-1]
    assert isinstance(number, int)
    return region_of(number)


def _tangents(region: Region, mesh: Mesh, values: Sequence[Value]) -> list[Layout]:
    """Returns the layout of each result of ``region``, as its out_layouts say. The gradient of a result has the same
    layout.

    Args:
        values: the type of each result.
    """
    return [_layout(region, "out", at, region.outputs[at], mesh, value) for at, value in enumerate(values)]


def _layout(region: Region, side: str, at: int, spec: object, mesh: Mesh, value: Value) -> Layout:
    """Returns the `Layout` that ``spec`` gives to number ``at`` of the arguments (``side`` "in") or of the results
    ("out") of the region.
    """
    what = f"{'argument' if side == 'in' else 'result'} {at} of {region.name}"
    return to_layout(spec, mesh, value.shape, what=what, entry=f"{side}_layouts[{at}] = {spec!r} of {region.source}")


def _replicating_axes(layout: Layout) -> tuple[str, ...]:
    """Returns the axes over which a tensor at ``layout`` is replicated."""
    return tuple(axis for axis in layout.mesh.axes if axis not in layout.axes and layout.mesh.size(axis) > 1)


def _part(tangent: Tensor, layout: Layout) -> Tensor:
    """Returns this rank's share of the gradient ``tangent`` of a result of the region. Ranks that hold the same part of
    the result get equal shares, which add up to the gradient.
    """
    copies = prod(layout.mesh.size(axis) for axis in _replicating_axes(layout))
    return tangent / copies if copies > 1 and tangent.is_floating_point() else tangent
