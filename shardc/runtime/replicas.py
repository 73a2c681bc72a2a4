"""Values that several ranks hold are the same on all of them: compared before the first use of a module."""

from __future__ import annotations

import json
from collections.abc import Mapping

from torch import Tensor
from torch.distributed.tensor import DTensor

from shardc.ir.layout import Layout
from shardc.runtime.acts import SAME, Act
from shardc.runtime.fingerprint import fingerprint
from shardc.runtime.groups import Groups
from shardc.runtime.shards import flat_index

Sources = dict[str, tuple[int, int]]  # parameter -> fingerprints of the whole that it was cut of, and of the cut


def compare_values(
    name: str,
    tensors: Mapping[str, Tensor],
    storages: Mapping[str, Layout],
    sources: Sources,
    groups: Groups,
) -> None:
    """Compares fingerprints of what the ranks hold, through the store.

    Args:
        name: of the module.
        tensors: its parameters and buffers, by name; a buffer is the same on all ranks.
        storages: of each parameter.
        sources: of parameters that were cut of whole ones: ranks that still hold what was cut then must have cut it of
            the same.

    Raises:
        MeshError: on every rank, where ranks that should hold the same values don't: names the tensor and the ranks.
    """
    agreement = groups.agreement
    if agreement.alone:
        return
    mine: dict[str, list[int | None]] = {}
    for key, x in tensors.items():
        local = 0 if x.is_meta else fingerprint(x._local_tensor if isinstance(x, DTensor) else x)
        whole, cut = sources.get(key, (None, None))
        mine[key] = [local, whole if cut == local else None]
    listed = "\n".join(
        f"{key} of shape {list(x.shape)}, {x.dtype}{_stored(storages.get(key))}" for key, x in tensors.items()
    )
    act = Act((("act", f"first use of the values of {name}"), ("parameters and buffers", listed)))
    first = {key: _first(storages.get(key), groups) for key in tensors}
    said = agreement.exchange(act, json.dumps(mine), {0, *first.values()})
    theirs = {rank: json.loads(text) for rank, text in said.items()}
    wrong = [
        (key, rank)
        for key, (local, whole) in mine.items()
        for rank, other in ((first[key], theirs[first[key]][key][0] == local), (0, _alike(whole, theirs[0][key][1])))
        if not other
    ]
    found = SAME
    if wrong:
        key, rank = wrong[0]
        kind = "parameter" if key in storages else "buffer"
        more = len({key for key, _ in wrong}) - 1
        found = f"{kind} {key!r} has other values on rank {agreement.rank} than on rank {groups.everyone()[rank]}" + (
            f", and so {'has 1 more tensor' if more == 1 else f'have {more} more tensors'}" if more else ""
        )
    agreement.act(Act((("act", f"comparison of the values of {name}"), ("values", found))), ask=True)


def note_source(sources: Sources, name: str, storage: Layout, whole: Tensor, param: Tensor) -> None:
    """Notes what parameter ``param`` was cut of, if it was."""
    if storage.bound:
        assert isinstance(param, DTensor)
        sources[name] = fingerprint(whole), fingerprint(param._local_tensor)


def _stored(storage: Layout | None) -> str:
    return "" if storage is None else f", stored as {storage}"


def _alike(one: int | None, other: int | None) -> bool:
    return one is None or other is None or one == other


def _first(storage: Layout | None, groups: Groups) -> int:
    """The first rank of the mesh that holds the same part as this one."""
    if storage is None:
        return 0
    parts = (flat_index(storage.mesh, storage.bound, rank) for rank in range(storage.mesh.ranks))
    mine = flat_index(storage.mesh, storage.bound, groups.rank)
    return next(rank for rank, part in enumerate(parts) if part == mine)
