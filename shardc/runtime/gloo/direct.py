"""Kernels of collectives between CPU ranks that send messages directly: ``shardc::*_coalesced``, ``permute_ranks``.

See `shardc.ir.comm` for the ops. A shard goes from its own memory to its place in the receiver's result. Small shards
are packed into one message (`shardc.ir.arena`). Gloo's own collectives copy lists of tensors into a buffer and back,
run a reduce-scatter as an all-reduce, and take several times as long for a gather (on one machine). Sums are computed
at the wait, in rank order, so that replicas are equal bit for bit. ``shardc::permute_ranks`` is an all-to-all in which
each rank sends to one.

``shardc::send_rows_coalesced`` sends numbers of rows that are known at run time only. On a CPU, rows go in messages to
their places in the result, and small ones of several tensors share a message. On other devices they go in one
all-to-all per tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch._C._distributed_c10d import _register_work
from torch.distributed.distributed_c10d import _resolve_process_group

from shardc._compat import timeout_of
from shardc.ir.arena import LARGEST, Packing
from shardc.ir.comm import IN_MESSAGES, is_ring
from shardc.runtime.gloo.buffers import empty, lend, let_compute_first
from shardc.runtime.host import Completion
from shardc.runtime.shards import COMBINE

# Differs from tags of the user's messages on the same groups.
_TAG = 0x5A
_OWN = timedelta(0)  # as timeout of a wait: that of the group at its creation


@dataclass(frozen=True)
class Mail:
    """One collective's messages to and from all peers, while they are in flight.

    Args:
        messages: work handles of the messages.
        packing: tensors that share a message.
        received: by peer, the received bytes of the shared message; empty if there is none.
        packs: memory of the shared messages, received and sent.
    """

    messages: list[dist.Work]
    packing: Packing
    received: dict[int, Tensor]
    packs: tuple[Tensor, ...]

    def unpacked(self, peer: int, like: Sequence[Tensor]) -> dict[int, Tensor]:
        """Splits the shared message received from ``peer`` into its tensors, flat. Returns them by index in ``like``,
        which gives their dtypes.
        """
        starts = self.packing.offsets
        ends = [*starts.values(), self.packing.size][1:]  # offsets ascend, and each part ends where the next begins
        return {
            at: self.received[peer][start:end].view(like[at].dtype)
            for (at, start), end in zip(starts.items(), ends, strict=True)
        }


def packing_of(rows: Sequence[Tensor]) -> Packing:
    """Decides which of ``rows``, the tensors for one peer, share a message. Returns a `Packing` with their offsets in
    it.
    """
    return Packing.of([(row.dtype, row.nbytes) for row in rows])


def exchange(
    group: dist.ProcessGroup,
    rows: Sequence[Tensor],
    into: Callable[[int, int], Tensor],
    packing: Packing,
    slots: Sequence[int] = (),
) -> Mail:
    """Starts the messages of one collective, and returns them as `Mail`. This rank sends each peer its row of each
    tensor in ``rows``, and receives what the peer sends for that tensor into ``into(tensor number, peer)``. Small
    tensors (``packing``) share one message to each peer, the shared message; each of the others is a message.

    Args:
        rows: per tensor, [ranks, elements] with a row to send to each rank; expanded if all get the same.
        into: (tensor number, peer) -> memory to receive into; not called for packed tensors, which `Mail.unpacked` has.
        packing: tensors that share a message.
        slots: slots for the memory of the shared messages: of those received, and of those sent.
    """
    # Each rank begins with another peer, so that they do not all send to one.
    peers = [(group.rank() + step) % group.size() for step in range(1, group.size())]
    # By peer, the bytes of the shared message.
    received: dict[int, Tensor] = {}
    sent: dict[int, Tensor] = {}
    packs: tuple[Tensor, ...] = ()
    if packing.offsets and peers:
        parts = {peer: [_bytes(rows[at][peer]) for at in packing.offsets] for peer in peers}
        # Distinct messages to send: one for all peers, if all get the same.
        distinct = 1 if all(row.stride(0) == 0 for row in rows) else len(peers)
        # Two buffers: a message to receive from each peer, and the distinct ones to send.
        packs = tuple(
            empty(slots[at : at + 1], 0, like=parts[peers[0]][0], shape=(count, packing.room))
            for at, count in enumerate((len(peers), distinct))
        )
        # A row of a buffer has room for alignment behind its message.
        receive_rows, send_rows = (pack[:, : packing.size] for pack in packs)
        received = dict(zip(peers, receive_rows, strict=True))
        sent = dict(zip(peers, send_rows.expand(len(peers), -1), strict=True))  # a single row is that of all peers
        for peer in peers[:distinct]:
            torch.cat(parts[peer], out=sent[peer])
    # Tensors that do not share a message; empty ones need none.
    alone = [at for at, row in enumerate(rows) if at not in packing.offsets and row.shape[1]]
    # Receives first: the notice of a receive would otherwise queue behind the data to that peer, and a link would
    # carry one direction after the other.
    messages = []
    for peer in peers:
        places = [into(at, peer) for at in alone]
        messages += [group.recv([x], peer, _TAG) for x in (*places, *_shared_message(received, peer))]
    for peer in peers:
        single_rows = [rows[at][peer] for at in alone]
        messages += [group.send([x], peer, _TAG) for x in (*single_rows, *_shared_message(sent, peer))]
    return Mail(messages, packing, received, packs)


def _bytes(x: Tensor) -> Tensor:
    """Views ``x``, whose elements are contiguous in memory, as bytes (uint8) in one dim. A single element may have any
    stride.
    """
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


def _shared_message(packs: dict[int, Tensor], peer: int) -> tuple[Tensor, ...]:
    """Returns ``packs[peer]``, the bytes of that peer's shared message, in a tuple; () if no messages are shared."""
    return (packs[peer],) if packs else ()


_REDUCE = {
    "sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}  # fmt: skip

_library = torch.library.Library("shardc", "IMPL")


def prepare(graph: fx.Graph) -> None:
    """Configures gloo's threads if ``graph`` sends messages; called before it runs."""
    if any(node.target in IN_MESSAGES for node in graph.nodes):
        let_compute_first()


def _all_gather(inputs: list[Tensor], group_size: int, group_name: str, slots: Sequence[int] = ()) -> list[Tensor]:
    """Implements ``all_gather_into_tensor_coalesced`` on CPU ranks by direct messages. ``slots`` are those of the
    results in the memory plan, then of the shared messages.
    """
    group, rank, peers = _group(group_name)
    inputs = [x.contiguous() for x in inputs]
    gathered = [
        empty(slots, at, x, (group_size * (x.shape[0] if x.dim() else 1), *x.shape[1:])) for at, x in enumerate(inputs)
    ]
    # Each result as one row for each rank, into which that rank's shard is received.
    parts = [full.view(group_size, -1) for full in gathered]
    flat = [x.view(-1) for x in inputs]
    packing = packing_of(flat)
    rows = [x.expand(group_size, -1) for x in flat]  # all peers get the same
    mail = exchange(group, rows, lambda at, peer: parts[at][peer], packing, slots[len(gathered) :])
    # This rank's own part, while messages are in flight.
    torch._foreach_copy_([part[rank] for part in parts], flat)

    def unpack() -> None:
        for peer in peers if packing.offsets else ():
            received = mail.unpacked(peer, flat)
            torch._foreach_copy_([parts[at][peer] for at in received], list(received.values()))

    return _attach_work(gathered, mail.messages, [*inputs, *mail.packs], unpack, timeout_of(group))


def _reduce_scatter(
    inputs: list[Tensor], reduce_op: str, group_size: int, group_name: str, slots: Sequence[int] = ()
) -> list[Tensor]:
    """Implements ``reduce_scatter_tensor_coalesced`` on CPU ranks by direct messages."""
    terms = [x.contiguous().view(group_size, -1) for x in inputs]  # row r is the term of rank r's result
    shapes = [(x.shape[0] // group_size, *x.shape[1:]) for x in inputs]
    return _start_reduction(group_name, terms, shapes, reduce_op, slots)


def _all_reduce(inputs: list[Tensor], reduce_op: str, group_name: str, slots: Sequence[int] = ()) -> list[Tensor]:
    """Implements ``all_reduce_coalesced`` on CPU ranks: direct messages for two ranks, gloo's ring for more."""
    group, _, _ = _group(group_name)
    if not is_ring("all_reduce", group.size()):  # two ranks: both get all of each tensor
        terms = [x.contiguous().view(1, -1).expand(2, -1) for x in inputs]
        return _start_reduction(group_name, terms, [tuple(x.shape) for x in inputs], reduce_op, slots)
    # Sending everything to everyone is optimal for 2 ranks only. More reduce all tensors as one, in place.
    flat = empty(slots, 0, inputs[0], (sum(x.numel() for x in inputs),))
    torch.cat([x.reshape(-1) for x in inputs], out=flat)
    options = dist.AllreduceOptions()
    options.reduceOp = _REDUCE[reduce_op]  # type: ignore[assignment]  # of an average: the sum, divided at the wait
    reduced = [part.view(x.shape) for part, x in zip(flat.split([x.numel() for x in inputs]), inputs, strict=True)]
    # Gloo's threads keep a tensor for a while after the wait, and would keep the arena's memory in use.
    lent, release = lend(flat)

    def finish() -> None:
        release()
        if reduce_op == "avg":
            flat.div_(group.size())

    return _attach_work(reduced, [group.allreduce([lent], options)], [flat], finish)


def _start_reduction(
    group_name: str, terms: list[Tensor], shapes: list[tuple[int, ...]], op: str, slots: Sequence[int]
) -> list[Tensor]:
    """Starts a reduction over ranks: rank r gets row r of each tensor in ``terms``, reduced over all ranks. The
    tensors have the shape [ranks, elements].

    Args:
        shapes: shapes of the results.
        op: "sum", "avg", "max", "min" or "product".
        slots: slots of the results, then of the terms that are received, then of the shared messages.
    """
    group, rank, peers = _group(group_name)
    ranks = group.size()
    results = [empty(slots, at, term, shape) for at, (term, shape) in enumerate(zip(terms, shapes, strict=True))]
    packing = packing_of([term[rank] for term in terms])
    # The first peer's term is received into the result, others into buffers; packed tensors need neither.
    alone = [at for at in range(len(results)) if at not in packing.offsets]
    term_memory: dict[int, dict[int, Tensor]] = {}  # tensor number -> peer -> memory for the peer's term
    for number, at in enumerate(alone):
        size = results[at].numel()
        buffers = empty(slots, len(results) + number, results[at], (ranks - 2, size)) if ranks > 2 else ()
        term_memory[at] = dict(zip(peers, (results[at].view(-1), *buffers), strict=True))
    # The slots are those of the results, then of the buffers, then of the shared messages.
    first_shared = len(results) + (len(alone) if ranks > 2 else 0)
    mail = exchange(group, terms, lambda at, peer: term_memory[at][peer], packing, slots[first_shared:])

    def terms_of(sender: int) -> list[Tensor]:
        """Returns the terms of this rank's results that rank ``sender`` has, flat."""
        if sender == rank:
            return [term[rank] for term in terms]
        unpacked = mail.unpacked(sender, terms)
        return [unpacked[at] if at in unpacked else term_memory[at][sender] for at in range(len(terms))]

    def finish() -> None:
        # In rank order on every rank, so that replicas are equal bit for bit.
        for result, *rows in zip(results, *map(terms_of, range(ranks)), strict=True):
            total = result.view(-1)
            # The first peer is rank 0 or 1, so its term, which lies in `total`, is read before `total` is written.
            torch.add(rows[0], rows[1], out=total) if op in ("sum", "avg") else total.copy_(COMBINE[op](*rows[:2]))
            for row in rows[2:]:
                total.copy_(COMBINE[op](total, row))
            if op == "avg":
                total.div_(ranks)

    return _attach_work(results, mail.messages, [*terms, *mail.packs], finish, timeout_of(group))


def _group(name: str) -> tuple[dist.ProcessGroup, int, list[int]]:
    """Returns (process group of this name, this rank's index in it, the other ranks' indices)."""
    group = _resolve_process_group(name)  # type: ignore[arg-type]  # a str with a name of its own
    rank = group.rank()
    return group, rank, [peer for peer in range(group.size()) if peer != rank]


def _attach_work(
    results: list[Tensor],
    messages: Sequence[dist.Work],
    keep: Sequence[Tensor],
    finish: Callable[[], None],
    timeout: timedelta = _OWN,
) -> list[Tensor]:
    """Makes ``wait_tensor`` of each of ``results`` wait for ``messages``, then call ``finish`` (once); returns
    ``results``.

    Args:
        keep: tensors to keep alive until then.
        timeout: of the wait for each message.
    """

    def wait() -> None:
        for message in messages:
            message.wait(timeout)
        finish()

    work = Completion(wait, keep)
    # Works are registered by storage, and results may be parts of one.
    for tensor in {x.untyped_storage().data_ptr(): x for x in results}.values():
        _register_work(tensor, work)
    return results


_library.impl("all_gather_into_tensor_coalesced", _all_gather, "CPU")
_library.impl("reduce_scatter_tensor_coalesced", _reduce_scatter, "CPU")
_library.impl("all_reduce_coalesced", _all_reduce, "CPU")


def _permute_ranks(x: torch.Tensor, destinations: list[int], group_name: str) -> torch.Tensor:
    """Sends ``x`` to rank ``destinations[r]`` of the group, where r is this rank. Returns the tensor that this rank
    receives; it must be waited for.
    """
    rank = dist.get_rank(_resolve_process_group(group_name))  # type: ignore[arg-type]  # a str with a name of its own
    # Elements to and from each rank: all to one and all from one, whose destination is this rank.
    sends, receives = [0] * len(destinations), [0] * len(destinations)
    sends[destinations[rank]] = receives[destinations.index(rank)] = x.numel()
    flat = torch.ops._c10d_functional.all_to_all_single(x.reshape(-1), receives, sends, group_name)
    return flat.view(x.shape)


_library.impl("permute_ranks", _permute_ranks, "CompositeExplicitAutograd")


def _parts(inputs: Sequence[Tensor], counts: Sequence[int]) -> list[list[Tensor]]:
    """Splits the rows of each of ``inputs`` by ``counts``, the rows per rank; returns for each rank a list of parts."""
    edges = [0, *accumulate(counts)]
    return [[x[start:end] for x in inputs] for start, end in pairwise(edges)]


def _share_message(parts: Sequence[Tensor]) -> bool:
    """Returns whether ``parts``, the tensors for one peer, are sent as one message. They are if there are several and
    they are small in total. Sender and receiver decide alike, as both know the sizes.
    """
    return len(parts) > 1 and sum(x.nbytes for x in parts) <= LARGEST


def _send_by_messages(
    inputs: list[Tensor], sends: Tensor, receives: Tensor, rows: int, group_name: str
) -> list[Tensor]:
    """Implements ``send_rows_coalesced`` on CPU ranks by direct messages: sends rows of each of ``inputs``, sorted by
    rank, and returns for each the rows that come, sorted by the rank that sent them.

    Args:
        sends, receives: number of rows to and from each rank of the group.
        rows: rows of the results, at least as many as come.
    """
    group, rank, peers = _group(group_name)
    inputs = [x.contiguous() for x in inputs]
    received = [x.new_empty((rows, *x.shape[1:])) for x in inputs]
    outgoing, incoming = _parts(inputs, sends.tolist()), _parts(received, receives.tolist())
    messages: list[dist.Work] = []
    alive = list(inputs)  # memory that messages read until they are done
    unpack: list[tuple[Tensor, list[Tensor]]] = []  # (shared message, the places of its tensors in the results)
    # Receives first, as in `exchange`.
    for peer in peers:
        places = incoming[peer]
        if not places[0].numel():  # no rows of any tensor
            continue
        if _share_message(places):
            pack = torch.empty(sum(x.nbytes for x in places), dtype=torch.uint8)
            unpack.append((pack, places))
            places = [pack]
        messages += [group.recv([x], peer, _TAG) for x in places]
    for peer in peers:
        parts = outgoing[peer]
        if not parts[0].numel():
            continue
        if _share_message(parts):
            parts = [torch.cat([_bytes(x) for x in parts])]
            alive += parts
        messages += [group.send([x], peer, _TAG) for x in parts]
    for target, source in zip(incoming[rank], outgoing[rank], strict=True):  # rows that stay on this rank
        target.copy_(source)

    def finish() -> None:
        for pack, places in unpack:
            for place, part in zip(places, pack.split([x.nbytes for x in places]), strict=True):
                # The copy starts at an address that fits the dtype.
                place.copy_(part.clone().view(place.dtype).view(place.shape))

    return _attach_work(received, messages, alive, finish, timeout_of(group))


def _send_by_all_to_all(
    inputs: list[Tensor], sends: Tensor, receives: Tensor, rows: int, group_name: str
) -> list[Tensor]:
    """Implements ``send_rows_coalesced`` by one all-to-all per tensor; arguments as `_send_by_messages`."""
    group, _, _ = _group(group_name)
    goes, comes = sends.tolist(), receives.tolist()
    received = [x.new_empty((rows, *x.shape[1:])) for x in inputs]
    works = [
        # Results and operands may have unused rows at their end.
        dist.all_to_all_single(to[: sum(comes)], x[: sum(goes)].contiguous(), comes, goes, group, async_op=True)
        for to, x in zip(received, inputs, strict=True)
    ]
    return _attach_work(received, works, inputs, lambda: None)


_KERNELS: dict[str, Callable[..., list[Tensor]]] = {"CPU": _send_by_messages, "CUDA": _send_by_all_to_all}
for _key, _kernel in _KERNELS.items():
    _library.impl("send_rows_coalesced", _kernel, _key)
