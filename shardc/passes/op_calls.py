"""Graph nodes as the `Call` that rules take; starts of collectives, and the ops that only finish them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shardc.ir import graph as ir
from shardc.ir.comm import WAIT
from shardc.ir.comm_volume import arguments_of
from shardc.ir.graph import Value
from shardc.ir.op_traits import CAST, moves_data, starts
from shardc.rules import spec_of
from shardc.rules.rule import Call
from shardc.rules.spec import Spec

aten = torch.ops.aten


def call_of(node: fx.Node) -> Call:
    """Converts an op node to a `Call`: target, arguments and results at global shapes, without layouts."""
    return Call(
        target=node.target,
        args=tuple(plain(a) for a in node.args),
        kwargs=tuple(sorted((k, plain(a)) for k, a in node.kwargs.items())),
        results=tuple(v and Value(v.dtype, v.shape) for v in ir.info(node).values),
    )


def operands_of(node: fx.Node) -> list[fx.Node]:
    """Returns the tensor operands of ``node`` in schema order, lists flattened, as `Call.operands` has them."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return [x for x in node.all_input_nodes if ir.is_tensor(x)]
    arguments, out = arguments_of(node), []
    for argument in schema.arguments:
        item = arguments.get(argument.name)
        for x in item if isinstance(item, (list, tuple)) else (item,):
            if isinstance(x, fx.Node) and ir.is_tensor(x):
                out.append(x)
    return out


def with_operands(node: fx.Node, operands: list[fx.Node]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns (args, kwargs) of ``node`` with its operands, in the order of `operands_of`, replaced by ``operands``."""
    replacements = iter(operands)
    operand_ids = set(map(id, operands_of(node)))

    def swap(argument: Any) -> Any:
        if isinstance(argument, (list, tuple)):
            return type(argument)(swap(a) for a in argument)
        return next(replacements) if isinstance(argument, fx.Node) and id(argument) in operand_ids else argument

    args = tuple(swap(a) for a in node.args)
    schema = getattr(node.target, "_schema", None)
    order = [a.name for a in schema.arguments if a.name in node.kwargs] if schema else list(node.kwargs)
    return args, {name: swap(node.kwargs[name]) for name in order}


def plain(argument: Any) -> Any:
    """Converts an argument to a hashable form: nodes become their `Value`, lists become tuples."""
    if isinstance(argument, fx.Node):
        value = ir.info(argument).value
        return Value(value.dtype, value.shape) if isinstance(value, Value) else value
    if isinstance(argument, (list, tuple)):
        return tuple(plain(a) for a in argument)
    return argument


def move_of(node: fx.Node) -> Spec | None:
    """Returns the factors (`Spec`) of an op that only moves data (a view, a transpose) from one operand to one result.

    None for any other node.
    """
    if node.op != "call_function" or not hasattr(node.target, "_schema"):
        return None
    spec = spec_of(call_of(node))
    return spec if spec is not None and spec.moves and len(spec.operands) == len(spec.results) == 1 else None


# Ops that, like views, may stand between a collective and the output, or between two collectives on the way there.
_FINISHING = {WAIT, CAST, aten.sum.dim_IntList, aten.div.Tensor}


def is_start(node: fx.Node) -> bool:
    """Tells whether ``node`` starts a collective, or a move between host and device."""
    return node.op == "call_function" and starts(node.target)


def result_bytes(node: fx.Node) -> int:
    """Returns the bytes per rank of the results of a collective or move."""
    return sum(value.nbytes for value in ir.info(node).tensors)


def leaving(graph: fx.Graph) -> dict[fx.Node, int]:
    """Maps each node that leads only from collectives to the output to the number of collectives before it.

    These are waits, views, casts and sums of received terms, further collectives, and copies to the host.
    """
    out: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if (moves_data(node.target) or node.target in _FINISHING or is_start(node)) and node.users:
            if all(user.op == "output" or user in out for user in node.users):
                out.add(node)
    level: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node in out:
            behind = [level.get(x, 0) + is_start(x) for x in node.all_input_nodes if x in out or is_start(x)]
            if any(behind):
                level[node] = max(behind)
    return level
