"""Kernels for CPUs of causal attention of packed sequences (``varlen_attn``), and samples of its rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen

from shardc._compat import differentiable
from tests.rules.samples.values import Draw, Sample


def attend(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Causal attention of each sequence, and the log-sum-exp of scores [heads, places]."""
    document = torch.bucketize(torch.arange(len(query)), ends, right=True)
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = torch.einsum("qhe,khe->hqk", query, key) * (query.shape[2] ** -0.5 if scale is None else scale)
    later = torch.ones(len(query), len(key), dtype=torch.bool).triu(1)
    scores = scores.masked_fill(later | (document[:, None] != document), -torch.inf)
    return torch.einsum("hqk,khe->qhe", scores.softmax(-1), value), scores.logsumexp(-1)


@varlen._varlen_attn.register_kernel("cpu")
def forward(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, ends_k: Tensor, max_q: int, max_k: int,
    is_causal: bool = False, scale: float | None = None, *_: object,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    out, sums = attend(query, key, value, ends, scale)
    return out.contiguous(), sums.float(), torch.zeros(2, dtype=torch.uint64)


@varlen._varlen_attn_backward.register_kernel("cpu")
def backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, ends: Tensor, ends_k: Tensor,
    max_q: int, max_k: int, is_causal: bool, state: Tensor, scale: float | None = None, *_: object,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    with differentiable():
        q, k, v = (x.detach().requires_grad_() for x in (query, key, value))
        dq, dk, dv = torch.autograd.grad(attend(q, k, v, ends, scale)[0], (q, k, v), grad)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


def samples(op: str) -> Iterator[Sample]:
    """Samples of forward or backward: as many heads of keys as of queries, and fewer."""
    draw, ops, places = Draw(op), torch.ops.torch_attn, 12
    ends = torch.tensor([0, 5, 6, places], dtype=torch.int32)
    for heads, groups in ((4, 4), (8, 4), (4, 2)):
        q, k, v = (draw.normal(places, count, 4) for count in (heads, groups, groups))
        how: Any = (ends, ends, places, places, True)
        out, sums, state = ops._varlen_attn.default(q, k, v, *how)
        if op.endswith("backward"):
            grads = draw.normal(*out.shape), q, k, v, out, sums
            yield Sample(ops._varlen_attn_backward.default, (*grads, *how, state))
        else:
            yield Sample(ops._varlen_attn.default, (q, k, v, *how))
