"""`Body`: the function of one expert as a forward and a backward fx graph, run by `shardc.custom_ops.expert_ops`."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from shardc.custom_ops.grouped import grouped
from shardc.errors import RuleError, TextError
from shardc.ir import grammar
from shardc.validate import torch_name

aten = torch.ops.aten


@dataclass(frozen=True)
class PerRow:
    """Shape and dtype of one row of a tensor whose dim 0 is rows (tokens)."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Body:
    """The function of one expert on its ``n`` rows, as a forward and a backward graph.

    Args:
        forward: graph of (``n``, rows [n, d], scale [n, 1], one expert's parameters) -> (results [n, o], saved values).
        backward: graph of (``n``, gradient of the results, rows, scale, parameters, saved values) -> gradients of rows,
            scale and parameters, with None for operands without a gradient; None if the function has no gradient.
        result: type of a row of the result.
        saved: types of a row of each value that forward saves for backward.
        flops: operations per row of forward and of backward.
    """

    forward: fx.Graph
    backward: fx.Graph | None
    result: PerRow
    saved: tuple[PerRow, ...]
    flops: tuple[int, int]

    @cached_property
    def name(self) -> str:
        """Return a name that is a hash of the content: equal bodies have the same name in every process."""
        return "experts." + hashlib.sha256(json.dumps(self.to_json()).encode()).hexdigest()[:8]

    @cached_property
    def run_forward(self) -> Callable[..., Tensor]:
        """Return the graph ``forward`` as a function that returns the results of the rows. It writes the values to save
        for backward to buffers, which are further arguments.

        The buffers, one for each saved value, follow the arguments of ``forward``.
        """
        graph = deepcopy(self.forward)
        out, *saved = _outputs(graph)
        for at, node in enumerate(saved):
            _write_to(graph, node, _buffer(graph, f"keep{at}"))
        return _run(graph, out)

    @cached_property
    def run_backward(self) -> Callable[..., Sequence[Tensor | None]]:
        """Return the graph ``backward`` as a function that returns the gradients. It can write the gradients of
        parameters to buffers, which are further arguments.

        The caller passes the buffers, one for each parameter, after the arguments of ``backward``. A gradient that is a
        matrix product is written to its buffer; any other is returned in memory of its own.
        """
        assert self.backward is not None, f"{self.name} has no gradient"
        graph = deepcopy(self.backward)
        rows, scale, *params = _outputs(graph)
        gradients = [_product(graph, x, _buffer(graph, f"into{at}")) for at, x in enumerate(params)]
        return _run(graph, (rows, scale, *gradients))

    @cached_property
    def grouped_forward(self) -> Callable[..., Sequence[Tensor]] | None:
        """Return ``forward`` as a function that computes the rows of all experts at once (`grouped`). None if the graph
        cannot be rewritten so.
        """
        return grouped(self.forward, 1 + len(self.saved))

    @cached_property
    def grouped_backward(self) -> Callable[..., Sequence[Tensor | None]] | None:
        """Return ``backward`` as a function that computes the rows of all experts at once (`grouped`). None if there is
        no backward, or if it cannot be rewritten so.
        """
        return None if self.backward is None else grouped(self.backward, 2)

    def to_json(self) -> dict[str, object]:
        """Return the body as dicts, lists, strings and numbers, for `from_json`."""

        def per_row(value: PerRow) -> list[object]:
            return [list(value.shape), torch_name(value.dtype)]

        return {
            "forward": list(graph_to_json(self.forward)),
            "backward": None if self.backward is None else list(graph_to_json(self.backward)),
            "result": per_row(self.result),
            "saved": [per_row(value) for value in self.saved],
            "flops": list(self.flops),
        }

    @classmethod
    def from_json(cls, data: Any, allowed: Callable[[Any], bool]) -> Body:
        """Make a `Body` from what `to_json` returned. TextError for any other data, or if it calls an op for which
        ``allowed(op)`` is false.
        """

        def per_row(entry: Any) -> PerRow:
            shape, dtype = entry
            return PerRow(tuple(int(size) for size in shape), _constant(str(dtype), torch.dtype))

        try:
            backward = None if data["backward"] is None else graph_from_json(data["backward"], allowed)
            return cls(
                graph_from_json(data["forward"], allowed), backward, per_row(data["result"]),
                tuple(map(per_row, data["saved"])), (int(data["flops"][0]), int(data["flops"][1])),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
            raise TextError(f"this is no body of experts: {error}") from error


_bodies: dict[str, Body] = {}


def register(body: Body) -> Body:
    """Register ``body`` under its name and return it. If an equal body has that name already, return that one."""
    return _bodies.setdefault(body.name, body)


def body_of(name: str) -> Body:
    """Return the `Body` registered under ``name``. RuleError if this process has neither captured nor loaded it."""
    if name not in _bodies:
        raise RuleError(f"no experts are known by the name {name!r}", fix="capture, or load, the model that has them")
    return _bodies[name]


def bodies_in(graph: fx.Graph) -> list[str]:
    """Return the names of the registered bodies (functions of one expert) that expert ops in ``graph`` call, sorted,
    each once.
    """
    arguments = (node.args[-1] for node in graph.nodes if getattr(node.target, "namespace", "") == "shardc_experts")
    return sorted({name for name in arguments if isinstance(name, str) and name in _bodies})


# --- as functions

_OUT = {aten.mm.default: aten.mm.out, aten.addmm.default: aten.addmm.out}


def _outputs(graph: fx.Graph) -> list[fx.node.Argument]:
    """Erase the output node of ``graph``; return the nodes that it returned, as a list with None for missing
    results.
    """
    end = graph.output_node()
    results = end.args[0]
    graph.erase_node(end)
    return list(results)


def _buffer(graph: fx.Graph, name: str) -> fx.Node:
    """Insert a placeholder ``name``, for a buffer to write to, after the last placeholder of ``graph``; return its
    node.
    """
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    with graph.inserting_after(last):
        return graph.placeholder(name)


def _write_to(graph: fx.Graph, node: fx.Node, place: fx.Node) -> None:
    """Make ``node`` write its result to a buffer, whose node is ``place``: by the op's ``out=`` variant or, if it has
    none, by a copy.
    """
    if node.target in _OUT:
        node.target, node.kwargs = _OUT[node.target], {**node.kwargs, "out": place}
        return
    with graph.inserting_after(node):
        copy = graph.call_function(aten.copy_.default, (place, node))
    node.replace_all_uses_with(copy, lambda user: user is not copy)


def _product(graph: fx.Graph, gradient: fx.node.Argument, place: fx.Node) -> fx.node.Argument:
    """If ``gradient`` is a matrix product (``mm``), or the transpose of one, insert a product that writes its result to
    the buffer ``place``; return its node. Any other ``gradient`` is returned as it is.

    The transpose of a product is a product too.
    """
    node, transposed = gradient, False
    while isinstance(node, fx.Node) and node.target in (aten.t.default, aten.detach.default):
        transposed ^= node.target is aten.t.default
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.target is not aten.mm.default:
        return gradient
    left, right = node.args
    if transposed:
        left, right = (graph.call_function(aten.t.default, (x,)) for x in (right, left))
    return graph.call_function(aten.mm.out, (left, right), {"out": place})


def _run(graph: fx.Graph, results: fx.node.Argument) -> Callable[..., Any]:
    """Make ``graph`` return ``results``, and drop the ops that these do not need. Return the graph as a function."""
    graph.output(results)
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or _writes(node))
    forward: Callable[..., Any] = fx.GraphModule({}, graph).forward
    return forward


def _writes(node: fx.Node) -> bool:
    """Return whether an op writes to a buffer that is passed to it."""
    return "out" in node.kwargs or node.target is aten.copy_.default


# --- as plain data


def graph_to_json(graph: fx.Graph) -> Iterator[list[object]]:
    """Convert a graph to plain data: yield a list of strings and numbers for each node, with its name, op, arguments
    and keyword arguments.
    """
    for node in graph.nodes:
        if node.op == "placeholder":
            yield [node.name]
        elif node.op == "output":
            yield ["", _encoded(node.args[0])]
        else:
            name = "getitem" if node.target is getitem else grammar.op_text(node.target)
            yield [node.name, name, _encoded(node.args), {key: _encoded(x) for key, x in sorted(node.kwargs.items())}]


def _encoded(argument: fx.node.Argument) -> object:
    """Return an argument of an op for JSON: ``%name`` for a node, text for a constant."""
    if isinstance(argument, fx.Node):
        return f"%{argument.name}"
    if isinstance(argument, (list, tuple)):
        return [_encoded(x) for x in argument]
    return grammar.constant_text(argument)


def graph_from_json(lines: Sequence[Any], allowed: Callable[[Any], bool]) -> fx.Graph:
    """Make a graph from what `graph_to_json` yielded. ValueError if it calls an op for which ``allowed(op)`` is
    false.
    """
    graph = fx.Graph()
    env: dict[str, fx.Node] = {}

    def decoded(argument: Any) -> fx.node.Argument:
        if isinstance(argument, list):
            return [decoded(x) for x in argument]
        return env[argument[1:]] if argument.startswith("%") else _constant(argument)

    for name, *call in lines:
        if not name:
            graph.output(tuple(decoded(call[0])))
            return graph
        if not name.isidentifier() or name in env:
            raise ValueError(f"{name!r} is no new name")
        if not call:
            env[name] = graph.placeholder(name)
            continue
        target = getitem if call[0] == "getitem" else grammar.op_of(call[0])
        if target is not getitem and (not grammar.is_torch_op(target) or not allowed(target)):
            raise ValueError(f"it may not call {call[0]}")
        args, kwargs = tuple(decoded(call[1])), {key: decoded(x) for key, x in call[2].items()}
        env[name] = graph.create_node("call_function", target, args, kwargs, name=name)
        if env[name].name != name:
            raise ValueError(f"{name!r} is no name of a node")
    raise ValueError("it gives nothing")


def _constant(text: str, kind: type = object) -> Any:
    """Parse ``text`` as a constant and return it. ValueError if it is no constant, or no instance of ``kind``."""
    try:
        constant = grammar.constant_of(text)
    except ValueError:
        constant = ast.literal_eval(text)
    if not isinstance(constant, kind) or isinstance(constant, (list, dict, tuple, set, bytes)):
        raise ValueError(f"{text!r} is no constant")
    return constant
