"""Blocks of keys that one rank's queries attend to, in order, each with its source rank and its mask (`KeyBlocks`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import inf, prod

import torch

from shardc.ir.comm import WAIT
from shardc.ir.layout import Digit, Digits, refine, strides
from shardc.rules.positions import positions
from shardc.rules.rule import Emitted, Local

aten, functional = torch.ops.aten, torch.ops._c10d_functional


@dataclass(frozen=True)
class KeyBlock:
    """A block of keys (and values) that a rank's queries attend to in one kernel call. Keys have the shape [batch b,
    heads g, keys k, head dim e].

    Args:
        take: function that selects the block from this rank's shard or, if keys are gathered, from [ranks, b, g, k, e].
        back: function that maps a gradient of the block to one of the shard that contains it, with zeros elsewhere.
        source: index of the rank of this shard, if keys are gathered; else 0.
        bias: tensor to add to the scores; None for none.
        causal: whether query i attends to keys 0 to i of the block only.
        later: bool [], true if query i must not attend to key i (the block's keys are one position later than the
            queries); None if that never holds.
        blind: bool [..., q], the queries that attend to no key of the block; None if there are none.
        columns: int64 [k], global positions of the keys, for a kernel that masks by these; None for 0, 1, 2, ...
    """

    take: Callable[[Emitted], Emitted]
    back: Callable[[Emitted], Emitted]
    source: int = 0
    bias: Emitted | None = None
    causal: bool = False
    later: Emitted | None = None
    blind: Emitted | None = None
    columns: Emitted | None = None

    @property
    def mask_options(self) -> dict[str, Emitted]:
        """Return keyword arguments of the kernel: ``{"later": later}``, or {} if ``later`` is None."""
        return {} if self.later is None else {"later": self.later}


class KeyBlocks:
    """Enumeration of the blocks of keys that one rank's queries attend to; emits the communication of keys.

    Axes that split queries and keys (``sent``) move keys between ranks: gathered, or passed around a ring. Axes that
    split keys only (``pending``) leave partial results, which the caller combines by their log-sum-exp.

    Attributes:
        query, key: layouts of queries and keys; dim 2 is the sequence.
        ranks, group: number of ranks along ``sent``, and name of their process group.
        gathers: whether keys are gathered; else ``ranks`` pass them around a ring (with one rank, nothing is sent).
        keys: number of keys without padding.
        has_all_keys: whether each rank has all keys.
        masks_padding: whether some keys are padding that a mask must hide.
    """

    def __init__(self, local: Local) -> None:
        self.local, self.run = local, local.builder.call
        self.mesh = local.operands[0].mesh
        self.query, self.key = local.operand_layout("query"), local.operand_layout("key")
        split = self.key.dim_axes(2)
        # Axes that split queries as well: keys travel over these. Over the others a sum is left pending.
        both = [axis for axis in self.query.dim_axes(2) if axis in split]
        self.sent = tuple(sorted(both, key=self.mesh.order))
        self.pending = tuple(sorted((axis for axis in split if axis not in both), key=self.mesh.order))
        self.ranks, self.group = local.builder.group(self.sent) if self.sent else (1, "")
        self.gathers = bool(self.sent) and not local.call["around"]
        self.packed: Emitted | None = None  # key and value as one contiguous tensor, ready to send
        self.keys: int = local.call["keys"]
        # Dim 2 of the first operand, the query or the gradient of the output, has the queries.
        queries = local.true_size(2, self.query.shape[2])
        # Padding is behind all keys; with a causal mask no query of the sequence sees it, so it needs no mask.
        causal_hides_padding = "causal" in local.call and local.call["causal"] and queries <= self.keys
        self.has_all_keys = not split
        # Where keys are whole, the kernel gets their number without padding instead.
        self.masks_padding = self.key.shape[2] != self.keys and not self.has_all_keys and not causal_hides_padding

    def blocks(self) -> Iterator[KeyBlock]:
        """Yield the blocks: one of all keys if no axis splits the sequence, or if keys are gathered and cannot be cut
        into causal stripes; else one per stripe (every n-th key) of each rank or, without stripes, one per rank.
        """
        causal = self.local.call["causal"]
        if self.has_all_keys and not self.query.dim_axes(2):  # the sequence is not split: as on a single device
            yield KeyBlock(_same, _same, bias=self.local.operand("bias"), causal=causal)
            return
        # Stripes need no mask as a tensor: they are causal by themselves. Else the bias contains the mask.
        stripes = self._stripe_digits() if causal and not self.masks_padding else None
        if self.gathers and stripes is None:  # the keys of all ranks, one rank after the other
            bias, blind = self._bias([self._coordinates(source) for source in range(self.ranks)])
            yield KeyBlock(self._concatenated, self._split_by_rank, 0, bias, blind=blind)
            return
        for number in range(self.ranks):  # of the rank that has the keys or, in a ring, its distance from this rank
            if stripes is None:
                bias, blind = self._bias([self._coordinates(number)])
                yield KeyBlock(*self._shard_functions(number), number, bias, blind=blind)
            else:
                yield from self._striped(stripes, number)

    def by_position(self) -> Iterator[KeyBlock]:
        """Yield the blocks for a kernel that masks by the global positions of keys (`KeyBlock.columns`), without bias:
        a block of all keys that are here, or in a ring one of each rank's.
        """
        if self.has_all_keys:  # keys 0, 1, 2, ...
            yield KeyBlock(_same, _same)
        elif self.gathers and not self.pending:  # all keys, which this puts in order: again 0, 1, 2, ...
            yield KeyBlock(self._in_order, self._out_of_order)
        elif self.gathers:  # a part of all keys: other ranks along `pending` have the rest
            yield KeyBlock(self._concatenated, self._split_by_rank, columns=self._columns(*range(self.ranks)))
        else:
            for number in range(self.ranks):
                yield KeyBlock(*self._shard_functions(number), source=number, columns=self._columns(number))

    def _columns(self, *numbers: int) -> Emitted:
        """Return the global positions of the keys of several ranks, one rank after the other: int64 [k], emitted once.
        ``numbers`` are the ranks' numbers (in a ring, their distances from this rank), as in `_coordinates`.
        """
        key = ("columns", self.gathers, self.sent, self.key.shape[2], self.key.dims[2], numbers)
        return self.local.builder.once(key, lambda: self._key_positions([self._coordinates(n) for n in numbers]))

    def _shard_functions(self, number: int) -> tuple[Callable[[Emitted], Emitted], Callable[[Emitted], Emitted]]:
        """Return the functions `KeyBlock.take` and `KeyBlock.back` of the shard of rank ``number`` (see
        `_coordinates`).
        """
        if self.gathers:  # `total` collects the gradients by source
            return partial(self._shard_of, number), _same
        # In a ring, keys come from that rank, and their gradients go back the same way.
        return partial(self._sent, shift=number), partial(self._sent, shift=-number)

    def joined(self, key: Emitted, value: Emitted) -> list[Emitted]:
        """Return a list of one tensor, key and value concatenated to [2 b, g, k, e], so that they are sent as one
        message. Return [key, value] if they are not sent or have different shapes.
        """
        shape = self.local.builder.shape
        if not self.sent or shape(key)[1:] != shape(value)[1:]:
            return [key, value]
        self.packed = self.run(aten.cat.default, [key, value])  # contiguous: `_contiguous` does not copy it again
        return [self.packed]

    def parted(self, tensors: list[Emitted]) -> list[Emitted]:
        """Return [keys, values], split off the result of `joined` or a block of it; [keys, values] itself is returned
        unchanged.
        """
        if len(tensors) == 2:
            return tensors
        half = self.local.builder.shape(tensors[0])[0] // 2
        return [self.run(aten.slice.Tensor, tensors[0], 0, at, at + half) for at in (0, half)]

    def with_keys(self, blocks: Iterator[KeyBlock]) -> Iterator[tuple[KeyBlock, Emitted, Emitted]]:
        """Yield each of ``blocks`` with its keys and its values. Emits the communication that brings them here."""
        # Where their shapes allow it, keys and values travel as one tensor.
        shards = self.joined(self.local.operand("key"), self.local.operand("value"))
        if self.gathers:
            shards = [gathered(self.local, x, self._contiguous(x), self.ranks, self.group) for x in shards]
        for block in blocks:
            keys, values = self.parted([block.take(x) for x in shards])
            yield block, keys, values

    def gradients(
        self, blocks: Iterator[KeyBlock], of_block: Callable[[KeyBlock, Emitted, Emitted], Sequence[Emitted]]
    ) -> list[Emitted]:
        """Return the gradients of this rank's query, key and value, and of further tensors, summed over ``blocks``.

        Args:
            of_block: function of a block, its keys and its values that emits and returns the gradients for this block.
        """
        sources: list[int] = []
        of_keys: list[list[Emitted]] = []
        of_others: list[list[Emitted]] = []
        for block, keys, values in self.with_keys(blocks):
            dq, dk, dv, *rest = of_block(block, keys, values)
            # Gradients of keys go back to the rank of the keys, the others stay.
            of_others.append([dq, *rest])
            sources.append(block.source)
            of_keys.append([block.back(x) for x in self.joined(dk, dv)])
        totals = [self.total(list(zip(sources, parts, strict=True))) for parts in zip(*of_keys, strict=True)]
        dq, *rest = (added(self.local, list(parts)) for parts in zip(*of_others, strict=True))
        grads = [dq, *self.parted(totals)]
        # Sums of several blocks may be in float32 (`added`); gradients of a single block have the call's dtype.
        return [*([narrow(self.local, x) for x in grads] if len(sources) > 1 else grads), *rest]

    def total(self, parts: list[tuple[int, Emitted]]) -> Emitted:
        """Return the gradient of this rank's keys or values (or both, as `joined`), summed over blocks and ranks.

        If keys are gathered, it emits a reduce-scatter. In a ring `KeyBlock.back` has sent each gradient to this rank.

        Args:
            parts: (`KeyBlock.source`, gradient after `KeyBlock.back`) of each block.
        """
        if not self.gathers:
            return added(self.local, [x for _, x in parts])
        # Keys are gathered: [ranks, b, g, k, e], with the gradient of each rank's shard.
        if len(parts) == 1:  # a block of the keys of all ranks
            gradient = parts[0][1]
        else:  # blocks of one rank's keys each
            sums = [added(self.local, [x for at, x in parts if at == source]) for source in range(self.ranks)]
            gradient = self.run(aten.stack.default, [narrow(self.local, x) for x in sums])
        # A reduce-scatter cuts dim 0, so ranks and batch become one dim.
        shape = self.local.builder.shape(gradient)
        gradient = self._contiguous(self.run(aten.reshape.default, gradient, [shape[0] * shape[1], *shape[2:]]))
        started = self.run(functional.reduce_scatter_tensor.default, gradient, "sum", self.ranks, self.group)
        return self.run(WAIT, started)

    def _contiguous(self, x: Emitted) -> Emitted:
        """Return ``x`` in contiguous memory, as a message requires."""
        if x is self.packed:  # the result of a cat is contiguous
            return x
        return self.run(aten.clone.default, x, memory_format=torch.contiguous_format)

    def _shard_of(self, source: int, x: Emitted) -> Emitted:
        """Return the shard of rank ``source``, selected from the gathered keys ``x`` [ranks, b, g, k, e]."""
        return self.run(aten.select.int, x, 0, source)

    def _concatenated(self, x: Emitted) -> Emitted:
        """Return the shards of all ranks in ``x`` [ranks, b, g, k, e], concatenated along the sequence: [b, g, ranks *
        k, e].
        """
        n, b, g, k, e = self.local.builder.shape(x)
        return self.run(aten.reshape.default, self.run(aten.permute.default, x, [1, 2, 0, 3, 4]), [b, g, n * k, e])

    def _split_by_rank(self, x: Emitted) -> Emitted:
        """Return ``x`` [b, g, ranks * k, e] split into [ranks, b, g, k, e]: the gradient of `_concatenated`."""
        b, g, k, e = self.local.builder.shape(x)
        x = self.run(aten.reshape.default, x, [b, g, self.ranks, k // self.ranks, e])
        return self.run(aten.permute.default, x, [2, 0, 1, 3, 4])

    def _in_order(self, x: Emitted) -> Emitted:
        """Return the shards of all ranks in ``x`` [ranks, b, g, k, e], concatenated in the order of the sequence: [b,
        g, ranks * k, e].
        """
        n, b, g, k, e = self.local.builder.shape(x)
        sizes, order = self._order(b, g, e)
        x = self.run(aten.permute.default, self.run(aten.reshape.default, x, sizes), order)
        return self.run(aten.reshape.default, x, [b, g, n * k, e])

    def _out_of_order(self, x: Emitted) -> Emitted:
        """Return ``x`` [b, g, ranks * k, e] split into [ranks, b, g, k, e]: the gradient of `_in_order`."""
        b, g, k, e = self.local.builder.shape(x)
        sizes, order = self._order(b, g, e)
        x = self.run(aten.reshape.default, x, [sizes[at] for at in order])
        x = self.run(aten.permute.default, x, [order.index(at) for at in range(len(order))])
        return self.run(aten.reshape.default, x, [self.ranks, b, g, k // self.ranks, e])

    def _order(self, b: int, g: int, e: int) -> tuple[list[int], list[int]]:
        """Return how gathered keys, [ranks, b, g, k, e], are put in the order of the sequence: the sizes to view them
        by, and a permutation of the dims of that view to (b, g, digits of the sequence from major to minor, e).

        The view has one dim for each axis of ``sent`` (in place of the ranks) and one for each local digit of the
        sequence (in place of k). So there each digit of the sequence (`Layout`) is a dim.
        """
        digits = self.key.dims[2]
        local_radices = [digit.radix for digit in digits if digit.axis is None]
        # Dims of the view: the axes of `sent`, b, g, the local digits, e.
        b_at, g_at, first_local = (len(self.sent) + at for at in range(3))
        local_dims = iter(range(first_local, first_local + len(local_radices)))
        sequence = [next(local_dims) if digit.axis is None else self.sent.index(digit.axis) for digit in digits]
        sizes = [*(self.mesh.size(axis) for axis in self.sent), b, g, *local_radices, e]
        return sizes, [b_at, g_at, *sequence, len(sizes) - 1]

    def _sent(self, x: Emitted, shift: int) -> Emitted:
        """Emit a send to the rank ``shift`` positions later in the ring of ranks; return ``x`` of the rank ``shift``
        positions earlier.
        """
        if shift == 0:
            return x
        to = [(rank + shift) % self.ranks for rank in range(self.ranks)]  # where each rank's ``x`` goes
        x = self._contiguous(x)
        return self.run(WAIT, self.run(torch.ops.shardc.permute_ranks.default, x, to, self.group))

    def _coordinates(self, number: int) -> dict[str, Emitted]:
        """Return axis -> index of the rank that keys come from: rank ``number`` if keys are gathered, else the rank
        ``number`` positions earlier in the ring. Axes that are missing have this rank's index.
        """
        if not self.gathers and number == 0:  # this rank itself
            return {}
        # The same for all ranks if keys are gathered (an int); in a ring it depends on this rank (a tensor).
        rank: Emitted = number
        if not self.gathers:
            rank = self.run(aten.sub.Tensor, self.local.builder.coordinate(self.sent), number)
            rank = self.run(aten.remainder.Scalar, rank, self.ranks)
        # A rank's number has its indices along the axes as digits, that of the first axis major.
        out, below = dict[str, Emitted](), self.ranks
        for axis in self.sent:
            size = self.mesh.size(axis)
            below //= size
            if isinstance(rank, int):
                out[axis] = rank // below % size
                continue
            index = rank if below == 1 else self.run(aten.div.Tensor_mode, rank, below, rounding_mode="floor")
            out[axis] = index if axis == self.sent[0] else self.run(aten.remainder.Scalar, index, size)
        return out

    # --- causal blocks, for the kernel's own causal mode

    def _stripe_digits(self) -> Digits | None:
        """Return the minor digits (factors of the sequence) of the keys, which number their stripes: stripe s of n has
        the keys s, s + n, s + 2 n, ... Return None if the keys cannot be cut into stripes that match the split of the
        queries.

        With stripes a causal mask is causal within each block, so that the kernel's own causal mode can be used.
        Requires that a rank's queries are a stripe too: its axes are the minor digits of the sequence. Then queries
        and stripe have exactly one element each in every run of n neighbours, and query i of the rank sees the keys 0
        to i of the stripe, or 0 to i - 1.
        """
        digits = self.query.dims[2]
        bound = [digit for digit in digits if digit.axis is not None]
        if not bound or digits[len(digits) - len(bound) :] != tuple(bound) or self.pending:
            return None
        # The strides at which the queries' bound digits begin and end: from the length n of a run down to 1.
        cuts = [prod(d.radix for d in bound[at:]) for at in range(len(bound) + 1)]
        run_length = cuts[0]
        if self.key.shape[2] % run_length and self.has_all_keys:
            return tuple(Digit(d.radix) for d in bound)  # keys are not split: the last run may be shorter
        fine = refine(self.mesh, self.key.dims[2], cuts)
        if fine is None:
            return None
        by_stride = list(zip(fine, strides(fine), strict=True))
        minor = tuple(d for d, stride in by_stride if stride < run_length)
        # Keys that an axis splits above the runs: a rank has no key in some runs.
        if any(d.axis is not None for d, stride in by_stride if stride >= run_length):
            return None
        # Each minor digit of the keys must be one of the queries, split over the same axis or local.
        if len(minor) != len(bound) or any(d.axis not in (None, a.axis) for d, a in zip(minor, bound, strict=True)):
            return None
        return minor

    def _striped(self, minor: Digits, source: int) -> Iterator[KeyBlock]:
        """Yield a block for each stripe (every n-th key of the sequence) of the keys of one rank. A stripe and this
        rank's queries have one element each in every run of n neighbours.

        Args:
            minor: digits of the sequence that number the stripes (`_stripe_digits`): n is the product of their radices.
                Where a digit is local, the rank has the stripes of all its values; else that of its coordinate.
            source: number of the rank whose keys they are, as in `_coordinates`.
        """
        source_index, (take, back) = self._coordinates(source), self._shard_functions(source)
        axes = [digit.axis for digit in self.query.dims[2] if digit.axis is not None]
        stripes_per_rank = prod(d.radix for d in minor if d.axis is None)
        # The keys of the shard that are cut into stripes: if it has all keys, those that are not padding.
        length = min(self.keys, self.key.shape[2]) if self.has_all_keys else self.key.local_shape[2]
        # A stripe of the rank is a value of each local digit.
        for values in product(*(range(d.radix) if d.axis is None else (None,) for d in minor)):
            # Where this rank's queries and the keys of the stripe are in each run: sums of digit * stride. And the
            # number of the stripe among those of the rank, from its local digits.
            query_offset, key_offset = None, None
            number, stride = 0, prod(d.radix for d in minor)
            for axis, value, digit in zip(axes, values, minor, strict=True):
                stride //= digit.radix
                query_term = _times(self.run, self.local.builder.coordinate((axis,)), stride)
                if value is not None:
                    number = number * digit.radix + value
                    key_term: Emitted = value * stride
                else:  # an axis that is not in `source_index` has the same index on both ranks
                    key_term = _times(self.run, source_index[axis], stride) if axis in source_index else query_term
                query_offset = _add(self.run, query_offset, query_term)
                key_offset = _add(self.run, key_offset, key_term)
            # Causal: query i sees key i of the block only if that does not come later in their run.
            later = None
            # A rank's own keys have the offsets of its queries, so none comes later; nor does the first key of a run.
            own_piece = not self.gathers and source == 0 and stripes_per_rank == 1
            if not own_piece and not (isinstance(key_offset, int) and key_offset == 0):
                is_before = aten.lt.Scalar if isinstance(key_offset, int) else aten.lt.Tensor
                later = self.run(aten.squeeze.dim, self.run(is_before, query_offset, key_offset), 0)
            if stripes_per_rank == 1:  # all keys of the rank
                yield KeyBlock(take, back, source, causal=True, later=later)
                continue
            cut, uncut = (partial(f, number, stripes_per_rank, length) for f in (self._stripe, self._unstripe))
            yield KeyBlock(_composed(take, cut), _composed(uncut, back), source, causal=True, later=later)

    def _stripe(self, number: int, step: int, length: int, x: Emitted) -> Emitted:
        """Return elements ``number``, ``number + step``, ... below ``length`` of ``x`` along the sequence."""
        return self.run(aten.slice.Tensor, x, 2, number, length, step)

    def _unstripe(self, number: int, step: int, length: int, x: Emitted) -> Emitted:
        """Return zeros with element i of ``x`` at position ``number + i * step`` of the sequence: the gradient of
        `_stripe`, with the same arguments (``length`` is not needed).
        """
        b, g, n, e = self.local.builder.shape(x)
        full = self.key.local_shape[2]
        # Each element becomes a row of ``step`` elements, zeros but for place ``number``; rows are then concatenated.
        x = self.run(aten.unsqueeze.default, x, 3)
        x = self.run(aten.constant_pad_nd.default, x, [0, 0, number, step - number - 1], 0.0)
        x = self.run(aten.reshape.default, x, [b, g, n * step, e])
        # Where ``step`` does not divide the keys, or some are padding, the end is cut off or filled with zeros.
        if n * step == full:
            return x
        if n * step > full:
            return self.run(aten.slice.Tensor, x, 2, 0, full)
        return self.run(aten.constant_pad_nd.default, x, [0, 0, 0, full - n * step], 0.0)

    # --- masks by position in the unsharded sequence

    def _bias(self, ranks: Sequence[dict[str, Emitted]]) -> tuple[Emitted, Emitted]:
        """Return the bias of a block's scores, and the mask of the queries that see no key of the block.

        Either is None if it is not needed.

        Args:
            ranks: coordinates (`_coordinates`) of each rank whose keys are in the block.
        """
        call, run = self.local.call, self.run
        bias = self.local.operand("bias")
        # A rank has the bias for all keys, of which it selects the columns of this block's keys.
        if bias is not None and not self.has_all_keys and call["bias"].shape[-1] > 1:
            columns = self._key_positions(ranks)
            if self.key.shape[2] != self.keys:  # padding has no column; queries do not see it, so any will do
                columns = run(aten.clamp.default, columns, 0, self.keys - 1)
            bias = run(aten.index_select.default, bias, len(call["bias"].shape) - 1, columns)
        if (hidden := self._hidden(ranks)) is not None:  # as a term of the scores: -inf where hidden, else 0
            hidden = run(aten.reshape.default, hidden, [1, 1, *self.local.builder.shape(hidden)])
            mask = run(aten._to_copy.default, hidden, dtype=call.operands[call.position("query") or 0].dtype)
            mask = run(aten.where.ScalarOther, hidden, run(aten.full_like.default, mask, -inf), 0.0)
            bias = mask if bias is None else run(aten.add.Tensor, bias, mask)
        # In a block of all keys, a query sees none only if it sees none on a single device: the kernel's result for it
        # is right then.
        if bias is None or self.has_all_keys or (self.gathers and not self.pending):
            return bias, None
        # A query sees no key of the block if all of its scores are -inf.
        return bias, run(aten.eq.Scalar, run(aten.amax.default, bias, [-1]), -inf)

    def _hidden(self, ranks: Sequence[dict[str, Emitted]]) -> Emitted | None:
        """Return the mask of the keys of ``ranks`` that a query must not see, later keys and padding: bool [q or 1, k];
        None if there are none.
        """
        run, causal, hidden = self.run, self.local.call["causal"], None
        if not causal and not self.masks_padding:
            return None
        columns = self._key_positions(ranks)
        if causal:  # keys at later positions than the query's
            rows = run(aten.unsqueeze.default, positions(self.local, self.query, 2, None), 1)
            hidden = run(aten.gt.Tensor, run(aten.unsqueeze.default, columns, 0), rows)
        if self.masks_padding:
            padding = run(aten.unsqueeze.default, run(aten.ge.Scalar, columns, self.keys), 0)
            hidden = padding if hidden is None else run(aten.logical_or.default, hidden, padding)
        return hidden

    def _key_positions(self, ranks: Sequence[dict[str, Emitted]]) -> Emitted:
        """Return the global positions of the keys of ``ranks``, one after the other: int64 [k]."""
        per_rank = [positions(self.local, self.key, 2, None, at) for at in ranks]
        return per_rank[0] if len(per_rank) == 1 else self.run(aten.cat.default, per_rank)


def _add(run: Callable[..., Emitted], left: Emitted | None, right: Emitted) -> Emitted:
    """Return ``left + right``, emitted by ``run``; either may be an int. Without ``left`` (None) return ``right``."""
    if left is None:
        return right
    if isinstance(left, int) and isinstance(right, int):
        return left + right
    return run(aten.add.Tensor, *((right, left) if isinstance(left, int) else (left, right)))


def _times(run: Callable[..., Emitted], x: Emitted, by: int) -> Emitted:
    """Return ``x * by``, emitted by ``run``; ``x`` may be an int."""
    return x * by if isinstance(x, int) else x if by == 1 else run(aten.mul.Tensor, x, by)


def gathered(local: Local, x: Emitted, message: Emitted, ranks: int, group: str) -> Emitted:
    """Emit an all-gather of ``message``, which is ``x`` in contiguous memory, over the ``ranks`` of ``group``, and wait
    for it; return the result, [ranks, *shape of x].
    """
    call = local.builder.call
    started = call(functional.all_gather_into_tensor.default, message, ranks, group)
    return call(aten.reshape.default, call(WAIT, started), [ranks, *local.builder.shape(x)])


def _same(x: Emitted) -> Emitted:
    """Return ``x`` itself."""
    return x


def added(local: Local, parts: list[Emitted]) -> Emitted:
    """Return the sum of ``parts``, in float32 if there are several of a 16-bit dtype."""
    if len(parts) == 1:
        return parts[0]
    total = wide(local, parts[0])
    for x in parts[1:]:
        total = local.builder.call(aten.add.Tensor, total, wide(local, x))
    return total


def _composed(
    first: Callable[[Emitted], Emitted], second: Callable[[Emitted], Emitted]
) -> Callable[[Emitted], Emitted]:
    """Return the function that applies ``first``, then ``second``."""
    return lambda x: second(first(x))


def wide(local: Local, x: Emitted) -> Emitted:
    """Cast ``x`` to float32 if the call computes in a 16-bit dtype; else return it unchanged."""
    return local.builder.call(aten._to_copy.default, x, dtype=torch.float32) if _is_16_bit(local) else x


def narrow(local: Local, x: Emitted) -> Emitted:
    """Cast ``x`` from float32 to the call's dtype, if this is a 16-bit one; else return it unchanged."""
    dtype = local.call.operands[0].dtype
    return local.builder.call(aten._to_copy.default, x, dtype=dtype) if _is_16_bit(local) else x


def _is_16_bit(local: Local) -> bool:
    """Return whether the call computes in a 16-bit dtype."""
    return local.call.operands[0].dtype in (torch.float16, torch.bfloat16)
