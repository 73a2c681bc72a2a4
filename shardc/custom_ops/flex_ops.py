"""`flex_attention` as an op: scores and masks are functions of places in the global sequence, given by name.

The kernel takes queries block by block, and of the keys those that a query of the block sees, with an online softmax:
no tensor has all scores. Functions are graphs (`shardc.custom_ops.function_ops`) of tensors that broadcast to a block's
scores [b, h, q, k], in this order: score (of the score function only), batch [b, 1, 1, 1], head [1, h, 1, 1], row
[1, 1, q, 1] and column [1, 1, 1, k] in the global tensor, batch and head in the operands, and the captured tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.functional import pad

from shardc._compat import differentiable
from shardc.custom_ops.attention_ops import _fake_call, _fake_gradient
from shardc.custom_ops.function_ops import function_of
from shardc.custom_ops.op_library import OpLibrary

KIND = "flex"
_ALL = 2  # in `flex_visible`: all queries of the block see the key
ROWS, COLUMNS = 64, 512  # queries of a block of 4 heads or more, most keys of a block
STRIP = 8192  # keys whose mask is computed at once
BLOCK = 128  # queries, and keys, of a block of torch's kernel
SCORES = 1 << 26  # of a block with all keys of a strip: large enough that few kernels are launched
_PLACES = ("batch", "head")  # by-place dims of captured tensors, by the position of their placeholder after the column


@dataclass(frozen=True)
class ScoreFunctions:
    """The score and mask functions of a call of flex_attention, and what they read.

    Args:
        score: of (score, batch, head, row, column, batch here, head here, *captured) -> score; None for the score as
            it is.
        mask: of the same without the score -> bool, true where the query sees the key.
        counts: number of tensors that each captures.
        by_batch: whether the mask depends on the batch.
        reads: whether a function reads the batch, or the head, of the global tensor.
        places: for each captured tensor, dim -> "batch" or "head" if it is indexed there by that place only.
    """

    score: Callable[..., Tensor] | None
    mask: Callable[..., Tensor]
    counts: tuple[int, int]
    by_batch: bool
    reads: tuple[bool, bool]
    places: tuple[dict[int, str], ...]


@lru_cache(maxsize=1024)
def score_functions(body: str) -> ScoreFunctions:
    """Return the functions registered as ``body``; RuleError if there are none of this name."""
    function = function_of(body)
    places: list[list[fx.Node]] = []  # of each graph, its arguments for batch, head, row, column, batch here, head here
    by_place: list[dict[int, str]] = []
    for graph, count in zip(function.graphs, function.counts, strict=True):
        inputs = list(graph.find_nodes(op="placeholder"))
        end = len(inputs) - count
        places.append(inputs[end - 6 : end])
        by_place += [_by_place(captured, inputs[end - 2 : end]) for captured in inputs[end:]]
    score = function.graphs[0]
    is_identity = score.output_node().args[0] == (next(iter(score.nodes)),)
    score_call, mask_call = (_single(call) for call in function.calls)
    reads_batch, reads_head = (any(of_graph[at].users for of_graph in places) for at in (0, 1))
    return ScoreFunctions(
        None if is_identity else score_call,
        mask_call,
        function.counts,
        by_batch=any(places[1][at].users for at in (0, 4)),
        reads=(reads_batch, reads_head),
        places=tuple(by_place),
    )


def _single(call: Callable[..., Sequence[Tensor]]) -> Callable[..., Tensor]:
    return lambda *operands: call(*operands)[0]


def _by_place(captured: fx.Node, local_places: Sequence[fx.Node]) -> dict[int, str]:
    """Return dim -> "batch" or "head" for each dim of ``captured`` that a lookup indexes by this rank's local index of
    the batch or head.

    Args:
        captured: a captured tensor of the function's graph.
        local_places: the graph's arguments for batch and head, counted on this rank.
    """
    places: dict[int, str] = {}
    for user in captured.users:
        if user.target is torch.ops.aten.index.Tensor and user.args[0] is captured:
            indices: Any = user.args[1]
            places |= {dim: _PLACES[list(local_places).index(x)] for dim, x in enumerate(indices) if x in local_places}
    return places


# body: name of the functions. keys: number of keys before the padding. axis, method, around: as those of `call`.
# rows, columns, batches, heads: global positions; None for 0, 1, 2, ... visible: the result of `flex_visible`, or of
# `flex_tables`. All of these on one rank only.
_POSITIONS = "Tensor? rows=None, Tensor? columns=None, Tensor? batches=None, Tensor? heads=None"
_HOW = (
    "Tensor[] captured, str body, float scale, int keys, str axis='', str method='', bool around=False, "
    f"{_POSITIONS}, Tensor[]? visible=None"
)


def flex(
    query: Tensor, key: Tensor, value: Tensor, captured: Sequence[Tensor], body: str, scale: float, keys: int,
    axis: str = "", method: str = "", around: bool = False,
    rows: Tensor | None = None, columns: Tensor | None = None, batches: Tensor | None = None,
    heads: Tensor | None = None, visible: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (output of attention, log-sum-exp of each query's scores).

    Args:
        query: [b, h, q, e].
        key, value: [b, g, k, e] and [b, g, k, f]; h is a multiple of g.
        captured: tensors that the score function reads, then those that the mask function reads.
        body: name of the functions.
        scale: factor of the scores, before the score function.
        keys: number of keys without padding: no query sees a key at this global position or behind.
        axis, method, around: not used by the kernel; the op's rule reads them, as those of ``shardc_attention``.
        rows, columns, batches, heads: int64 [q], [k], [b], [h]: global positions; None for 0, 1, 2, ...
        visible: what `flex_visible` returns for this call; None to compute it here. On CUDA, the result of
            `flex_tables`, which this code does not read.

    Returns:
        output [b, h, q, f], and log-sum-exp of each query's scores [b, h, q]: -inf for a query that sees no key.
    """
    mask = _mask_of(query, key, captured, body, keys, (rows, columns, batches, heads))
    blocks = _Blocks(query, key, captured, mask, visible)
    out, sums = _fake_call(query, key, value)
    for at, block in blocks.of_queries():
        q = blocks.wide(query[at]) * scale
        top, total, result = q.new_full(q.shape[:3], -inf), q.new_zeros(q.shape[:3]), None
        for take, hidden in block:
            scores, _ = blocks.scores(q, at, take, hidden)
            before, top = top, torch.maximum(top, scores.amax(-1))
            finite = top.masked_fill(top == -inf, 0)
            weights = scores.sub_(finite.unsqueeze(-1)).exp_()
            part = blocks.by_group(weights) @ blocks.wide(_select(value[at[0]], take))
            shrink = (before - finite).exp_()
            total = total * shrink + weights.sum(-1)
            part = part.view(*q.shape[:3], -1)
            result = part if result is None else part.addcmul_(result, shrink.unsqueeze(-1))
        if result is None:
            out[at], sums[at] = 0, -inf
        else:
            out[at] = (result / total.masked_fill(total == 0, 1).unsqueeze(-1)).to(out.dtype)
            sums[at] = top.masked_fill(top == -inf, 0) + total.log()
    return out, sums


def flex_gradient(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    grad_logsumexp: Tensor | None, wanted: Sequence[int],
    captured: Sequence[Tensor], body: str, scale: float, keys: int,
    axis: str = "", method: str = "", around: bool = False,
    rows: Tensor | None = None, columns: Tensor | None = None, batches: Tensor | None = None,
    heads: Tensor | None = None, visible: Sequence[Tensor] | None = None,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of query, key, value, and of the captured tensors ``wanted`` (positions).

    ``grad`` and ``grad_logsumexp`` are those of the results of `flex`. ``out`` and ``logsumexp`` are its results, also
    of a call on more keys than ``key`` has; other arguments are those of `flex`.
    """
    mask = _mask_of(query, key, captured, body, keys, (rows, columns, batches, heads))
    blocks = _Blocks(query, key, captured, mask, visible)
    blocks.differentiate(wanted)
    dq, *results = _fake_gradient(grad, query, key, value)
    dk, dv = (torch.zeros(x.shape, dtype=blocks.dtype, device=x.device) for x in (key, value))
    for at, block in blocks.of_queries():
        q, d = blocks.wide(query[at]) * scale, blocks.wide(grad[at])
        lse = logsumexp[at]
        lse = lse.masked_fill(lse == -inf, 0).unsqueeze(-1)
        mean = (d * out[at]).sum(-1)
        mean = (mean if grad_logsumexp is None else mean - grad_logsumexp[at]).unsqueeze(-1)
        total = q.new_zeros(q.shape)
        for take, hidden in block:
            scores, back = blocks.scores(q, at, take, hidden)
            weights = scores.sub_(lse).exp_()
            k, v = (blocks.wide(_select(x[at[0]], take)) for x in (key, value))
            shares = (blocks.by_group(d) @ v.transpose(-1, -2)).view(weights.shape)
            shares = back(shares.sub_(mean).mul_(weights))
            shares, weights = blocks.by_group(shares), blocks.by_group(weights)
            blocks.by_group(total).flatten(0, 1).baddbmm_(shares.flatten(0, 1), k.flatten(0, 1))
            _add_product(dk[at[0]], take, shares.transpose(-1, -2), blocks.by_group(q))
            _add_product(dv[at[0]], take, weights.transpose(-1, -2), blocks.by_group(d))
        dq[at] = total.mul_(scale).to(dq.dtype)
    for result, total in zip(results, (dk, dv), strict=True):
        result.copy_(total)
    return [dq, *results, *(blocks.gradients or ())]


def flex_visible(
    captured: Sequence[Tensor], body: str, size: Sequence[int], keys: int,
    rows: Tensor | None = None, columns: Tensor | None = None, batches: Tensor | None = None,
    heads: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """Return for each block of queries and each key whether no query of the block sees it (0), some do (1), or all (2).

    On CPUs only. A program computes it once for all calls with the same mask, and their gradients.

    Args:
        captured: tensors that the mask function reads.
        size: [b, h, q, k] of the call.
        body, keys, rows, columns, batches, heads: as of `flex`.

    Returns:
        A list with it alone: uint8 [b or 1, blocks of queries, k]; 1 if the mask does not depend on the batch.
    """
    return [_Mask(captured, body, size, keys, (rows, columns, batches, heads), torch.device("cpu")).visible()]


def flex_tables(
    captured: Sequence[Tensor], body: str, size: Sequence[int], keys: int, device: torch.device,
    rows: Tensor | None = None, columns: Tensor | None = None, batches: Tensor | None = None,
    heads: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """Return the tables of torch's `BlockMask` for a call of `flex`, in the order of its arguments.

    A program for CUDA computes them once for all calls with the same mask, and their gradients. Nothing in it waits for
    the device.

    Args:
        device: of the results.
        captured, body, size, keys, rows, columns, batches, heads: as of `flex_visible`.

    Returns:
        For each block of `BLOCK` queries: the number of key blocks of which it sees some keys, int32 [b or 1, 1,
        blocks]; the indices of these, followed by those of the others, int32 [b or 1, 1, blocks, key blocks]; both for
        the key blocks of which it sees all keys. Then the same four for each block of keys. 1 if the mask does not
        depend on the batch.
    """
    mask = _Mask(captured, body, size, keys, (rows, columns, batches, heads), device)
    blocks = torch.cat([mask.blocks(batch) for batch in mask.batch_slices()]).unsqueeze(1)
    tables = []
    for by_block in (blocks, blocks.transpose(2, 3)):
        for kind in (1, _ALL):
            chosen = (by_block == kind).to(torch.int32)
            tables += [chosen.sum(-1), chosen.argsort(dim=-1, descending=True, stable=True)]
    return [x.to(torch.int32, memory_format=torch.contiguous_format) for x in tables]


_At = tuple[slice, slice, slice]  # of batches, heads and queries
_Take = slice | Tensor  # of keys: neighbours, or any


class _Mask:
    """The mask of a call of `flex`: evaluates the mask function at the global positions of the call's queries and keys.

    Args:
        captured: tensors that the mask function reads.
        body, keys: as of `flex`.
        size: [b, h, q, k] of the call.
        positions: rows, columns, batches and heads, as of `flex`.
    """

    def __init__(
        self, captured: Sequence[Tensor], body: str, size: Sequence[int], keys: int,
        positions: Sequence[Tensor | None], device: torch.device,
    ) -> None:  # fmt: skip
        self.functions, self.size = score_functions(body), size
        self.captured = captured
        batch, heads, queries, columns = size
        self.rows, self.columns, self.batches, self.heads = (
            torch.arange(n, device=device) if x is None else x
            for n, x in zip((queries, columns, batch, heads), positions, strict=True)
        )
        self.padding = self.columns >= keys if positions[1] is not None or columns > keys else None
        if self.padding is not None:
            self.columns = self.columns.clamp(max=keys - 1)
        self.local_batches, self.local_heads = (torch.arange(n, device=device) for n in (batch, heads))

    def batch_slices(self) -> list[slice]:
        """Return slices of the batch dim; all entries of a slice have the same mask."""
        return [slice(at, at + 1) for at in range(self.size[0])] if self.functions.by_batch else [slice(None)]

    def of(self, batch: slice, rows: slice, take: _Take) -> Tensor:
        """Return bool [b or 1, h or 1, q or 1, k], true where a query sees a key of ``take``."""
        places = self.places(batch, rows, take)
        visible = self.functions.mask(*places, *self.captured)
        visible = visible.reshape([1] * (4 - visible.ndim) + list(visible.shape))
        if self.padding is not None:
            visible = visible & ~self.padding[take]
        return visible.expand(*visible.shape[:3], places[3].shape[3])

    def visible(self) -> Tensor:
        """Return for each block of queries and each key whether no query sees it, some do or all (`flex_visible`)."""
        *_, queries, keys = self.size
        batches, length = self.batch_slices(), _block_rows(self.functions, self.size)
        visible = torch.empty(_visible_shape(self.functions, self.size), dtype=torch.uint8)
        for at, batch in enumerate(batches):
            for block, row in enumerate(range(0, queries, length)):
                for start in range(0, keys, STRIP):
                    strip = slice(start, min(start + STRIP, keys))
                    # As numbers, whose least and largest are vectorized.
                    of_columns = self.of(batch, slice(row, row + length), strip).view(torch.uint8).flatten(0, 2)
                    visible[at, block, strip] = of_columns.amax(0) + of_columns.amin(0)
        return visible

    def blocks(self, batch: slice) -> Tensor:
        """Return for each block of `BLOCK` queries and block of `BLOCK` keys whether no query sees a key (0), some see
        some (1), or all see all (2): uint8 [1, blocks of queries, blocks of keys].

        A last block with fewer queries or keys is never 2.
        """
        _, heads, queries, keys = self.size
        length = max(SCORES // max(heads * min(keys, STRIP), 1) // BLOCK, 1) * BLOCK
        rows = []
        for row in range(0, queries, length):
            strips = []
            for start in range(0, keys, STRIP):
                visible = self.of(batch, slice(row, row + length), slice(start, min(start + STRIP, keys)))
                visible = visible.expand(-1, -1, min(length, queries - row), -1)
                short = [-size % BLOCK for size in visible.shape[2:]]
                # As numbers, whose least and largest are vectorized.
                visible = pad(visible.view(torch.uint8), [0, short[1], 0, short[0]])
                visible = visible.reshape(-1, visible.shape[2] // BLOCK, BLOCK, visible.shape[3] // BLOCK, BLOCK)
                strips.append(visible.amax((0, 2, 4)) + visible.amin((0, 2, 4)))
            rows.append(torch.cat(strips, 1))
        return torch.cat(rows).unsqueeze(0)

    def places(self, batch: slice, rows: slice, take: _Take) -> list[Tensor]:
        """Return the places of a block that score and mask functions take: indices of batch, head, query and key, then
        batch and head as counted on this rank.
        """
        return [
            self.batches[batch].view(-1, 1, 1, 1), self.heads.view(1, -1, 1, 1), self.rows[rows].view(1, 1, -1, 1),
            self.columns[take].view(1, 1, 1, -1),
            self.local_batches[batch].view(-1, 1, 1, 1), self.local_heads.view(1, -1, 1, 1),
        ]  # fmt: skip


def _mask_of(
    query: Tensor, key: Tensor, captured: Sequence[Tensor], body: str, keys: int, positions: Sequence[Tensor | None]
) -> _Mask:
    """Return the mask of a call of `flex` with these arguments."""
    of_mask = captured[score_functions(body).counts[0] :]
    return _Mask(of_mask, body, [*query.shape[:3], key.shape[2]], keys, positions, query.device)


class _Blocks:
    """Computes the scores of a call of `flex` block by block: it iterates over blocks of queries and, for each of them,
    over blocks of the keys that it sees.

    Args:
        query, key, captured: as of `flex`.
        mask: of the call.
        visible: the result of `flex_visible`; None to compute it.

    Attributes:
        dtype: in which scores are computed.
        length: number of queries of a block.
        gradients: of the captured tensors that `differentiate` names, summed over the blocks so far; None before it.
    """

    def __init__(
        self, query: Tensor, key: Tensor, captured: Sequence[Tensor], mask: _Mask, visible: Sequence[Tensor] | None
    ) -> None:
        self.functions, self.key, self.mask = mask.functions, key, mask
        self.captured, self.dtype = list(captured), torch.promote_types(query.dtype, torch.float32)
        self.groups, self.keys = key.shape[1], key.shape[2]
        self.visible: Tensor | None = None
        if skips(query.device):
            (self.visible,) = (mask.visible(),) if visible is None else visible
            self.length = _block_rows(mask.functions, mask.size)
        else:
            by_row = query.shape[1] * min(STRIP, max(self.keys, 1))
            scores_per_row = by_row * (1 if self.functions.by_batch else query.shape[0])
            self.length = max(ROWS, SCORES // max(scores_per_row, 1))
        self.leaves: list[Tensor] = []
        self.gradients: list[Tensor] | None = None

    def differentiate(self, wanted: Sequence[int]) -> None:
        """Prepare for backward: from now on, the function that `scores` returns differentiates the score function, and
        adds the gradients of the captured tensors ``wanted`` (positions) to ``gradients``.
        """
        for at in wanted:
            self.captured[at] = self.captured[at].detach().requires_grad_()
            self.leaves.append(self.captured[at])
        self.gradients = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in self.leaves]

    def wide(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)

    def by_group(self, x: Tensor) -> Tensor:
        """Return ``x`` [b, h, q, e] with the queries of all heads that share keys: [b, g, h / g * q, e]."""
        return x.reshape(x.shape[0], self.groups, -1, x.shape[3])

    def of_queries(self) -> Iterator[tuple[_At, Iterator[tuple[_Take, Tensor | None]]]]:
        """Yield each block of queries with an iterator of (block of keys that it sees, mask that is true where a query
        does not see a key).

        The mask broadcasts to the block's scores; None for none.
        """
        for number, batch in enumerate(self.mask.batch_slices()):
            for block, start in enumerate(range(0, self.mask.size[2], self.length)):
                rows = slice(start, start + self.length)
                visible = None if self.visible is None else self.visible[number, block]
                yield (batch, slice(None), rows), self._of_keys(batch, rows, visible)

    def _of_keys(self, batch: slice, rows: slice, visible: Tensor | None) -> Iterator[tuple[_Take, Tensor | None]]:
        """Yield each block of the keys that queries ``rows`` see, with a mask that is true where a query does not see a
        key (None if all see all). ``visible``: the values of `flex_visible` for these queries, one for each key; if
        None, the blocks are of all keys.
        """
        if visible is None:
            for start in range(0, self.keys, STRIP):
                strip = slice(start, min(start + STRIP, self.keys))
                yield strip, ~self.mask.of(batch, rows, strip)
            return
        columns = visible.nonzero().squeeze(1)
        for piece in columns.split(COLUMNS) if len(columns) else ():
            first, last = int(piece[0]), int(piece[-1]) + 1
            take: _Take = slice(first, last) if last - first == len(piece) else piece
            yield take, None if (visible[take] == _ALL).all() else ~self.mask.of(batch, rows, take)

    def scores(
        self, query: Tensor, at: _At, take: _Take, hidden: Tensor | None
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return (scores of the block, -inf where ``hidden``; backward function). The function takes the gradient of
        the scores and returns the gradient of the products of query and key.

        Args:
            query: queries of the block, times the scale.
            hidden: as of `of_queries`.
        """
        key = self.wide(_select(self.key[at[0]], take))
        products = (self.by_group(query) @ key.transpose(-1, -2)).view(*query.shape[:3], -1)
        if self.functions.score is None:
            return products if hidden is None else products.masked_fill_(hidden, -inf), lambda grad: grad
        captured, places = self.captured[: self.functions.counts[0]], self.mask.places(at[0], at[2], take)
        if self.gradients is None:
            scores = self.functions.score(products, *places, *captured).to(self.dtype).expand(products.shape)
            return _masked(scores, hidden), lambda grad: grad
        with differentiable():
            products.requires_grad_()
            scores = self.functions.score(products, *places, *captured).to(self.dtype).expand(products.shape)

        def back(grad: Tensor) -> Tensor:
            if not scores.requires_grad:  # a function that reads neither
                return torch.zeros_like(grad)
            with differentiable():
                grads = torch.autograd.grad(scores, [products, *self.leaves], grad, allow_unused=True)
            for total, x in zip(self.gradients or (), grads[1:], strict=True):
                if x is not None:
                    total += x
            return torch.zeros_like(grad) if grads[0] is None else grads[0]

        return _masked(scores.detach(), hidden), back


def _masked(scores: Tensor, hidden: Tensor | None) -> Tensor:
    """Return ``scores``, -inf where ``hidden``, in memory of their own."""
    return scores.clone(memory_format=torch.contiguous_format) if hidden is None else scores.masked_fill(hidden, -inf)


def skips(device: torch.device) -> bool:
    """Return whether calls on ``device`` leave out the keys that no query of a block sees. CPUs do; on other devices
    the host would have to wait for the mask.
    """
    return device.type == "cpu"


def mask_op(device: torch.device) -> Any:
    """Return the op that evaluates the mask once for all calls on ``device``: `flex_visible`, or `flex_tables` for
    torch's kernel; None if each call evaluates it.
    """
    return FLEX_VISIBLE if skips(device) else FLEX_TABLES if device.type == "cuda" else None


def _select(x: Tensor, take: _Take) -> Tensor:
    """Return those keys or values of ``x`` [b, g, k, e] that ``take`` selects."""
    return x[:, :, take] if isinstance(take, slice) else x.index_select(2, take)


def _add_product(x: Tensor, take: _Take, a: Tensor, b: Tensor) -> None:
    """Add ``a @ b`` [b, g, keys of take, e] to the keys ``take`` of ``x`` [b, g, k, e]."""
    if isinstance(take, slice):
        x.flatten(0, 1)[:, take].baddbmm_(a.flatten(0, 1), b.flatten(0, 1))
    else:
        x.index_add_(2, take, a @ b)


def _fake(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    return _fake_call(query, key, value)


def _fake_flex_gradient(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    grad_logsumexp: Tensor | None, wanted: Sequence[int], captured: Sequence[Tensor], *_: object, **__: object,
) -> list[Tensor]:  # fmt: skip
    gradients = [torch.empty_like(captured[at], memory_format=torch.contiguous_format) for at in wanted]
    return [*_fake_gradient(grad, query, key, value), *gradients]


def _block_rows(functions: ScoreFunctions, size: Sequence[int]) -> int:
    """Return the number of queries of a block in a call of ``size`` [b, h, q, k], on devices where keys that the block
    does not see are left out (`skips`).

    Blocks of few heads have more, so that products stay as large.
    """
    batch, heads, *_ = size
    return ROWS * max(1, 4 // max(heads * (1 if functions.by_batch else batch), 1))


def _visible_shape(functions: ScoreFunctions, size: Sequence[int]) -> list[int]:
    batch, _, queries, keys = size
    return [batch if functions.by_batch else 1, -(-queries // _block_rows(functions, size)), keys]


def _fake_visible(captured: object, body: str, size: Sequence[int], *_: object, **__: object) -> list[Tensor]:
    return [torch.empty(_visible_shape(score_functions(body), size), dtype=torch.uint8)]


def _fake_tables(
    captured: object, body: str, size: Sequence[int], keys: int, device: torch.device, *_: object, **__: object
) -> list[Tensor]:
    queries, columns = (-(-n // BLOCK) for n in size[2:])
    batch = size[0] if score_functions(body).by_batch else 1
    of_queries, of_keys = ([[n], [n, others]] for n, others in ((queries, columns), (columns, queries)))
    shapes = [*of_queries, *of_queries, *of_keys, *of_keys]
    return [torch.empty(batch, 1, *shape, dtype=torch.int32, device=device) for shape in shapes]


_library = OpLibrary("shardc_attention")
FLEX = _library.define(f"flex(Tensor query, Tensor key, Tensor value, {_HOW}) -> (Tensor, Tensor)", flex, _fake)
FLEX_GRADIENT = _library.define(
    "flex_gradient(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, "
    f"Tensor? grad_logsumexp, int[] wanted, {_HOW}) -> Tensor[]",
    flex_gradient,
    _fake_flex_gradient,
)
FLEX_VISIBLE = _library.define(
    f"flex_visible(Tensor[] captured, str body, SymInt[] size, int keys, {_POSITIONS}) -> Tensor[]",
    flex_visible,
    _fake_visible,
)
FLEX_TABLES = _library.define(
    f"flex_tables(Tensor[] captured, str body, SymInt[] size, int keys, Device device, {_POSITIONS}) -> Tensor[]",
    flex_tables,
    _fake_tables,
)


@lru_cache(maxsize=1024)
def seen_share(body: str, rows: int, columns: int) -> float:
    """Return the share of ``rows`` x ``columns`` pairs that the mask of ``body`` leaves visible for batch 0 and head 0.
    It is computed on a sample of the rows. Return 1 if the mask reads tensors, or if there are no pairs.
    """
    functions = score_functions(body)
    if functions.counts[1] or not rows or not columns:
        return 1.0
    row = torch.linspace(0, rows - 1, min(rows, 64)).long()
    zero = torch.zeros(1, dtype=torch.int64)
    places = [zero, zero, row, torch.arange(columns), zero, zero]
    shaped = [
        x.view([-1 if dim == at else 1 for dim in range(4)]) for x, at in zip(places, (0, 1, 2, 3, 0, 1), strict=True)
    ]
    with torch.no_grad():
        visible = functions.mask(*shaped)
    return visible.expand(1, 1, len(row), columns).double().mean().item()
