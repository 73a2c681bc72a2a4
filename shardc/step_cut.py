"""`StepCut` and `MicrobatchCut`: cut the joint graph of a step into the graphs that run, each a `Phase` of the step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from shardc import passes, verify
from shardc._compat import LazyGraphModule
from shardc.cost.step_sequence import ALIASED
from shardc.ir import executable as step
from shardc.ir import graph as ir
from shardc.ir.executable import Phase, opening
from shardc.ir.graph import Role
from shardc.ir.layout import Layout
from shardc.ir.phases import Phases
from shardc.joint import Joint
from shardc.passes.lower.microbatch import closing_forward, mark_terms, with_closing_last, with_gathers_first
from shardc.passes.unfold import Folded
from shardc.plan.resolve import BoundPlan
from shardc.verify.subject import reporting

InTime = Mapping[str, Mapping[Any, Layout]]


@dataclass
class StepCut:
    """Cuts a joint graph into forward and backward, or into the graph of an inference. The graphs have all blocks of
    the model.

    Args:
        joint: the joint graph of the captured blocks.
        folded: its relation to all blocks; None if all are captured.
        levels: parameter -> its FSDP level.
    """

    joint: Joint
    folded: Folded | None
    levels: Mapping[str, int]
    _graphs: dict[Phase, fx.GraphModule | None] = field(default_factory=dict, repr=False)

    @property
    def bound(self) -> BoundPlan:
        """Return the plan, resolved for all blocks."""
        return self.joint.bound if self.folded is None else self.folded.bound

    @cached_property
    def localized(self) -> fx.GraphModule:
        """The joint graph at local shapes, of all blocks."""
        return self.joint.local if self.folded is None else self.folded.joint(self.joint.local)

    @property
    def trains(self) -> bool:
        """Return whether a parameter or input needs a gradient, so that there is a backward."""
        return has_gradients(self.joint.local.graph)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Return the phases of a training step: forward, then backward if there is one. Cuts into microbatches and
        pipeline stages return further phases.
        """
        return (step.FORWARD, step.BACKWARD) if self.trains else (step.FORWARD,)

    def graph(self, phase: Phase) -> fx.GraphModule | None:
        """Return the graph of ``phase`` (forward, backward, ...) as a copy that passes may change; None if the step has
        no such phase.

        Without gradients, FORWARD is the graph of an inference.
        """
        if phase == step.INFERENCE:
            local = passes.inference(self.joint.local)
            return local if self.folded is None else self.folded.halves(local, None)[0]
        if phase not in self._graphs:
            self._graphs = self._cut()
        return self._graphs.pop(phase)  # a later request cuts again

    def _cut(self) -> dict[Phase, fx.GraphModule | None]:
        """Cuts the joint graph into forward and backward."""
        first, second = self._partitioned(self.joint.local)
        if self.folded is not None:
            first, second = self.folded.halves(first, second)
        return {step.FORWARD: first, step.BACKWARD: second}

    def _partitioned(self, joint: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule | None]:
        """Cuts a joint graph into (forward, backward), and verifies that they compute the same."""
        first, second = self._partition(joint)
        mesh = self.bound.mesh
        if self.joint.options.verify:
            with reporting(mesh, {"before": joint, "forward": first, "backward": second}):
                verify.verify_halves(first, second, mesh, joint.graph)
        return first, second

    @property
    def _partition(self) -> passes.Partition:
        """The pass that splits a joint graph into forward and backward."""
        return self.joint.pipeline[passes.Partition]


@dataclass
class MicrobatchCut(StepCut):
    """Cuts the joint graph of a step in microbatches into the graphs that run for each microbatch and those that run
    once.

    Args:
        wanted: indices of the outputs whose gradients are computed; None: that of the loss, or all if there is none.
    """

    wanted: frozenset[int] | None = None

    def __post_init__(self) -> None:
        graph = self.joint.local.graph
        tangents = {ir.role(node).index: node for node in ir.placeholders(graph, "tangent") if node.users}
        self.tangents: dict[int, torch.dtype] = {index: node.meta["val"].dtype for index, node in tangents.items()}
        self.loss = self._loss(graph)
        by_default = frozenset(tangents if self.loss is None else [self.loss])
        self.used = by_default if self.wanted is None else self.wanted

    def _loss(self, graph: fx.Graph) -> int | None:
        """Returns the index of the output that is the loss: the first scalar output that has a gradient and is not
        split over microbatches. None if there is none.
        """
        for role, x in ir.outputs(graph):
            if role.kind == "output" and isinstance(x, fx.Node) and role.index in self.tangents:
                if role.layout is not None and role.layout.numel == 1 and not _is_timed(role.layout):
                    return role.index
        return None

    @cached_property
    def in_time(self) -> InTime:
        """Layouts of those inputs and outputs whose rows are split over the microbatches."""
        inputs = zip(self.joint.captured.inputs, (x.layout for x in self.bound.inputs), strict=True)
        return in_time(inputs, [role for role, _ in ir.outputs(self.joint.local.graph)])

    @cached_property
    def parts(self) -> Phases:
        """The graphs into which the joint graph is cut for microbatches."""
        return self._cut_in_time()

    def _cut_in_time(self) -> Phases:
        """Cuts the joint graph into the graphs that run for each microbatch and those that run once. Verifies
        the cut.
        """
        gm = LazyGraphModule(self.localized, ir.copied(self.localized.graph))
        for node in gm.graph.nodes:
            node.meta.pop(ALIASED, None)  # of operands, which some graphs of the cut take as arguments
        gm = passes.PruneUnusedGrads(self.used)(gm)
        cause = next(str(entry) for entry in reversed(self.bound.plan.entries) if "microbatches" in entry.settings)
        gathered_once = frozenset(name for name, level in self.levels.items() if level in (1, 2))
        split = frozenset((*self.in_time["inputs"], *self.in_time["outputs"]))
        inputs = zip(self.joint.captured.inputs, self.bound.inputs, strict=True)
        layouts = {name: x.padded or x.layout for name, x in inputs}
        parts = passes.Microbatch(self.bound.mesh, split, layouts, gathered_once, cause)(gm)
        if self.joint.options.verify:
            verify.verify_phases(parts, self.bound.mesh, split)
        return parts

    @property
    def phases(self) -> tuple[Phase, ...]:
        loops = enumerate(self.parts.openings)
        openings = [name for at, loop in loops for name in opening(at)[loop.body is None :]]
        if not self.trains:
            return (step.FORWARD, *openings)
        backward = [step.BACKWARD] if has_gradients(self.parts.body.graph) else []
        first = [] if self.parts.gathers is None else [step.FIRST_FORWARD]
        return (step.FORWARD, *backward, step.LAST_BACKWARD, *first, *openings)

    def graph(self, phase: Phase) -> fx.GraphModule | None:
        half = self._of_parts(phase)
        if half is None and phase not in (step.FIRST_INFERENCE, *self._openings):
            half = super().graph(phase)
        if half is None:
            return None
        return LazyGraphModule(half, ir.copied(half.graph))

    @property
    def _openings(self) -> tuple[str, ...]:
        """Names of the phases of the loops over microbatches that run before the forward."""
        return tuple(name for at in range(len(self.parts.openings)) for name in opening(at))

    def _of_parts(self, phase: Phase) -> fx.GraphModule | None:
        """Returns the graph of a phase other than forward and backward (a loop before the forward, the inference, the
        closing graph); None if the step has no such phase.
        """
        parts = self.parts
        for at, loop in enumerate(parts.openings):
            if phase in opening(at):
                return loop.body if phase == opening(at)[0] else loop.once
        if phase in (step.INFERENCE, step.FIRST_INFERENCE):
            half = passes.inference(parts.body)
            return half if phase == step.INFERENCE else with_gathers_first(half, parts.gathers)
        return closing_forward(parts.closing) if phase == step.CLOSING else None

    def _cut(self) -> dict[Phase, fx.GraphModule | None]:
        first, second = self._partitioned(self.parts.body)
        if second is None:
            # No gradient varies over the microbatches: the batch is too small to be split.
            last, start = self.parts.closing, with_gathers_first(first, self.parts.gathers)
            return {step.FIRST_FORWARD: start, step.FORWARD: first, step.BACKWARD: None, step.LAST_BACKWARD: last}
        second = mark_terms(second, self.parts.reduce)
        last = with_closing_last(second, self.parts.closing, self.parts.reduce)
        if self.bound.plan.setting("reduce_in") == "step":  # else the sums of shards, which end the step, cut buckets
            last = passes.HoistGradEpilogue()(last)
        start = with_gathers_first(first, self.parts.gathers)
        if self.joint.options.verify:
            verify.verify_closing(second, self.parts.closing, last, self.parts.reduce, self.bound.mesh)
            verify.verify_first(first, self.parts.gathers, start, self.bound.mesh)
        return {step.FIRST_FORWARD: start, step.FORWARD: first, step.BACKWARD: second, step.LAST_BACKWARD: last}

    @property
    def _partition(self) -> passes.Partition:
        # The pass has levels for the captured blocks only.
        return replace(super()._partition, levels=lambda graph: self.levels)


def has_gradients(graph: fx.Graph) -> bool:
    """Return whether a joint graph computes gradients."""
    return any(role.kind == "grad" for role, _ in ir.outputs(graph))


def in_time(inputs: Iterable[tuple[str, Layout]], roles: Iterable[Role]) -> InTime:
    """Return the layouts of the inputs and outputs that are split over the microbatches: {"inputs": {name: layout},
    "outputs": {index: layout}}.

    Args:
        inputs: name and layout of each input.
        roles: roles of the results of a joint graph.
    """
    outputs = ((role.index, role.layout) for role in roles if role.kind == "output")
    return {
        "inputs": {name: layout for name, layout in inputs if _is_timed(layout)},
        "outputs": {index: layout for index, layout in outputs if layout is not None and _is_timed(layout)},
    }


def on_devices(role: Role) -> Role:
    """Return ``role`` with its layout on the mesh of devices, without the axis of microbatches."""
    return role if role.layout is None else replace(role, layout=role.layout.untimed)


def of_half(role: Role) -> Role:
    """Return ``role``, of a joint graph's result, for that result in a local graph: with its layout on the mesh of
    devices, or without layout if each microbatch has its own result.
    """
    return replace(role, layout=None) if role.layout is not None and _is_timed(role.layout) else on_devices(role)


def _is_timed(layout: Layout) -> bool:
    """Return whether ``layout`` splits a dim over the axis of microbatches."""
    return layout.mesh.time in layout.bound
