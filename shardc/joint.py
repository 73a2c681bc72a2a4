"""`Joint`: the captured joint graph of a model at local shapes, before it is cut into forward and backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, fx, nn

from shardc import passes
from shardc._compat import LazyGraphModule, PyTree, pytree
from shardc.capture import Captured, Dtypes, Tag, capture
from shardc.cost.compute import Dense, dense, model_flops
from shardc.errors import PlanError
from shardc.ir import graph as ir
from shardc.ir.deferred import NOTHING, Deferred
from shardc.ir.mesh import Mesh
from shardc.lower.min_cut import min_cut, must_recompute, must_save
from shardc.passes.check import Verify
from shardc.passes.options import Options
from shardc.plan import ports
from shardc.plan.entries import Policies
from shardc.plan.layout_spec import Form
from shardc.plan.pipeline_stages import PipelineStages
from shardc.plan.placed import SavePolicy
from shardc.plan.resolve import BoundPlan, ParamPlan
from shardc.plan.value import Plan

CUT = passes.Partition.name


class StageRecorder(passes.Hook):
    """Hook that copies the graph after each stage into ``graphs``. The key is the stage's name followed by
    ``suffix``.
    """

    def __init__(self, graphs: dict[str, fx.Graph], suffix: str = "") -> None:
        self.graphs, self.suffix = graphs, suffix

    def after(self, stage: str, gm: fx.GraphModule) -> None:
        self.graphs[stage + self.suffix] = ir.copied(gm.graph)


class Work(passes.Hook):
    """Hook that records the FLOPs of the model's dense ops, and the dense ops (`Dense`) that one rank runs."""

    flops: tuple[tuple[str, int], ...] = ()
    ops: tuple[Dense, ...] = ()

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def after(self, stage: str, gm: fx.GraphModule) -> None:
        if stage == passes.Seed.name:  # before ``pad``: work on padding does not count
            self.flops = tuple((ir.info(node).name, flops) for node, flops in model_flops(gm.graph))
        if stage == passes.Collectives.name and self.mesh.ranks > 1:
            self.ops = tuple(op for _, op in dense(gm.graph, self.mesh))


@dataclass(frozen=True)
class Joint:
    """Joint graph of a model at local shapes, with the capture, plan and passes that it comes from.

    Args:
        bound: the plan, resolved for this model.
        options: the options to compile with.
        captured: the captured model.
        pipeline: all passes; those before the cut have run.
        local: the joint graph at local shapes.
        stage_graphs: graphs after the stages so far; only the captured one if stages are not kept.
        work: dense ops of a rank.
        flops: (name, FLOPs) of each dense op of the captured model.
    """

    bound: BoundPlan
    options: Options
    captured: Captured
    pipeline: passes.Pipeline
    local: fx.GraphModule
    stage_graphs: dict[str, fx.Graph]
    work: tuple[Dense, ...] = ()
    flops: tuple[tuple[str, int], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the stages of `stages`: ``capture``, and the passes before the split into forward and backward."""
        return ("capture", *self.pipeline.until(CUT).names)

    @cached_property
    def stages(self) -> dict[str, fx.Graph]:
        """Graphs after each stage up to the split into forward and backward: stage name -> graph. The passes run again
        if the graphs were not kept.
        """
        graphs = dict(self.stage_graphs)
        if len(graphs) < len(self.names):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # warnings were given in the first run
                first = LazyGraphModule(self.captured.graph, ir.copied(graphs["capture"]))
                self.pipeline.until(CUT).run(first, StageRecorder(graphs))
        return graphs


@dataclass(frozen=True)
class Request:
    """A model, example inputs, and the settings that determine how they are compiled.

    Args:
        model: the model.
        mesh, plan: the mesh to compile for, and the plan.
        params: the plan, resolved per parameter.
        args, kwargs: example inputs at global shapes.
        device: the device to compile for.
        loss: the loss function, if the call passes its targets; else None.
        options: the options to compile with.
        pins: the layouts of activations by the plan.
        saves: the policies by which activations are saved for backward, in the order of the plan's entries.
        deferred: parameters whose gradients stay unreduced and are summed on each rank; see `Program.reduction`.
        keep_stages: copy the graph after each stage, for inspection.
        traced_in: dtypes of the model's modules; by default those of the plan.
        pp: the stages of the plan's pipeline; None without one.
    """

    model: nn.Module
    mesh: Mesh
    plan: Plan
    params: Mapping[str, ParamPlan]
    args: Sequence[PyTree]
    kwargs: dict[str, PyTree]
    device: torch.device
    loss: Callable[..., PyTree] | None
    options: Options
    pins: Sequence[ports.ActivationPin]
    saves: Sequence[SavePolicy]
    deferred: Deferred = NOTHING
    keep_stages: bool = True
    traced_in: Dtypes | None = None
    pp: PipelineStages | None = None

    @property
    def precision(self) -> Policies:
        """The mixed precision of the plan."""
        return self.plan.precision.mode(self.model.training)

    @cached_property
    def dtypes(self) -> Dtypes:
        """Dtypes in which the model's modules are traced."""
        return self.traced_in or Dtypes.of(self.model, self.precision.of, self.precision.scaled)

    def lengths(self) -> frozenset[int]:
        """Return the sequence lengths of the inputs: the sizes of the dims that the plan splits as sequences."""
        dims = {entry.sequence[0] for entry in self.plan.entries if entry.sequence is not None}
        shapes = [x.shape for x in pytree.tree_leaves((tuple(self.args), self.kwargs)) if isinstance(x, Tensor)]
        return frozenset(int(shape[dim]) for shape in shapes for dim in dims if dim < len(shape) and shape[dim] > 1)


def build_joint(request: Request, captured: Captured | None = None) -> Joint:
    """Captures the model at its example inputs and runs the passes before the split into forward and backward.

    Args:
        captured: the model, if it is captured already.

    Raises:
        ShardcError: the plan, the inputs or the model are invalid; nothing has changed then.
    """
    mesh, options, device = request.mesh, request.options, request.device
    if captured is None:
        take = options.capture or capture
        captured = take(
            request.model,
            request.args,
            request.kwargs,
            device=device,
            loss=request.loss,
            tags=[Tag(pin.module, pin.where, pin.index) for pin in request.pins],
            dtypes=request.dtypes,
            lengths=request.lengths(),
        )
    bound = bound_of(request, captured)
    pipeline = passes.pipeline(bound, options, captured.fake_mode, device, (min_cut, must_recompute, must_save))
    graphs: dict[str, fx.Graph] = {}
    # The verifier is first: the others take a valid graph.
    verifier = [Verify(mesh)] if options.verify else []
    recorder, work = StageRecorder(graphs), Work(mesh)
    for hook in (*verifier, recorder, *options.hooks):
        hook.after("capture", captured.graph)
    hooks = [*verifier, *([recorder] if request.keep_stages else ()), work, *options.hooks]
    local = pipeline.until(CUT).run(captured.graph, *hooks)
    return Joint(bound, options, captured, pipeline, local, graphs, work.ops, work.flops)


def bound_of(request: Request, captured: Captured) -> BoundPlan:
    """Resolves the plan for a captured model; PlanError if it names an input, output or activation that is missing."""
    tags = [Tag(pin.module, pin.where, pin.index).name for pin in request.pins]
    ports.check_pins(request.pins, tags, captured.graph.graph)
    leaves = [x for x in pytree.tree_leaves((tuple(request.args), request.kwargs)) if isinstance(x, Tensor)]
    shapes = [(name, tuple(x.shape)) for name, x in zip(captured.inputs, leaves, strict=True)]
    return BoundPlan(
        request.plan,
        request.mesh,
        request.params,
        inputs=tuple(ports.resolve_inputs(request.plan, request.mesh, shapes)),
        pins=dict(zip(tags, request.pins, strict=True)),
        saves=tuple(request.saves),
        outputs=_outputs(request.plan, captured),
        precision=request.precision,
        stored={name: p.dtype for name, p in request.model.named_parameters()},
        deferred=request.deferred,
        pp=request.pp,
        scaled={module: dtypes.scaled for module, dtypes in request.dtypes.modules if dtypes.scaled},
    )


def _outputs(plan: Plan, captured: Captured) -> dict[int, tuple[Form, str]]:
    """Returns the outputs that the plan gives a layout: index -> (spec of the layout, plan entry).

    Raises:
        PlanError: one output is returned twice, with two layouts.
    """
    specs = ports.output_specs(plan, captured.output_spec)
    for at, output in enumerate(captured.returned):
        if output.same is None:
            continue
        both = [specs[place] for place in (output.same, at) if place in specs]
        if both and both[0][0] != both[-1][0]:
            raise PlanError(
                f"outputs {output.same} and {at} are one tensor, which cannot have two layouts",
                plan_entry=both[-1][1],
                fix="give both the same, or return a copy: y, y.clone()",
            )
        specs |= {place: both[0] for place in (output.same, at) if both}
    return specs
