"""`Program`: a model at one call signature, compiled for a mesh and a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from pathlib import Path

import torch
from torch import fx

from shardc import passes
from shardc._compat import LazyGraphModule
from shardc.cost.causes import Cause, cause_of
from shardc.errors import PlanError
from shardc.ir import graph as ir
from shardc.ir.executable import BACKWARD, FORWARD, REDUCTION, Executable, Half, Phase
from shardc.ir.graph import Role
from shardc.ir.guards import Guards, Reads
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.ir.schedules import Schedule
from shardc.ir.text import dump
from shardc.joint import CUT, Joint, StageRecorder
from shardc.passes.check import VerifyHalf
from shardc.passes.schedule.reduce_accumulated import Sum, deferred_reduction
from shardc.passes.unfold import Folded
from shardc.precompiled import ProgramKey, save_program
from shardc.precompiled.load import backward_for
from shardc.stage_cut import PipelineCut
from shardc.step_cut import MicrobatchCut, StepCut, in_time, of_half, on_devices
from shardc.validate import typed

Rebuild = Callable[[Mesh, Sequence[Sequence[int]]], "Program"]


@dataclass(frozen=True)
class Source:
    """What a program was compiled from: its key and guards, and the functions that compile it anew.

    Args:
        key: the static cache key; None for a program of no module.
        guards: values of the model that the capture read.
        rebuild: compiles the program for another mesh, and other shapes of the inputs in order.
        lower_again: returns Inductor's artifacts of the program saved in a folder.
        model: name of the model's class, for reports.
    """

    key: ProgramKey | None = None
    guards: Guards = field(default_factory=lambda: Guards(Reads(), ()))
    rebuild: Rebuild | None = None
    lower_again: Callable[[Path], bytes | None] | None = None
    model: str = ""


class Program(Executable):
    """A compiled program with its annotated graphs: the graph of the model after every stage, up to the local forward
    and backward.

    Attributes:
        plan, options: those that it was compiled with; ``bound`` is the plan, resolved for this model.
        pipeline: its passes.
        conditions: conditions on the dynamic sizes that it is valid for, as text; see `shardc.dynamic`.
        results: the role of each output, with the axis of microbatches in its layout.
        used: indices of the outputs whose gradients a program with microbatches computes; None: by default.
        folded: for a model whose repeated blocks were captured and planned on a few, the relation to all blocks; stages
            up to the cut show the few.
        source: its `Source`, whose key, guards, rebuild and lower_again are attributes too.
    """

    conditions: tuple[str, ...] = ()

    def __init__(
        self,
        joint: Joint,
        source: Source | None = None,
        folded: Folded | None = None,
        used: frozenset[int] | None = None,
    ) -> None:
        self.joint, self.folded, self.source = joint, folded, source or Source()
        self.key, self.guards, self.rebuild = self.source.key, self.source.guards, self.source.rebuild
        self.lower_again = self.source.lower_again
        self.bound = joint.bound if folded is None else folded.bound
        self.mesh, self.plan, self.options = self.bound.mesh.untimed, self.bound.plan, joint.options
        self.pipeline, captured = joint.pipeline, joint.captured
        inputs = tuple((n, x.layout) for n, x in zip(captured.inputs, self.bound.inputs, strict=True))
        self.output_spec = captured.output_spec
        self.returned = captured.returned
        self.constants = captured.constants
        levels = self.pipeline[passes.Partition].levels(joint.local.graph)
        self.levels: Mapping[str, int] = levels if folded is None else folded.levels(levels)
        self.causes: Mapping[str, str] = {name: p.compute_cause for name, p in self.bound.params.items()}
        self.deferred = self.bound.deferred
        forward = [(role, x) for role, x in ir.outputs(joint.local.graph) if role.kind != "grad"]
        self.used, self.results = used, tuple(role for role, _ in forward)
        self._set_ports(inputs, self.results)
        self.output_values = tuple(x if not isinstance(x, fx.Node) else None for _, x in forward)
        self.cut: StepCut = StepCut(joint, folded, self.levels)
        if self.bound.mesh.time:
            kind = MicrobatchCut if self.bound.pp is None else PipelineCut
            self.cut = cut = kind(joint, folded, self.levels, wanted=used)
            if self.bound.pp is not None:
                self.stage_ranks, self.stage_of = self.bound.pp.ranks, self.bound.pp.first
            self.microbatches, self.loss, self.tangents = self.bound.mesh.microbatches, cut.loss, cut.tangents
            self.openings, self.reduce = len(cut.parts.openings), cut.parts.reduce
            self.gathers_once, self.opens_backward = cut.parts.gathers is not None, cut.parts.backward

    def _set_ports(self, inputs: Sequence[tuple[str, Layout]], outputs: Sequence[Role]) -> None:
        """Sets the program's layouts of inputs and outputs, in place. The layouts passed in include the axis of
        microbatches.
        """
        self.inputs = tuple((name, layout.untimed) for name, layout in inputs)
        self.outputs = tuple(map(on_devices, outputs))
        self.in_time = in_time(inputs, outputs)

    def reduction(self, sums: Sequence[tuple[str, Layout, torch.dtype]]) -> Half:
        """Return the graph that reduces accumulated gradients. ``sums`` has (parameter, layout of its accumulator,
        dtype) of each.
        """
        plan, joint = self.bound, self.pipeline.until(CUT)
        summands, device = [Sum(*parts) for parts in sums], joint[passes.Localize].device
        storages = {name: storage.untimed for name, storage in plan.storages.items()}
        reduced = deferred_reduction(summands, storages, plan.gradients, self.joint.captured.fake_mode, device)
        spelled = passes.Pipeline((joint[passes.Collectives], *joint.behind(passes.Collectives.name)))
        reduced = spelled.replaced(replace(joint[passes.Offload], pending=frozenset())).run(reduced)
        return Half(REDUCTION, self._schedule(reduced), self.mesh)

    @property
    def stages(self) -> tuple[str, ...]:
        """Names of the stages, in order. Stages after the split into forward and backward run only when their graphs
        are asked for.
        """
        last = [f"{name}{_suffix(phase)}" for name in (CUT, *self.halves.names) for phase in self.cut.phases]
        return (*self.joint.names, *last)

    def is_half(self, stage: str) -> bool:
        """Return whether the graph after ``stage`` is a half (forward, backward, or a part of it) and not the joint
        graph.
        """
        return stage.partition(".")[0] in (CUT, *self.halves.names)

    @property
    def shown(self) -> Program:
        """The program whose graphs reports show: this program, or for dynamic sizes a program compiled for
        fixed sizes.
        """
        return self

    @property
    def halves(self) -> passes.Pipeline:
        """Passes that run on the forward and on the backward graph, after the split into the two."""
        return self.pipeline.behind(CUT)

    @property
    def localized(self) -> fx.GraphModule:
        """The joint graph at local shapes, of all blocks."""
        return self.cut.localized

    def make(self, phase: Phase) -> fx.GraphModule | None:
        """Return the local graph of a phase of the step, such as the forward. None if the program has none: no
        backward, and no forward other than that of inference, if nothing needs a gradient.
        """
        if isinstance(phase, frozenset):
            return backward_for(phase, self.half(BACKWARD), *self._hooks)
        if phase == FORWARD and not self.cut.trains:
            return None
        half = self.cut.graph(phase)
        if half is None:
            return None
        half = self._schedule(half)
        output = ir.output_node(half.graph)
        output.meta[ir.ROLES] = tuple(map(of_half, output.meta[ir.ROLES]))
        return half

    @property
    def trains(self) -> bool:
        """Whether a parameter or input needs a gradient, so that there is a backward."""
        return self.cut.trains

    def order(self, training: bool) -> Schedule:
        assert self.bound.pp is not None
        return self.bound.pp.order(self.microbatches, training)

    @cached_property
    def _using(self) -> dict[frozenset[int], Program]:
        """Variants of this program, by the outputs whose tangents their backward takes: output indices -> program."""
        return {}

    def using(self, used: frozenset[int]) -> Program:
        """Return the variant of this program with microbatches whose backward takes tangents of the outputs ``used``
        (indices) only. Variants are cached.
        """
        if isinstance(self.cut, MicrobatchCut) and used == self.cut.used:
            return self
        if used not in self._using:
            self._using[used] = self._for(used)
        return self._using[used]

    def _for(self, used: frozenset[int]) -> Program:
        """Returns a new program whose backward takes tangents of the outputs ``used`` (indices) only."""
        return type(self)(self.joint, self.source, self.folded, used)

    def _schedule(self, half: fx.GraphModule) -> fx.GraphModule:
        """Runs the passes of a half (bucketing, scheduling, ...) on ``half``, a forward or backward graph, and returns
        the resulting graph.
        """
        return self.halves.run(half, *self._hooks)

    @property
    def _hooks(self) -> tuple[passes.Hook, ...]:
        """Hooks that run before and after each pass over a forward or backward graph: the verifier and the user's
        hooks.
        """
        checks = (VerifyHalf(self.bound.mesh, self.halves, self.causes),) if self.options.verify else ()
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
        """Graphs of the stages after the split into forward and backward, for inspection: stage name -> graph."""
        graphs: dict[str, fx.Graph] = {}
        for phase in self.cut.phases:
            if (half := self.cut.graph(phase)) is not None:
                graphs[f"{CUT}{_suffix(phase)}"] = half.graph
                self.halves.run(LazyGraphModule(half, ir.copied(half.graph)), StageRecorder(graphs, _suffix(phase)))
        return graphs

    def whole(self, stage: str) -> fx.Graph:
        """Returns the graph after ``stage``, unfolded to all blocks (from stage ``propagate`` on)."""
        few = self.folded is not None and not self.is_half(stage)
        return self.folded.whole(stage, self.graph(stage)) if few and self.folded else self.graph(stage)

    @typed()
    def text(self, stage: str = "collectives", *, origins: bool = False) -> str:
        """Returns the annotated graph after ``stage`` as text; ``origins`` adds module, source line and cause to each
        line.

        Of a folded model, stages before ``propagate`` show only the captured blocks.
        """
        few = ("capture", *self.pipeline.until(passes.Propagate.name).names)
        graph = self.graph(stage) if stage in few else self.whole(stage)
        mesh = self.mesh if self.is_half(stage) else self.bound.mesh
        return dump(LazyGraphModule(self.joint.captured.graph, graph), mesh, origins=origins)

    def __str__(self) -> str:
        """Returns `text` of stage "collectives"."""
        return self.text()

    def _repr_html_(self) -> str:
        """Returns HTML for a notebook: mesh and plan, and `text` in an element that opens by a click."""
        title = escape(f"{self.source.model or 'Program'} on mesh {self.mesh}, {self.plan}")
        return f"<details><summary>{title}</summary><pre>{escape(self.text())}</pre></details>"

    def module(self, stage: str) -> fx.GraphModule:
        """Returns the graph after ``stage``, with its constants."""
        return LazyGraphModule(self.joint.captured.graph, self.graph(stage))

    @typed()
    def save(self, directory: str | Path) -> list[Path]:
        """Writes the program, for `shardc.load`, and the text of every stage; returns the paths.

        Includes Inductor's artifacts if the program has run in this process.

        Raises:
            PrecompiledError: a part cannot be serialised, or the program leaves gradients unreduced (`no_sync`).
        """
        paths = save_program(self, Path(directory), self.lower_again)
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


def _suffix(phase: Phase) -> str:
    """Return the suffix that ``phase`` adds to the name of a stage: none for the forward, else a dot and the phase,
    such as ``.last_backward``.
    """
    return "" if phase == FORWARD else f".{str(phase).replace(' ', '_')}"
