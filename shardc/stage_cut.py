"""`PipelineCut`: cuts the joint graph of a step into the graphs of pipeline stages, which run for each microbatch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx

from shardc import passes, verify
from shardc._compat import LazyGraphModule
from shardc.ir import graph as ir
from shardc.ir.executable import (
    BACKWARD,
    CLOSING,
    FORWARD,
    GATHERS,
    GRADIENTS,
    INFERENCE,
    INPUT_GRADIENTS,
    SUM,
    TRANSFER,
    WEIGHT_GRADIENTS,
    AtStage,
    Phase,
    opening,
)
from shardc.ir.graph import Role
from shardc.ir.phases import Phases, Staged
from shardc.ir.schedules import Kind, play
from shardc.ir.stage_runs import Boundary, StageRuns
from shardc.passes.lower.microbatch import closing_forward, marked_terms
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
        """The step, cut in time and into stages."""
        staged = passes.Stages(self.stages)(self._cut_in_time())
        if self.joint.options.verify:
            verify.verify_stages(staged, self.bound.mesh)
        return staged

    @cached_property
    def parts(self) -> Phases:
        return self.staged.parts

    @property
    def phases(self) -> tuple[Phase, ...]:
        loops = enumerate(self.parts.openings)
        openings = [name for at, loop in loops for name in opening(at)[loop.each is None :]]
        names = (GATHERS, FORWARD, *self._backwards, GRADIENTS) if self.trains else (GATHERS, FORWARD, CLOSING)
        return (*openings, *(AtStage(name, at) for at in range(self.stages.count) for name in names))

    @property
    def _backwards(self) -> tuple[str, ...]:
        """The phases of a backward, of which the schedule has one or two."""
        lists = self.stages.entry.lists(self.stages.ranks, self.bound.mesh.microbatches).lists
        is_split = any(action.kind == Kind.BACKWARD_INPUT for actions in lists for action in actions)
        return (INPUT_GRADIENTS, WEIGHT_GRADIENTS) if is_split else (BACKWARD,)

    def graph(self, phase: Phase) -> fx.GraphModule | None:
        half = self._at(phase) if isinstance(phase, AtStage) else self._of_parts(phase)
        return None if half is None else LazyGraphModule(half, ir.copied(half.graph))

    def _at(self, phase: AtStage) -> fx.GraphModule | None:
        """Returns the graph of a phase of a stage; None if it has none."""
        staged, at = self.staged, phase.stage
        if phase.phase == GATHERS:
            return staged.gathers[at]
        if phase.phase == INFERENCE:
            return passes.inference(staged.bodies[at])
        if phase.phase == CLOSING:
            return closing_forward(staged.closings[at])
        if phase.phase == GRADIENTS:
            return staged.closings[at]
        first, second = self._partitioned(staged.bodies[at])
        if phase.phase == FORWARD or second is None:
            return first if phase.phase == FORWARD else None
        sent = [ir.info(x).name for x in staged.down[at - 1]] if at else []
        second = marked_terms(marked_terms(second, self.parts.reduce), sent, TRANSFER)
        return second if phase.phase == BACKWARD else self._of_two(second, phase.phase)

    def _of_two(self, backward: fx.GraphModule, phase: str) -> fx.GraphModule | None:
        """Returns one of the two parts of a backward, and verifies that they compute the same."""
        inputs, weights = passes.SplitBackward()(backward)
        if self.joint.options.verify:
            verify.verify_two_backwards(backward, inputs, weights, self.bound.mesh)
        return inputs if phase == INPUT_GRADIENTS else weights

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
        for at, graphs in enumerate(zip(bodies, closings, staged.gathers, strict=True)):
            for node in (node for gm in graphs if gm is not None for node in ir.placeholders(gm.graph)):
                key = ir.role(node).kind, ir.role(node).name
                takers.setdefault(key, (set(), node.meta["val"]))[0].add(at)
        first = self.stages.first
        copies = {
            name: (first[name], frozenset(stages - {first[name]}), like)
            for (kind, name), (stages, like) in takers.items() if kind == "param" and like.dim()
        }  # fmt: skip
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

        def crossing(nodes: Iterable[fx.Node], readers: Iterable[int], sends: bool) -> dict[str, Any]:
            names = {name for (kind, name), (stages, _) in takers.items() if kind == TRANSFER and stages & set(readers)}
            return {ir.info(x).name: x.meta["val"] for x in nodes if sends and ir.info(x).name in names}

        stages = range(self.stages.count)
        boundaries = tuple(
            Boundary(crossing(up, stages[at + 1 :], True), crossing(down, stages[: at + 1], training))
            for at, (up, down) in enumerate(zip(staged.up, staged.down, strict=True))
        )
        return StageRuns(order, boundaries, copies, terms, results)

    def _is_result(self, role: Role, val: Any) -> bool:
        """Returns whether all ranks get a result: an output, or a gradient of an input or of a parameter without dims,
        which all ranks have.
        """
        crosses = {ir.info(x).name for boundary in self.staged.down for x in boundary}
        is_of_stage = role.name in (*self.parts.reduce, *crosses) or role.name in self.stages.first and val.dim()
        is_grad = role.kind == "grad" and not is_of_stage
        return role.kind in ("output", "buffer") or is_grad
