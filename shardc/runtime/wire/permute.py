"""``shardc::permute_ranks``: whole shards change ranks inside a group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

import shardc.ir.comm  # noqa: F401  (defines the op)

_library = torch.library.Library("shardc", "IMPL")


def _permute_ranks(x: torch.Tensor, destinations: list[int], group_name: str) -> torch.Tensor:
    """Sends ``x`` to ``destinations[rank in the group]``; the result must be waited for."""
    rank = dist.get_rank(_resolve_process_group(group_name))  # type: ignore[arg-type]  # a str with a name of its own
    sends, receives = [0] * len(destinations), [0] * len(destinations)
    sends[destinations[rank]] = receives[destinations.index(rank)] = x.numel()
    flat = torch.ops._c10d_functional.all_to_all_single(x.reshape(-1), receives, sends, group_name)
    return flat.view(x.shape)


_library.impl("permute_ranks", _permute_ranks, "CompositeExplicitAutograd")
