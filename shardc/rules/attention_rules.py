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
from shardc.ir.comm import WAIT
from shardc.rules.key_blocks import KeyBlocks, added, narrow, wide
from shardc.rules.notation import FREE, WHOLE, Loops
from shardc.rules.rule import CONTIGUOUS, Call, Emitted, Local, Rule, table
from shardc.rules.spec import Dims, Routed, Spec


class _FusedHeads:
    """Factors of the operands and results of a fused attention (SDPA): queries ``b h q e``, keys ``b g k e`` and values
    ``b g k f`` with ``h = g * r`` (GQA).
    """

    def __init__(self, loops: Loops, *, backward: bool) -> None:
        self.loops = loops
        call = loops.call
        query, key, value = (loops.shapes[loops.names.index(name)] for name in ("query", "key", "value"))
        # Backward sums over queries, over the heads that share a key, and over the dims that a bias was broadcast to.
        # A kernel with dropout draws by position in the unsharded tensor, so it must not be split.
        kind = WHOLE if call["dropout_p"] else "sum" if backward else FREE
        self.queries = query[2]
        self.b, g = loops.dim("b", query[0], kind), loops.dim("g", key[1], kind)
        h = (*g, *loops.dim("r", query[1] // key[1], kind))
        # A causal kernel takes the first query that it gets for the first of the sequence.
        q = loops.dim("q", query[2], WHOLE if call["is_causal"] or self._pads_rows() else kind)
        k, e, f = loops.dim("k", key[2], WHOLE), loops.dim("e", query[3], WHOLE), loops.dim("f", value[3], WHOLE)
        self.query, self.key, self.value = (self.b, h, q, e), (self.b, g, k, e), (self.b, g, k, f)
        self.output, self.scores = (self.b, h, q, f), (self.b, h, q, k)

    def _pads_rows(self) -> bool:
        """Return whether the kernel's log-sum-exp has more rows than there are queries (some kernels pad it)."""
        lse = [s for n, s in zip(self.loops.names, self.loops.shapes, strict=True) if n == "logsumexp"]
        return any(shape[2] != self.queries for shape in lse or self.loops.result_shapes[1:2] if len(shape) > 2)

    def row(self, shape: Sequence[int]) -> Dims:
        """Return the factors of the dims of a tensor with one number per query, such as the log-sum-exp. Some kernels
        append a dim of size 1, pad the rows or return an empty tensor.
        """
        q = self.output[2] if shape[2] == self.queries else self.loops.dim("rows", shape[2], WHOLE)
        return (*self.output[:2], q, *[()] * (len(shape) - 3))

    def bias(self, shape: Sequence[int]) -> Dims:
        """Return the factors of a mask or bias that broadcasts to the scores."""
        full = self.scores[len(self.scores) - len(shape) :]
        return tuple(() if size == 1 else factors for size, factors in zip(shape, full, strict=True))

    def operand(self, name: str, shape: Sequence[int]) -> Dims:
        """Return the factors of the dims of the operand ``name``. An operand that is no input or output of attention,
        such as a random seed, must not be split.
        """
        if name in ("attn_mask", "attn_bias"):
            return self.bias(shape)
        if name == "logsumexp":
            return self.row(shape)
        if name in ("out", "grad_out", "grad_out_"):
            return self.output
        inputs = {"query": self.query, "key": self.key, "value": self.value}
        return inputs[name] if name in inputs else self.loops.dims(name, shape, WHOLE)

    def operands(self) -> list[Dims]:
        """Return the factors of the dims of each operand of the call."""
        return [self.operand(n, shape) for n, shape in zip(self.loops.names, self.loops.shapes, strict=True)]


def _forward(call: Call) -> Spec:
    """Return the spec of a fused attention."""
    loops = Loops(call)
    heads = _FusedHeads(loops, backward=False)
    state = [loops.dims(f"state{i}.", shape, WHOLE) for i, shape in enumerate(loops.result_shapes[2:])]
    results = [heads.output, heads.row(loops.result_shapes[1]), *state]
    return loops.spec(heads.operands(), results, replicated=range(2, len(results)))


def _backward(call: Call) -> Spec:
    """Return the spec of the backward of a fused attention."""
    loops = Loops(call)
    heads = _FusedHeads(loops, backward=True)
    inputs = [heads.query, heads.key, heads.value]
    grads = [dims for dims, result in zip(inputs, call.results, strict=False) if result is not None]
    bias = [heads.bias(v.shape) for v in call.results[3:] if v is not None]
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
    if len(key) != 3:  # pages of a cache
        whole = [loops.dims(f"{name}.", shape, WHOLE) for name, shape in shapes.items()]
        results = [loops.dims(f"result{at}.", shape, WHOLE) for at, shape in enumerate(loops.result_shapes)]
        return loops.spec(whole, results)
    g = loops.dim("g", key[1])
    h = (*g, *loops.dim("r", query[1] // key[1], "sum" if backward else FREE))
    # All sequences lie in one dim; where each begins is data, so this dim is whole.
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


aten, functional = torch.ops.aten, torch.ops._c10d_functional
QUERIES, KEYS = "q", "k"
_BOTH, _HEADS = (frozenset({QUERIES, KEYS}),), (frozenset("g"), frozenset("r"), frozenset("gr"))
_SPLITS = {"gather": _BOTH, "ring": _BOTH, "ulysses": _HEADS, "auto": _BOTH + _HEADS}


class SequenceHeads:
    """Factors of `shardc.custom_ops.attention_ops`, whose sequence may be split: queries ``b h q e``, keys ``b g k e``
    and values ``b g k f`` with ``h = g * r`` (GQA).
    """

    def __init__(self, loops: Loops, *, backward: bool, batch: str = FREE) -> None:
        shapes = dict(zip(loops.names, loops.shapes, strict=True))
        query, key, value = (shapes[name] for name in ("query", "key", "value"))
        kind = "sum" if backward else FREE
        b, g = loops.dim("b", query[0], batch), loops.dim("g", key[1], batch)
        h = (*g, *loops.dim("r", query[1] // key[1], kind))
        q, k = loops.indexed(QUERIES, query[2], kind), loops.indexed(KEYS, key[2], "sum")
        e, f = loops.dim("e", query[3], WHOLE), loops.dim("f", value[3], WHOLE)
        self.query, self.key, self.value = (b, h, q, e), (b, g, k, e), (b, g, k, f)
        self.out, self.row = (b, h, q, f), (b, h, q)
        # The columns of a bias are whole: each block of keys selects its own columns.
        scores = (b, h, q, loops.dim("columns", shapes["bias"][-1], WHOLE) if "bias" in shapes else ())
        self.bias: Dims = ()
        if "bias" in shapes:
            sizes = shapes["bias"]
            self.bias = tuple(() if n == 1 else dims for n, dims in zip(sizes, scores[-len(sizes) :], strict=True))

    def operands(self, names: Sequence[str]) -> list[Dims]:
        """Return the factors of the dims of each operand, given the argument names."""
        by_name = {"query": self.query, "key": self.key, "value": self.value, "logsumexp": self.row, "bias": self.bias}
        by_name["later"] = ()
        return [by_name.get(name, self.out) for name in names]


def routed(call: Call, spec: Spec, moving: tuple[int, ...], trips: int) -> Spec:
    """Return ``spec`` with a `Routed` added, so that one axis may split queries and keys together; the op then sends
    keys between the ranks. ``moving``: positions of the operands with keys and values, each sent ``trips`` times.
    """
    sizes = dict(spec.sizes)
    if QUERIES not in sizes or KEYS not in sizes:
        return spec
    methods = zip(call["axis"].split(","), call["method"].split(","), strict=True)
    required = tuple((axis, _SPLITS[method]) for axis, method in methods if axis)
    routed = Routed(QUERIES, KEYS, moving=moving, trips=trips, around=call["around"], required=required)
    return replace(spec, routed=routed)


def _call(call: Call) -> Spec:
    """Return the spec of attention with a split sequence. If keys are split, the output is a partial sum."""
    loops = Loops(call)
    heads = SequenceHeads(loops, backward=False)
    # With keys split the output is a partial sum, already weighted by each rank's share; the log-sum-exp is complete.
    spec = loops.spec(heads.operands(loops.names), [heads.out, heads.row], linear=[{2}], replicated=[1])
    return routed(call, spec, (1, 2), 1)


def _gradient(call: Call) -> Spec:
    """Return the spec of the backward of attention of a split sequence."""
    loops = Loops(call)
    heads = SequenceHeads(loops, backward=True)
    spec = loops.spec(heads.operands(loops.names), [heads.query, heads.key, heads.value], linear=[{0}])
    return routed(call, spec, (2, 3), 2)


# --- on one rank


class Attended:
    """Output and log-sum-exp of a rank's queries over the blocks of keys so far, combined as each block is added."""

    def __init__(self, local: Local) -> None:
        self.local, self.run = local, local.builder.call
        self.out: Emitted = None
        self.sums: Emitted = None
        self.blind = self.many = False

    def add(self, out: Emitted, sums: Emitted, *, blind: bool = False) -> None:
        """Adds the result for one block of keys: its output ``out`` and its log-sum-exp ``sums``. ``blind``: some
        queries may see no key of this block, so their log-sum-exp is -inf.
        """
        self.blind |= blind
        if self.out is None:
            self.out, self.sums = out, sums
            return
        self.many = True
        combined = self.run(aten.logaddexp.default, self.sums, sums)
        base = self._base(combined)
        # Each block's output is divided by the sum over its own keys, so it is weighted by its share of all.
        first, second = (
            self.run(aten.mul.Tensor, wide(self.local, x), self._share(part, base))
            for x, part in ((self.out, self.sums), (out, sums))
        )
        self.out, self.sums = self.run(aten.add.Tensor, first, second), combined

    def over(self, pending: tuple[str, ...]) -> tuple[Emitted, Emitted]:
        """Return (this rank's term of the output, log-sum-exp over all keys). ``pending``: the axes over which the keys
        are split, so that each rank has seen a part of them.
        """
        if pending:
            part, self.sums = self.sums, _all_sums(self.local, self.sums, pending)
            share = self._share(part, self._base(self.sums))
            self.out, self.many = self.run(aten.mul.Tensor, wide(self.local, self.out), share), True
        return narrow(self.local, self.out) if self.many else self.out, self.sums

    def _base(self, sums: Emitted) -> Emitted:
        """Return the log-sum-exp ``sums`` as a base of exponents: if some query sees no key of a block, with 0 in place
        of -inf (else -inf minus -inf would give nan).
        """
        return _finite(self.local, sums) if self.blind else sums

    def _share(self, part: Emitted, whole: Emitted) -> Emitted:
        """Return the weight ``exp(part - whole)`` of a block in the output: ``part`` is the log-sum-exp over the
        block's keys, ``whole`` the log-sum-exp over all keys.
        """
        weight = self.run(aten.exp.default, self.run(aten.sub.Tensor, part, whole))
        return self.run(aten.unsqueeze.default, weight, 3)


def _call_local(local: Local) -> Emitted:
    """Emit attention of this rank's queries to all keys, block by block; return [output, log-sum-exp]."""
    run, sequence, attended = local.builder.call, KeyBlocks(local), Attended(local)
    scale, query = local.call["scale"], local.operand("query")
    # Where their shapes allow it, keys and values travel as one tensor.
    reached = sequence.reached(sequence.joined(local.operand("key"), local.operand("value")))
    for block in sequence.blocks():
        k, v = sequence.parted([block.take(x) for x in reached])
        # Keys beyond ``keys`` are padding; in a block of split keys the bias hides these.
        keys = min(local.call["keys"], local.builder.shape(k)[2]) if sequence.whole else local.builder.shape(k)[2]
        outputs = run(CALL, query, k, v, block.bias, block.causal, scale, keys, **block.when)
        o, s = run(getitem, outputs, 0), run(getitem, outputs, 1)
        if block.blind is not None:
            s = run(aten.where.self, block.blind, run(aten.full_like.default, s, -inf), s)
        attended.add(o, s, blind=block.blind is not None)
    out, sums = attended.over(sequence.pending)
    return [out, _finite(local, sums) if attended.blind else sums]


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
    run, shape = local.builder.call, local.builder.shape(sums)
    ranks, group = local.builder.group(axes)
    sums = run(aten.clone.default, sums, memory_format=torch.contiguous_format)
    gathered = run(WAIT, run(functional.all_gather_into_tensor.default, sums, ranks, group))
    return run(aten.logsumexp.default, run(aten.reshape.default, gathered, [ranks, *shape]), [0])


def _gradient_local(local: Local) -> Emitted:
    """Emit the gradients of query, key and value on this rank, block by block; return them."""
    run, sequence = local.builder.call, KeyBlocks(local)
    scale = local.call["scale"]
    grad, query, out, sums = (local.operand(name) for name in ("grad", "query", "out", "logsumexp"))
    reached = sequence.reached(sequence.joined(local.operand("key"), local.operand("value")))
    rows_total: list[Emitted] = []
    sources: list[int] = []
    keys_total: list[list[Emitted]] = []
    for block in sequence.blocks():
        k, v = sequence.parted([block.take(x) for x in reached])
        keys = min(local.call["keys"], local.builder.shape(k)[2]) if sequence.whole else local.builder.shape(k)[2]
        grads = run(GRADIENT, grad, query, k, v, out, sums, block.bias, block.causal, scale, keys, **block.when)
        dq, dk, dv = (run(getitem, grads, at) for at in range(3))
        # Gradients of keys go back to the rank of the keys, those of queries stay.
        rows_total.append(dq)
        sources.append(block.source)
        keys_total.append([block.back(x) for x in sequence.joined(dk, dv)])
    key_grads = [sequence.total(list(zip(sources, parts, strict=True))) for parts in zip(*keys_total, strict=True)]
    grads = [added(local, rows_total), *sequence.parted(key_grads)]
    return [narrow(local, x) for x in grads] if len(rows_total) > 1 else grads


SEQUENCE = table(
    Rule(
        "shardc_attention.call",
        _call,
        "b (g r) q e, b g k e, b g k f -> b (g r) q f, b (g r) q    k: sum; or q and k on one axis",
        _call_local,
        opaque=True,
    ),
    Rule(
        "shardc_attention.gradient",
        _gradient,
        "b (g r) q f, b (g r) q e, b g k e, b g k f, ... -> b (g r) q e, b g k e, b g k f    q k r: sum; or as forward",
        _gradient_local,
        opaque=True,
    ),
    strides=CONTIGUOUS,
)

TABLE = FUSED | PACKED | SEQUENCE
