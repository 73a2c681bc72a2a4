"""`Program`: a model at one call signature, compiled for a mesh and a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import fx

from shardc import passes, verify
from shardc._compat import LazyGraphModule
from shardc.cost.hardware import Hardware, find
from shardc.cost.step_sequence import of_halves, of_joint
from shardc.errors import InputError, PlanError
from shardc.ir import graph as ir
from shardc.ir.executable import BACKWARD, FORWARD, INFERENCE, REDUCTION, Executable, Half, Phase
from shardc.ir.layout import Layout
from shardc.ir.text import dump
from shardc.joint import CUT, Joint, StageRecorder
from shardc.passes.check import VerifyHalf
from shardc.passes.decompose import candidates
from shardc.passes.folded import Folded
from shardc.passes.reduce_accumulated import Sum, deferred_reduction
from shardc.plan.match import near_names
from shardc.precompiled import Identity, save_program
from shardc.precompiled.unused import backward_for
from shardc.report.causes import Cause, cause_of
from shardc.report.derive import Dims, derive
from shardc.report.formulas import Costs
from shardc.report.lint_rules import Finding, in_pieces, lint
from shardc.report.predicted_schedule import Schedule, build, room_of_rows
from shardc.report.tiles import Tiles
from shardc.validate import typed
from shardc.verify.report import reporting


@dataclass(frozen=True)
class Source:
    """Cache key of a program, and functions that compile it again.

    Args:
        identity: cache key: the call and the model.
        rebuild: (mesh, input shapes) -> the program for these.
        lower_again: folder of a saved program -> Inductor's artifacts of it.
        model: name of the model's class.
    """

    identity: Identity | None = None
    rebuild: Any = None
    lower_again: Callable[[Path], bytes | None] | None = None
    model: str = ""


class Program(Executable):
    """The annotated graphs of a model after every stage, up to the local forward and backward.

    Attributes:
        plan, options: what it was compiled for; ``bound``: the plan, resolved for this model.
        pipeline: its passes.
        conditions: conditions on dynamic sizes; see `shardc.dynamic`.
        folded: the repeated blocks of which a few were captured, or None; stages up to the cut show these few.
        source, identity, rebuild, lower_again: see `Source`.
    """

    conditions: tuple[str, ...] = ()

    def __init__(self, joint: Joint, source: Source | None = None, folded: Folded | None = None) -> None:
        self.joint, self.folded, self.source = joint, folded, source or Source()
        self.identity, self.rebuild = self.source.identity, self.source.rebuild
        self.lower_again = self.source.lower_again
        self.bound = joint.bound if folded is None else folded.bound
        self.mesh, self.plan, self.options = self.bound.mesh, self.bound.plan, joint.options
        self.pipeline, captured = joint.pipeline, joint.captured
        self.inputs = tuple((n, x.layout) for n, x in zip(captured.inputs, self.bound.inputs, strict=True))
        self.input_spec, self.output_spec = captured.input_spec, captured.output_spec
        self.returned = captured.returned
        self.constants, self.reads = captured.constants, captured.reads if folded is None else folded.reads
        levels = self.pipeline[passes.Partition].levels(joint.local.graph)
        self.levels: Mapping[str, int] = levels if folded is None else folded.levels(levels)
        self.causes: Mapping[str, str] = {name: p.compute_cause for name, p in self.bound.params.items()}
        self.deferred = self.bound.deferred
        self._untaken: dict[Phase, fx.GraphModule | None] = {}  # halves as cut, before further passes
        forward = [(role, x) for role, x in ir.outputs(joint.local.graph) if role.kind != "grad"]
        self.outputs = tuple(role for role, _ in forward)
        self.output_values = tuple(x if not isinstance(x, fx.Node) else None for _, x in forward)

    def reduction(self, sums: Sequence[tuple[str, Layout, torch.dtype]]) -> Half:
        plan, joint = self.bound, self.pipeline.until(CUT)
        summands, device = [Sum(*each) for each in sums], joint[passes.Localize].device
        reduced = deferred_reduction(summands, plan.storages, plan.gradients, self.joint.captured.fake_mode, device)
        spelled = passes.Pipeline((joint[passes.Collectives], *joint.behind(passes.Collectives.name)))
        reduced = spelled.replaced(replace(joint[passes.Offload], pending=frozenset())).run(reduced)
        return Half(REDUCTION, self._scheduled(reduced), self.mesh)

    @property
    def stages(self) -> tuple[str, ...]:
        """Names of the stages, in order; those after the cut run on demand."""
        differentiated = any(role.kind == "grad" for role, _ in ir.outputs(self.joint.local.graph))
        halves = ("", ".backward")[: 1 + differentiated]
        last = [f"{name}{half}" for name in (CUT, *self.halves.names) for half in halves]
        return (*self.joint.names, *last)

    def is_half(self, stage: str) -> bool:
        """Whether the graph after ``stage`` is a forward or backward graph, not the joint one."""
        return stage.removesuffix(".backward") in (CUT, *self.halves.names)

    @property
    def halves(self) -> passes.Pipeline:
        """Passes that run on the forward and the backward graph, after the cut."""
        return self.pipeline.behind(CUT)

    @cached_property
    def localized(self) -> fx.GraphModule:
        """The joint graph at local shapes, of all blocks."""
        return self.joint.local if self.folded is None else self.folded.joint(self.joint.local)

    def make(self, phase: Phase) -> fx.GraphModule | None:
        if phase == INFERENCE:
            local = passes.inference(self.joint.local)
            return self._scheduled(local if self.folded is None else self.folded.halves(local, None)[0])
        if not isinstance(phase, str):
            return backward_for(phase, self.half(BACKWARD), *self._hooks)
        if phase not in self._untaken:
            first, second = self._cut()
            self._untaken = {FORWARD: None if second is None else first, BACKWARD: second}
        half = self._untaken.pop(phase)  # passes change it; a later request cuts again
        return None if half is None else self._scheduled(half)

    def _cut(self) -> tuple[fx.GraphModule, fx.GraphModule | None]:
        """Cuts the joint graph of all blocks into forward and backward; the backward is None without gradients."""
        local = self.joint.local
        first, second = self.pipeline[passes.Partition](local)
        if self.options.verify:
            with reporting(self.mesh, {"before": local, "forward": first, "backward": second}):
                verify.verify_halves(first, second, self.mesh, local.graph)
        return (first, second) if self.folded is None else self.folded.halves(first, second)

    def _scheduled(self, half: fx.GraphModule) -> fx.GraphModule:
        """Runs the passes after the cut (bucketing, scheduling, ...) on a forward or backward graph."""
        return self.halves.run(half, *self._hooks)

    @property
    def _hooks(self) -> tuple[passes.Hook, ...]:
        """Hooks that inspect a forward or backward graph before and after each pass."""
        checks = (VerifyHalf(self.mesh, self.halves, self.causes),) if self.options.verify else ()
        return (*checks, *self.options.hooks)

    def cause(self, collective: fx.Node) -> Cause:
        """Returns the plan entry and source line that caused a collective."""
        return cause_of(self, collective, map(str, self.plan.entries))

    def graph(self, stage: str) -> fx.Graph:
        """Returns the graph after ``stage``.

        Raises:
            PlanError: there is no such stage (or no backward, if nothing needs a gradient).
        """
        if stage not in self.stages:
            raise PlanError(f"there is no stage {stage!r}", fix=passes.near_stage(stage, self.stages))
        return self._last[stage] if self.is_half(stage) else self.joint.stages[stage]

    @cached_property
    def _last(self) -> dict[str, fx.Graph]:
        """Graphs after each stage from the cut on, computed for inspection."""
        graphs: dict[str, fx.Graph] = {}
        for half, suffix in zip(self._cut(), ("", ".backward"), strict=True):
            if half is not None:
                graphs[f"{CUT}{suffix}"] = half.graph
                self.halves.run(LazyGraphModule(half, ir.copied(half.graph)), StageRecorder(graphs, suffix))
        return graphs

    def whole(self, stage: str) -> fx.Graph:
        """Returns the graph after ``stage``, unfolded to all blocks (from stage ``propagate`` on)."""
        few = self.folded is not None and not self.is_half(stage)
        return self.folded.whole(stage, self.graph(stage)) if few and self.folded else self.graph(stage)

    @typed()
    def text(self, stage: str = "collectives", *, origins: bool = False) -> str:
        """Returns the annotated graph after ``stage``; ``origins`` adds module, source line and cause to each line.

        Of a folded model, stages before ``propagate`` show only the captured blocks.
        """
        few = ("capture", *self.pipeline.until(passes.Propagate.name).names)
        graph = self.graph(stage) if stage in few else self.whole(stage)
        return dump(LazyGraphModule(self.joint.captured.graph, graph), self.mesh, origins=origins)

    @typed()
    def draw(self, name: str, stage: str = "collectives") -> Tiles:
        """Returns a picture of which ranks hold which part of a tensor: ``print`` it, or ``save("picture.png")``.

        Args:
            name: name of a parameter, input or activation, as in the dump.
            stage: a stage with layouts.

        Raises:
            InputError: no such tensor after ``stage``.
        """
        nodes = [node for node in self.whole(stage).nodes if node.op != "output" and ir.is_tensor(node)]
        layouts = {ir.info(node).name: ir.layout(node) for node in nodes if ir.value(node).layout is not None}
        wanted = name.removeprefix("%")
        if wanted not in layouts:
            close = near_names(wanted, list(layouts))
            fix = f"did you mean {' or '.join(map(repr, close))}?" if close else f"names are in program.text({stage!r})"
            raise InputError(f"there is no tensor {wanted!r} with a layout after {stage!r}", fix=fix)
        return Tiles(wanted, layouts[wanted])

    def module(self, stage: str) -> fx.GraphModule:
        """Returns the graph after ``stage``, with its constants."""
        return LazyGraphModule(self.joint.captured.graph, self.graph(stage))

    @typed()
    def schedule(
        self,
        hardware: str | Hardware = "h100",
        *,
        stage: str = "schedule",
        order: str = "graph",
        optimizer_copies: float = 2.0,
        skew: float = 1.0,
    ) -> Schedule:
        """Predicts communication, time and memory of one training step, without running it.

        Args:
            hardware: a description, or its name in `shardc.cost.hardware`.
            stage: "schedule": the forward and backward that run; "localize": the joint graph before the cut, bucketing
                and scheduling, which is much faster for a large model.
            order: "graph": collectives start and are awaited at their place in the graph; "earliest": as dependences
                allow.
            optimizer_copies: size of the optimizer state as a multiple of the parameters (AdamW: 2).
            skew: expert rows of the most loaded rank, relative to an even load.

        Raises:
            MeshError: unknown hardware, or the mesh is larger than its description.
            PlanError: no such stage or order.
        """
        if stage not in ("schedule", "localize"):
            raise PlanError(f"there is no schedule of stage {stage!r}", fix="use schedule or localize")
        folded = self.folded
        if stage == "localize":
            step = of_joint(self.localized.graph, self.levels, self.options.checkpoint_collectives)
        else:
            step = of_halves(self.step(), self.levels)
        useful = sum(flops * (1 if folded is None else folded.times(name)) for name, flops in self.joint.flops)
        described = find(hardware) if isinstance(hardware, str) else hardware
        return build(
            step, self.mesh, described, symbols=partial(self.costs, described), order=order, causes=self.causes,
            useful_flops=useful / self.mesh.ranks, optimizer_copies=optimizer_copies, skew=skew,
            notes=(*(() if folded is None else folded.notes), *room_of_rows(op.node for op in step.ops)),
            model=self.source.model, plan=str(self.plan),
        )  # fmt: skip

    @typed()
    def costs(self, hardware: str | Hardware = "h100", dims: Dims | None = None) -> Costs:
        """Returns bytes and seconds per axis as formulas in batch, sequence and axis sizes; see `shardc.report.derive`.

        Raises:
            PlanError: the program has other collectives at other sizes, or a formula does not hold there.
        """
        return derive(self, find(hardware) if isinstance(hardware, str) else hardware, dims)

    @typed()
    def lint(self, hardware: str | Hardware = "h100", *, stage: str = "schedule") -> list[Finding]:
        """Returns needless communication and compute in the plan, the costliest first; arguments as in `schedule`."""
        joint = self.schedule(hardware, stage="localize")
        findings = lint(self.whole("collectives"), joint, joint if stage == "localize" else self.schedule(hardware))
        loops = candidates(self.graph("hoist_grad_epilogue"), self.pipeline[passes.Decompose])
        return findings + [in_pieces(one.name, one.module, one.source, one.pieces, one.reason) for one in loops]

    @typed()
    def save(self, directory: str | Path) -> list[Path]:
        """Writes the program, for `shardc.load`, and the text of every stage; returns the paths.

        Includes Inductor's artifacts if the program has run in this process.

        Raises:
            PrecompiledError: a part cannot be serialised, or the program leaves gradients unreduced (`no_sync`).
        """
        paths = save_program(self, self.plan, Path(directory), self.lower_again)
        return [*self.write_stages(directory), *paths]

    def write_stages(self, directory: str | Path, stages: Sequence[str] | None = None) -> list[Path]:
        """Writes the text of every stage (or of ``stages``) as ``NN_stage.txt``; returns the paths."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for at, stage in enumerate(self.stages):
            if stages is None or stage in stages:
                paths.append(folder / f"{at:02d}_{stage}.txt")
                paths[-1].write_text(self.text(stage))
        return paths
