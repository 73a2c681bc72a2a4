"""The keys that one rank's queries see, piece by piece: where each comes from, and what masks it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import inf, prod
from typing import Any

import torch

from shardc.ir.comm import WAIT
from shardc.ir.layout import Digit, Digits, refine, strides
from shardc.rules.positions import positions
from shardc.rules.rule import Local

aten, functional = torch.ops.aten, torch.ops._c10d_functional


@dataclass(frozen=True)
class Piece:
    """Keys that a rank's queries see at once.

    Args:
        take: of keys or values, those of the piece.
        back: the gradient of the piece, as one of all that the rank holds from which they came.
        source: where that rank stands among those whose keys are gathered; else 0.
        bias: added to the scores; None for nothing.
        causal: query i sees the keys up to i of the piece.
        later: bool [], whether it sees the keys before i alone; None: it never is so.
        blind: bool [..., q], which queries see none of it; None: all see some.
    """

    take: Callable[[Any], Any]
    back: Callable[[Any], Any]
    source: int = 0
    bias: Any = None
    causal: bool = False
    later: Any = None
    blind: Any = None

    @property
    def when(self) -> dict[str, Any]:
        return {} if self.later is None else {"later": self.later}


class Pieces:
    """The pieces of the keys, as one rank sees them."""

    def __init__(self, local: Local) -> None:
        self.local, self.run = local, local.builder.call
        self.mesh = local.operands[0].mesh
        self.query, self.key = local.operand_layout("query"), local.operand_layout("key")
        split = self.key.dim_axes(2)
        both = [axis for axis in self.query.dim_axes(2) if axis in split]
        self.sent = tuple(sorted(both, key=self.mesh.order))
        self.pending = tuple(sorted((axis for axis in split if axis not in both), key=self.mesh.order))
        self.ranks, self.group = local.builder.group(self.sent) if self.sent else (1, "")
        self.gathers = bool(self.sent) and not local.call["around"]
        self.packed: Any = None  # what lies as messages do
        self.keys: int = local.call["keys"]
        seen = local.true_size(2, self.query.shape[2])
        # What fills the keys up stands behind all of them, where no causal query of the sequence sees it.
        hides = local.call["causal"] and seen <= self.keys
        self.whole = not split
        self.filled = self.key.shape[2] != self.keys and not self.whole and not hides

    def each(self) -> Iterator[Piece]:
        causal = self.local.call["causal"]
        if self.whole and not self.query.dim_axes(2):
            yield Piece(_same, _same, bias=self.local.operand("bias"), causal=causal)
            return
        stripes = self._stripes() if causal and not self.filled else None
        if self.gathers and stripes is None:
            bias, blind = self._bias([self._coordinates(source) for source in range(self.ranks)])
            yield Piece(self._in_a_row, self._by_source, 0, bias, blind=blind)
            return
        for number in range(self.ranks):
            at = self._coordinates(number)
            if self.gathers:
                come, go = partial(self._of_source, number), _same
            else:
                come, go = partial(self._sent, shift=number), partial(self._sent, shift=-number)
            if stripes is None:
                bias, blind = self._bias([at])
                yield Piece(come, go, number, bias, blind=blind)
            else:
                yield from self._striped(stripes, number, at, come, go)

    def joined(self, key: Any, value: Any) -> list[Any]:
        """Both as one tensor, [2 b, g, k, e], where they are sent and can be: one message for two."""
        shape = self.local.builder.shape
        if not self.sent or shape(key)[1:] != shape(value)[1:]:
            return [key, value]
        self.packed = self.run(aten.cat.default, [key, value])
        return [self.packed]

    def parted(self, tensors: list[Any]) -> list[Any]:
        """Key and value of what `joined` made, or of pieces of it."""
        if len(tensors) == 2:
            return tensors
        half = self.local.builder.shape(tensors[0])[0] // 2
        return [self.run(aten.slice.Tensor, tensors[0], 0, at, at + half) for at in (0, half)]

    def reached(self, tensors: list[Any]) -> list[Any]:
        """What pieces are taken of: where keys are gathered, [ranks, b, g, k, e]."""
        out = []
        for x in tensors if self.gathers else ():
            started = self.run(functional.all_gather_into_tensor.default, self._packed(x), self.ranks, self.group)
            shape = [self.ranks, *self.local.builder.shape(x)]
            out.append(self.run(aten.reshape.default, self.run(WAIT, started), shape))
        return out or tensors

    def total(self, parts: list[tuple[int, Any]]) -> Any:
        """The gradient of this rank's keys or values, of those of pieces by where these came from."""
        if not self.gathers:
            return added(self.local, [x for _, x in parts])
        if len(parts) == 1:
            every = parts[0][1]
        else:
            sums = [added(self.local, [x for at, x in parts if at == source]) for source in range(self.ranks)]
            every = self.run(aten.stack.default, [narrow(self.local, x) for x in sums])
        shape = self.local.builder.shape(every)
        every = self.run(aten.reshape.default, every, [shape[0] * shape[1], *shape[2:]])
        every = self._packed(every)
        return self.run(WAIT, self.run(functional.reduce_scatter_tensor.default, every, "sum", self.ranks, self.group))

    def _packed(self, x: Any) -> Any:
        if x is self.packed:
            return x
        return self.run(aten.clone.default, x, memory_format=torch.contiguous_format)

    def _of_source(self, source: int, x: Any) -> Any:
        return self.run(aten.select.int, x, 0, source)

    def _in_a_row(self, x: Any) -> Any:
        """What ranks hold, one behind the other: [b, g, ranks * k, e]."""
        n, b, g, k, e = self.local.builder.shape(x)
        return self.run(aten.reshape.default, self.run(aten.permute.default, x, [1, 2, 0, 3, 4]), [b, g, n * k, e])

    def _by_source(self, x: Any) -> Any:
        b, g, k, e = self.local.builder.shape(x)
        x = self.run(aten.reshape.default, x, [b, g, self.ranks, k // self.ranks, e])
        return self.run(aten.permute.default, x, [2, 0, 1, 3, 4])

    def _sent(self, x: Any, shift: int) -> Any:
        """``x`` of the rank that is ``shift`` before this one on the axes over which keys go round."""
        if shift == 0:
            return x
        to = [(rank + shift) % self.ranks for rank in range(self.ranks)]
        x = self._packed(x)
        return self.run(WAIT, self.run(torch.ops.shardc.permute_ranks.default, x, to, self.group))

    def _coordinates(self, number: int) -> dict[str, Any]:
        """By axis, the index of a rank: by its number where keys are gathered, else of that ``number`` before this one.

        None for this rank.
        """
        if self.gathers:
            out, below = {}, self.ranks
            for axis in self.sent:
                below //= self.mesh.size(axis)
                out[axis] = number // below % self.mesh.size(axis)
            return out
        if (shift := number) == 0:
            return {}
        linear = self.run(aten.sub.Tensor, self.local.builder.coordinate(self.sent), shift)
        linear = self.run(aten.remainder.Scalar, linear, self.ranks)
        out, below = {}, self.ranks
        for axis in self.sent:
            below //= self.mesh.size(axis)
            index = linear if below == 1 else self.run(aten.div.Tensor_mode, linear, below, rounding_mode="floor")
            last = index if axis == self.sent[0] else self.run(aten.remainder.Scalar, index, self.mesh.size(axis))
            out[axis] = last
        return out

    # --- a causal mask that every piece has by itself

    def _stripes(self) -> Digits | None:
        """The digits of the keys in front of those that split the queries and behind; None if there are no stripes.

        Where the queries' axes are the minor digits, the elements that differ in these alone stand side by side. A
        piece of the keys that is alike in them has one key in each such run, as the queries have.
        """
        digits = self.query.dims[2]
        axes = [digit for digit in digits if digit.axis is not None]
        if not axes or digits[len(digits) - len(axes) :] != tuple(axes) or self.pending:
            return None
        cuts = [prod(d.radix for d in axes[at:]) for at in range(len(axes) + 1)]
        if self.key.shape[2] % cuts[0] and self.whole:
            return tuple(Digit(d.radix) for d in axes)  # of keys that are whole, the last run may be shorter
        fine = refine(self.mesh, self.key.dims[2], cuts)
        if fine is None:
            return None
        by_stride = list(zip(fine, strides(fine), strict=True))
        minor = tuple(d for d, stride in by_stride if stride < cuts[0])
        if any(d.axis is not None for d, stride in by_stride if stride >= cuts[0]):
            return None
        if len(minor) != len(axes) or any(d.axis not in (None, a.axis) for d, a in zip(minor, axes, strict=True)):
            return None
        return minor

    def _striped(
        self, minor: Digits, source: int, at: dict[str, Any], come: Callable[[Any], Any], go: Callable[[Any], Any]
    ) -> Iterator[Piece]:
        axes = [digit.axis for digit in self.query.dims[2] if digit.axis is not None]
        held = prod(d.radix for d in minor if d.axis is None)  # stripes of one rank
        length = min(self.keys, self.key.shape[2]) if self.whole else self.key.local_shape[2]
        for choice in product(*(range(d.radix) if d.axis is None else (None,) for d in minor)):
            number = sum(
                index * stride
                for index, stride in zip((i for i in choice if i is not None), _below(minor), strict=True)
            )  # fmt: skip
            here, there, stride = None, None, prod(d.radix for d in minor)
            for axis, index, digit in zip(axes, choice, minor, strict=True):
                stride //= digit.radix
                own = _times(self.run, self.local.builder.coordinate((axis,)), stride)
                if index is None:
                    term = _times(self.run, at[axis], stride) if axis in at else own
                else:
                    term = index * stride
                here = own if here is None else self.run(aten.add.Tensor, here, own)
                there = term if there is None else _add(self.run, there, term)
            later = None
            own_piece = not self.gathers and source == 0 and held == 1
            if not own_piece and not (isinstance(there, int) and there == 0):
                later = self.run(aten.squeeze.dim, self._before(here, there), 0)
            take, back = partial(self._stripe, number, held, length), partial(self._unstripe, number, held, length)
            if held == 1:
                yield Piece(come, go, source, None, True, later)
            else:
                yield Piece(_then(come, take), _then(back, go), source, None, True, later)

    def _before(self, here: Any, there: Any) -> Any:
        compare = aten.lt.Scalar if isinstance(there, int) else aten.lt.Tensor
        return self.run(compare, here, there)

    def _stripe(self, number: int, held: int, length: int, x: Any) -> Any:
        return self.run(aten.slice.Tensor, x, 2, number, length, held)

    def _unstripe(self, number: int, held: int, length: int, x: Any) -> Any:
        """``x``, of which element i goes to ``number + i * held``; zero elsewhere."""
        b, g, n, e = self.local.builder.shape(x)
        full = self.key.local_shape[2]
        x = self.run(aten.unsqueeze.default, x, 3)
        x = self.run(aten.constant_pad_nd.default, x, [0, 0, number, held - number - 1], 0.0)
        x = self.run(aten.reshape.default, x, [b, g, n * held, e])
        if n * held == full:
            return x
        if n * held > full:
            return self.run(aten.slice.Tensor, x, 2, 0, full)
        return self.run(aten.constant_pad_nd.default, x, [0, 0, 0, full - n * held], 0.0)

    # --- a mask of places in the whole sequence

    def _bias(self, ranks: Sequence[dict[str, Any]]) -> tuple[Any, Any]:
        """What is added to the scores of a piece that ``ranks`` hold, and which queries see none of it."""
        call, run = self.local.call, self.run
        causal = call["causal"]
        bias = self.local.operand("bias")
        dtype = call.operands[call.position("query") or 0].dtype
        if bias is not None and not self.whole and call["bias"].shape[-1] > 1:
            columns = self._places(ranks)
            if self.key.shape[2] != self.keys:
                columns = run(aten.clamp.default, columns, 0, self.keys - 1)
            bias = run(aten.index_select.default, bias, len(call["bias"].shape) - 1, columns)
        hidden = None
        if causal or self.filled:
            columns = self._places(ranks)
            if causal:
                rows = run(aten.unsqueeze.default, positions(self.local, self.query, 2, None), 1)
                hidden = run(aten.gt.Tensor, run(aten.unsqueeze.default, columns, 0), rows)
            if self.filled:
                past = run(aten.unsqueeze.default, run(aten.ge.Scalar, columns, self.keys), 0)
                hidden = past if hidden is None else run(aten.logical_or.default, hidden, past)
        if hidden is not None:
            hidden = run(aten.reshape.default, hidden, [1, 1, *self.local.builder.shape(hidden)])
            mask = run(aten._to_copy.default, hidden, dtype=dtype)
            mask = run(aten.where.ScalarOther, hidden, run(aten.full_like.default, mask, -inf), 0.0)
            bias = mask if bias is None else run(aten.add.Tensor, bias, mask)
        if bias is None or self.whole or (self.gathers and not self.pending):
            return bias, None
        return bias, run(aten.eq.Scalar, run(aten.amax.default, bias, [-1]), -inf)

    def _places(self, ranks: Sequence[dict[str, Any]]) -> Any:
        every = [positions(self.local, self.key, 2, None, at) for at in ranks]
        return every[0] if len(every) == 1 else self.run(aten.cat.default, every)


def _below(minor: Digits) -> list[int]:
    """For each local digit, how many elements of the minor local ones it counts."""
    sizes = [d.radix for d in minor if d.axis is None]
    return [prod(sizes[at + 1 :]) for at in range(len(sizes))]


def _add(run: Callable[..., Any], one: Any, other: Any) -> Any:
    if isinstance(one, int) and isinstance(other, int):
        return one + other
    return run(aten.add.Tensor, *((other, one) if isinstance(one, int) else (one, other)))


def _times(run: Callable[..., Any], one: Any, by: int) -> Any:
    return one * by if isinstance(one, int) else one if by == 1 else run(aten.mul.Tensor, one, by)


def _same(x: Any) -> Any:
    return x


def added(local: Local, parts: list[Any]) -> Any:
    """The sum, in a dtype to add up in if there are several."""
    if len(parts) == 1:
        return parts[0]
    total = wide(local, parts[0])
    for x in parts[1:]:
        total = local.builder.call(aten.add.Tensor, total, wide(local, x))
    return total


def _then(first: Callable[[Any], Any], second: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: second(first(x))


def wide(local: Local, x: Any) -> Any:
    """``x`` in a dtype to add up in."""
    dtype = local.call.operands[0].dtype
    few = dtype in (torch.float16, torch.bfloat16)
    return local.builder.call(aten._to_copy.default, x, dtype=torch.float32) if few else x


def narrow(local: Local, x: Any) -> Any:
    dtype = local.call.operands[0].dtype
    few = dtype in (torch.float16, torch.bfloat16)
    return local.builder.call(aten._to_copy.default, x, dtype=dtype) if few else x
