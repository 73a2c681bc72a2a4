"""`PipelineCut`: cuts the joint graph of a step into the graphs of pipeline stages, which run for each microbatch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx

from shardc import passes
from shardc._compat import LazyGraphModule
from shardc.ir import graph as ir
from shardc.ir.executable import (
    BACKWARD,
    CLOSING,
    FORWARD,
    GATHERS,
    GRADIENTS,
    INFERENCE,
    SUM,
    TRANSFER,
    AtStage,
    Phase,
    opening,
)
from shardc.ir.graph import Role
from shardc.ir.phases import Phases
from shardc.ir.schedules import schedule
from shardc.ir.stage_runs import Boundary, StageRuns
from shardc.passes.lower.microbatch import closing_forward, marked_terms
from shardc.passes.lower.stages import Staged
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
        return passes.Stages(self.stages)(self._cut_in_time())

    @cached_property
    def parts(self) -> Phases:
        return self.staged.parts

    @property
    def phases(self) -> tuple[Phase, ...]:
        loops = enumerate(self.parts.openings)
        openings = [name for at, loop in loops for name in opening(at)[loop.each is None :]]
        names = (GATHERS, FORWARD, BACKWARD, GRADIENTS) if self.trains else (GATHERS, FORWARD, CLOSING)
        return (*openings, *(AtStage(name, at) for at in range(self.stages.count) for name in names))

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
        if second is not None:
            sent = [ir.info(x).name for x in staged.down[at - 1]] if at else []
            second = marked_terms(marked_terms(second, self.parts.reduce), sent, TRANSFER)
        return first if phase.phase == FORWARD else second

    def runs(self, training: bool) -> StageRuns:
        """Returns what crosses between the stages, and their order, in a step or in a call without gradients."""
        staged, entry = self.staged, self.stages.entry
        order = schedule(
            entry.schedule, self.stages.ranks, self.bound.mesh.microbatches, entry.stages_per_rank, training
        )
        down = staged.down if training else ((),) * len(staged.down)
        bodies = staged.bodies if training else [passes.inference(body) for body in staged.bodies]
        closings = staged.closings if training else [closing_forward(closing) for closing in staged.closings]
        boundaries = [
            Boundary(_examples(up), _examples(back)) for up, back in zip(self._up(training), down, strict=True)
        ]
        copies: dict[str, tuple[int, frozenset[int], Any]] = {}
        terms: dict[str, tuple[int, frozenset[int], Any]] = {}
        for at, graphs in enumerate(zip(bodies, closings, staged.gathers, strict=True)):
            for node in (node for gm in graphs if gm is not None for node in ir.placeholders(gm.graph)):
                name, kind, example = ir.role(node).name, ir.role(node).kind, node.meta["val"]
                if kind == "param" and self.stages.first[name] != at and example.dim():
                    takers = copies[name][1] if name in copies else frozenset[int]()
                    copies[name] = self.stages.first[name], takers | {at}, example
                elif kind == SUM:
                    takers = terms[name][1] if name in terms else frozenset[int]()
                    terms[name] = staged.terms[name], takers | {at}, example
        results: dict[tuple[str, Any], tuple[int, int, Any]] = {}
        for count, of_stages in ((self.bound.mesh.microbatches, bodies), (1, closings)):
            for at, gm in enumerate(of_stages):
                for role, x in ir.outputs(gm.graph):
                    if isinstance(x, fx.Node) and self._is_result(role, x.meta["val"]):
                        results[role.kind, role.index if role.kind == "output" else role.name] = (
                            at,
                            count,
                            x.meta["val"],
                        )
        return StageRuns(order, tuple(boundaries), copies, terms, results)

    def _up(self, training: bool) -> list[tuple[fx.Node, ...]]:
        """Returns the values that cross each boundary with the forward: in a step, or those that a forward reads."""
        if training:
            return list(self.staged.up)
        read = [
            {ir.role(node).name for node in ir.placeholders(passes.inference(body).graph, TRANSFER) if node.users}
            for body in self.staged.bodies
        ]
        return [
            tuple(x for x in crossing if any(ir.info(x).name in names for names in read[at + 1 :]))
            for at, crossing in enumerate(self.staged.up)
        ]

    def _is_result(self, role: Role, val: Any) -> bool:
        """Returns whether all ranks get a result: an output, or a gradient of an input or of a parameter without dims,
        which all ranks have.
        """
        crosses = {ir.info(x).name for boundary in self.staged.down for x in boundary}
        is_of_stage = role.name in (*self.parts.reduce, *crosses) or role.name in self.stages.first and val.dim()
        is_grad = role.kind == "grad" and not is_of_stage
        return role.kind in ("output", "buffer") or is_grad


def _examples(nodes: Iterable[fx.Node]) -> dict[str, Any]:
    """Return name -> fake tensor of each of ``nodes``."""
    return {ir.info(node).name: node.meta["val"] for node in nodes}
