"""The verifier between passes: hooks that check the joint graph and its halves with the sharding rules of the ops."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from functools import lru_cache
from operator import getitem
from typing import Any

from torch import fx

from shardc.errors import VerifyError
from shardc.ir import grammar
from shardc.ir import graph as ir
from shardc.ir.comm import WAIT, collective_of
from shardc.ir.comm_volume import collective_kind
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.passes import local_regions
from shardc.passes.layout.precision import REDUCED_IN
from shardc.passes.op_calls import before_other_starts, call_of, is_start, leaving, operands_of
from shardc.passes.pipeline import Hook, Pass
from shardc.passes.schedule.prefetch import prefetchable
from shardc.passes.schedule.schedule import Schedule
from shardc.rules import spec_of
from shardc.rules.spec import Spec, from_results, infer
from shardc.verify import HALF, MOVING, SPECS, broken, check_all, halves, requirement_of, verify
from shardc.verify.identity import (
    ProgramFingerprints,
    changed,
    fingerprints,
    of_outputs,
    program_fingerprints,
    reimplemented,
    same,
)
from shardc.verify.local_graph import Collective, collectives
from shardc.verify.subject import Broken, Check, State, Subject, no_rules, reporting


def check(
    gm: fx.GraphModule, mesh: Mesh, stage: str, before: ProgramFingerprints | None = None, *, spec: str | None = None
) -> ProgramFingerprints:
    """Verifies ``gm``, the graph after the pass ``stage``, and returns the fingerprints of its values.

    Args:
        mesh: the mesh of the layouts.
        stage: the name of the pass that has run.
        before: the fingerprints after the previous stage; a stage that only moves data may not change them.
        spec: the stage whose spec ``gm`` has to meet; by default ``stage``.

    Raises:
        VerifyError: a check fails; the error names the stage, the node and the reason.
    """
    verify(gm, mesh, stage, disagreement, spec=spec)
    prints = fingerprints(gm.graph)  # a reshard has that of its operand
    if before is not None and stage in MOVING and (wrong := changed(before, gm, prints)) is not None:
        raise broken(Subject(gm, mesh, disagreement), stage, *wrong)
    return program_fingerprints(gm, prints)


# Passes on halves after which every output has the same value as before, and those that keep the order of ops.
KEEP_VALUES = ("bucket", "algorithms", "schedule", "plan_memory")
KEEP_ORDER = ("plan_memory",)
ALGORITHMS = "algorithms"  # may replace a collective by other ops
ON_HALVES = (
    *KEEP_VALUES,
    "partition",
    "skip_regather",
    "offload_saved",
    "skip_communication",
    "prune_unused_grads",
)  # shardc's own passes on halves


class Verify(Hook):
    """Verifies the joint graph after every pass; a pass without a spec has to meet the spec of the previous one.

    Attributes:
        spec: the last stage that has a spec (`SPECS`); "" before the first.
        state: the graph when it was verified last.
        fingerprints: of the graph as it is; None if not computed, as behind a pass that changes values.
        input: the graph that the current pass takes.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.spec = mesh, ""
        self.state: State | None = None
        self.fingerprints: ProgramFingerprints | None = None
        self.input: fx.GraphModule | None = None

    def before(self, stage: str, gm: fx.GraphModule) -> None:
        """Records the graph, and its fingerprints if ``stage`` only moves data, which must not change them."""
        self.input = gm
        if stage in MOVING and self.fingerprints is None:  # else the check of the pass before has left them
            self.fingerprints = program_fingerprints(gm)

    def after(self, stage: str, gm: fx.GraphModule) -> None:
        """Raises VerifyError if the graph breaks an invariant of ``stage``."""
        last_spec, state = self.spec, State(gm.graph)
        has_spec = stage in SPECS  # else it is a pass of the user
        if has_spec:
            self.spec = stage
        # Neither the graph nor the spec that applies to it has changed.
        if state.is_of(self.state) and SPECS[last_spec] is SPECS[self.spec]:
            return
        self.state = state
        # For the report. None if the pass has changed the graph that it took, which then is no longer there.
        before = self.input if self.input is not gm else None
        with reporting(self.mesh, {"before": before, "after": gm}):
            if stage in MOVING:
                self.fingerprints = check(gm, self.mesh, stage, before=self.fingerprints, spec=self.spec)
            else:
                _check(Subject(gm, self.mesh, disagreement), stage, SPECS[self.spec], of_user=not has_spec)
                self.fingerprints = None  # other passes change values on purpose


class VerifyHalf(Hook):
    """Verifies a forward or backward graph after every pass: structure, results and late waits (`check_waits`).

    Args:
        mesh: the mesh of the layouts.
        passes: the passes that run on the half.
        causes: parameter -> the plan entries that decide its compute layout, for errors.

    Attributes:
        overlaps: names of the schedule passes after which waits have to be late.
        state: the graph after the last pass.
        prints: node -> fingerprint in the graph after the last pass; None if not computed.
        replaced: name of a collective's result that other ops compute (`Algorithms`) -> the collective.
        values, order: fingerprints of outputs and names of ops before the current pass, if it has to keep them.
    """

    def __init__(self, mesh: Mesh, passes: Iterable[Pass] = (), causes: Mapping[str, str] | None = None) -> None:
        self.mesh, self.causes = mesh, causes or {}
        self.overlaps = {pass_.name for pass_ in passes if isinstance(pass_, Schedule) and not pass_.blocking}
        self.state: State | None = None
        self.prints: dict[fx.Node, Any] | None = None
        self.replaced: dict[str, Collective] = {}

    def before(self, stage: str, gm: fx.GraphModule) -> None:
        """Records, before the pass ``stage`` runs, what the pass must not change: fingerprints of values and, for some
        passes, the order of ops.
        """
        if stage in KEEP_VALUES and self.prints is None:
            self.prints = fingerprints(gm.graph, replaced=self.replaced)
        # All collectives may be replaced; `_after` keeps those that were.
        if stage == ALGORITHMS and self.prints is not None:
            self.replaced = collectives(gm.graph, self.prints)
        self.values = of_outputs(gm.graph, self.prints) if self.prints is not None else {}
        self.order = halves.order(gm.graph) if stage in KEEP_ORDER else []

    def after(self, stage: str, gm: fx.GraphModule) -> None:
        """Raises VerifyError if the graph breaks an invariant of ``stage``."""
        with reporting(self.mesh, {"after": gm}):
            self._after(stage, gm)

    def _after(self, stage: str, gm: fx.GraphModule) -> None:
        """Checks the graph after the pass ``stage``, and records its state for the checks of the next pass."""
        last, self.state = self.state, State(gm.graph)
        # A schedule is checked even if it changes nothing: from it on, waits have to be late.
        if stage not in self.overlaps and self.state.is_of(last):
            return
        subject = Subject(gm, self.mesh, no_rules, self.causes)
        checks = (*HALF, check_waits) if stage in self.overlaps else HALF
        _check(subject, stage, checks, of_user=stage not in ON_HALVES)
        if stage not in KEEP_VALUES:
            self.prints = None  # of a graph that is no longer there
        # The same ops in another order have the same fingerprints.
        elif not self.state.computes(last):
            self.prints = fingerprints(gm.graph, replaced=self.replaced)
            if (difference := same(self.values, of_outputs(gm.graph, self.prints))) is not None:
                raise broken(subject, stage, ir.output_node(gm.graph), difference)
        # Where other ops now compute a collective, later checks take the fingerprint of the collective itself.
        if stage == ALGORITHMS and self.prints is not None:
            self.replaced = reimplemented(gm.graph, self.prints, self.replaced)
        if stage in KEEP_ORDER and (moved := halves.moved(self.order, gm.graph)) is not None:
            raise broken(subject, stage, *moved)


def _check(subject: Subject, stage: str, checks: Iterable[Check], of_user: bool) -> None:
    """Raises VerifyError if one of ``checks`` fails on ``subject``, the graph after the pass ``stage``.

    Args:
        of_user: whether the pass is the user's; the error then says which invariant the pass has to keep.
    """
    for invariant in checks:
        try:
            check_all(subject, stage, (invariant,))
        except VerifyError as error:
            if not of_user:
                raise
            fix = f"mend the pass {stage!r}: what runs after it requires that {requirement_of(invariant)}"
            raise error.with_fix(fix) from None


def disagreement(node: fx.Node, operands: tuple[Layout, ...] | None = None) -> str | None:
    """Checks the layouts of an op against its rule. Returns None if the layouts of its results follow from those of its
    operands, else the disagreement as text.

    Args:
        operands: layouts of the operands; by default those of the operand nodes.
    """
    if operands is None:
        operands = tuple(ir.layout(x) for x in operands_of(node))
    results = tuple(value.layout for value in ir.info(node).tensors if value.layout is not None)
    if node.target in local_regions.OPS:
        strategy = local_regions.strategy_of(node, results[0].mesh)
        same = (strategy.operands, strategy.results) == (operands, results)
        return None if same else f"its region takes {_shown(strategy.operands)} and gives {_shown(strategy.results)}"
    if ir.info(node).origin.cause == REDUCED_IN:  # carries a pending sum, to a smaller dtype too
        return None if operands == results else f"the cast takes {_shown(operands)} and gives {_shown(results)}"
    spec = spec_of(call_of(node))
    if spec is None:
        not_whole = [layout for layout in (*operands, *results) if layout.axes]
        return f"the op has no rule and must be whole, not {not_whole[0]}" if not_whole else None
    return _disagreement(spec, operands, results)


@lru_cache(maxsize=65536)
def _disagreement(spec: Spec, operands: tuple[Layout, ...], results: tuple[Layout, ...]) -> str | None:
    """Returns, as text, why an op with the factors ``spec`` cannot turn operands with the layouts ``operands`` into
    results with the layouts ``results``; None if it can.
    """
    if len(operands) != len(spec.operands):
        return f"the rule has {len(spec.operands)} operands, the op has {len(operands)}"
    if not operands:  # an op such as `arange`: the layout of its result is free
        strategy = from_results(spec, results[0])
        return None if strategy is not None and strategy.results == results else f"the op cannot make {_shown(results)}"
    inferred = infer(spec, operands, results)
    if isinstance(inferred, str):
        return inferred
    return None if inferred == results else f"its operands at {_shown(operands)} give {_shown(inferred)}"


def _shown(layouts: tuple[Layout, ...]) -> str:
    """Returns ``layouts`` as text for an error."""
    return ", ".join(map(str, layouts))


def check_waits(subject: Subject) -> Broken:
    """Checks that no op computes between a wait and its first use. Yields each wait that is too early, with the reason.

    A collective whose result only leaves the graph has to be waited for after the start of another one, or after all
    compute.
    """
    nodes, place, graph = subject.nodes, subject.place, subject.gm.graph
    leaves = leaving(graph)  # nodes that only carry results of collectives to the output
    start_places = [place[node] for node in subject.calls if collective_kind(node) is not None]
    last_compute = max((place[node] for node in subject.calls if _computes(node) and node not in leaves), default=0)
    sent_on = before_other_starts(leaves)
    for wait in subject.calls:
        # A result that is sent on is waited for where the next collective starts.
        if wait.target is not WAIT or wait in sent_on or (start := collective_of(wait)) is None:
            continue
        if wait not in leaves:
            first_use = min(map(place.__getitem__, wait.users), default=0)
            behind = nodes[place[wait] + 1 : first_use]
        elif start in leaves:  # a second reduction, which starts when the first is done
            continue
        elif bisect_right(start_places, place[start]) != bisect_right(start_places, place[wait]):
            continue  # late enough: another collective starts between its start and its wait
        else:
            behind = [node for node in nodes[place[wait] + 1 : last_compute + 1] if node not in leaves]
        if (blocking := _first_compute(graph, behind)) is not None:
            yield (
                wait,
                f"it is waited for in front of {grammar.name_text(ir.info(blocking).name)}, which does not need it",
            )


def _computes(node: fx.Node) -> bool:
    """Returns whether ``node`` is an op that takes compute time: no start, wait or getitem."""
    return not is_start(node) and node.target is not WAIT and node.target is not getitem


def _first_compute(graph: fx.Graph, nodes: list[fx.Node]) -> fx.Node | None:
    """Returns the first of ``nodes`` that computes and is not `prefetchable` (free to move); None if there is none."""
    computing = [node for node in nodes if _computes(node)]
    movable = prefetchable(graph) if computing else frozenset()  # not computed if there is nothing to compare with
    return next((node for node in computing if node not in movable), None)
