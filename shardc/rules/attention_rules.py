"""Rules for attention: the fused kernels (SDPA), and attention of a split sequence (`shardc.custom_ops.attention_ops`).

Queries and keys of a split sequence may be split separately, or both over one axis (context parallelism). A rank's
queries attend to the keys block by block. Results of two blocks are combined by the log-sum-exp of their scores, so
over an axis that splits keys and not queries the result of one rank is partial.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import inf
from operator import getitem

import torch

from shardc.custom_ops.attention_ops import CALL, GRADIENT
from shardc.rules.key_blocks import KeyBlock, KeyBlocks, gathered, narrow, wide
from shardc.rules.notation import FREE, WHOLE, Loops, broadcast_factors
from shardc.rules.rule import CONTIGUOUS, Call, Emitted, Local, Rule, table
from shardc.rules.spec import Dims, Routed, Spec

aten = torch.ops.aten
QUERIES, KEYS = "q", "k"


class Heads:
    """Factors of attention: queries ``b h q e``, keys ``b g k e`` and values ``b g k f`` with ``h = g * r`` (GQA).

    Args:
        batch, groups, rows, keys: kinds of the factors: of b and g (batch), r (groups), q (rows), k (keys). A kind is
            `FREE`, `WHOLE` (never split), or "sum" if a split leaves a partial sum. e and f are whole.
        indexed: whether the op finds queries and keys by their positions.

    Attributes:
        query, key, value: factors of their dims.
        out, row, scores: factors of the output, of a tensor with one number per query, and of the scores.
        by_name: argument name -> factors of its dims.
        shapes: argument name -> shape, of the operands.
    """

    def __init__(
        self, loops: Loops, *, batch: str, groups: str, rows: str, keys: str = WHOLE, indexed: bool = False
    ) -> None:
        self.loops, self.shapes = loops, dict(zip(loops.names, loops.shapes, strict=True))
        query, key, value = (self.shapes[name] for name in ("query", "key", "value"))
        sequence = loops.indexed if indexed else loops.dim
        b, g = loops.dim("b", query[0], kind=batch), loops.dim("g", key[1], kind=batch)
        h = (*g, *loops.dim("r", query[1] // key[1], kind=groups))  # r heads of queries share a head of keys
        q, k = sequence(QUERIES, query[2], kind=rows), sequence(KEYS, key[2], kind=keys)
        e, f = loops.dim("e", query[3], WHOLE), loops.dim("f", value[3], WHOLE)
        self.query, self.key, self.value = (b, h, q, e), (b, g, k, e), (b, g, k, f)
        # Of the output, of a tensor with one number per query (the log-sum-exp), and of the scores.
        self.out, self.row, self.scores = (b, h, q, f), (b, h, q), (b, h, q, k)
        self.by_name: dict[str, Dims] = {"query": self.query, "key": self.key, "value": self.value}
        # The gradient of the output has another name in each kernel's schema.
        self.by_name |= dict.fromkeys(("out", "grad", "grad_out", "grad_out_"), self.out)


class _FusedHeads(Heads):
    """Factors of the operands and results of a fused attention (SDPA)."""

    def __init__(self, loops: Loops, *, backward: bool) -> None:
        # Backward sums over queries, over the heads that share a key, and over the dims that a bias was broadcast to.
        # A kernel with dropout draws by position in the unsharded tensor, so it must not be split.
        kind = WHOLE if loops.call["dropout_p"] else "sum" if backward else FREE
        # A causal kernel takes the first query that it gets for the first of the sequence. A log-sum-exp with padded
        # rows does not divide as the queries do.
        rows = WHOLE if loops.call["is_causal"] or _pads_rows(loops) else kind
        super().__init__(loops, batch=kind, groups=kind, rows=rows)

    def log_sum_exp(self, shape: Sequence[int]) -> Dims:
        """Return the factors of the dims of a log-sum-exp, one number per query. Some kernels append a dim of size 1,
        pad the rows or return an empty tensor.
        """
        *batch_and_head, q = self.row
        if shape[2] != self.shapes["query"][2]:  # padded or empty
            q = self.loops.dim("rows", shape[2], WHOLE)
        appended: Dims = ((),) * (len(shape) - 3)  # a dim of size 1 has no factors
        return (*batch_and_head, q, *appended)

    def operands(self) -> list[Dims]:
        """Return the factors of the dims of each operand of the call. An operand that is no input or output of
        attention, such as a random seed, must not be split.
        """

        def operand(name: str, shape: Sequence[int]) -> Dims:
            """Return the factors of the dims of one operand, by the argument's name and its shape."""
            if name in ("attn_mask", "attn_bias"):  # of the scores' shape, or broadcastable to it
                return broadcast_factors(self.scores, shape)
            if name == "logsumexp":
                return self.log_sum_exp(shape)
            return self.by_name[name] if name in self.by_name else self.loops.dims(name, shape, WHOLE)

        return [operand(n, shape) for n, shape in zip(self.loops.names, self.loops.shapes, strict=True)]


def _pads_rows(loops: Loops) -> bool:
    """Return whether the kernel's log-sum-exp has more or fewer rows than there are queries: some kernels pad it, or
    return an empty one.
    """
    lse = [shape for name, shape in zip(loops.names, loops.shapes, strict=True) if name == "logsumexp"]
    lse = lse or loops.result_shapes[1:2]  # an operand of a backward kernel, the second result of a forward one
    queries = loops.shapes[loops.names.index("query")][2]
    return any(shape[2] != queries for shape in lse if len(shape) > 2)


def _forward(call: Call) -> Spec:
    """Return the spec of a fused attention: its results are the output, the log-sum-exp and further state for backward,
    such as a random seed.
    """
    loops = Loops(call)
    heads = _FusedHeads(loops, backward=False)
    state = [loops.dims(f"state{i}.", shape, WHOLE) for i, shape in enumerate(loops.result_shapes[2:])]
    results = [heads.out, heads.log_sum_exp(loops.result_shapes[1]), *state]
    # The state is the same on every rank, whatever is split.
    return loops.spec(heads.operands(), results, replicated=range(2, len(results)))


def _backward(call: Call) -> Spec:
    """Return the spec of the backward of a fused attention: its results are the gradients of query, key and value, and
    of a bias from the kernels that give it. A result that is None is left out.
    """
    loops = Loops(call)
    heads = _FusedHeads(loops, backward=True)
    inputs = [heads.query, heads.key, heads.value]
    grads = [dims for dims, result in zip(inputs, call.results, strict=False) if result is not None]
    # A bias broadcasts to the scores; over the dims that it lacks, its gradient is a sum.
    bias = [broadcast_factors(heads.scores, grad.shape) for grad in call.results[3:] if grad is not None]
    return loops.spec(heads.operands(), [*grads, *bias])


_KERNELS = ("flash_attention_for_cpu", "efficient_attention", "flash_attention", "cudnn_attention")
_TEXT = "b (g r) q e, b g k e, b g k f -> b (g r) q f, b (g r) q    k e f: whole; q: whole where causal"

FUSED = table(
    [Rule(f"aten._scaled_dot_product_{kernel}", _forward, _TEXT) for kernel in _KERNELS],
    [
        Rule(f"aten._scaled_dot_product_{kernel}_backward", _backward, f"backward of {_TEXT}    g r q: sum")
        for kernel in _KERNELS
    ],
    strides=CONTIGUOUS,
)


def _packed(call: Call, backward: bool) -> Spec:
    """Return the spec of attention of packed sequences (``varlen_attn``) or, if ``backward``, of its gradient: heads
    may be split, unless keys are in the pages of a cache.
    """
    loops = Loops(call)
    shapes = dict(zip(loops.names, loops.shapes, strict=True))
    query, key, value = (shapes[name] for name in ("query", "key", "value"))
    if len(key) != 3:  # not [tokens, heads, elements], but pages of a cache: nothing may be split
        whole = [loops.dims(f"{name}.", shape, WHOLE) for name, shape in shapes.items()]
        results = [loops.dims(f"result{at}.", shape, WHOLE) for at, shape in enumerate(loops.result_shapes)]
        return loops.spec(whole, results)
    g = loops.dim("g", key[1])
    # r heads of queries share a head of keys, whose gradient sums over them.
    h = (*g, *loops.dim("r", query[1] // key[1], kind="sum" if backward else FREE))
    # All sequences lie in one dim, of t queries and u keys; where each begins is data, so this dim is whole.
    t, u = loops.dim("t", query[0], WHOLE), loops.dim("u", key[0], WHOLE)
    e, f = loops.dim("e", query[2], WHOLE), loops.dim("f", value[2], WHOLE)
    dims = {
        "query": (t, h, e),
        "key": (u, g, e),
        "value": (u, g, f),
        "out": (t, h, f),
        "grad_out": (t, h, f),
        "lse": (h, t),
    }
    # Others, such as where each sequence begins, are whole.
    operands = [dims[n] if n in dims else loops.dims(f"{n}.", shape, WHOLE) for n, shape in shapes.items()]
    if backward:
        return loops.spec(operands, [dims[name] for name in ("query", "key", "value")])
    state = loops.dims("state", loops.result_shapes[2], WHOLE)
    return loops.spec(operands, [dims["out"], dims["lse"], state], replicated=[2])


_PACKED_TEXT = "t (g r) e, u g e, u g f, ... -> t (g r) f, (g r) t    t u e f: whole"
PACKED = table(
    Rule("torch_attn._varlen_attn", partial(_packed, backward=False), _PACKED_TEXT),
    Rule("torch_attn._varlen_attn_backward", partial(_packed, backward=True), f"backward of {_PACKED_TEXT}    r: sum"),
    strides=CONTIGUOUS,
)


# Method of `shardc.cp` -> the sets of factors of which its axis must split one: queries and keys, or heads.
_BOTH, _HEADS = (frozenset({QUERIES, KEYS}),), (frozenset("g"), frozenset("r"), frozenset("gr"))
_SPLITS = {"gather": _BOTH, "ring": _BOTH, "ulysses": _HEADS, "auto": _BOTH + _HEADS}


class SequenceHeads(Heads):
    """Factors of `shardc.custom_ops.attention_ops`, whose sequence may be split: the queries, the keys, or both.

    Args:
        backward: whether the op is the gradient.
        batch: kind of the factors b (batch) and g (heads of keys).
    """

    def __init__(self, loops: Loops, *, backward: bool, batch: str = FREE) -> None:
        # Gradients of keys and values are sums over queries and over the heads that share a key. A split of the keys
        # leaves a sum in both directions: of the output (weighted), or of the gradient of the queries.
        kind = "sum" if backward else FREE
        super().__init__(loops, batch=batch, groups=kind, rows=kind, keys="sum", indexed=True)
        self.by_name |= {"logsumexp": self.row, "later": ()}  # ``later`` is a single bool
        if (bias := self.shapes.get("bias")) is not None:
            # The columns of a bias are whole: each block of keys selects its own columns.
            scores = (*self.row, loops.dim("columns", bias[-1], WHOLE))
            self.by_name["bias"] = broadcast_factors(scores, bias)

    def operands(self) -> list[Dims]:
        """Return the factors of the dims of each operand of the call."""
        return [self.by_name[name] for name in self.loops.names]


def routed(call: Call, spec: Spec, moving: tuple[int, ...], trips: int) -> Spec:
    """Return ``spec`` with a `Routed` added, so that one axis may split queries and keys together; the op then sends
    keys between the ranks. ``moving``: positions of the operands with keys and values, each sent ``trips`` times.
    """
    sizes = dict(spec.sizes)
    if QUERIES not in sizes or KEYS not in sizes:  # a sequence of one element has no factor to split
        return spec
    # Of each axis that the plan says something about ("cp0,cp1", with the methods "ring,ulysses"), the sets of factors
    # of which it has to split one.
    methods = zip(call["axis"].split(","), call["method"].split(","), strict=True)
    required = tuple((axis, _SPLITS[method]) for axis, method in methods if axis)
    # ``around``: keys pass round a ring of ranks while they compute; else they are gathered first.
    routed = Routed(QUERIES, KEYS, moving=moving, trips=trips, around=call["around"], required=required)
    return replace(spec, routed=routed)


def _call(call: Call) -> Spec:
    """Return the spec of attention with a split sequence. If keys are split, the output is a partial sum."""
    loops = Loops(call)
    heads = SequenceHeads(loops, backward=False)
    key, value = 1, 2  # positions of the operands; linear in the values
    log_sum_exp = 1  # position of the result
    # With keys split the output is a partial sum, already weighted by each rank's share; the log-sum-exp is complete.
    spec = loops.spec(heads.operands(), [heads.out, heads.row], linear=[{value}], replicated=[log_sum_exp])
    return routed(call, spec, moving=(key, value), trips=1)


def _gradient(call: Call) -> Spec:
    """Return the spec of the backward of attention of a split sequence. If keys are split, the gradient of the queries
    is a partial sum; if queries are, those of keys and values are.
    """
    loops = Loops(call)
    heads = SequenceHeads(loops, backward=True)
    grad, key, value = 0, 2, 3  # positions of the operands; linear in the gradient of the output
    spec = loops.spec(heads.operands(), [heads.query, heads.key, heads.value], linear=[{grad}])
    # Each block of keys and values is sent, and their gradients back.
    return routed(call, spec, moving=(key, value), trips=2)


# --- on one rank


class Attended:
    """Output and log-sum-exp of a rank's queries over the blocks of keys so far, combined as each block is added.

    With s the log-sum-exp of all scores and s_i that of block i, the output is the sum of ``exp(s_i - s) * out_i``.

    Attributes:
        out, sums: the output and its log-sum-exp; None before the first block.
        blind: whether a log-sum-exp may be -inf, since a query sees no key of a block.
        many: whether the output was weighted, and so is in float32.
    """

    def __init__(self, local: Local) -> None:
        self.local, self.run = local, local.builder.call
        self.out: Emitted = None  # before the first block
        self.sums: Emitted = None  # the log-sum-exp of ``out``
        # Whether some query may see no key of a block; whether blocks were combined, in float32.
        self.blind = self.many = False

    def add(self, out: Emitted, sums: Emitted, *, blind: bool = False) -> None:
        """Combine the result for one more block of keys with that of the blocks so far.

        Args:
            out: output of the block.
            sums: its log-sum-exp.
            blind: whether some queries may see no key of the block, so that their log-sum-exp is -inf.
        """
        self.blind |= blind
        if self.out is None:  # a single block stays as it is, in its dtype
            self.out, self.sums = out, sums
            return
        self.many = True
        combined = self.run(aten.logaddexp.default, self.sums, sums)  # over the keys of all blocks so far
        base = self._base(combined)
        # Each block's output is divided by the sum over its own keys, so it is weighted by its share of all.
        before, added = (
            self.run(aten.mul.Tensor, wide(self.local, x), self._share(part, base))
            for x, part in ((self.out, self.sums), (out, sums))
        )
        self.out, self.sums = self.run(aten.add.Tensor, before, added), combined

    def over(self, pending: tuple[str, ...]) -> tuple[Emitted, Emitted]:
        """Return (this rank's term of the output, log-sum-exp over all keys). ``pending``: the axes over which the keys
        are split, so that each rank has seen a part of them.
        """
        if pending:
            # Weighted by the share of this rank's keys in all, outputs of the ranks add up to the whole output.
            part, self.sums = self.sums, _all_sums(self.local, self.sums, pending)
            share = self._share(part, self._base(self.sums))
            self.out, self.many = self.run(aten.mul.Tensor, wide(self.local, self.out), share), True
        return narrow(self.local, self.out) if self.many else self.out, self.sums

    def _base(self, sums: Emitted) -> Emitted:
        """Return the log-sum-exp ``sums`` in the form that `_share` subtracts: with 0 in place of -inf if some query
        sees no key of a block (else -inf minus -inf would give nan).
        """
        return _finite(self.local, sums) if self.blind else sums

    def _share(self, part: Emitted, whole: Emitted) -> Emitted:
        """Return the weight ``exp(part - whole)`` of a block in the output: ``part`` is the log-sum-exp over the
        block's keys, ``whole`` the log-sum-exp over all keys.
        """
        weight = self.run(aten.exp.default, self.run(aten.sub.Tensor, part, whole))
        return self.run(aten.unsqueeze.default, weight, 3)  # [b, h, q, 1], to broadcast to an output


def _call_local(local: Local) -> Emitted:
    """Emit attention of this rank's queries to all keys, block by block; return [output, log-sum-exp]."""
    run, sequence, attended = local.builder.call, KeyBlocks(local), Attended(local)
    scale, query = local.call["scale"], local.operand("query")
    # A block has a mask of its own: a bias, the kernel's causal mode, or that (`mask_options`) one position later.
    for block, k, v in sequence.with_keys(sequence.blocks()):
        keys = _key_count(local, sequence, k)
        results = run(CALL, query, k, v, block.bias, block.causal, scale, keys, **block.mask_options)
        block_out, block_sums = run(getitem, results, 0), run(getitem, results, 1)
        # The kernel returns 0 for a query that sees no key of the block; -inf gives the block no share in its output.
        if block.blind is not None:
            nothing = run(aten.full_like.default, block_sums, -inf)
            block_sums = run(aten.where.self, block.blind, nothing, block_sums)
        attended.add(block_out, block_sums, blind=block.blind is not None)
    out, sums = attended.over(sequence.pending)  # the axes that split keys and not queries
    return [out, _finite(local, sums) if attended.blind else sums]


def _key_count(local: Local, sequence: KeyBlocks, keys: Emitted) -> int:
    """Return how many of ``keys``, those of a block [b, g, k, e], the kernel attends to: those that are no padding. If
    keys are split, all of them, since the bias hides the padding there.
    """
    count = local.builder.shape(keys)[2]
    return min(local.call["keys"], count) if sequence.has_all_keys else count  # padding comes after all keys


def _finite(local: Local, sums: Emitted) -> Emitted:
    """Return the log-sum-exp ``sums`` with 0 in place of -inf (a query that sees no key). The fused kernels return 0
    for such queries, too.
    """
    run = local.builder.call
    nothing = run(aten.eq.Scalar, sums, -inf)
    return run(aten.where.self, nothing, run(aten.full_like.default, sums, 0.0), sums)


def _all_sums(local: Local, sums: Emitted, axes: tuple[str, ...]) -> Emitted:
    """Return the log-sum-exp over the keys of all ranks along ``axes``, given ``sums``, the log-sum-exp over this
    rank's keys.
    """
    run = local.builder.call
    message = run(aten.clone.default, sums, memory_format=torch.contiguous_format)
    ranks, group = local.builder.group(axes)
    of_ranks = gathered(local, sums, message, ranks, group)  # [ranks, b, h, q]
    return run(aten.logsumexp.default, of_ranks, [0])


def _gradient_local(local: Local) -> Emitted:
    """Emit the gradients of query, key and value on this rank, block by block; return them. Output and log-sum-exp are
    those over all keys, by which the op for a block gives the block's part of the gradients.
    """
    run, sequence, scale = local.builder.call, KeyBlocks(local), local.call["scale"]
    grad, query, out, sums = (local.operand(name) for name in ("grad", "query", "out", "logsumexp"))

    def of_block(block: KeyBlock, k: Emitted, v: Emitted) -> list[Emitted]:
        """Emit and return the gradients for one block, with the keys ``k`` and the values ``v``."""
        keys = _key_count(local, sequence, k)
        grads = run(GRADIENT, grad, query, k, v, out, sums, block.bias, block.causal, scale, keys, **block.mask_options)
        return [run(getitem, grads, at) for at in range(3)]  # of the queries, and of the block's keys and values

    # `gradients` adds the queries' over the blocks, and sends the keys' and values' to the rank that has these.
    return sequence.gradients(sequence.blocks(), of_block)


SEQUENCE = table(
    Rule(
        "shardc_attention.call",
        _call,
        "b (g r) q e, b g k e, b g k f -> b (g r) q f, b (g r) q    k: sum; or q and k on one axis",
        _call_local,
    ),
    Rule(
        "shardc_attention.gradient",
        _gradient,
        "b (g r) q f, b (g r) q e, b g k e, b g k f, ... -> b (g r) q e, b g k e, b g k f    q k r: sum; or as forward",
        _gradient_local,
    ),
    opaque=True,
    strides=CONTIGUOUS,
)

TABLE = FUSED | PACKED | SEQUENCE
