"""Memory traffic of ops under fusion: the operands that an op reads from memory, and whether it writes its results.

A run of ops between matrix products counts as one kernel, as in `shardc.cost.fused_kernels`: it reads values from
outside of the run and writes values that are read outside of it. Views have no traffic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from shardc.cost.fused_kernels import is_dense
from shardc.ir import graph as ir
from shardc.ir import ops
from shardc.ir.op_traits import aliases
from shardc.passes.op_calls import operands_of


@dataclass(frozen=True)
class Traffic:
    """Memory traffic of an op.

    Args:
        reads: positions of the operands that it reads from memory.
        writes: whether it writes its results to memory.
        dense: whether it is a kernel of its own: a matrix product, attention or convolution.
    """

    reads: tuple[int, ...] = ()
    writes: bool = False
    dense: bool = False


def traffic_of(graph: fx.Graph) -> dict[fx.Node, Traffic]:
    """Returns the traffic of every op of a graph at global shapes; views have no entry."""
    runs: dict[fx.Node, int] = {}  # the run that makes each value
    roots: dict[fx.Node, fx.Node] = {}
    readers: dict[fx.Node, set[int]] = {}
    order: list[tuple[fx.Node, int]] = []
    run, phase, after_dense = 0, "", True
    for node in graph.nodes:
        if node.op != "call_function":
            if node.op == "output":
                for _, x in ir.outputs(graph):
                    if isinstance(x, fx.Node):
                        readers.setdefault(roots[x], set()).add(-1)
            roots[node] = node
            continue
        if _moves_nothing(node):
            roots[node] = roots[node.all_input_nodes[0]] if node.all_input_nodes else node
            continue
        roots[node] = node
        now = ir.info(node).origin.phase
        if after_dense or is_dense(node) or now != phase:
            run += 1
        after_dense, phase, runs[node] = is_dense(node), now, run
        order.append((node, run))
        for x in node.all_input_nodes:
            readers.setdefault(roots[x], set()).add(run)
    return dict(_traffic_per_op(order, runs, roots, readers))


def _traffic_per_op(
    order: list[tuple[fx.Node, int]],
    runs: dict[fx.Node, int],
    roots: dict[fx.Node, fx.Node],
    readers: dict[fx.Node, set[int]],
) -> Iterator[tuple[fx.Node, Traffic]]:
    seen: set[tuple[int, fx.Node]] = set()
    for node, run in order:
        reads = []
        for at, x in enumerate(operands_of(node)):
            root = roots[x]
            if runs.get(root) != run and (run, root) not in seen:
                seen.add((run, root))
                reads.append(at)
        yield node, Traffic(tuple(reads), bool(readers.get(node, set()) - {run}), is_dense(node))


def _moves_nothing(node: fx.Node) -> bool:
    """Tells whether a node allocates no memory: a view, a marker, a getitem."""
    return node.target in ops.MARKERS.values() or aliases(node.target)
