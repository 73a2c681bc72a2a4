"""Messages between ranks that run on one machine, through memory that they share.

Gloo sends them through the machine's own network: two copies in the kernel, and two threads to wake before the
receiver goes on. Here the sender copies what it sends into its staging memory and tells where; the receiver reads it
from there, a sum as it adds it up. What is told goes through Unix sockets, which also tell when a peer is gone:

    told    number of the exchange, segment and offset; the segment itself (a file descriptor) when it is new; and
            which of the receiver's exchanges the sender has read, whose memory is free again

The sockets' names are abstract (unix(7)): only processes of the same network namespace reach them, nothing is left
behind by a rank that is killed.

All this is only where it is asked for, by ``SHARDC_SHARED_MEMORY=1`` in the environment of every rank: by default what
ranks send each other goes through `torch.distributed` alone. Where some rank of a group did not ask, or cannot be
reached, the group's messages go through gloo; its ranks find that out together, through the store, before their first
exchange.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.distributed import distributed_c10d as c10d

from shardc.ir.staging import Block, Part, Staging

SENT, RECEIVED = "shardc::sent", "shardc::received"  # what the profiler shows: with channel, exchange and bytes
_SWITCH = "SHARDC_SHARED_MEMORY"
_HEAD = struct.Struct("<QIQI")  # exchange, segment, offset, count of exchanges that were read
_LONGEST = 1 << 16  # bytes of a message
_MOST = 1000  # exchanges that one message tells were read
_QUEUE = 1 << 20  # bytes of messages that may wait to be received
_numbers = count()


def channel(group: dist.ProcessGroup) -> Channel | None:
    """This rank's end of ``group``, or None where not all of its ranks share memory. All of them call this at once.

    Raises:
        RuntimeError: not all of them came within the store's timeout.
    """
    if group not in _channels:
        _channels[group] = _connect(group)
    return _channels[group]


def reaches(group: dist.ProcessGroup) -> bool:
    """Whether the ranks of ``group`` share memory. All of them call this at once."""
    return channel(group) is not None


@dataclass
class _Peer:
    """Another rank of the group, and what it told."""

    rank: int
    socket: socket.socket
    segments: list[Tensor] = field(default_factory=list)  # its memory, as it is mapped here
    came: dict[int, tuple[int, int]] = field(default_factory=dict)  # exchange -> segment, offset
    read: list[int] = field(default_factory=list)  # of its exchanges, and not told yet
    unwanted: set[int] = field(default_factory=set)  # exchanges that are done here, though it told nothing yet
    shown: int = 0  # how many of this rank's segments it has

    def __post_init__(self) -> None:
        self.poll = select.poll()
        self.poll.register(self.socket, select.POLLIN)


class Channel:
    """A rank's end of a group whose ranks share memory; ranks are those of the group.

    Every rank starts the same exchanges in the same order; each is read, or given up, by all others.
    """

    def __init__(self, sockets: dict[int, socket.socket], timeout: timedelta) -> None:
        self.number = next(_numbers)
        self._timeout = timeout
        self._peers = {rank: _Peer(rank, socket) for rank, socket in sockets.items()}
        self.staging = Staging()
        self._memory: list[Tensor] = []
        self._files: list[int] = []
        self._unread: dict[int, tuple[Block, list[int]]] = {}  # exchange -> where it lies, how many have yet to read it
        self.started = 0
        self.sent = 0  # bytes, to all peers

    def start(self, parts: Sequence[tuple[Sequence[int], Sequence[Tensor]]]) -> int:
        """Sends tensors, which are free to change afterwards.

        Args:
            parts: (to whom, contiguous tensors), with one part for each peer.

        Returns:
            The number of the exchange.
        """
        sizes = [_part(tensors).size for _, tensors in parts]
        block = self.staging.take(sum(sizes))
        if block.segment == len(self._memory):
            self._add(self.staging.segments[block.segment])
        exchange, offset = self.started, block.offset
        self.started += 1
        count = sum(len(to) * sum(x.nbytes for x in tensors) for to, tensors in parts)
        self.sent += count
        self._unread[exchange] = block, [sum(len(to) for to, _ in parts)]
        with _shown(SENT, self.number, exchange, count):
            for size, (to, tensors) in zip(sizes, parts, strict=True):
                memory = self._memory[block.segment][offset : offset + size]
                torch._foreach_copy_(_pieces(memory, tensors), [x.view(-1) for x in tensors])
                for rank in to:
                    self._tell(self._peers[rank], exchange, block.segment, offset)
                offset += size
        return exchange

    def received(self, exchange: int, rank: int, like: Sequence[Tensor]) -> list[Tensor]:
        """What ``rank`` sent here, flat, of the sizes and dtypes of ``like``; it may be read until `done`.

        Raises:
            RuntimeError: the rank is gone, or sent nothing within the group's timeout.
        """
        peer = self._peers[rank]
        with _shown(RECEIVED, self.number, exchange):
            while exchange not in peer.came:
                self._hear(peer)
        segment, offset = peer.came[exchange]
        return _pieces(peer.segments[segment][offset : offset + _part(like).size], like)

    def done(self, exchange: int) -> None:
        """What the others sent in this exchange has been read, or never will be."""
        for peer in self._peers.values():
            if peer.came.pop(exchange, None) is None:
                peer.unwanted.add(exchange)
            peer.read.append(exchange)

    def _add(self, size: int) -> None:
        """Another segment of memory that peers can map."""
        file = os.memfd_create("shardc-staging")
        os.ftruncate(file, size)
        self._memory.append(_mapped(file, size))
        self._files.append(file)

    def _tell(self, peer: _Peer, exchange: int, segment: int, offset: int) -> None:
        told, peer.read = peer.read[:_MOST], peer.read[_MOST:]
        message = _HEAD.pack(exchange, segment, offset, len(told)) + struct.pack(f"<{len(told)}Q", *told)
        # A peer gets the segments in order; one that this exchange does not use may be among them.
        files, peer.shown = self._files[peer.shown :], len(self._files)
        while True:
            try:
                if files:
                    socket.send_fds(peer.socket, [message], files)
                else:
                    peer.socket.send(message)
                return
            except BlockingIOError:  # it hears nothing for long
                self._hear_all_until_free(peer)
            except OSError as error:
                raise RuntimeError(f"Connection closed by peer: rank {peer.rank} of the group ({error})") from error

    def _hear(self, peer: _Peer, wait: bool = True) -> None:
        """The next message of ``peer``; where there is none and ``wait`` is False, nothing."""
        while True:
            try:
                message, files, _, _ = socket.recv_fds(peer.socket, _LONGEST, 64)
                break
            except BlockingIOError:
                if not wait:
                    return
                self._wait(peer, peer.poll)
            except ConnectionResetError:  # told once, before what the peer said last, when it left without hearing all
                continue
        if not message:
            raise RuntimeError(f"Connection closed by peer: rank {peer.rank} of the group")
        for file in files:
            peer.segments.append(_mapped(file, os.fstat(file).st_size))
            os.close(file)
        exchange, segment, offset, told = _HEAD.unpack_from(message)
        if exchange in peer.unwanted:
            peer.unwanted.remove(exchange)
        else:
            peer.came[exchange] = segment, offset
        for read in struct.unpack_from(f"<{told}Q", message, _HEAD.size):
            block, left = self._unread[read]
            left[0] -= 1
            if not left[0]:
                del self._unread[read]
                self.staging.give(block)

    def _wait(self, peer: _Peer, poll: select.poll) -> None:
        """Until one of the events of ``poll`` is there; what it waits for is up to ``peer``."""
        seconds = self._timeout.total_seconds()
        if not poll.poll(1000 * seconds):
            raise RuntimeError(f"Timed out waiting for rank {peer.rank} of the group for {seconds:g} seconds")

    def _hear_all_until_free(self, peer: _Peer) -> None:
        """Until ``peer`` may be told more, or somebody told something: ranks that all send hear each other so."""
        talking = [(each, other) for each in _all() for other in each._peers.values()]
        poll = select.poll()
        for _, other in talking:
            poll.register(other.socket, select.POLLIN | (select.POLLOUT if other is peer else 0))
        self._wait(peer, poll)
        for each, other in talking:
            each._hear(other, wait=False)

    def close(self) -> None:
        """Hangs up; what was sent can still be read."""
        for peer in self._peers.values():
            peer.socket.close()
        while self._files:
            os.close(self._files.pop())

    def __del__(self) -> None:
        self.close()


_channels: WeakKeyDictionary[dist.ProcessGroup, Channel | None] = WeakKeyDictionary()


def staged() -> int:
    """Bytes of staging memory of this process, of all groups."""
    return sum(each.staging.size for each in _all())


def restart_peak() -> None:
    """Makes `peak` count from here on."""
    for each in _all():
        each.staging.peak = each.staging.used


def peak() -> int:
    """The most bytes of staging memory that were in use, summed over the groups."""
    return sum(each.staging.peak for each in _all())


def sent() -> int:
    """Bytes that this process has sent so far through shared memory."""
    return sum(each.sent for each in _all())


def started() -> int:
    """Exchanges that it has started so far."""
    return sum(each.started for each in _all())


def _all() -> list[Channel]:
    return [each for each in _channels.values() if each is not None]


# --- memory


def _mapped(file: int, size: int) -> Tensor:
    memory = mmap.mmap(file, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
    return torch.frombuffer(memory, dtype=torch.uint8)


def _pieces(memory: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Flat tensors of the sizes and dtypes of ``like``, one after the other in ``memory``."""
    dtypes = {x.dtype for x in like}
    if len(dtypes) == 1:
        total = sum(x.nbytes for x in like)
        return list(memory[:total].view(dtypes.pop()).split([x.numel() for x in like]))
    places = _part(like).offsets
    return [memory[at : at + x.nbytes].view(x.dtype) for at, x in zip(places, like, strict=True)]


def _part(tensors: Sequence[Tensor]) -> Part:
    return Part.of([(x.dtype, x.nbytes) for x in tensors])


class _shown:
    """A span that the profiler shows, where one runs."""

    def __init__(self, *what: object) -> None:
        self._span = record_function(" ".join(map(str, what))) if torch.autograd._profiler_enabled() else None

    def __enter__(self) -> None:
        if self._span is not None:
            self._span.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._span is not None:
            self._span.__exit__(*error)


# --- connecting


def _connect(group: dist.ProcessGroup) -> Channel | None:
    """The channel of ``group``, if all of its ranks can reach all others; they agree on it through the store."""
    ranks, rank = group.size(), group.rank()
    if ranks == 1 or dist.get_backend(group) == "fake":
        return None
    store = c10d._world.pg_map[group][1]
    name = f"shardc-{uuid.uuid4()}"
    listener = _listener(name, ranks)
    store.set(f"shardc/shared/name/{rank}", name)
    sockets: dict[int, socket.socket] = {}
    for lower in range(rank):
        reached = _reach(store.get(f"shardc/shared/name/{lower}").decode(), rank) if listener is not None else None
        if reached is None:
            break
        sockets[lower] = reached
    # A connection that nobody accepted yet counts: nobody waits for one that will not come.
    store.set(f"shardc/shared/reached/{rank}", "yes" if listener is not None and len(sockets) == rank else "no")
    everyone = all([store.get(f"shardc/shared/reached/{each}") == b"yes" for each in range(ranks)])
    if not everyone or listener is None:
        for reached in (*sockets.values(), *([listener] if listener is not None else [])):
            reached.close()
        return None
    while len(sockets) < ranks - 1:
        accepted, _ = listener.accept()
        _, uid, _ = struct.unpack("3i", accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.getuid():  # some stranger's
            accepted.close()
            continue
        sockets[int.from_bytes(accepted.recv(4), "little")] = accepted
    listener.close()
    for each in sockets.values():
        each.setblocking(False)
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _QUEUE)
    timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return Channel(sockets, timeout)


def _listener(name: str, backlog: int) -> socket.socket | None:
    """A socket that peers on this machine may connect to; None where the system has no such thing."""
    if os.environ.get(_SWITCH) != "1" or not hasattr(os, "memfd_create") or not hasattr(socket, "SO_PEERCRED"):
        return None
    try:
        os.close(os.memfd_create("shardc-staging"))
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        made.bind(f"\0{name}")
        made.listen(backlog)
    except OSError:
        return None
    return made


def _reach(name: str, rank: int) -> socket.socket | None:
    """A connection to the listener of this name, told who calls."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        made.connect(f"\0{name}")
        made.send(rank.to_bytes(4, "little"))
    except OSError:
        made.close()
        return None
    return made
