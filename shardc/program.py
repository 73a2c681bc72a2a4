"""A program: one model at one input signature, compiled for a mesh and a plan."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from shardc import passes
from shardc._compat import pytree
from shardc.analysis.cost import CostModel
from shardc.capture import Captured, Tag, capture
from shardc.errors import PlanError
from shardc.ir import graph as ir
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.ir.text import dump
from shardc.lower import min_cut, must_recompute, must_save
from shardc.passes.check import check
from shardc.passes.partition import inference
from shardc.passes.seed import SeededParam
from shardc.plan.ports import batch_axes, grad_mode, resolve_activations, resolve_inputs, resolve_outputs
from shardc.plan.resolve import ParamPlan
from shardc.plan.spec import to_layout
from shardc.plan.value import Plan

PARTITIONED = ("partition", "partition.backward")


@dataclass(frozen=True)
class Options:
    """How to compile.

    Args:
        strict: an op without a sharding rule is an error instead of a warning.
        cost: the cost model that layouts and algorithms are chosen by.
        verify: check the graph after every pass.
        dump: directory for the text of every stage; by default the environment's ``SHARDC_DUMP``.
    """

    strict: bool = False
    cost: CostModel = field(default_factory=CostModel)
    verify: bool = True
    dump: str | None = field(default_factory=lambda: os.environ.get("SHARDC_DUMP"))


class Program:
    """The annotated graphs of a model after every stage, and the local forward and backward at the end.

    Attributes:
        mesh, plan: what it was compiled for.
        stages: names of the stages whose text there is.
        forward, backward, inference: localized graphs; the first two are None where nothing needs a gradient.
        inputs: (name, layout) of each tensor input.
        outputs: the role (with layout) of each forward output.
    """

    def __init__(self, mesh: Mesh, plan: Plan, captured: Captured, inputs: Sequence[tuple[str, Layout]]) -> None:
        self.mesh, self.plan = mesh, plan
        self.inputs = tuple(inputs)
        self.input_spec, self.constants = captured.input_spec, captured.constants
        self.output_spec = captured.output_spec
        self.outputs: tuple[ir.Role, ...] = ()
        self.output_values: tuple[Any, ...] = ()
        self._graphs: dict[str, fx.Graph] = {}
        self._root = captured.graph
        self._levels: dict[str, int] = {}
        self._local: fx.GraphModule | None = None

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages in order; the last ones run when they are first asked for."""
        return (*self._graphs, *(stage for stage in PARTITIONED if stage not in self._graphs))

    @property
    def forward(self) -> fx.GraphModule | None:
        return self._halves[0]

    @property
    def backward(self) -> fx.GraphModule | None:
        return self._halves[1]

    @cached_property
    def inference(self) -> fx.GraphModule:
        assert self._local is not None
        return inference(self._local)

    @cached_property
    def _halves(self) -> tuple[fx.GraphModule | None, fx.GraphModule | None]:
        """The forward and the backward, or two None where nothing needs a gradient."""
        assert self._local is not None
        first, second = passes.Partition(self._levels, min_cut, must_recompute, must_save)(self._local)
        self.keep(PARTITIONED[0], first.graph)
        if second is None:
            return None, None
        self.keep(PARTITIONED[1], second.graph)
        return first, second

    def finish(self, local: fx.GraphModule, levels: Mapping[str, int]) -> None:
        """Takes the localized joint graph; it is split when a half of it is first asked for."""
        self._local, self._levels = local, dict(levels)
        forward = [(role, x) for role, x in ir.outputs(local.graph) if role.kind != "grad"]
        self.outputs = tuple(role for role, _ in forward)
        self.output_values = tuple(x if not isinstance(x, fx.Node) else None for _, x in forward)

    def graph(self, stage: str) -> fx.Graph:
        """The graph as it was after ``stage``.

        Raises:
            PlanError: no such stage, or none for this program (no backward where nothing needs a gradient).
        """
        if stage in PARTITIONED and stage not in self._graphs:
            _ = self._halves
        if stage not in self._graphs:
            raise PlanError(f"there is no stage {stage!r}", fix=f"use one of {', '.join(self._graphs)}")
        return self._graphs[stage]

    def text(self, stage: str = "collectives", *, origins: bool = False) -> str:
        """The annotated graph after ``stage``; with ``origins``, each line ends in module, source and cause."""
        return dump(fx.GraphModule(self._root, self.graph(stage)), self.mesh, origins=origins)

    def save(self, directory: str | Path) -> list[Path]:
        """Writes the text of every stage as ``NN_stage.txt``; returns the paths."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for at, stage in enumerate(self.stages):
            path = folder / f"{at:02d}_{stage}.txt"
            path.write_text(self.text(stage))
            paths.append(path)
        return paths

    def keep(self, stage: str, graph: fx.Graph) -> None:
        """Keeps a copy of ``graph`` as it is now."""
        copy = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        out = copy.graph_copy(graph, env)
        made = copy.output(out)
        made.meta = dict(ir.output_node(graph).meta)
        for node, twin in env.items():
            twin.meta = dict(node.meta)
        self._graphs[stage] = copy


def build_program(
    model: nn.Module,
    mesh: Mesh,
    plan: Plan,
    params: Mapping[str, ParamPlan],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    device: torch.device,
    loss: Callable[..., Any] | None,
    options: Options,
) -> Program:
    """Captures ``model`` at global example inputs and runs the pipeline.

    Raises:
        ShardcError: whatever is wrong with the plan, the inputs or the model; nothing is changed before.
    """
    pins = resolve_activations(plan, [name for name, _ in model.named_modules()])
    tags = [Tag(pin.module, pin.where, pin.index) for pin in pins]
    captured = capture(model, args, kwargs, device=device, loss=loss, tags=tags)
    leaves = [x for x in pytree.tree_leaves((tuple(args), kwargs)) if isinstance(x, Tensor)]
    shapes = [(name, tuple(x.shape)) for name, x in zip(captured.inputs, leaves, strict=True)]
    inputs = resolve_inputs(plan, mesh, shapes)
    program = Program(mesh, plan, captured, [(n, layout) for (n, _), (layout, _) in zip(shapes, inputs, strict=True)])
    by_tag = {tag.name: pin for tag, pin in zip(tags, pins, strict=True)}
    axes = batch_axes(plan, mesh)
    reduce, grad_scale = grad_mode(plan)
    outputs = _output_specs(plan, captured)
    seeded = {n: SeededParam(p.storage, p.compute, p.storage_cause, p.compute_cause) for n, p in params.items()}

    def pin_layout(tag: str, base: Layout) -> tuple[Layout, str]:
        pin = by_tag[tag]
        what = f"{pin.where} of module {pin.module!r}"
        return to_layout(pin.spec, mesh, base.shape, base.without_partial(), what=what, entry=pin.entry), pin.entry

    def output_layout(index: int, name: str, natural: Layout) -> tuple[Layout, str]:
        said = outputs.get(index)
        if said is None:
            return natural, ""
        return to_layout(said[0], mesh, natural.shape, natural, what=f"output {name!r}", entry=said[1]), said[1]

    seen: list[Any] = [None]

    def hook(stage: str, gm: fx.GraphModule) -> None:
        program.keep(stage, gm.graph)
        if options.verify:
            seen[0] = check(gm, mesh, stage, seen[0])

    gm = captured.graph
    hook("capture", gm)
    local = passes.run(
        (
            passes.Canonicalize(),
            passes.Seed(mesh, seeded, inputs, frozenset(by_tag)),
            passes.Propagate(
                mesh, options.cost, axes, output_layout, pin_layout,
                {name: p.storage for name, p in params.items()}, {name: p.compute for name, p in params.items()},
                reduce, options.strict,
            ),
            passes.Objective(axes, reduce, grad_scale),
            passes.Reshard(),
            passes.Simplify(options.cost),
            passes.Collectives(options.cost),
            passes.Localize(mesh, captured.fake_mode, device),
        ),
        gm,
        hook,
    )  # fmt: skip
    program.finish(local, {name: p.level for name, p in params.items()})
    if options.dump:
        program.save(options.dump)
    return program


def _output_specs(plan: Plan, captured: Captured) -> dict[int, tuple[Any, str]]:
    """What the plan says of each tensor output, by flat position."""
    flat = list(range(captured.output_spec.num_leaves))
    paths = pytree.tree_flatten_with_path(pytree.tree_unflatten(flat, captured.output_spec))[0]
    names = [".".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path) or "0" for path, _ in paths]
    said = resolve_outputs(plan, names)
    return {at: one for at, one in enumerate(said) if one is not None}
