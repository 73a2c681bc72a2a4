"""`PipelineCut`: cuts the joint graph of a step into the graphs of pipeline stages, which run for each microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx

from shardc import passes, verify
from shardc._compat import LazyGraphModule
from shardc.errors import PlanError
from shardc.ir import graph as ir
from shardc.ir.executable import (
    BACKWARD,
    BACKWARDS,
    CLOSING,
    FIRST_FORWARD,
    FIRST_INFERENCE,
    FORWARD,
    GATHERS,
    GRADIENTS,
    INFERENCE,
    INPUT_GRADIENTS,
    LAST_BACKWARD,
    SUM,
    TRANSFER,
    WEIGHT_GRADIENTS,
    AtStage,
    Phase,
    opening,
)
from shardc.ir.graph import Role
from shardc.ir.op_traits import communicates
from shardc.ir.phases import Phases, Staged
from shardc.ir.schedules import play
from shardc.ir.stage_runs import Boundary, StageRuns
from shardc.passes.lower.microbatch import closed, closing_forward, marked_terms, opened, part
from shardc.plan.stages import PipelineStages
from shardc.step_cut import MicrobatchCut


@dataclass
class PipelineCut(MicrobatchCut):
    """Cuts a joint graph into the graphs of a step in microbatches, those of each stage apart."""

    @property
    def stages(self) -> PipelineStages:
        """The stages of the plan's pipeline."""
        assert self.bound.pp is not None
        return self.bound.pp

    @cached_property
    def staged(self) -> Staged:
        """The step, cut in time and into stages.

        Raises:
            PlanError: no input is split in time, such as a batch of one row.
        """
        staged = passes.Stages(self.stages)(self._cut_in_time())
        if self.joint.options.verify:
            verify.verify_stages(staged, self.bound.mesh)
        if self.stages.count > 1 and not any((*staged.up, *staged.openings)):
            raise PlanError(
                "the inputs are not split into microbatches, so stages have nothing to run one after the other",
                plan_entry=str(self.stages.entry),
                fix="pass two rows or more on each rank, in dim 0 of the inputs",
            )
        return staged

    @cached_property
    def parts(self) -> Phases:
        return self.staged.parts

    @property
    def phases(self) -> tuple[Phase, ...]:
        openings: list[Phase] = []
        for at, (loop, cut) in enumerate(zip(self.parts.openings, self.staged.openings, strict=True)):
            each, once = opening(at)
            stages = range(self.stages.count if cut is not None else 0)
            openings += [AtStage(each, stage) for stage in stages] or [each] * (loop.each is not None)
            openings.append(once)
        out: list[AtStage] = []
        for at, backwards in enumerate(self._backwards):
            last = (*dict.fromkeys(backwards), LAST_BACKWARD, GRADIENTS) if self.trains else (CLOSING,)
            out += [AtStage(name, at) for name in (GATHERS, FIRST_FORWARD, FORWARD, *last)]
        return (*openings, *(phase for phase in out if self._at(phase) is not None))

    @cached_property
    def _backwards(self) -> list[list[str]]:
        """The phases of the backwards of each stage, in the order of the schedule; of a backward in two, the second
        gives terms.
        """
        lists = self.stages.entry.lists(self.stages.ranks, self.bound.mesh.microbatches).lists
        out: list[list[str]] = [[] for _ in range(self.stages.count)]
        for action in (action for actions in lists for action in actions if action.kind in BACKWARDS):
            out[action.stage].append(BACKWARDS[action.kind])
        return out

    def graph(self, phase: Phase) -> fx.GraphModule | None:
        opens = [each for at, cut in enumerate(self.staged.openings) if cut is not None for each in opening(at)[:1]]
        half = self._at(phase) if isinstance(phase, AtStage) else None if phase in opens else self._of_parts(phase)
        return None if half is None else LazyGraphModule(half, ir.copied(half.graph))

    def _at(self, phase: AtStage) -> fx.GraphModule | None:
        """Returns the graph of a phase of a stage; None if it has none."""
        staged, at = self.staged, phase.stage
        for number, loop in enumerate(staged.openings):
            if loop is not None and phase.phase == opening(number)[0]:
                return loop.bodies[at] if ir.outputs(loop.bodies[at].graph) else None
        if phase.phase in (INFERENCE, FIRST_INFERENCE):
            forward = passes.inference(staged.bodies[at])
            return forward if phase.phase == INFERENCE else opened(forward, self._gathers(at, first=True))
        if phase.phase == GATHERS:
            return self._gathers(at, first=False)
        if phase.phase == CLOSING:
            return closing_forward(staged.closings[at])
        if at not in self._halves:
            self._halves[at] = self._cut_stage(at)
        return self._halves[at].get(phase.phase)

    @cached_property
    def _halves(self) -> dict[int, dict[str, fx.GraphModule | None]]:
        return {}

    def _cut_stage(self, at: int) -> dict[str, fx.GraphModule | None]:
        """Cuts the joint graph of a stage into forward and backward, or backwards, and closes the last of these.

        The closing graph is what this does not close.
        """
        staged, checks, mesh = self.staged, self.joint.options.verify, self.bound.mesh
        first, second = self._partitioned(staged.bodies[at])
        out: dict[str, fx.GraphModule | None] = {FORWARD: first, GRADIENTS: staged.closings[at]}
        # Others wait for the first forward of stage 0, and for its last backward nobody does. At other stages it is the
        # other way round, so what communicates once a step runs beside it.
        if (gathers := self._gathers(at, first=True)) is not None:
            out[FIRST_FORWARD] = opened(first, gathers)
            if checks:
                verify.verify_first(first, gathers, out[FIRST_FORWARD], mesh)
        if second is None:
            return out
        sent = [ir.info(x).name for x in staged.down[at - 1]] if at else []
        second = marked_terms(marked_terms(second, self.parts.reduce), sent, TRANSFER)
        out[BACKWARD] = second
        if INPUT_GRADIENTS in self._backwards[at]:
            inputs, weights = passes.SplitBackward()(second)
            if checks:
                verify.verify_two_backwards(second, inputs, weights, mesh)
            out |= {INPUT_GRADIENTS: inputs, WEIGHT_GRADIENTS: weights}
        last = out[next(phase for phase in reversed(self._backwards[at]) if phase != INPUT_GRADIENTS)]
        closing, rest = self._closings[at]
        if at == 0 and closing is not None and last is not None:
            others = [graph for _, graph in self._closings if graph is not None]
            left = {ir.role(node).name for gm in others for node in ir.placeholders(gm.graph, SUM)}
            ended = passes.HoistGradEpilogue()(closed(last, closing, self.parts.reduce, left))
            out |= {LAST_BACKWARD: ended, GRADIENTS: rest}
            if checks:
                verify.verify_closing(last, closing, ended, self.parts.reduce, left, mesh)
        return out

    def _gathers(self, at: int, first: bool) -> fx.GraphModule | None:
        """Returns the gathers of a stage that its first forward runs (``first``), or that run in front of it."""
        opens = at == 0 and not any(self.staged.openings)
        return self.staged.gathers[at] if first == opens else None

    @cached_property
    def _closings(self) -> list[tuple[fx.GraphModule | None, fx.GraphModule | None]]:
        """The closing graph of each stage, in two: what its last backward also computes, and the rest.

        The first part is what takes sums of the stage's own terms, if it communicates: so that this overlaps.
        """
        return [self._in_two(at, closing) for at, closing in enumerate(self.staged.closings)]

    def _in_two(self, at: int, closing: fx.GraphModule) -> tuple[fx.GraphModule | None, fx.GraphModule | None]:
        elsewhere: dict[fx.Node, bool] = {}  # whether it depends on sums of terms of other stages
        for node in closing.graph.nodes:
            is_sum = node.op == "placeholder" and ir.role(node).kind == SUM
            elsewhere[node] = any(elsewhere[x] for x in node.all_input_nodes) or (
                is_sum and self.staged.terms[ir.role(node).name] != at
            )
        results: tuple[list[tuple[Role, fx.node.Argument]], ...] = [], []
        for role, x in ir.outputs(closing.graph):
            results[not isinstance(x, fx.Node) or elsewhere[x]].append((role, x))
        graphs = [LazyGraphModule(closing, part(closing.graph, some, {})) for some in results]
        if not any(communicates(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"):
            return None, closing
        return graphs[0], graphs[1] if ir.outputs(graphs[1].graph) else None

    def runs(self, training: bool) -> StageRuns:
        """Returns what crosses between the stages, and their order, in a step or in a call without gradients.

        Raises:
            VerifyError: the lists of the ranks do not fit together.
        """
        staged, count = self.staged, self.bound.mesh.microbatches
        order = self.stages.entry.lists(self.stages.ranks, count, training)
        play(order)
        bodies, closings = staged.bodies, staged.closings
        if not training:
            bodies = tuple(passes.inference(body) for body in bodies)
            closings = tuple(closing_forward(closing) for closing in closings)
        takers: dict[tuple[str, str], tuple[set[int], Any]] = {}  # argument -> stages that take it, a tensor like it
        opened = [loop.bodies for loop in staged.openings if loop is not None]
        for at, graphs in enumerate(zip(bodies, closings, staged.gathers, *opened, strict=True)):
            for node in (node for gm in graphs if gm is not None for node in ir.placeholders(gm.graph)):
                key = ir.role(node).kind, ir.role(node).name
                takers.setdefault(key, (set(), node.meta["val"]))[0].add(at)
        first = self.stages.first
        copies = {
            name: (first[name], others, like)
            for (kind, name), (stages, like) in takers.items()
            if kind == "param" and like.dim() and (others := frozenset(stages - {first[name]}))
        }
        terms = {
            name: (staged.terms[name], frozenset(stages), like)
            for (kind, name), (stages, like) in takers.items() if kind == SUM
        }  # fmt: skip
        results: dict[tuple[str, Any], tuple[int, int, Any]] = {}
        for number, of_stages in ((count, bodies), (1, closings)):
            for at, gm in enumerate(of_stages):
                for role, x in ir.outputs(gm.graph):
                    if isinstance(x, fx.Node) and self._is_result(role, x.meta["val"]):
                        name = role.index if role.kind == "output" else role.name
                        results[role.kind, name] = at, number, x.meta["val"]

        downs = staged.down if training else ((),) * len(staged.down)
        boundaries = _boundaries(bodies, staged.up, downs)
        owners = self.stages.owners
        closed_grads = [x for closing in closings for x in ir.outputs(closing.graph) if x[0].kind == "grad"]
        grads = {
            role.name: (owners[role.name], x.meta["val"])
            for role, x in closed_grads
            if role.name in owners and isinstance(x, fx.Node) and x.meta["val"].dim()
        }
        openings = tuple(None if loop is None else self._opening_runs(at) for at, loop in enumerate(staged.openings))
        return StageRuns(order, boundaries, copies, terms, results, grads, openings)

    def _opening_runs(self, number: int) -> StageRuns:
        """Returns what crosses between the stages in a loop before the forward, and the order: that of an inference."""
        loop, once = self.staged.openings[number], self.parts.openings[number].once
        assert loop is not None
        order = self.stages.entry.lists(self.stages.ranks, self.bound.mesh.microbatches, trains=False)
        play(order)
        everywhere = frozenset(range(self.stages.count))
        sums = {ir.role(node).name: node.meta["val"] for node in ir.placeholders(once.graph, SUM)}
        terms = {name: (loop.terms[name], everywhere, like) for name, like in sums.items()}
        return StageRuns(order, _boundaries(loop.bodies, loop.up, ((),) * len(loop.up)), {}, terms, {}, {})

    def _is_result(self, role: Role, val: Any) -> bool:
        """Returns whether all ranks get a result: an output, or a gradient of an input or of a parameter without dims,
        which all ranks have.
        """
        crosses = {ir.info(x).name for boundary in self.staged.down for x in boundary}
        is_of_stage = role.name in (*self.parts.reduce, *crosses) or role.name in self.stages.first and val.dim()
        is_grad = role.kind == "grad" and not is_of_stage
        return role.kind in ("output", "buffer") or is_grad


def _boundaries(
    bodies: Sequence[fx.GraphModule], ups: Sequence[Sequence[fx.Node]], downs: Sequence[Sequence[fx.Node]]
) -> tuple[Boundary, ...]:
    """Returns the values that cross behind each stage but the last; those that no graph takes do not."""
    taken = [{ir.role(node).name for node in ir.placeholders(body.graph, TRANSFER)} for body in bodies]

    def crossing(nodes: Sequence[fx.Node], readers: Sequence[set[str]]) -> dict[str, Any]:
        names = set[str]().union(*readers)
        return {ir.info(x).name: x.meta["val"] for x in nodes if ir.info(x).name in names}

    return tuple(
        Boundary(crossing(up, taken[at + 1 :]), crossing(down, taken[: at + 1]))
        for at, (up, down) in enumerate(zip(ups, downs, strict=True))
    )
