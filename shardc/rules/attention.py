"""Fused attention: batch and heads are free, queries too where nothing masks by position; keys stay whole."""

from __future__ import annotations

from shardc.rules.loops import FREE, WHOLE, Loops
from shardc.rules.rule import Call, Rule, table
from shardc.rules.spec import Dims, Factors, Spec


class _Attention:
    """The factors of queries ``b h q e``, keys ``b g k e`` and values ``b g k f``, with ``h = g * r`` heads."""

    def __init__(self, call: Call, loops: Loops, *, backward: bool) -> None:
        def shape(name: str) -> tuple[int, ...]:
            at = call.position(name)
            assert at is not None
            return loops.shapes[at]

        query, key, value = shape("query"), shape("key"), shape("value")
        sums = "sum" if backward else FREE
        b, self.g = loops.dim("b", query[0]), loops.dim("g", key[1])
        # Key and value gradients sum over the queries and over the heads that share a key.
        self.h = (*self.g, *loops.dim("r", query[1] // key[1], sums))
        self.q = loops.dim("q", query[2], WHOLE if call["is_causal"] else sums)
        self.k = loops.dim("k", key[2], WHOLE)
        e, f = loops.dim("e", query[3], WHOLE), loops.dim("f", value[3], WHOLE)
        self.b = b
        self.query: Dims = (b, self.h, self.q, e)
        self.key: Dims = (b, self.g, self.k, e)
        self.value: Dims = (b, self.g, self.k, f)
        self.output: Dims = (b, self.h, self.q, f)

    def mask(self, shape: tuple[int, ...]) -> Dims:
        """The dims of a mask or bias that broadcasts to ``b h q k``."""
        full: list[Factors] = [self.b, self.h, self.q, self.k][4 - len(shape) :]
        return tuple(() if size == 1 else factors for size, factors in zip(shape, full, strict=True))

    def named(self, loops: Loops, name: str, shape: tuple[int, ...]) -> Dims:
        """The dims of the operand given as argument ``name``."""
        if name in ("attn_mask", "attn_bias"):
            return self.mask(shape)
        if name == "logsumexp":
            return self.row(loops, shape)
        known = {"query": self.query, "key": self.key, "value": self.value}
        if name in known:
            return known[name]
        if name in ("out", "grad_out", "grad_out_"):
            return self.output
        return loops.dims(name, shape, WHOLE)

    def row(self, loops: Loops, shape: tuple[int, ...]) -> Dims:
        """The dims of one number a query, which some kernels pad or follow with a dim of size 1."""
        q = self.q if len(shape) < 3 or shape[2] == self.size_q(loops) else loops.dim("q.padded", shape[2], WHOLE)
        return (self.b, self.h, q, *(() for _ in shape[3:]))

    def size_q(self, loops: Loops) -> int:
        at = loops.call.position("query")
        assert at is not None
        return loops.shapes[at][2]
