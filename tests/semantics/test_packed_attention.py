"""Attention of packed sequences (``varlen_attn``) under plans that split heads; torch has no kernel of it for CPUs."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

import shardc
from tests.models.alike import trains_alike
from tests.rules.samples import packed

assert packed.forward  # its kernels for CPUs
WIDTH, HEAD, PLACES = 32, 8, 24


class Packed(nn.Module):
    """Four heads of queries, and as many or fewer of keys."""

    def __init__(self, keys: int) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, 4 * HEAD), nn.Linear(4 * HEAD, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, keys * HEAD), nn.Linear(WIDTH, keys * HEAD)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, HEAD)) for layer in (self.q, self.k, self.v))
        out = varlen_attn(q, k, v, ends, ends, PLACES, PLACES, window_size=(-1, 0), enable_gqa=len(k[0]) < 4)
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
