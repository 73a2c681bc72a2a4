"""`PipelineCut`: cuts the joint graph of a step into the graphs of pipeline stages, which run for each microbatch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import fx

from shardc import passes, verify
from shardc._compat import LazyGraphModule
from shardc.errors import PlanError
from shardc.ir import executable as step
from shardc.ir import graph as ir
from shardc.ir.executable import AtStage, Phase, opening
from shardc.ir.graph import Role
from shardc.ir.op_traits import communicates
from shardc.ir.phases import Phases, Staged
from shardc.passes.lower.microbatch import closing_forward, cut_out, mark_terms, with_closing_last, with_gathers_first
from shardc.plan.pipeline_stages import PipelineStages
from shardc.step_cut import MicrobatchCut


@dataclass
class PipelineCut(MicrobatchCut):
    """Cuts the joint graph of a step in microbatches into the graphs of each pipeline stage."""

    @property
    def stages(self) -> PipelineStages:
        """The pipeline stages that the plan asks for."""
        assert self.bound.pp is not None
        return self.bound.pp

    @cached_property
    def staged(self) -> Staged:
        """The graphs of the step, cut into microbatches and then into pipeline stages.

        Raises:
            PlanError: no input can be split over microbatches, for example because the batch has one row.
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
            body, once = opening(at)
            stages = range(self.stages.count if cut is not None else 0)
            openings += [AtStage(body, stage) for stage in stages] or [body] * (loop.body is not None)
            openings.append(once)
        out: list[AtStage] = []
        for at, backwards in enumerate(self._backwards):
            last = (*dict.fromkeys(backwards), step.LAST_BACKWARD, step.GRADIENTS) if self.trains else (step.CLOSING,)
            out += [AtStage(name, at) for name in (step.GATHERS, step.FIRST_FORWARD, step.FORWARD, *last)]
        return (*openings, *(phase for phase in out if self._at(phase) is not None))

    @cached_property
    def _backwards(self) -> list[list[str]]:
        """For each stage, the phase (``backward``, ...) of each backward that it runs for a microbatch, in the order of
        the schedule.

        Of a backward in two parts (zero bubble), the second computes the terms of parameters' gradients.
        """
        lists = self.stages.order(self.bound.mesh.microbatches).lists
        out: list[list[str]] = [[] for _ in range(self.stages.count)]
        for action in (action for actions in lists for action in actions if action.kind in step.BACKWARDS):
            out[action.stage].append(step.BACKWARDS[action.kind])
        return out

    def graph(self, phase: Phase) -> fx.GraphModule | None:
        opens = [each for at, cut in enumerate(self.staged.openings) if cut is not None for each in opening(at)[:1]]
        half = self._at(phase) if isinstance(phase, AtStage) else None if phase in opens else self._of_parts(phase)
        return None if half is None else LazyGraphModule(half, ir.copied(half.graph))

    def _at(self, phase: AtStage) -> fx.GraphModule | None:
        """Returns the graph of ``phase``, which is a phase of one stage (its forward, its backward, ...). None if the
        stage has no such graph.
        """
        staged, at = self.staged, phase.stage
        for number, loop in enumerate(staged.openings):
            if loop is not None and phase.phase == opening(number)[0]:
                return loop.bodies[at] if list(ir.outputs(loop.bodies[at].graph)) else None
        if phase.phase in (step.INFERENCE, step.FIRST_INFERENCE):
            forward = passes.inference(staged.bodies[at])
            gathers = self._gathers(at, first=True)
            return forward if phase.phase == step.INFERENCE else with_gathers_first(forward, gathers)
        if phase.phase == step.GATHERS:
            return self._gathers(at, first=False)
        if phase.phase == step.CLOSING:
            return closing_forward(staged.closings[at])
        if at not in self._halves:
            self._halves[at] = self._cut_stage(at)
        return self._halves[at].get(phase.phase)

    @cached_property
    def _halves(self) -> dict[int, dict[str, fx.GraphModule | None]]:
        """Graphs of the stages that were cut so far: stage number -> {phase: graph}."""
        return {}

    def _cut_stage(self, at: int) -> dict[str, fx.GraphModule | None]:
        """Cuts the joint graph of a stage into its forward and its backwards. Returns phase -> graph.

        At stage 0 the last backward also computes its part of the closing graph; the rest of it is a graph of its own.
        """
        staged, checks, mesh = self.staged, self.joint.options.verify, self.bound.mesh
        first, second = self._partitioned(staged.bodies[at])
        out: dict[str, fx.GraphModule | None] = {step.FORWARD: first, step.GRADIENTS: staged.closings[at]}
        # Others wait for the first forward of stage 0, and for its last backward nobody does. At other stages it is the
        # other way round, so what communicates once a step runs beside it.
        if (gathers := self._gathers(at, first=True)) is not None:
            out[step.FIRST_FORWARD] = with_gathers_first(first, gathers)
            if checks:
                verify.verify_first(first, gathers, out[step.FIRST_FORWARD], mesh)
        if second is None:
            return out
        sent = [ir.info(x).name for x in staged.down[at - 1]] if at else []
        second = mark_terms(mark_terms(second, self.parts.reduce), sent, step.TRANSFER)
        out[step.BACKWARD] = second
        if step.INPUT_GRADIENTS in self._backwards[at]:
            inputs, weights = passes.SplitBackward()(second)
            if checks:
                verify.verify_two_backwards(second, inputs, weights, mesh)
            out |= {step.INPUT_GRADIENTS: inputs, step.WEIGHT_GRADIENTS: weights}
        last = out[next(phase for phase in reversed(self._backwards[at]) if phase != step.INPUT_GRADIENTS)]
        closing, rest = self._closings[at]
        if at == 0 and closing is not None and last is not None:
            others = [graph for _, graph in self._closings if graph is not None]
            left = {ir.role(node).name for gm in others for node in ir.placeholders(gm.graph, step.SUM)}
            ended = passes.HoistGradEpilogue()(with_closing_last(last, closing, self.parts.reduce, left))
            out |= {step.LAST_BACKWARD: ended, step.GRADIENTS: rest}
            if checks:
                verify.verify_closing(last, closing, ended, self.parts.reduce, mesh, left, "stages")
        return out

    def _gathers(self, at: int, first: bool) -> fx.GraphModule | None:
        """Returns the graph in which stage ``at`` gathers parameters, if it runs where ``first`` says: as a part of the
        first forward (True), or before that (False). Else None.

        Each stage has one or the other.
        """
        opens = at == 0 and not any(self.staged.openings)
        return self.staged.gathers[at] if first == opens else None

    @cached_property
    def _closings(self) -> list[tuple[fx.GraphModule | None, fx.GraphModule | None]]:
        """The closing graph of each stage (gradient reductions after the last microbatch), as a pair: (the part that
        runs with the stage's last backward, the other part).

        The first part has what takes sums of the stage's own terms only, so that its collectives overlap.
        """
        return [self._in_two(at, closing) for at, closing in enumerate(self.staged.closings)]

    def _in_two(self, at: int, closing: fx.GraphModule) -> tuple[fx.GraphModule | None, fx.GraphModule | None]:
        """Returns the closing graph of stage ``at`` in two: (the part that runs with the stage's last backward, the
        other part).

        The first is None if it communicates nothing, the second if it is empty.
        """
        sums = ir.placeholders(closing.graph, step.SUM)
        of_others = [node for node in sums if self.staged.terms[ir.role(node).name] != at]
        elsewhere = ir.dependents(closing.graph, of_others)  # depend on sums of terms of other stages
        results: tuple[list[tuple[Role, fx.node.Argument]], ...] = [], []
        for role, x in ir.outputs(closing.graph):
            results[not isinstance(x, fx.Node) or x in elsewhere].append((role, x))
        graphs = [LazyGraphModule(closing, cut_out(closing.graph, some, {})) for some in results]
        if not any(communicates(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"):
            return None, closing
        return graphs[0], graphs[1] if list(ir.outputs(graphs[1].graph)) else None
