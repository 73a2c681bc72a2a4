"""`shardc.measure_links`: what the links of a mesh of CPU ranks take, for buckets of a size that suits them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardc.cost.model import CostModel, Messages
from shardc.errors import MeshError
from shardc.runtime.wire.measure import Sent, measure_messages
from shardc.validate import typed


@typed()
def measure_links(mesh: DeviceMesh) -> CostModel:
    """The default cost model with measured times of messages between the ranks of ``mesh``, for ``Options(cost=...)``.

    The default size of a bucket is then the one at which latency is a twentieth of its time on these links. On a fast
    link buckets are large. On a slow link small buckets hide more of their bytes behind compute. Every rank of the mesh
    calls this, and all get the same numbers: the first rank's, of its slowest axis. It takes a second, more on a slow
    link. ``python -m shardc calibrate`` measures more, for the choice of layouts and the prediction of schedules.

    Args:
        mesh: of CPU ranks.

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
    # Axis by axis they reach all ranks.
    for group in groups:
        dist.broadcast(slowest, dist.get_global_rank(group, 0), group)
    return CostModel(messages=messages(Sent(*slowest.tolist())))


def messages(sent: Sent, pair: Sent | None = None, ranks: int = 2) -> Messages:
    """Converts measurements on ``ranks`` ranks for the cost model.

    Args:
        sent: of all of them.
        pair: of two of them, for what a further rank adds; None: that is not known.
        ranks: how many.
    """
    pair = pair or sent
    hop = max(sent.latency - pair.latency, 0.0) / max(ranks - 2, 1)
    return Messages(pair.latency, sent.call, sent.message, hop, sent.bandwidth, sent.share)
