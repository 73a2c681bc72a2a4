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
        MeshError: on every rank, where some rank's text differs: the first collective in which it does; or where some
            ranks did not come within the store's timeout: which.
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
    try:
        store.wait([f"{key}digest/{rank}" for rank in ranks])
    except RuntimeError as error:  # of every kind of store
        missing = _missing(store, key, ranks)
        if missing is not None:
            raise missing from error
    for rank in ranks:
        if store.get(f"{key}digest/{rank}").decode() != digest:
            raise _different(mine, rank, text, store.get(f"{key}text/{rank}").decode())


def _missing(store: dist.Store, key: str, ranks: list[int]) -> MeshError | None:
    """What to say where not all of ``ranks`` came; None where the last of them just did."""
    waited = f"{store.timeout.total_seconds():g} seconds"  # type: ignore[attr-defined]
    try:
        late = [rank for rank in ranks if not store.check([f"{key}digest/{rank}"])]
    except RuntimeError:
        return MeshError(
            "the ranks' store is gone, in which they compare their programs before the first step",
            fix="look at the rank that keeps it first (rank 0, or torchrun itself): it died; then restart all ranks",
        )
    if not late:
        return None
    which = f"rank {late[0]}" if len(late) == 1 else f"ranks {', '.join(map(str, late))}"
    return MeshError(
        f"{which} of {ranks} did not come to compare programs, before the first step, within {waited}",
        fix=f"look at {which} first: it died or raised before, never called the module, or compiles for longer (then "
        "give init_process_group a longer timeout); all ranks must call it with inputs of the same shapes",
    )


def _different(mine: int, other: int, text: str, theirs: str) -> MeshError:
    pairs = zip_longest(text.splitlines(), theirs.splitlines(), fillvalue=_END)
    here, there = next((pair for pair in pairs if pair[0] != pair[1]), (_END, _END))
    return MeshError(
        f"ranks {mine} and {other} compiled different programs: rank {mine} has {here!r} where rank {other} has "
        f"{there!r}",
        fix="compile the same model, plan, mesh and input shapes on every rank",
    )
