"""`shardc.measure_links`: measures the links between CPU ranks, to choose the bucket size."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardc.cost.model import CostModel, Messages
from shardc.errors import MeshError
from shardc.runtime.gloo.measure import Sent, measure_messages
from shardc.validate import typed


@typed()
def measure_links(mesh: DeviceMesh) -> CostModel:
    """Returns the default cost model with measured message times on ``mesh``, for ``Options(cost=...)``.

    It sets the default bucket size so that latency is a twentieth of a bucket's time: large on a fast link, small on a
    slow one, where small buckets overlap better. All ranks of the mesh call this and get the same numbers, those of the
    slowest axis. It takes a second, or more on a slow link. ``python -m shardc calibrate`` measures more, for the
    choice of layouts and predicted schedules.

    Args:
        mesh: a mesh of CPU ranks.

    Raises:
        MeshError: the mesh is of another device.
    """
    if mesh.device_type != "cpu":
        raise MeshError(
            f"measure_links measures CPU ranks, and this mesh is of {mesh.device_type!r}",
            fix="leave it out: the default cost model is of accelerators and their links",
        )
    groups = [group for group in mesh.get_all_groups() if dist.get_world_size(group) > 1]
    if not groups:
        return CostModel()
    measured = [measure_messages(group, runs=2, times=1) for group in groups]
    slowest = torch.tensor(min(measured, key=lambda sent: sent.bandwidth), dtype=torch.float64)
    # One broadcast per axis reaches all ranks.
    for group in groups:
        dist.broadcast(slowest, dist.get_global_rank(group, 0), group)
    return CostModel(messages=messages(Sent(*slowest.tolist())))


def messages(sent: Sent, pair: Sent | None = None, ranks: int = 2) -> Messages:
    """Return the cost model's `Messages` (cost of direct messages) from the times measured on ``ranks`` ranks
    (``sent``) and on two (``pair``).
    """
    pair = pair or sent
    hop = max(sent.latency - pair.latency, 0.0) / max(ranks - 2, 1)
    return Messages(pair.latency, sent.call, sent.message, hop, sent.bandwidth, sent.share)
