"""Rules for fused attention kernels (SDPA): batch and heads may be split, queries too if no mask depends on their
position. Keys must be whole: see `shardc.rules.sequence_attention` for the op that splits them.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardc.rules.loops import FREE, Loops
from shardc.rules.notation import WHOLE
from shardc.rules.rule import CONTIGUOUS, Call, Rule, table
from shardc.rules.spec import Dims, Spec


class _Heads:
    """The factors of queries ``b h q e``, keys ``b g k e`` and values ``b g k f`` with ``h = g * r`` (GQA)."""

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
        q = loops.dim("q", query[2], WHOLE if call["is_causal"] or self._pads_rows() else kind)
        k, e, f = loops.dim("k", key[2], WHOLE), loops.dim("e", query[3], WHOLE), loops.dim("f", value[3], WHOLE)
        self.query, self.key, self.value = (self.b, h, q, e), (self.b, g, k, e), (self.b, g, k, f)
        self.output, self.scores = (self.b, h, q, f), (self.b, h, q, k)

    def _pads_rows(self) -> bool:
        """Return whether the kernel's log-sum-exp has more rows than there are queries (some kernels pad it)."""
        lse = [s for n, s in zip(self.loops.names, self.loops.shapes, strict=True) if n == "logsumexp"]
        return any(shape[2] != self.queries for shape in lse or self.loops.result_shapes[1:2] if len(shape) > 2)

    def row(self, shape: Sequence[int]) -> Dims:
        """Return the factors of a tensor with one number per query (log-sum-exp). Some kernels append a dim of size 1,
        pad the rows or return an empty tensor.
        """
        q = self.output[2] if shape[2] == self.queries else self.loops.dim("rows", shape[2], WHOLE)
        return (*self.output[:2], q, *[()] * (len(shape) - 3))

    def bias(self, shape: Sequence[int]) -> Dims:
        """Return the factors of a mask or bias that broadcasts to the scores."""
        full = self.scores[len(self.scores) - len(shape) :]
        return tuple(() if size == 1 else factors for size, factors in zip(shape, full, strict=True))

    def operand(self, name: str, shape: Sequence[int]) -> Dims:
        if name in ("attn_mask", "attn_bias"):
            return self.bias(shape)
        if name == "logsumexp":
            return self.row(shape)
        if name in ("out", "grad_out", "grad_out_"):
            return self.output
        inputs = {"query": self.query, "key": self.key, "value": self.value}
        return inputs[name] if name in inputs else self.loops.dims(name, shape, WHOLE)

    def operands(self) -> list[Dims]:
        return [self.operand(n, shape) for n, shape in zip(self.loops.names, self.loops.shapes, strict=True)]


def _forward(call: Call) -> Spec:
    loops = Loops(call)
    heads = _Heads(loops, backward=False)
    state = [loops.dims(f"state{i}.", shape, WHOLE) for i, shape in enumerate(loops.result_shapes[2:])]
    results = [heads.output, heads.row(loops.result_shapes[1]), *state]
    return loops.spec(heads.operands(), results, replicated=range(2, len(results)))


def _backward(call: Call) -> Spec:
    loops = Loops(call)
    heads = _Heads(loops, backward=True)
    inputs = [heads.query, heads.key, heads.value]
    grads = [dims for dims, result in zip(inputs, call.results, strict=False) if result is not None]
    bias = [heads.bias(v.shape) for v in call.results[3:] if v is not None]
    return loops.spec(heads.operands(), [*grads, *bias])


_KERNELS = ("flash_attention_for_cpu", "efficient_attention", "flash_attention", "cudnn_attention")
_TEXT = "b (g r) q e, b g k e, b g k f -> b (g r) q f, b (g r) q    k e f: whole; q: whole where causal"

TABLE = table(
    [Rule(f"aten._scaled_dot_product_{kernel}", _forward, _TEXT) for kernel in _KERNELS],
    [
        Rule(f"aten._scaled_dot_product_{kernel}_backward", _backward, f"backward of {_TEXT}    g r q: sum")
        for kernel in _KERNELS
    ],
    strides=CONTIGUOUS,
)
