"""The verifier: what must hold of a graph after each stage, checked between passes.

A stage's spec is a tuple of checks (`SPECS`); each check goes over the graph and yields what is broken and
where. Rules of ops are not known here: the caller passes ``agrees``, which says of one node why the layouts of
its operands do not give those of its results.
"""

from __future__ import annotations

from torch import fx

from shardc.errors import VerifyError
from shardc.ir import ops, text
from shardc.ir.graph import KEY, info
from shardc.ir.mesh import Mesh
from shardc.ir.tally import NAMESPACE, OWN_NAMESPACE
from shardc.ir.verify import layouts, local, structure
from shardc.ir.verify.subject import Agrees, Check, Subject

GRAPH = (structure.records, structure.order, structure.types, structure.results)
PLACED = (*GRAPH, layouts.present, layouts.shapes, layouts.pins, layouts.moves)
RESHARDED = (*PLACED, layouts.agreement, layouts.whole_outputs)
LOCAL_NAMESPACES = ("aten", "prims", NAMESPACE, OWN_NAMESPACE)
LOCAL = (*GRAPH, structure.legal(namespaces=LOCAL_NAMESPACES), local.types, local.groups, local.waits)

PADS = (ops.pad, ops.unpad)

SPECS: dict[str, tuple[Check, ...]] = {
    "capture": (*GRAPH, structure.legal(ops.tag), layouts.shapes),
    "canonicalize": (*GRAPH, structure.legal(ops.tag), layouts.shapes),
    "seed": (*GRAPH, structure.legal(ops.tag, *PADS), layouts.shapes, layouts.pins),
    "propagate": (*PLACED, structure.legal(ops.tag, *PADS)),
    "reshard": (*RESHARDED, structure.legal(ops.tag, ops.reshard, *PADS)),
    "simplify": (*RESHARDED, structure.legal(ops.tag, ops.reshard, *PADS)),
    "collectives": (*RESHARDED, structure.legal(*ops.COLLECTIVES, *ops.LOCAL_MOVES, *PADS)),
    "localize": LOCAL,
    "partition": LOCAL,
}


def verify(gm: fx.GraphModule, mesh: Mesh, stage: str, agrees: Agrees = lambda node: None) -> None:
    """Checks ``gm`` against the spec of ``stage``.

    Args:
        gm: the graph as ``stage`` left it.
        mesh: the mesh that it is for.
        stage: a key of `SPECS`.
        agrees: for an op node, why its operands' layouts do not give its results' layouts, or None.

    Raises:
        VerifyError: with the stage, what is broken, and the line of the dump with two lines around it.
    """
    subject = Subject(gm, mesh, agrees)
    for check in SPECS[stage]:
        for node, reason in check(subject):
            shown = f"%{info(node).name}" if KEY in node.meta else f"the node {node.name!r}"
            where = "the outputs" if node.op == "output" else shown
            raise VerifyError(f"after {stage}: {where}: {reason}", program=window(gm, mesh, node))


def window(gm: fx.GraphModule, mesh: Mesh, node: fx.Node, around: int = 2) -> str:
    """The line of the dump that shows ``node``, marked, with ``around`` lines before and after."""
    try:
        shown = text.lines(gm, mesh)
    except VerifyError as error:
        return error.program or error.what
    at = next((at for at, (_, owner) in enumerate(shown) if owner is node), len(shown) - 1)
    picked = range(max(at - around, 0), min(at + around + 1, len(shown)))
    return "\n".join(f"{'>' if i == at else ' '}{shown[i][0]}" for i in picked)
