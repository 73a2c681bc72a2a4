"""Row exchange with sizes known at run time: ``shardc::send_rows_coalesced`` (see `shardc.ir.comm`).

On a CPU, rows go in messages directly to their places in the result; small ones of several tensors share a message. On
other devices they go in one all-to-all per tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardc.ir.packing import LARGEST
from shardc.runtime.wire.direct import _TAG, _Exchange, _group, _started

_library = torch.library.Library("shardc", "IMPL")


def _parts(inputs: Sequence[Tensor], counts: Sequence[int]) -> list[list[Tensor]]:
    """Splits each tensor by ``counts``; per rank, the rows that go to or come from it."""
    edges = [0, *accumulate(counts)]
    return [[x[start:end] for x in inputs] for start, end in pairwise(edges)]


def _together(parts: Sequence[Tensor]) -> bool:
    """Whether the tensors for one peer share a message."""
    return len(parts) > 1 and sum(x.numel() * x.element_size() for x in parts) <= LARGEST


def _bytes(x: Tensor) -> Tensor:
    """Views contiguous rows as bytes; a single element may have any stride."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


def _send(inputs: list[Tensor], sends: Tensor, receives: Tensor, rows: int, group_name: str) -> list[Tensor]:
    """Sends rows in direct messages between CPU ranks; ``sends`` and ``receives`` are row counts per rank."""
    group, rank, peers = _group(group_name)
    inputs = [x.contiguous() for x in inputs]
    received = [x.new_empty((rows, *x.shape[1:])) for x in inputs]
    goes, comes = _parts(inputs, sends.tolist()), _parts(received, receives.tolist())
    messages: list[Any] = []
    keep = list(inputs)
    unpack: list[tuple[Tensor, list[Tensor]]] = []
    for peer in peers:
        if not comes[peer][0].numel():
            continue
        if _together(comes[peer]):
            size = sum(x.numel() * x.element_size() for x in comes[peer])
            pack = torch.empty(size, dtype=torch.uint8)
            unpack.append((pack, comes[peer]))
            messages.append(group.recv([pack], peer, _TAG))
        else:
            messages += [group.recv([x], peer, _TAG) for x in comes[peer]]
    for peer in peers:
        if not goes[peer][0].numel():
            continue
        if _together(goes[peer]):
            keep.append(torch.cat([_bytes(x) for x in goes[peer]]))
            messages.append(group.send([keep[-1]], peer, _TAG))
        else:
            messages += [group.send([x], peer, _TAG) for x in goes[peer]]
    for to, of in zip(comes[rank], goes[rank], strict=True):
        to.copy_(of)

    def finish() -> None:
        for pack, places in unpack:
            parts = pack.split([x.numel() * x.element_size() for x in places])
            for place, part in zip(places, parts, strict=True):
                _bytes_into(place, part)

    return _started(received, _Exchange(messages, keep, finish))


def _bytes_into(place: Tensor, part: Tensor) -> None:
    place.copy_(part.clone().view(place.dtype).view(place.shape))


def _exchange(inputs: list[Tensor], sends: Tensor, receives: Tensor, rows: int, group_name: str) -> list[Tensor]:
    """Sends rows by one all-to-all per tensor; arguments as `_send`."""
    group, _, _ = _group(group_name)
    goes, comes = sends.tolist(), receives.tolist()
    received = [x.new_empty((rows, *x.shape[1:])) for x in inputs]
    works = [
        dist.all_to_all_single(to[: sum(comes)], x[: sum(goes)].contiguous(), comes, goes, group, async_op=True)
        for to, x in zip(received, inputs, strict=True)
    ]
    return _started(received, _Exchange(works, inputs, lambda: None))


_KERNELS: dict[str, Callable[..., list[Tensor]]] = {"CPU": _send, "CUDA": _exchange}
for _key, _kernel in _KERNELS.items():
    _library.impl("send_rows_coalesced", _kernel, _key)
