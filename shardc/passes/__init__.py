"""The pipeline: a captured joint graph becomes the program of one rank.

Each pass is a frozen dataclass in the file of its name; it takes a graph that its predecessors made and
gives one that its successors can take. ``pipeline`` is the whole of it, in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import fx

from shardc import _compat
from shardc.ir.mesh import Mesh
from shardc.passes.absent import Absent
from shardc.passes.algorithms import Algorithms
from shardc.passes.bucket import Bucket
from shardc.passes.canonicalize import Canonicalize
from shardc.passes.collectives import Collectives
from shardc.passes.localize import Localize
from shardc.passes.objective import Objective
from shardc.passes.offload import Offload
from shardc.passes.options import Options
from shardc.passes.pad import Pad
from shardc.passes.partition import Partition, inference
from shardc.passes.plan_memory import PlanMemory
from shardc.passes.precision import Precision
from shardc.passes.propagate import Propagate
from shardc.passes.reshard import Reshard
from shardc.passes.schedule import Schedule
from shardc.passes.seed import Seed
from shardc.passes.settle import Settle
from shardc.passes.silence import Silence
from shardc.passes.simplify import Simplify


class Pass(Protocol):
    """What every pass is."""

    name: str

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule: ...


PIPELINE: tuple[type[Pass], ...] = (
    Canonicalize,  # one form of each thing, before anything is decided
    Seed,  # what the plan says
    Pad,  # sizes that its axes do not divide, before layouts are chosen
    Propagate,  # every value's layout, at least cost
    Objective,  # needs the layouts of tangents; adds no layouts of its own
    Precision,  # before gradients are reduced, while their sums are pending
    Reshard,  # disagreements become nodes
    Simplify,  # fewer of them, while they are still whole changes of layout
    Collectives,  # each spelled as steps
    Localize,  # global shapes become local ones
    Offload,  # the shards are known; what is moved is then cut, bucketed and scheduled as collectives are
    Settle,  # all that a gradient goes through is there
)

# Partition then cuts the joint graph in two; these run on each half, and on the forward alone for inference.
HALVES: tuple[type[Pass], ...] = (
    Bucket,  # while each collective still stands where its inputs and uses put it
    Algorithms,  # by the sizes that bucketing leaves; each is then scheduled as what it is
    Schedule,  # starts and waits, of what is left after bucketing
    PlanMemory,  # lifetimes depend on the order
)


def halves(mesh: Mesh, options: Options) -> tuple[Pass, ...]:
    """The passes of `HALVES`, and `Silence` where it is asked for.

    Where collectives go direct, the cost model has no algorithm of theirs to choose.
    """
    made = (
        Bucket(options.bucket_bytes(), bool(options.direct)),
        Algorithms(mesh, options.cost),
        Schedule(options.in_flight_bytes(), blocking=not options.overlap),
        PlanMemory(mesh),
    )
    return made if options.comm == "real" else (*made, Silence())


# The stages behind the cut into forward and backward; they run when a half is first asked for.
PARTITIONED: tuple[str, ...] = tuple(
    f"{name}{suffix}" for name in (Partition.name, *(p.name for p in HALVES)) for suffix in ("", ".backward")
)

STAGES: tuple[str, ...] = ("capture", *(p.name for p in PIPELINE), Partition.name, *(p.name for p in HALVES))

Hook = Callable[[str, fx.GraphModule], None]


def run(passes: tuple[Pass, ...], gm: fx.GraphModule, hook: Hook) -> fx.GraphModule:
    """Runs ``passes`` in order on ``gm``; ``hook`` sees the graph after each, by the pass's name.

    The graph has its casts: an autocast that is on while passes run ops, to find out shapes and dtypes, adds none.
    """
    with _compat.no_autocast():
        for each in passes:
            gm = each(gm)
            hook(each.name, gm)
    return gm


__all__ = [
    "HALVES",
    "PARTITIONED",
    "PIPELINE",
    "STAGES",
    "Absent",
    "Algorithms",
    "Bucket",
    "Canonicalize",
    "Collectives",
    "Localize",
    "Objective",
    "Offload",
    "Pad",
    "Partition",
    "Pass",
    "PlanMemory",
    "Precision",
    "Propagate",
    "Reshard",
    "Schedule",
    "Options",
    "Seed",
    "Settle",
    "Silence",
    "Simplify",
    "halves",
    "inference",
    "run",
]
