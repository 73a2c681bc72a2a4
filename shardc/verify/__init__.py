"""Verifier: checks the invariants of a graph after each pass.

The spec of a stage (the state after a pass) is a tuple of checks (`SPECS`); a check yields (node, reason) for each
failure. Sharding rules come from the caller: ``disagreement`` returns why an op's operand layouts do not give its
results'.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from functools import partial

from torch import fx

from shardc.errors import VerifyError
from shardc.ir import comm, grammar, ops, text
from shardc.ir.graph import KEY, Info, info, output_node
from shardc.ir.mesh import Mesh
from shardc.ir.phases import Phases, Staged
from shardc.verify import cuts, halves, layouts, local_graph, structure
from shardc.verify.subject import Agrees, Check, Subject, no_rules

Crossing = Sequence[Sequence[fx.Node]]  # for each boundary between stages, the values that cross it

GRAPH = (structure.records, structure.order, structure.types, structure.results)
CAPTURED = (*GRAPH, structure.legal(ops.tag), layouts.shapes)
SEEDED = (*GRAPH, structure.legal(ops.tag, ops.reshard, ops.pad, ops.unpad), layouts.shapes, layouts.pins)
PLACED = (*GRAPH, layouts.present, layouts.shapes, layouts.pins)
DECIDED = (*PLACED, structure.legal(ops.reshard, ops.pad, ops.unpad), layouts.decisions)
AGREED = (*PLACED, layouts.moves, layouts.agreement, layouts.results)
RESHARDED = (*AGREED, structure.legal(ops.reshard, ops.pad, ops.unpad))
STEPS = (*AGREED, structure.legal(*ops.COLLECTIVES, *ops.LOCAL_MOVES, ops.pad, ops.unpad))
LOCAL = (
    *GRAPH, structure.legal(collectives=True),
    local_graph.local_shapes, local_graph.host_memory, local_graph.groups, local_graph.waits,
)  # fmt: skip
HALF = (*LOCAL, halves.read, halves.once, halves.slots)  # forward and backward graphs, from partition on

SPECS: dict[str, tuple[Check, ...]] = {
    **dict.fromkeys(("capture", "experts", "attention", "windows", "canonicalize", "float8"), CAPTURED),
    **dict.fromkeys(("seed", "pad"), SEEDED),
    **dict.fromkeys(("propagate", "objective", "precision"), DECIDED),
    **dict.fromkeys(("reshard", "simplify"), RESHARDED),
    **dict.fromkeys(("collectives", "keep_part"), STEPS),
    **dict.fromkeys(("localize", "offload", "hoist_grad_epilogue", "chunk_loss", "decompose", "partition"), LOCAL),
}
# Passes that only move data: they change no computed value.
MOVING = ("seed", "propagate", "reshard", "simplify", "collectives", "keep_part")


def requirement_of(check: Check) -> str:
    """Return what ``check`` requires of a graph, as text for errors: what its docstring says after "Check that"."""
    first_sentence, _, _ = " ".join((check.__doc__ or f"{check.__name__} holds").split()).partition(". ")
    return first_sentence.removeprefix("Check that ").removesuffix(".")


def verify(
    gm: fx.GraphModule, mesh: Mesh, stage: str, disagreement: Agrees = no_rules, *, spec: str | None = None
) -> None:
    """Check the invariants that hold in graph ``gm`` after the pass ``stage``.

    Args:
        gm: the graph after ``stage``.
        stage: name of a pass, for errors; a key of `SPECS` unless ``spec`` is set.
        disagreement: see `Subject`.
        spec: the stage whose spec is checked, if not ``stage``.

    Raises:
        VerifyError: a check fails; the error has the stage, the reason, and the dump around the node.
    """
    check(gm, mesh, stage, SPECS[spec or stage], disagreement)


def check(gm: fx.GraphModule, mesh: Mesh, stage: str, checks: Iterable[Check], disagreement: Agrees = no_rules) -> None:
    """Run ``checks`` on the graph ``gm``. Raises VerifyError for the first failure, as `verify` does."""
    check_all(Subject(gm, mesh, disagreement), stage, checks)


def check_all(subject: Subject, stage: str, checks: Iterable[Check]) -> None:
    """Raise VerifyError, as `verify` does, for the first failure of ``checks`` on ``subject``."""
    for run_check in checks:
        for node, reason in run_check(subject):
            raise broken(subject, stage, node, reason)


def verify_halves(
    forward: fx.GraphModule, backward: fx.GraphModule | None, mesh: Mesh, joint: fx.Graph | None = None
) -> None:
    """Check forward and backward graph after partition. If there is a backward, also check that together they return
    the results of ``joint``.

    Backward may not repeat a collective whose result forward saves. Raises VerifyError, as `verify` does.
    """
    check(forward, mesh, "partition", HALF)
    if backward is not None:
        check(backward, mesh, "partition", (*HALF, partial(halves.rerun, forward)))
        if joint is not None:
            _require_no_fault(backward, mesh, "partition", halves.cut(joint, forward.graph, backward.graph))


def verify_phases(cut: Phases, mesh: Mesh, split: Iterable[str | int]) -> None:
    """Check that the graphs into which a joint graph is cut compute the results of the joint graph. Raises VerifyError,
    as `verify` does.

    Args:
        cut: the graphs.
        mesh: the mesh, with its axis of microbatches.
        split: names of inputs, and indices of outputs, that each microbatch has its own part of.
    """
    bodies = [(f"opening {at}", x.body.graph) for at, x in enumerate(cut.openings, 1) if x.body is not None]
    bodies.append(("body", cut.body.graph))
    once = [(f"opened {at}", x.once.graph) for at, x in enumerate(cut.openings, 1)]
    once += [] if cut.gathers is None else [("gathers", cut.gathers.graph)]
    once.append(("closing", cut.closing.graph))
    fault = cuts.in_microbatches(cut.joint.graph, bodies, once, mesh, split)
    _require_no_fault(cut.joint, mesh, "microbatch", fault)


def verify_first(
    forward: fx.GraphModule, gathers: fx.GraphModule | None, first: fx.GraphModule | None, mesh: Mesh
) -> None:
    """Check the forward of the first microbatch, ``first``, which also gathers parameters; None if it does not. Raises
    VerifyError. Other arguments are as for `cuts.opens`.
    """
    if first is not None and gathers is not None:
        _require_no_fault(first, mesh, "microbatch", cuts.opens(forward.graph, gathers.graph, first.graph))


def verify_closing(
    backward: fx.GraphModule,
    closing: fx.GraphModule,
    last: fx.GraphModule,
    reduce: Mapping[str, str],
    mesh: Mesh,
    left: Container[str] = (),
    stage: str = "microbatch",
) -> None:
    """Check the backward of the last microbatch, ``last``: it must compute what ``backward`` and the ``closing`` graph
    (gradient reductions) compute. Raises VerifyError, which names the pass ``stage``. Other arguments are as for
    `cuts.closes`.
    """
    _require_no_fault(last, mesh, stage, cuts.closes(backward.graph, closing.graph, last.graph, reduce, left))


def verify_stages(staged: Staged, mesh: Mesh) -> None:
    """Check that the graphs of pipeline stages together compute what the graphs before the cut into stages computed;
    raises VerifyError.
    """

    def check(whole: fx.GraphModule, stages: Sequence[fx.GraphModule], *up_and_down: Crossing) -> None:
        graphs = [gm.graph for gm in stages]
        _require_no_fault(whole, mesh, "stages", cuts.in_stages(whole.graph, graphs))
        if up_and_down:
            up, down = ([[info(x).name for x in values] for values in crossing] for crossing in up_and_down)
            _require_no_fault(whole, mesh, "stages", cuts.in_time(graphs, up, down))

    check(staged.parts.body, staged.bodies, staged.up, staged.down)
    for loop, cut in zip(staged.parts.openings, staged.openings, strict=True):
        if loop.body is not None and cut is not None:
            check(loop.body, cut.bodies, cut.up, [()] * len(cut.up))
    check(staged.parts.closing, staged.closings)


def verify_two_backwards(
    backward: fx.GraphModule, inputs: fx.GraphModule | None, weights: fx.GraphModule | None, mesh: Mesh
) -> None:
    """Check that a backward was split correctly into a graph for gradients of inputs and a graph for gradients of
    weights. Raises VerifyError.
    """
    graphs = [None if gm is None else gm.graph for gm in (inputs, weights)]
    _require_no_fault(backward, mesh, "split_backward", cuts.in_two(backward.graph, *graphs))


def _require_no_fault(gm: fx.GraphModule, mesh: Mesh, stage: str, fault: str | None) -> None:
    """Raise VerifyError after ``stage``, at the outputs of ``gm``, if there is a ``fault`` (its text)."""
    if fault is not None:
        raise broken(Subject(gm, mesh, no_rules), stage, output_node(gm.graph), fault)


def broken(subject: Subject, stage: str, node: fx.Node, reason: str) -> VerifyError:
    """Return the VerifyError for ``node``, which fails a check after ``stage`` because of ``reason``."""
    collective = comm.collective_of(node)
    where, name = "the outputs" if node.op == "output" else f"the node {node.name!r}", ""
    if node.op != "output" and isinstance(node.meta.get(KEY), Info):
        name = info(node).name
        where = grammar.name_text(name)
    return VerifyError(
        f"after {stage}: {where}: {reason}",
        node=name,
        reason=reason if name else f"{where}: {reason}",
        plan_entry=collective and comm.entry_of(collective, subject.causes),
        source=collective and comm.source_of(collective),
        program=window(subject.gm, subject.mesh, node),
    )


def window(gm: fx.GraphModule, mesh: Mesh, node: fx.Node, around: int = 2) -> str:
    """Return lines of the dump as text: the one that shows ``node``, marked, and ``around`` lines before and after."""
    try:
        shown = text.lines(gm, mesh)
    except VerifyError as error:
        return error.program or error.what
    at = next((at for at, (_, owner) in enumerate(shown) if owner is node), len(shown) - 1)
    picked = range(max(at - around, 0), min(at + around + 1, len(shown)))
    return "\n".join(f"{'>' if i == at else ' '}{shown[i][0]}" for i in picked)
