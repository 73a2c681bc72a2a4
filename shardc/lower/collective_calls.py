"""Runs segments that only start collectives and wait for them: a sequence of calls, without Inductor.

Inductor has nothing to fuse there, and takes some 10 ms for each result of a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import getitem

from torch import Tensor, fx
from torch._inductor.codecache import PyCodeCache

from shardc.ir import graph as ir
from shardc.ir.comm import WAIT, waits_of
from shardc.ir.comm_volume import collective_kind
from shardc.ir.emitted import check_order
from shardc.ir.repeat import is_call

Run = Callable[[list[Tensor]], Sequence[object]]


class _Name(str):
    """Name of a variable in generated code, whose repr is the name."""

    __slots__ = ()
    __repr__ = str.__str__


def only_calls(graph: fx.Graph) -> bool:
    """Return whether ``graph`` starts collectives, waits for some, and does nothing else."""
    ops = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    return bool(ops) and all(map(is_call, ops))


def called(gm: fx.GraphModule) -> tuple[Run, str]:
    """Generate Python source that runs ``gm``, a graph of collectives and waits only. Return (the function, its
    source).
    """
    source = "\n".join(["import torch", "", "def call(args):", *(f"    {line}" for line in _lines(gm.graph)), ""])
    check_order(gm.graph, source)
    run: Run = PyCodeCache.load(source).call
    return run, source


def _lines(graph: fx.Graph) -> Iterator[str]:
    """Yields the lines of the generated function; each value is deleted after its last use."""
    placeholders, ops = graph.find_nodes(op="placeholder"), [node for node in graph.nodes if node.op == "call_function"]
    returned = ir.output_node(graph).args[0]
    name = {node: _Name(f"arg{at}") for at, node in enumerate(placeholders)}
    for at, node in enumerate(ops):  # the result of a wait is its operand
        name[node] = name[node.all_input_nodes[0]] if node.target is WAIT else _Name(f"buf{at}")
    unused: list[list[_Name]] = [[] for _ in range(len(ops) + 1)]  # values without a use after each op
    results = {name.get(x) for x in returned}
    for value_name, at in _last_uses(ops, name).items():
        unused[at] += [value_name] if value_name not in results else []
    yield f"{', '.join(name[node] for node in placeholders)}, = args"
    yield "args.clear()"
    for at, node in enumerate(ops):
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), name.__getitem__)
        if node.target is getitem:
            call = f"{args[0]}[{args[1]}]"
        else:
            written = [*map(repr, args), *(f"{key}={x!r}" for key, x in kwargs.items())]
            call = f"torch.ops.{node.target}({', '.join(written)})"
        yield call if node.target is WAIT else f"{name[node]} = {call}"
        yield from (f"del {value_name}" for value_name in unused[at])
    yield f"return ({', '.join(str(name.get(x, x)) for x in returned)},)"


def _last_uses(ops: Sequence[fx.Node], name: dict[fx.Node, _Name]) -> dict[_Name, int]:
    """Return value name -> index of the last op that uses it; a wait also uses the operands of its collective."""
    place, last = {node: at for at, node in enumerate(ops)}, dict[_Name, int]()
    for at, node in enumerate(ops):
        until = at
        if collective_kind(node) is not None:
            until = max((place[wait] for wait in waits_of(node)), default=len(ops))
        for x in node.all_input_nodes:
            last[name[x]] = max(last.get(name[x], 0), until)
    return last
