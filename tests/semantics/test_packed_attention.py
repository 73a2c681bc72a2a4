"""Attention of packed sequences (``varlen_attn``) under plans that split heads; torch has no kernel of it for CPUs."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc._compat import differentiable
from tests.models.alike import trains_alike

varlen = pytest.importorskip("torch.nn.attention.varlen")
WIDTH, HEAD, PLACES = 32, 8, 24


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


class Packed(nn.Module):
    """Four heads of queries, and as many or fewer of keys."""

    def __init__(self, keys: int) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, 4 * HEAD), nn.Linear(4 * HEAD, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, keys * HEAD), nn.Linear(WIDTH, keys * HEAD)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, HEAD)) for layer in (self.q, self.k, self.v))
        out = varlen.varlen_attn(q, k, v, ends, ends, PLACES, PLACES, window_size=(-1, 0), enable_gqa=len(k[0]) < 4)
        return self.o(out.flatten(1))


@pytest.mark.parametrize(("keys", "ranks"), [(4, 2), (2, 2), (2, 4)])
def test_heads_are_split(keys: int, ranks: int) -> None:
    plan = shardc.tp("tp", colwise=["q", "k", "v"], rowwise=["o"]) | shardc.Plan(inputs={"x": "...", "ends": "..."})
    inputs = torch.randn(PLACES, WIDTH), torch.tensor([0, 5, 6, 17, PLACES], dtype=torch.int32)
    with warnings.catch_warnings():
        warnings.simplefilter("error", shardc.ShardcWarning)
        trains_alike(Packed(keys), inputs, {"tp": ranks}, plan, steps=2)
        module = shardc.compile(Packed(keys), shardc.Mesh(tp=ranks), plan, backend="eager")
        text = module.lower(*inputs).text("localize")
    assert "torch_attn._varlen_attn(" in text and f"f32[{PLACES},{4 // ranks},{HEAD}]" in text
