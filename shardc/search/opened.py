"""Opened: a model captured once, and its graph under any plan in front of the choice of layouts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from shardc import passes
from shardc._compat import LazyGraphModule, pytree
from shardc.capture import Captured, Tag, capture, input_names, loss_arity, shortened
from shardc.errors import ShardcWarning
from shardc.fold import KEEP, few_of, repeats_of, unfolds_of
from shardc.ir import graph as ir
from shardc.ir import ops
from shardc.ir.mesh import Mesh
from shardc.ir.repeat import Repeat, short_name
from shardc.joint import Request, bound_of, build_joint
from shardc.lower.partition import min_cut, must_recompute, must_save
from shardc.passes.folded import Folded
from shardc.passes.options import Options
from shardc.passes.propagate import Chooser, Problem, Propagate
from shardc.passes.unfold_names import NotPeriodic
from shardc.plan.resolve import ParamPlan, resolve_params
from shardc.plan.value import Plan
from shardc.program import Program


@dataclass(frozen=True)
class Model:
    """A model, a call of it at global shapes, and what to compile it for."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[..., Any] | None
    device: torch.device

    @property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], int]]:
        """Name -> (shape, bytes of an element) of each parameter."""
        return {name: (tuple(p.shape), p.element_size()) for name, p in self.model.named_parameters()}

    @property
    def inputs(self) -> list[tuple[str, tuple[int, ...]]]:
        """Name and global shape of each tensor input, the loss's among them."""
        arity = 0 if self.loss is None else loss_arity(self.loss)
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        names = input_names(self.model, self.args, self.kwargs, arity)
        return [(n, tuple(x.shape)) for n, x in zip(names, leaves, strict=True) if isinstance(x, Tensor)]

    def asked(self, mesh: Mesh, plan: Plan, options: Options) -> Request:
        """A compile of it under ``plan``."""
        params = resolve_params(plan, mesh, self.shapes)
        return Request(
            self.model, mesh, plan, params, self.args, self.kwargs, self.device, self.loss, options, keep_stages=False
        )


@dataclass(frozen=True)
class Opened:
    """A model captured on a few of its alike blocks, with every module's border marked.

    Args:
        repeats, keep: the runs of alike blocks, and how many of each were captured; none where all were.
        plan, mesh: what it was captured for.
    """

    source: Model
    captured: Captured
    repeats: tuple[Repeat, ...]
    keep: int
    plan: Plan
    mesh: Mesh

    @classmethod
    def of(cls, source: Model, plan: Plan, mesh: Mesh, keep: int = KEEP[0]) -> Opened:
        """Captures ``source`` for plans that treat alike blocks as ``plan`` does, on any mesh.

        Args:
            keep: how many of alike blocks stand for all; 0: all of them.
        """
        asked = source.asked(mesh, plan, Options())
        repeats = tuple(repeats_of(asked, keep)) if keep else ()
        dtypes = few_of(asked, repeats, keep).dtypes
        with shortened(source.model, repeats, keep):
            tags = [
                Tag(name, where, 0)
                for name, module in source.model.named_modules() if name
                for where in ("input", "output")
                if not isinstance(module, nn.ModuleList | nn.ModuleDict)
            ]  # fmt: skip
            made = capture(
                source.model, source.args, source.kwargs, device=source.device, loss=source.loss, tags=tags,
                dtypes=dtypes,
            )  # fmt: skip
        return cls(source, made, repeats, keep, plan, mesh)

    @cached_property
    def more(self) -> Opened:
        """The same with more of the alike blocks captured, in the end with all, for plans that make some differ."""
        keep = next((keep for keep in KEEP if keep > self.keep), 0)
        return Opened.of(self.source, self.plan, self.mesh, keep) if self.repeats else self

    def graph(self, mesh: Mesh, plan: Plan, options: Options, chooser: Chooser | None) -> Laid:
        """The graph under ``plan`` with layouts chosen by ``chooser``; without one, as it is in front of the choice."""
        asked = few_of(self.source.asked(mesh, plan, options), self.repeats, self.keep)
        gm = LazyGraphModule(self.captured.graph, ir.copied(self.captured.graph.graph))
        marked = {node: node.kwargs["name"] for node in gm.graph.nodes if node.target is ops.tag}
        borders: dict[str, fx.Node] = {}
        for node, name in marked.items():
            source = node
            while source.target is ops.tag:
                source = source.args[0]
            if ir.info(node).origin.phase == "forward":
                borders.setdefault(name, source)
        with shortened(self.source.model, self.repeats, self.keep), warnings.catch_warnings():
            warnings.simplefilter("ignore", ShardcWarning)
            bound = bound_of(asked, replace(self.captured, graph=gm), asked.activations())
            pipeline = passes.pipeline(
                bound, options, self.captured.fake_mode, self.source.device, (min_cut, must_recompute, must_save)
            )
            names = {node: ir.info(node).name for node in borders.values()}
            gm = pipeline.until(Propagate.name).run(gm)
            propagate = pipeline[Propagate]
            if chooser is not None:
                gm = replace(propagate, chooser=chooser)(gm)
        kept = {ir.info(node).name: node for node in gm.graph.nodes if node.op != "output"}
        found = {name: kept[names[node]] for name, node in borders.items() if names[node] in kept}
        return Laid(propagate.problem, gm.graph, found)

    def params(self, mesh: Mesh, plan: Plan) -> Mapping[str, ParamPlan]:
        """What ``plan`` says of each parameter of the captured model."""
        return few_of(self.source.asked(mesh, plan, Options()), self.repeats, self.keep).params

    def program(self, mesh: Mesh, plan: Plan, options: Options) -> Program:
        """The whole model compiled under ``plan``, without another capture.

        Raises:
            NotPeriodic: the plan makes alike blocks differ in the middle.
        """
        asked = self.source.asked(mesh, plan, options)
        graph = LazyGraphModule(self.captured.graph, ir.copied(self.captured.graph.graph))
        few, captured = few_of(asked, self.repeats, self.keep), replace(self.captured, graph=graph)
        with shortened(self.source.model, self.repeats, self.keep), warnings.catch_warnings():
            warnings.simplefilter("ignore", ShardcWarning)
            joint = build_joint(few, captured)
        if not self.repeats:
            return Program(joint)
        stored = {name: p.dtype for name, p in self.source.model.named_parameters()}
        bound = replace(joint.bound, params=asked.params, stored=stored)
        unfolds = unfolds_of(joint, self.repeats, self.keep)
        return Program(joint, None, Folded(self.repeats, self.keep, unfolds, bound, captured.reads))

    def folds(self, mesh: Mesh) -> bool:
        """Whether a program of all blocks can be made of those that were captured."""
        try:
            self.program(mesh, Plan(), Options(verify=False)).step()
        except NotPeriodic:
            return False
        return True

    def weight(self, node: fx.Node) -> float:
        """How many nodes of the whole model ``node`` stands for."""
        record = ir.info(node)
        name = record.origin.module or record.name
        for each in self.repeats:
            number, _, _ = name.removeprefix("d.").removeprefix(each.prefix).partition(".")
            if name.removeprefix("d.").startswith(each.prefix) and number.isdecimal():
                at = int(number) - each.first
                if 0 < at < self.keep - 1 and each.count > self.keep:
                    return (each.count - 2) / (self.keep - 2)
        return 1.0

    def short(self, name: str) -> str | None:
        """What ``name`` of the whole model is called in the captured one."""
        return short_name(name, self.repeats, self.keep)


@dataclass(frozen=True)
class Laid:
    """A graph under a plan.

    Args:
        problem: what the plan fixes.
        graph: seeded; with layouts where they were chosen.
        borders: the value at each module's border, by the tag's name.
    """

    problem: Problem
    graph: fx.Graph
    borders: Mapping[str, fx.Node]
