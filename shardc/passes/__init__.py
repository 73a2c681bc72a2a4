"""The pipeline: the passes that turn a captured joint graph into the program of one rank.

A pass is a frozen dataclass that takes a graph and returns a graph. `pipeline` builds all of them, in order.
"""

from __future__ import annotations

from functools import partial

import torch

from shardc._compat import FakeTensorMode
from shardc.cost.hardware import CPU, Hardware, calibrated
from shardc.cost.model import CostModel, Pricing
from shardc.cost.step_sequence import keep_within
from shardc.ir.mesh import Mesh
from shardc.passes.layout.attention import Attention as Attention
from shardc.passes.layout.canonicalize import Canonicalize as Canonicalize
from shardc.passes.layout.exact.chooser import Exact as Exact
from shardc.passes.layout.experts import Experts as Experts
from shardc.passes.layout.float8 import Float8 as Float8
from shardc.passes.layout.greedy import Greedy
from shardc.passes.layout.objective import Objective as Objective
from shardc.passes.layout.pad import Pad as Pad
from shardc.passes.layout.precision import Precision as Precision
from shardc.passes.layout.propagate import Problem
from shardc.passes.layout.propagate import Propagate as Propagate
from shardc.passes.layout.reshard import Reshard as Reshard
from shardc.passes.layout.seed import Seed as Seed
from shardc.passes.layout.simplify import Simplify as Simplify
from shardc.passes.layout.windows import Windows
from shardc.passes.lower.chunk_loss import ChunkLoss as ChunkLoss
from shardc.passes.lower.collectives import Collectives as Collectives
from shardc.passes.lower.comm_hooks import OnTheWire as OnTheWire
from shardc.passes.lower.decompose import Decompose as Decompose
from shardc.passes.lower.hoist_grad_epilogue import HoistGradEpilogue as HoistGradEpilogue
from shardc.passes.lower.keep_part import KeepPart as KeepPart
from shardc.passes.lower.localize import Localize as Localize
from shardc.passes.lower.microbatch import Microbatch as Microbatch
from shardc.passes.lower.offload import Offload as Offload
from shardc.passes.lower.offload_saved import OffloadSaved as OffloadSaved
from shardc.passes.lower.partition import Cut
from shardc.passes.lower.partition import Partition as Partition
from shardc.passes.lower.partition import inference as inference
from shardc.passes.lower.skip_regather import SkipRegather as SkipRegather
from shardc.passes.lower.split_backward import SplitBackward as SplitBackward
from shardc.passes.lower.stages import Stages as Stages
from shardc.passes.options import Options as Options
from shardc.passes.pipeline import Hook as Hook
from shardc.passes.pipeline import Pass as Pass
from shardc.passes.pipeline import Pipeline as Pipeline
from shardc.passes.pipeline import near_stage as near_stage
from shardc.passes.schedule.algorithms import Algorithms
from shardc.passes.schedule.bucket import Bucket as Bucket
from shardc.passes.schedule.bucket import ByLink
from shardc.passes.schedule.plan_memory import PlanMemory as PlanMemory
from shardc.passes.schedule.prune_unused_grads import PruneUnusedGrads as PruneUnusedGrads
from shardc.passes.schedule.schedule import Schedule as Schedule
from shardc.passes.schedule.skip_communication import SkipCommunication as SkipCommunication
from shardc.plan.entries import Cp, Ep, Prefetch
from shardc.plan.resolve import BoundPlan


def computing(cost: Pricing, device: torch.device) -> Pricing:
    """Returns the cost model for compute: ``cost``, or `CPU` if ``cost`` has default rates and ``device`` is a CPU."""
    has_rates = not isinstance(cost, CostModel) or cost.flops != CostModel().flops
    return cost if has_rates or device.type != "cpu" else CPU


def sending(cost: Pricing, direct: bool) -> Pricing | None:
    """Returns the cost model by which collectives of activations are cut into chunks; None for the default cost model,
    which knows nothing about the links between ranks.

    If collectives are sent as messages between ranks (``direct``), they are priced by what ``cost`` has measured of
    messages, if anything.
    """
    if isinstance(cost, CostModel) and cost.messages is not None and direct:
        return calibrated(cost)
    return None if cost == CostModel() else cost


def bucket_size(options: Options, mesh: Mesh) -> int | ByLink:
    """Returns the size of a bucket in bytes. If ``options.bucket_size`` is a `Hardware`, returns a `ByLink`, which
    gives a size for each group of ranks.
    """
    size = options.bucket_size
    return ByLink(size, mesh) if isinstance(size, Hardware) else options.bucket_bytes()


def in_pieces(options: Options) -> bool:
    """Returns whether `Decompose` may split collectives into chunks of rows under these options."""
    return options.decompose not in (1, "auto") or (options.decompose == "auto" and options.cost != CostModel())


def pipeline(plan: BoundPlan, options: Options, fake_mode: FakeTensorMode, device: torch.device, cut: Cut) -> Pipeline:
    """Returns the `Pipeline` of all passes for ``plan``, in order; those after ``partition`` run on the forward and on
    the backward graph. ``cut`` has the functions that split a joint graph in these two.

    Args:
        plan: the plan, resolved against the model.
        options: options of `shardc.compile`.
        fake_mode: mode of the graph's fake values.
        device: device of values that have none.
        cut: (partitioner of a joint graph, marks a node as recomputed in backward, marks a node as saved).

    Raises:
        InputError: ``options.pipeline`` returns an order in which a pass runs before one that it requires.
    """
    mesh, cost = plan.mesh, options.cost
    entries = plan.plan.entries
    may_split_sequence = bool(plan.pins) or any(  # an input's dim behind the batch is split, or an activation is pinned
        layout.dim_axes(dim)
        for place in plan.inputs
        for layout in [place.padded or place.layout]
        for dim in range(1, layout.ndim)
    )
    settings = options.with_plan_settings(plan.plan, device)
    # Settles the regather levels when the graph is partitioned: parameters stay unsharded as far as the budget goes.
    levels = partial(
        keep_within, mesh=mesh, levels={n: p.regather_level for n, p in plan.params.items()},
        budget=options.budget_bytes(), cost=cost, bucket=settings.bucket_bytes(),
    )  # fmt: skip
    passes = Pipeline(
        (
            # Normal form, before layouts are chosen.
            Experts(tuple(entry for entry in entries if isinstance(entry, Ep))),
            Attention(mesh, cost, tuple(entry for entry in entries if isinstance(entry, Cp))),
            # Shifts and convolutions of a sequence that may be split.
            Windows(enabled=may_split_sequence),
            Canonicalize(),
            # Equal views of a matrix are one node, so that it is quantised once; weights are quantised before they are
            # gathered.
            Float8(plan.scaled, entry=str(plan.precision.float8 or "")),
            # Layouts that the plan fixes.
            Seed(mesh, plan.params, plan.inputs, frozenset(plan.pins), plan.saves),
            # Sizes that these axes do not divide are padded, before the other layouts are chosen.
            Pad(mesh, plan.padded_inputs, plan.padded_params, plan.grown, fake_mode, device),
            # Every value's layout, at least cost.
            Propagate(Problem(
                mesh, cost, plan.batch_axes, plan.output, pin_layout=plan.pinned, grad_layouts=plan.storages,
                compute_layouts=plan.computes, reduce=plan.reduce if plan.own_losses else "mean",
                strict=options.strict, deferred=plan.deferred,
            ), Exact() if options.layout_solver == "exact" else Greedy()),
            # It needs the layouts of tangents and keeps the layout of every value.
            Objective(plan.loss_axes, plan.reduce, plan.grad_scale, plan.own_losses),
            # Before gradients are reduced, while their sums are pending.
            Precision(layouts=plan.storages, reduced=plan.reduced, stored=plan.gradients, deferred=plan.deferred),
            # A use that needs another layout gets a reshard node;
            Reshard(),
            # reshards are merged while each is still one change of layout.
            Simplify(cost),
            # Each reshard becomes collectives and slices.
            Collectives(cost, per_microbatch=plan.plan.setting("reduce_in") == "microbatch"),
            # It needs the gathers of parameters, which are nodes from here on.
            KeepPart({name: p.regather_axes for name, p in plan.params.items()}),
            # Global shapes become local ones.
            Localize(mesh, fake_mode, device),
            # It needs the shapes of shards; its moves are then partitioned and scheduled as collectives are.
            Offload(plan.on_host, device, pending=plan.deferred.names),
            # After the last pass that adds ops to a gradient.
            HoistGradEpilogue(),
            # It needs local shapes, and the collectives within rows.
            ChunkLoss(plan.plan.setting("chunked_loss"), cause=str(plan.plan.entry_of("chunked_loss") or "")),
            # It needs local shapes; the partitioner then treats chunks as any other ops.
            Decompose(
                mesh, sending(cost, direct=options.p2p_collectives is not False), compute=computing(cost, device),
                pieces=options.decompose,
            ),
            # The joint graph becomes a forward and a backward.
            Partition(levels, *cut, collectives=options.checkpoint_collectives),
            # It needs the slices that backward gathers from, which are outputs of forward now.
            SkipRegather(),
            # It needs to know what is saved; its moves are scheduled as collectives are.
            OffloadSaved(device),
            # Before anything moves a collective away from its inputs and uses.
            Bucket(bucket_size(settings, mesh), direct=bool(options.p2p_collectives)),
            # The choice depends on the size of a bucket, and the schedule on the choice.
            Algorithms(mesh, cost if isinstance(cost, CostModel) else CostModel()),
            # Places starts and waits of the final collectives.
            Schedule(
                settings.in_flight_bytes(), blocking=not settings.overlap,
                prefetch=tuple(entry for entry in entries if isinstance(entry, Prefetch)),
            ),
            # Lifetimes depend on the order.
            PlanMemory(mesh),
        )
    )  # fmt: skip
    # None stands for all kinds of collectives.
    if (silent := options.silent()) != frozenset():
        passes = passes.after(PlanMemory.name, SkipCommunication(silent))
    if options.pipeline is not None:
        passes = options.pipeline(passes)
        passes.check_requires()
    return passes
