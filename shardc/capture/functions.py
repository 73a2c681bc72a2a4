"""Makes ops of `shardc.custom_ops.function_ops` of torch's higher-order ops in a traced graph."""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from shardc.capture.capture_errors import COLLECTIVES, line_of
from shardc.capture.decompositions import numbers_as_tensors
from shardc.capture.flips import turn
from shardc.capture.invariants import hoist
from shardc.custom_ops.flops import of_function
from shardc.custom_ops.function_ops import OPS, Function, named, register
from shardc.errors import CaptureError, VerifyError
from shardc.ir.code import calling_line
from shardc.ir.op_traits import draws

_MARKS = torch.ops.shardc.tag.default


def functions_as_ops(gm: fx.GraphModule) -> None:
    """Replaces ``cond``, ``scan`` and ``while_loop`` in a traced graph, and in their functions, by ops that name these.

    Raises:
        CaptureError: a function draws random numbers, has a collective or a constant tensor, or takes no tensors.
    """
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and isinstance(node.target, torch._ops.HigherOrderOperator):
            kind = node.target.name()
            if kind in OPS:
                _replace(gm, node, kind)
    for node in gm.graph.find_nodes(op="get_attr"):
        if not node.users and isinstance(getattr(gm, node.target, None), fx.GraphModule):
            gm.graph.erase_node(node)


def _replace(gm: fx.GraphModule, node: fx.Node, kind: str) -> None:
    arguments: Sequence[Any] = node.args
    if kind == "cond":
        predicate, *modules, operands = arguments
        flat, counts = [predicate, *operands], (0, 0)
    elif kind == "scan":
        *modules, carries, xs, rest = arguments
        flat, counts = [*carries, *xs, *rest], (len(carries), len(xs))
    else:
        *modules, carries, rest = arguments
        flat, counts = [*carries, *rest], (len(carries), 0)
    if not all(isinstance(x, fx.Node) for x in flat):
        raise _error(node, f"{kind} is given a number among its operands", "pass it as a tensor")
    graphs = tuple(graph_of_function(getattr(gm, module.target), node, kind) for module in modules)
    node.meta["val"] = list(node.meta["val"])
    places = {old: new for new, old in enumerate(at for at, x in enumerate(node.meta["val"]) if isinstance(x, Tensor))}
    for user in list(node.users):  # without the results that are None
        if user.target is getitem and user.args[1] in places:
            user.args = (node, places[user.args[1]])
    node.meta["val"] = [x for x in node.meta["val"] if isinstance(x, Tensor)]
    before, reverse = list(flat), False
    if kind == "scan":
        counts = counts[0], hoist(gm.graph, node, graphs[0], flat, counts)
        reverse = turn(gm.graph, node, flat, counts)
        named(graphs[0])
    function = register(Function(kind, graphs, counts, of_function(kind, graphs)))
    node.target, node.args, node.kwargs = OPS[kind], (flat, function.name, *([True] if reverse else [])), {}
    for operand in before:
        _erase_unused(gm.graph, operand)


def _erase_unused(graph: fx.Graph, node: fx.Node) -> None:
    """Erases ``node``, and what it is computed from, as far as nothing else uses it."""
    if node.op == "call_function" and not node.users:
        sources = node.all_input_nodes
        graph.erase_node(node)
        for source in sources:
            _erase_unused(graph, source)


def graph_of_function(gm: fx.GraphModule, node: fx.Node | None, kind: str) -> fx.Graph:
    """Return the graph of a function of ``node`` in ops that it may have; CaptureError, with the node's line, if it
    has others.
    """
    functions_as_ops(gm)
    numbers_as_tensors(gm.graph)
    for inner in list(gm.graph.nodes):
        if inner.target is _MARKS:
            inner.replace_all_uses_with(inner.args[0])
            gm.graph.erase_node(inner)
        elif inner.op == "get_attr":
            _number(gm, inner, node, kind)
        elif inner.op == "call_function":
            namespace = getattr(inner.target, "namespace", "")
            if namespace == "shardc_random" or draws(inner.target):
                raise _error(node, f"a function of {kind} draws random numbers", "draw them outside, and pass them")
            if getattr(inner.target, "__module__", "") == "_operator" and inner.target is not getitem:
                fix = "leave dynamic= out, or compute the size outside of the function"
                raise _error(node, f"a function of {kind} computes with a size that is a symbol", fix)
            if namespace in COLLECTIVES or isinstance(inner.target, torch._ops.HigherOrderOperator):
                raise _error(node, f"a function of {kind} calls {inner.target}", "call it outside")
    gm.graph.eliminate_dead_code()
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    results = graph.graph_copy(gm.graph, env)
    wanted = list(results) if isinstance(results, (list, tuple)) else [results]
    graph.output(tuple(x for x in wanted if x is not None))
    named(graph)
    try:
        Function(kind, (graph,)).to_json()
    except VerifyError as error:
        raise _error(node, f"a function of {kind}: {error.what}", "write it with ops of torch on tensors") from error
    return graph


def _number(gm: fx.GraphModule, constant: fx.Node, node: fx.Node | None, kind: str) -> None:
    """Replaces a constant of one number by an op that makes it."""
    value = getattr(gm, str(constant.target))
    if not isinstance(value, Tensor) or value.ndim or value.is_complex():
        raise _error(node, f"a function of {kind} has a constant tensor", "make the tensor outside")
    with _disable_current_modes():
        number = value.item()
    with gm.graph.inserting_before(constant):
        kwargs = {"dtype": value.dtype, "device": value.device}
        tensor = gm.graph.call_function(torch.ops.aten.scalar_tensor.default, (number,), kwargs)
    constant.replace_all_uses_with(tensor)
    gm.graph.erase_node(constant)


def _error(node: fx.Node | None, what: str, fix: str) -> CaptureError:
    return CaptureError(what, source=(line_of(node) if node else "") or calling_line(), fix=fix)
