"""The graph rewriter, by which every pass inserts, replaces and erases nodes.

    rewriter = GraphRewriter(graph)
    padded = rewriter.before(user, like=x, suffix="padded").call(aten.constant_pad_nd.default, x, [0, 1])
    user.replace_input_with(x, padded)

A new node has a type, a name that is unique in the graph, and the provenance of the node that it is ``like``: module,
source line, phase and checkpoint region.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from typing import Any

from torch import fx

from shardc.ir.fake_values import fake_result
from shardc.ir.graph import (
    Info,
    NameScope,
    Value,
    ancestors,
    info,
    layout,
    output_node,
    placeholders,
    set_info,
    update,
    value_of,
)


class GraphRewriter:
    """Inserts, replaces and erases nodes of one graph.

    Args:
        graph: a graph whose nodes carry an `Info`.
        reusable: nodes that are going to be erased; new nodes may have their names.
        fake_mode: mode of the graph's fake values; by default that of the first value that has one, if any.
    """

    def __init__(
        self,
        graph: fx.Graph,
        reusable: Container[fx.Node] = (),
        fake_mode: AbstractContextManager[object] | None = None,
    ) -> None:
        self.graph, self._reusable, self._fake_mode = graph, reusable, fake_mode

    @cached_property
    def names(self) -> NameScope:
        """Names that are taken in the graph; new nodes get names from this `NameScope`."""
        return NameScope.of(self.graph, but=self._reusable)

    @cached_property
    def fake_mode(self) -> AbstractContextManager[object]:
        """The fake mode of the graph's example values. If no value has one, a context manager that does nothing."""
        vals = (node.meta.get("val") for node in self.graph.nodes)
        modes = (mode for val in vals if (mode := getattr(val, "fake_mode", None)) is not None)
        return self._fake_mode or next(modes, None) or nullcontext()

    def before(self, node: fx.Node, like: fx.Node | None = None, suffix: str = "", **provenance: Any) -> Inserter:
        """Return an `Inserter` for the position before ``node``. The nodes that it inserts are in the order of its
        calls.

        Args:
            like: node whose record new nodes inherit; by default ``node``.
            suffix: suffix of new names after the name of ``like``; by default the short name of the op.
            provenance: fields of `Origin` that differ, such as ``cause``.
        """
        record = info(node if like is None else like)
        origin = replace(record.origin, **provenance) if provenance else record.origin
        return Inserter(self, node, replace(record, origin=origin), suffix)

    def after(self, node: fx.Node, like: fx.Node | None = None, suffix: str = "", **provenance: Any) -> Inserter:
        """Return an `Inserter` for the position after ``node``. The nodes that it inserts are in the order of its
        calls; arguments are as in `before`.
        """
        return self.before(node.next, node if like is None else like, suffix, **provenance)

    def end(self, record: Info, suffix: str = "") -> Inserter:
        """Return an `Inserter` that appends nodes to a graph that is being built. The nodes inherit the provenance of
        ``record`` (an `Info`), and its name is the prefix of their names.
        """
        return Inserter(self, None, record, suffix)

    def replace(self, node: fx.Node, new: fx.Node, *, rename: bool = False) -> None:
        """Replace all uses of ``node`` by ``new``, and erase ``node``.

        Args:
            rename: ``new`` takes over the record, and so the name, of ``node``.
        """
        node.replace_all_uses_with(new)
        self.graph.erase_node(node)
        if rename:
            set_info(new, info(node))

    def redirect(self, node: fx.Node, new: fx.Node) -> None:
        """Make all users of ``node`` read ``new`` instead, except the ops from which ``new`` is computed."""
        made_of = ancestors([new], lambda x: x is node)
        node.replace_all_uses_with(new, lambda user: user not in made_of)

    def erase_unused(self) -> None:
        """Erase all ops whose results nothing reads, among them collectives and waits."""
        for node in reversed(list(self.graph.nodes)):
            if node.op == "call_function" and not node.users:
                self.graph.erase_node(node)


@dataclass(frozen=True)
class Inserter:
    """Inserts nodes at one position in a graph. The nodes inherit the provenance of ``record`` (an `Info`); see
    `GraphRewriter.before`.
    """

    rewriter: GraphRewriter
    anchor: fx.Node | None
    record: Info
    suffix: str = ""

    def call(self, target: Callable[..., object], *args: fx.node.Argument, **kwargs: fx.node.Argument) -> fx.Node:
        """Insert a call of the op ``target`` and return its node. The op is run on the operands' fake values, which
        gives the node's type and fake value.
        """
        val = fake_result(self.rewriter.fake_mode, target, fx.map_arg(args, _val), fx.map_arg(kwargs, _val))
        return self._insert(target, args, kwargs, value_of(val), val)

    def typed(
        self,
        value: Value | tuple[Value | None, ...] | None,
        target: Callable[..., object],
        *args: fx.node.Argument,
        **kwargs: fx.node.Argument,
    ) -> fx.Node:
        """Insert a call of ``target``, a torch op or a marker op, and return its node. The type of its result is given
        as ``value``.

        The node has no fake value. If ``value`` has a layout, the op's required operand layouts (`Info.needs`) are the
        operands' current layouts.
        """
        node = self._insert(target, args, kwargs, value)
        if isinstance(value, Value) and value.layout is not None and hasattr(target, "_schema"):
            operands: list[fx.Node] = []
            fx.map_arg((args, kwargs), operands.append)
            update(node, needs=tuple(map(layout, operands)))
        return node

    def copy(self, node: fx.Node, operands: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """Insert a copy of ``node`` and return it. ``operands`` (node -> its replacement) replaces operands in the
        copy.
        """
        graph = self.rewriter.graph
        with graph.inserting_before(self.anchor) if self.anchor is not None else nullcontext():
            twin = graph.node_copy(node, lambda x: operands.get(x, x))
        return set_info(twin, replace(info(node), name=self.rewriter.names.fresh(info(node).name), **_OWN))

    def _insert(
        self,
        target: Callable[..., object],
        args: tuple[fx.node.Argument, ...],
        kwargs: dict[str, fx.node.Argument],
        value: Value | tuple[Value | None, ...] | None,
        val: object = None,
    ) -> fx.Node:
        """Insert a call of ``target`` and return its node, whose `Info` inherits from ``record``.

        Args:
            value: type of its result.
            val: fake value of its result; None for none.
        """
        graph = self.rewriter.graph
        with graph.inserting_before(self.anchor) if self.anchor is not None else nullcontext():
            node = graph.call_function(target, args, kwargs)
        if val is not None:
            node.meta["val"] = val
        suffix = self.suffix or getattr(target, "overloadpacket", target).__name__
        name = self.rewriter.names.fresh(f"{self.record.name}.{suffix}")
        return set_info(node, replace(self.record, name=name, value=value, **_OWN))


def inline_graph(
    graph: fx.Graph, operands: Sequence[fx.Node | None], emit: Callable[[fx.Node, Any, Any], fx.Node]
) -> list[fx.Node]:
    """Insert the ops of ``graph``, a traced function, into another graph; return its results there.

    Args:
        operands: for each placeholder of ``graph``, the node that takes its place; None for one that nothing reads.
        emit: inserts the counterpart of an op of ``graph``, given the op and its new args and kwargs, and returns it.
    """
    env: dict[fx.Node, Any] = dict(zip(placeholders(graph), operands, strict=True))
    for node in graph.nodes:
        if node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = emit(node, args, kwargs)
    return [env[x] for x in output_node(graph).args[0]]


# Fields of `Info` that no new node inherits.
_OWN: dict[str, Any] = {"role": None, "needs": None, "is_kept_part": False, "true_sizes": None}


def _val(node: fx.Node) -> object:
    """Return the fake value of a node."""
    return node.meta["val"]


def erase_dead_code(graph: fx.Graph) -> None:
    """Erase the nodes whose results nothing reads. Inputs, outputs and ops with side effects stay.

    As torch's ``eliminate_dead_code``, which also checks the order of the whole graph, at four times the cost.
    """
    for node in reversed(graph.nodes):
        if not node.users and not node.is_impure():
            graph.erase_node(node)


def positions(graph: fx.Graph) -> dict[fx.Node, float]:
    """Return node -> its position in the graph, as a float, so that a priority for `reorder` can lie between two
    positions.
    """
    return {node: float(at) for at, node in enumerate(graph.nodes)}


def last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Return node -> the values that are read for the last time there: some of its operands, and its own result if no
    node reads that.
    """
    seen: set[fx.Node] = set()
    out: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        for read in [*node.all_input_nodes, node]:
            if read not in seen and read.op != "output":
                seen.add(read)
                out.setdefault(node, []).append(read)
    return out


def reorder(graph: fx.Graph, priority: Mapping[fx.Node, float]) -> None:
    """Sort the nodes topologically, the lowest ``priority`` first among those that are ready; ties keep their order.

    Placeholders stay first and the output last. The result depends on the graph and the priorities alone.
    """
    present = {node: at for at, node in enumerate(graph.nodes)}
    output = output_node(graph)
    missing = {node: len(node.all_input_nodes) for node in graph.nodes}
    ready: list[tuple[bool, float, int, fx.Node]] = []

    def push(node: fx.Node) -> None:
        heappush(ready, (node.op != "placeholder", priority[node], present[node], node))

    for node, count in missing.items():
        if count == 0 and node is not output:
            push(node)
    while ready:
        *_, node = heappop(ready)
        output.prepend(node)
        for user in node.users:
            missing[user] -= 1
            if missing[user] == 0 and user is not output:
                push(user)
