"""Messages through a process group, from each rank straight to each other rank; small tensors share one.

What is large goes from where it lies to its place at the receiver. What shares a message is copied together before, and
is read where it comes (`shardc.ir.packing`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardc.ir.packing import Packing
from shardc.runtime.wire.buffers import empty

# Apart from the messages that a user may send on the same groups.
_TAG = 0x5A


@dataclass(frozen=True)
class Mail:
    """Messages to and from all peers.

    Args:
        messages: to be waited for.
        packing: the tensors that share one.
        came: by peer, the bytes of that one; empty where none do.
        packs: its memory, as it comes and as it goes.
    """

    messages: list[Any]
    packing: Packing
    came: dict[int, Tensor]
    packs: tuple[Tensor, ...]

    def packed(self, peer: int, like: Sequence[Tensor]) -> dict[int, Tensor]:
        """What came from a peer in one message, by the number of the tensor: flat, of the dtype of its ``like``."""
        starts = self.packing.offsets
        ends = [*starts.values(), self.packing.size][1:]
        return {
            at: self.came[peer][start:end].view(like[at].dtype)
            for (at, start), end in zip(starts.items(), ends, strict=True)
        }


def packing_of(rows: Sequence[Tensor]) -> Packing:
    """How tensors go to one peer."""
    return Packing.of([(row.dtype, row.numel() * row.element_size()) for row in rows])


def exchange(
    group: dist.ProcessGroup,
    rows: Sequence[Tensor],
    into: Callable[[int, int], Tensor],
    packing: Packing,
    slots: Sequence[int] = (),
) -> Mail:
    """Starts the messages to and from all peers.

    Args:
        group: of the peers.
        rows: of each tensor, [ranks, elements]: what goes to each rank; expanded where all get the same.
        into: (number of a tensor, peer) -> where what comes belongs; not asked of those that share a message.
        packing: which those are.
        slots: of that message's memory, as it comes and as it goes.
    """
    peers = [(group.rank() + step) % group.size() for step in range(1, group.size())]
    came: dict[int, Tensor] = {}
    goes: dict[int, Tensor] = {}
    packs: tuple[Tensor, ...] = ()
    if packing.offsets and peers:
        parts = {peer: [_bytes(rows[at][peer]) for at in packing.offsets] for peer in peers}
        kinds = 1 if all(row.stride(0) == 0 for row in rows) else len(peers)
        packs = tuple(
            empty(slots[at : at + 1], 0, parts[peers[0]][0], (count, packing.room))
            for at, count in enumerate((len(peers), kinds))
        )
        comes, go = (pack[:, : packing.size] for pack in packs)
        came = dict(zip(peers, comes, strict=True))
        goes = dict(zip(peers, go.expand(len(peers), -1), strict=True))
        for peer in peers[:kinds]:
            torch.cat(parts[peer], out=goes[peer])
    alone = [at for at, row in enumerate(rows) if at not in packing.offsets and row.shape[1]]
    # Places first: what tells a peer of them would else wait behind all that goes to it, and a link would carry one
    # direction after the other.
    messages = []
    for peer in peers:
        places = [into(at, peer) for at in alone]
        messages += [group.recv([x], peer, _TAG) for x in (*places, *_of(came, peer))]
    for peer in peers:
        messages += [group.send([x], peer, _TAG) for x in (*(rows[at][peer] for at in alone), *_of(goes, peer))]
    return Mail(messages, packing, came, packs)


def _bytes(row: Tensor) -> Tensor:
    """The bytes of ``row``, which lies in a row; of a single element the stride may be anything, and counts here."""
    return row.as_strided((row.numel(),), (1,)).view(torch.uint8)


def _of(packs: dict[int, Tensor], peer: int) -> tuple[Tensor, ...]:
    return (packs[peer],) if packs else ()
