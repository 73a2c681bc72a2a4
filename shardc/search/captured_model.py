"""`CapturedModel`: a model captured once, from which graphs and programs are built under any plan."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from shardc import passes
from shardc._compat import LazyGraphModule, PyTree, pytree
from shardc.capture import Captured, Dtypes, Tag, capture, input_names, loss_arity, shortened
from shardc.cost.compute import model_flops, operand_dtype
from shardc.cost.hardware import Hardware
from shardc.cost.step_sequence import INPUT
from shardc.custom_ops.flops import is_attention
from shardc.errors import ShardcWarning
from shardc.fold import KEEP, alike_parts, few_of, folded_of, repeats_of
from shardc.ir import graph as ir
from shardc.ir import ops
from shardc.ir.mesh import Mesh
from shardc.ir.module_paths import forward_name
from shardc.ir.repeat import Repeats
from shardc.joint import Request, bound_of, build_joint
from shardc.lower.min_cut import min_cut, must_recompute, must_save
from shardc.passes.layout.propagate import Chooser, Problem, Propagate
from shardc.passes.options import Options
from shardc.passes.unfold import NotPeriodic
from shardc.plan.entries.raw import Activation
from shardc.plan.pipeline_stages import PipelineStages
from shardc.plan.ports import resolve_activations, resolve_saves
from shardc.plan.resolve import ParamPlan, check_axes, resolve_params
from shardc.plan.value import Plan
from shardc.report.inspected import InspectedProgram
from shardc.report.predicted_schedule import Schedule


@dataclass(frozen=True)
class ModelCall:
    """A model, the arguments of one call at global shapes, and the loss and device to compile it for.

    Args:
        model: the model.
        args, kwargs: arguments of one call, those of the loss last in ``args``; ``meta`` tensors are enough.
        loss: the loss to compile with the model; None for none.
        device: the device to compile for.
        resolved: (mesh, entries) -> layouts of parameters, filled by `request`.
        captures: (dtypes, blocks left out) -> captured graph, filled by `CapturedModel.of`. Which blocks of a run are
            left out does not matter, since they compute the same.
    """

    model: nn.Module
    args: tuple[PyTree, ...]
    kwargs: dict[str, PyTree]
    loss: Callable[..., Any] | None
    device: torch.device
    resolved: dict[tuple[Mesh, tuple[str, ...]], dict[str, ParamPlan]] = field(default_factory=dict, compare=False)
    captures: dict[tuple[Dtypes, tuple[tuple[str, int], ...]], Captured] = field(default_factory=dict, compare=False)

    @property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], int]]:
        """Return name -> (shape, bytes per element) of each parameter."""
        return {name: (tuple(p.shape), p.element_size()) for name, p in self.model.named_parameters()}

    @property
    def inputs(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return (name, global shape) of each tensor input, including those of the loss."""
        arity = 0 if self.loss is None else loss_arity(self.loss)
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        names = input_names(self.model, self.args, self.kwargs, arity)
        return [(n, tuple(x.shape)) for n, x in zip(names, leaves, strict=True) if isinstance(x, Tensor)]

    def request(self, mesh: Mesh, plan: Plan, options: Options) -> Request:
        """Return the `Request` to compile the model on ``mesh`` under ``plan`` with ``options``."""
        stages = PipelineStages.of(plan, mesh, self.model)
        mesh = (mesh if stages is None else mesh.of_stage(stages.entry.axis)).timed(plan.setting("microbatches"))
        params, modules = self._resolved(plan, mesh), [name for name, _ in self.model.named_modules()]
        return Request(
            self.model, mesh, plan, params, self.args, self.kwargs, self.device, self.loss, options,
            resolve_activations(plan, modules), resolve_saves(plan, modules), keep_stages=False, pp=stages,
        )  # fmt: skip

    def _resolved(self, plan: Plan, mesh: Mesh) -> dict[str, ParamPlan]:
        """Return the layouts of each parameter under ``plan``: name -> `ParamPlan`. Results are cached, and plans that
        differ only in pins of activations share one.
        """
        check_axes(plan, mesh)
        entries = [entry for entry in plan.entries if not isinstance(entry, Activation)]
        key = mesh, tuple(map(str, entries))
        if key not in self.resolved:
            self.resolved[key] = resolve_params(Plan.of(entries), mesh, self.shapes)
        return self.resolved[key]


@dataclass(frozen=True)
class Estimate:
    """The predicted seconds and memory of a plan, estimated from a few of the model's repeated blocks.

    Args:
        seconds: seconds of a step plus those of the update of parameters on the host.
        memory: bytes of a rank at the peak.
    """

    seconds: float
    memory: int


@dataclass(frozen=True)
class CapturedModel:
    """A model captured on a few of its repeated blocks, with every module boundary marked by a tag.

    Args:
        source: the model and the arguments of its call.
        captured: the captured graph.
        repeats: the runs of repeated blocks, and the number of blocks captured of each; empty if all were.
        plan, mesh: the plan and the mesh of the capture.
    """

    source: ModelCall
    captured: Captured
    repeats: Repeats
    plan: Plan
    mesh: Mesh

    @classmethod
    def of(cls, source: ModelCall, plan: Plan, mesh: Mesh, keep: int = KEEP[0]) -> CapturedModel:
        """Capture the model with a few of its repeated blocks, and return the capture. The capture serves all plans
        that treat the same blocks alike as ``plan`` does.

        Args:
            source: the model and the arguments of its call.
            plan, mesh: the plan and the mesh by which repeated blocks are found.
            keep: number of blocks captured of each run of equal ones; 0: all.
        """
        request = source.request(mesh, plan, Options())
        repeats = repeats_of(request, keep) if keep else Repeats()
        dtypes = few_of(request, repeats).dtypes
        key = dtypes, tuple(repeats.missing.items())
        if key in source.captures:
            return cls(source, source.captures[key], repeats, plan, mesh)
        with shortened(source.model, repeats):
            tags = [
                Tag(name, where, 0)
                for name, module in source.model.named_modules() if name
                for where in ("input", "output")
                if not isinstance(module, nn.ModuleList | nn.ModuleDict)
            ]  # fmt: skip
            captured = capture(
                source.model, source.args, source.kwargs, device=source.device, loss=source.loss, tags=tags,
                dtypes=dtypes,
            )  # fmt: skip
        source.captures[key] = captured
        return cls(source, captured, repeats, plan, mesh)

    def of_plan(self, plan: Plan, mesh: Mesh) -> CapturedModel:
        """Return a capture of the model from which a program under ``plan`` can be built: with blocks folded only where
        the plan treats them alike.

        The capture itself is returned if the plan treats all blocks of each run alike. Otherwise a new capture divides
        the runs where the plan treats blocks differently.
        """
        request = self.source.request(mesh, plan, Options())
        if all(len(alike_parts(request, run)) == 1 for run in self.repeats):
            return self
        return CapturedModel.of(self.source, plan, mesh, self.repeats.keep)

    @cached_property
    def more(self) -> CapturedModel:
        """Return a new capture with more of the repeated blocks (in the end with all), for plans that treat some blocks
        differently.
        """
        keep = next((keep for keep in KEEP if keep > self.repeats.keep), 0)
        return CapturedModel.of(self.source, self.plan, self.mesh, keep) if self.repeats else self

    @cached_property
    def forward(self) -> CapturedModel:
        """The captured model without its backward, for which layouts are chosen three times as fast."""
        return replace(self, captured=replace(self.captured, graph=passes.inference(self.captured.graph)))

    def graph(self, mesh: Mesh, plan: Plan, options: Options, chooser: Chooser | None) -> PlannedGraph:
        """Return the captured graph with the layouts of ``plan``, as `PlannedGraph`. ``chooser`` chooses the layouts
        that the plan leaves open; None leaves them open.

        Args:
            mesh, plan, options: the mesh, plan and options to compile with.
            chooser: chooses the layouts that the plan leaves open; None: the graph has only the plan's layouts.
        """
        request = few_of(self.source.request(mesh, plan, options), self.repeats)
        gm = LazyGraphModule(self.captured.graph, ir.copied(self.captured.graph.graph))
        at_border: dict[str, dict[str, str]] = {"forward": {}, "backward": {}}  # phase -> tag name -> name of a value
        for tag in gm.graph.find_nodes(op="call_function", target=ops.tag):
            source = tag
            while source.target is ops.tag:
                source = source.args[0]
            at_border[ir.info(tag).origin.phase].setdefault(tag.kwargs["name"], ir.info(source).name)
        with shortened(self.source.model, self.repeats), warnings.catch_warnings():
            warnings.simplefilter("ignore", ShardcWarning)
            bound = bound_of(request, replace(self.captured, graph=gm))
            pipeline = passes.pipeline(
                bound, options, self.captured.fake_mode, self.source.device, (min_cut, must_recompute, must_save)
            )
            gm = pipeline.until(Propagate.name).run(gm)
            propagate = pipeline[Propagate]
            if chooser is not None:
                gm = replace(propagate, chooser=chooser)(gm)
        nodes = {ir.info(node).name: node for node in gm.graph.nodes if node.op != "output"}
        values, gradients = (
            {tag: nodes[name] for tag, name in names.items() if name in nodes} for names in at_border.values()
        )
        return PlannedGraph(propagate.problem, gm.graph, values, gradients)

    def params(self, mesh: Mesh, plan: Plan) -> Mapping[str, ParamPlan]:
        """Return parameter of the captured model -> its `ParamPlan` (compute and storage layout) under ``plan``."""
        return few_of(self.source.request(mesh, plan, Options()), self.repeats).params

    def program(self, mesh: Mesh, plan: Plan, options: Options, few: bool = False) -> InspectedProgram:
        """Return the `InspectedProgram` of the complete model under a plan, from the captured graph; with ``few``, that
        of the captured blocks alone.

        Args:
            mesh, plan, options: the mesh, plan and options to compile with.
            few: the program of the captured blocks alone, which is an approximation that takes a fraction of the time.

        Raises:
            NotPeriodic: repeated blocks differ under the plan, other than the first and the last.
        """
        request = self.source.request(mesh, plan, options)
        graph = LazyGraphModule(self.captured.graph, ir.copied(self.captured.graph.graph))
        shorter, captured = few_of(request, self.repeats), replace(self.captured, graph=graph)
        with shortened(self.source.model, self.repeats), warnings.catch_warnings():
            warnings.simplefilter("ignore", ShardcWarning)
            joint = build_joint(shorter, captured)
        if few or not self.repeats:
            return InspectedProgram(joint)
        return InspectedProgram(joint, None, folded_of(request, joint, self.repeats, captured.reads))

    def folds(self, mesh: Mesh) -> bool:
        """Return whether the blocks' graphs repeat on ``mesh``, so that the graph of all blocks can be built from the
        captured blocks.
        """
        try:
            self.program(mesh, Plan(), Options(verify=False)).step()
        except NotPeriodic:
            return False
        return True

    def weight(self, node: fx.Node) -> float:
        """Return how many nodes of the complete model the captured ``node`` stands for, because blocks repeat."""
        record = ir.info(node)
        return self.times(record.origin.module or record.name)

    def times(self, name: str) -> float:
        """Return how many modules or values of the complete model one captured module or value ``name`` stands for,
        because blocks repeat.
        """
        place = self.repeats.place(forward_name(name))
        if place is None or place[1] in (0, self.repeats.keep - 1):
            return 1.0
        return (place[0].count - 2) / (self.repeats.keep - 2)

    def floor(self, hardware: Hardware, phase: str | None = None) -> float:
        """Return a lower bound of the compute: the seconds in which one rank computes all dense ops of a step, or of
        one ``phase`` ("forward", "backward"), at the rates of ``hardware``.
        """
        return sum(
            flops * self.weight(node) / hardware.rate(operand_dtype(node), is_attention(node.target))
            for node, flops in self._dense_ops
            if phase in (None, ir.info(node).origin.phase)
        )

    @cached_property
    def _dense_ops(self) -> list[tuple[fx.Node, int]]:
        """The dense ops (matrix products, attention) of the captured graph, as (node, operations)."""
        return list(model_flops(self.captured.graph.graph))

    def estimate(self, few: Schedule) -> Estimate:
        """Return the cost of the complete model, estimated from ``few``, the prediction for the captured blocks alone.

        What inner blocks take is multiplied by the number of blocks that they stand for.
        """
        ends = (*few.clock[1:], few.seconds)
        spans = zip(few.step.ops, few.clock, ends, strict=True)
        seconds = sum((end - start) * self.weight(op.node) for op, start, end in spans)
        inputs = [(op.node, ir.info(op.node).value) for op in few.step.ops if op.kind == INPUT]
        on_host = [(self.weight(node), x.nbytes) for node, x in inputs if isinstance(x, ir.Value) and x.host]
        if on_host:
            update = few.host_update_seconds / sum(size for _, size in on_host)
            seconds += sum(weight * update * size for weight, size in on_host)
        size = sum(round(x.bytes * self.times(x.module or x.name)) for x in few.memory.tensors_at_peak)
        return Estimate(seconds, size)


@dataclass(frozen=True)
class PlannedGraph:
    """The graph of a captured model under a plan.

    Args:
        problem: the layouts that the plan fixes, and the cost model.
        graph: the graph with the plan's layouts; with all layouts, if they were chosen.
        borders, gradients: tag name -> the value at that module boundary, and its gradient.
    """

    problem: Problem
    graph: fx.Graph
    borders: Mapping[str, fx.Node]
    gradients: Mapping[str, fx.Node]
