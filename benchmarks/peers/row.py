"""A row of the ruler: one way to train the same model on the same ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from benchmarks.work import Step, Work


@dataclass(frozen=True)
class Row:
    """One way to train.

    Args:
        name: what ``--rows`` matches.
        kind: whose way it is ("DDP", "FSDP2", ...); the report gives the ratio to the best of each kind.
        family: rows of one family alternate with each other and are compared with each other; the limit is in all.
        build: called on every rank with the work and a one-dimensional mesh; gives the rank's training step.
        whole_batch: the step takes the global batch; else it takes this rank's share of it.
    """

    name: str
    kind: str
    family: str
    build: Callable[[Work, DeviceMesh], Step]
    whole_batch: bool = False


ALONE = "alone"
OURS = "shardc"
