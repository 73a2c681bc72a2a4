"""Ranks agree on the order of their collectives before the first of them, through the store."""

from __future__ import annotations

import hashlib
from itertools import zip_longest

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from shardc.errors import MeshError
from shardc.runtime.groups import Groups

_END = "nothing more"


def agree(groups: Groups, text: str) -> None:
    """Compares ``text``, the collectives of a program in order, with what all other ranks of the mesh have.

    Nothing but the store is used, so ranks that differ raise instead of waiting for each other's collectives.

    Raises:
        MeshError: on every rank, where some rank's text differs: the first collective in which it does.
    """
    if dist.get_backend() == "fake":
        return  # torch's stand-in for a world: nobody else is there
    store = c10d._get_default_store()
    at = groups.agreed = groups.agreed + 1
    ranks = groups.everyone()
    # Two meshes of the same ranks each count their own programs.
    key = f"{groups.prefix}{','.join(map(str, ranks))}/{at}/"
    digest = hashlib.sha256(text.encode()).hexdigest()
    mine = ranks[groups.rank]
    store.set(f"{key}text/{mine}", text)
    store.set(f"{key}digest/{mine}", digest)
    for rank in ranks:
        if store.get(f"{key}digest/{rank}").decode() != digest:
            raise _different(mine, rank, text, store.get(f"{key}text/{rank}").decode())


def _different(mine: int, other: int, text: str, theirs: str) -> MeshError:
    pairs = zip_longest(text.splitlines(), theirs.splitlines(), fillvalue=_END)
    here, there = next((pair for pair in pairs if pair[0] != pair[1]), (_END, _END))
    return MeshError(
        f"ranks {mine} and {other} compiled different programs: rank {mine} has {here!r} where rank {other} has "
        f"{there!r}",
        fix="compile the same model, plan, mesh and input shapes on every rank",
    )
