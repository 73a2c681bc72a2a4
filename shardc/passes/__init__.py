"""The pipeline: a captured joint graph becomes the program of one rank.

Each pass is a frozen dataclass: it takes the graph of the pass before it and returns the graph for the pass after it.
`pipeline` builds all of them, in order.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from shardc.cost.hardware import CPU, calibrated
from shardc.cost.model import CostModel, Pricing
from shardc.cost.unshard import keep_within
from shardc.passes.algorithms import Algorithms
from shardc.passes.attention import Attention as Attention
from shardc.passes.bucket import Bucket as Bucket
from shardc.passes.canonicalize import Canonicalize as Canonicalize
from shardc.passes.collectives import Collectives as Collectives
from shardc.passes.comm_hooks import OnTheWire as OnTheWire
from shardc.passes.decompose import Decompose as Decompose
from shardc.passes.exact.chooser import Exact as Exact
from shardc.passes.experts import Experts as Experts
from shardc.passes.greedy import Greedy
from shardc.passes.hoist_grad_epilogue import Settle as Settle
from shardc.passes.keep_part import KeepPart as KeepPart
from shardc.passes.localize import Localize as Localize
from shardc.passes.objective import Objective as Objective
from shardc.passes.offload import Offload as Offload
from shardc.passes.options import Options as Options
from shardc.passes.pad import Pad as Pad
from shardc.passes.partition import Cut
from shardc.passes.partition import Partition as Partition
from shardc.passes.partition import inference as inference
from shardc.passes.pipeline import Hook as Hook
from shardc.passes.pipeline import Pass as Pass
from shardc.passes.pipeline import Pipeline as Pipeline
from shardc.passes.plan_memory import PlanMemory as PlanMemory
from shardc.passes.precision import Precision as Precision
from shardc.passes.propagate import Problem
from shardc.passes.propagate import Propagate as Propagate
from shardc.passes.prune_unused_grads import Absent as Absent
from shardc.passes.reshard import Reshard as Reshard
from shardc.passes.schedule import Schedule as Schedule
from shardc.passes.seed import Seed as Seed
from shardc.passes.simplify import Simplify as Simplify
from shardc.passes.skip_communication import Silence as Silence
from shardc.passes.skip_regather import SkipRegather as SkipRegather
from shardc.plan.bound import BoundPlan
from shardc.plan.entries import Cp, Ep, Prefetch


def computing(cost: Pricing, device: torch.device) -> Pricing:
    """Returns the cost model of compute: ``cost`` if its rates were given or ``device`` is no CPU, else ``CPU``'s."""
    has_rates = not isinstance(cost, CostModel) or cost.flops != CostModel().flops
    return cost if has_rates or device.type != "cpu" else CPU


def sending(cost: Pricing, direct: bool) -> Pricing | None:
    """Returns the cost model of activations' collectives; None if ``cost`` is the default and says nothing of links.

    With ``direct`` messages and measured ones in ``cost``, it is calibrated to these.
    """
    if isinstance(cost, CostModel) and cost.messages is not None and direct:
        return calibrated(cost)
    return None if cost == CostModel() else cost


def in_pieces(options: Options) -> bool:
    """Tells whether `Decompose` may cut collectives in chunks of rows."""
    return options.decompose not in (1, "auto") or (options.decompose == "auto" and options.cost != CostModel())


def pipeline(plan: BoundPlan, options: Options, fake_mode: Any, device: torch.device, cut: Cut) -> Pipeline:
    """Returns the passes that a model goes through, in order; those after ``partition`` run on each half.

    Args:
        plan: the plan, resolved against the model.
        options: how to compile; see `Options`.
        fake_mode: mode of the captured graph's fake values.
        device: the device that the program runs on.
        cut: (partitioner of a joint graph, marks a node as recomputed in backward, marks a node as saved).
    """
    mesh, cost = plan.mesh, options.cost
    settings = options.with_plan_settings(plan.plan)
    levels = partial(
        keep_within, mesh=mesh, levels={n: p.regather_level for n, p in plan.params.items()},
        budget=options.budget_bytes(), cost=cost, bucket=settings.bucket_bytes(),
    )  # fmt: skip
    passes = Pipeline(
        (
            # One form of each thing, before anything is decided.
            Experts(tuple(entry for entry in plan.plan.entries if isinstance(entry, Ep))),
            Attention(mesh, cost, tuple(entry for entry in plan.plan.entries if isinstance(entry, Cp))),
            Canonicalize(),
            # What the plan says.
            Seed(mesh, plan.params, plan.inputs, frozenset(plan.pins), plan.regions),
            # Sizes that its axes do not divide, before layouts are chosen.
            Pad(mesh, plan.padded_inputs, plan.padded_params, plan.grown, fake_mode, device),
            # Every value's layout, at least cost.
            Propagate(Problem(
                mesh, cost, plan.batch_axes, plan.output, plan.pinned, plan.storages, plan.computes,
                plan.reduce if plan.own_losses else "mean", options.strict, plan.deferred,
            ), Exact() if options.chooser == "exact" else Greedy()),
            # It needs the layouts of tangents, and adds none of its own.
            Objective(plan.batch_axes, plan.reduce, plan.grad_scale, plan.own_losses),
            # Before gradients are reduced, while their sums are pending.
            Precision(plan.storages, plan.reduced, plan.gradients, plan.deferred),
            # Disagreements become nodes,
            Reshard(),
            # and fewer of them, while they are still whole changes of layout.
            Simplify(cost),
            # Each is spelled as steps.
            Collectives(cost),
            # A parameter's gathers are steps now.
            KeepPart({name: p.regather_axes for name, p in plan.params.items()}),
            # Global shapes become local ones.
            Localize(mesh, fake_mode, device),
            # The shards are known; what is moved is then cut, bucketed and scheduled as collectives are.
            Offload(plan.on_host, fake_mode, device, plan.deferred.names),
            # All that a gradient goes through is there.
            Settle(),
            # Its products and collectives are at local shapes; the cut then sees pieces as any other.
            Decompose(mesh, sending(cost, options.direct is not False), computing(cost, device), options.decompose),
            # The joint graph becomes a forward and a backward.
            Partition(levels, *cut, options.checkpoint_collectives),
            # The slices that backward gathers from are outputs now.
            SkipRegather(),
            # While each collective still stands where its inputs and uses put it.
            Bucket(settings.bucket_bytes(), bool(options.direct)),
            # By the sizes that bucketing leaves; each is then scheduled as what it is.
            Algorithms(mesh, cost if isinstance(cost, CostModel) else CostModel()),
            # Starts and waits, of what is left after bucketing.
            Schedule(
                settings.in_flight_bytes(), not settings.overlap,
                tuple(entry for entry in plan.plan.entries if isinstance(entry, Prefetch)),
            ),
            # Lifetimes depend on the order.
            PlanMemory(mesh),
        )
    )  # fmt: skip
    if (silent := options.silent()) != frozenset():
        passes = passes.after(PlanMemory.name, Silence(silent))
    return passes if options.pipeline is None else options.pipeline(passes)
