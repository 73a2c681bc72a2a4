"""Kernels that look at strides (attention, convolutions, norms) under plans that gather their operands otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from tests.models.alike import trains_alike

ROWS, PLACES, WIDTH, HEAD = 4, 6, 8, 4


class Heads(nn.Module):
    """Attention with some heads of keys, which all queries' heads share.

    Args:
        shares: how a head of keys gets to its queries: by the kernel, expanded, or repeated.
        mask: "causal", "none", or the dims of a mask that is expanded over the others.
        cross: queries come from fewer places than keys.
    """

    def __init__(self, keys: int = 1, shares: str = "kernel", mask: str = "causal", cross: bool = False) -> None:
        super().__init__()
        self.keys, self.shares, self.mask, self.cross = keys, shares, mask, cross
        self.q, self.k = nn.Linear(WIDTH, 4 * HEAD), nn.Linear(WIDTH, keys * HEAD)
        self.v, self.o = nn.Linear(WIDTH, keys * HEAD), nn.Linear(4 * HEAD, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        of_queries = x[:, : PLACES // 2] if self.cross else x
        q, k, v = (t.view(*t.shape[:2], -1, HEAD).transpose(1, 2) for t in (self.q(of_queries), self.k(x), self.v(x)))
        if self.shares == "expanded":
            k, v = (t[:, :, None].expand(-1, -1, 4 // self.keys, -1, -1).flatten(1, 2) for t in (k, v))
        elif self.shares == "repeated":
            k, v = (t.repeat_interleave(4 // self.keys, 1) for t in (k, v))
        how: dict[str, Any] = {"is_causal": self.mask == "causal", "enable_gqa": self.shares == "kernel"}
        if self.mask not in ("causal", "none"):
            whole = {"b": x.shape[0], "h": 4, "q": q.shape[2], "k": k.shape[2]}
            here = x.new_ones([whole[dim] if dim in self.mask else 1 for dim in "bhqk"]).cumsum(-1)
            how["attn_mask"] = here.sin().expand(list(whole.values()))
        out = F.scaled_dot_product_attention(q, k, v, **how)
        return self.o(out.transpose(1, 2).flatten(2))


TP = shardc.tp("tp", colwise=["q", "k", "v"], rowwise=["o"])
PLANS: dict[str, tuple[dict[str, int], shardc.Plan]] = {
    "tp 4": ({"tp": 4}, TP),
    "dp 2 tp 2": ({"dp": 2, "tp": 2}, shardc.fsdp("dp", threshold=0) | TP),
    "tp 3, which does not divide heads": ({"tp": 3}, TP),
}
ATTENTION = {
    "one head of keys": Heads(),
    "two heads of keys": Heads(2),
    "expanded": Heads(1, "expanded"),
    "two expanded": Heads(2, "expanded", "none"),
    "repeated": Heads(1, "repeated"),
    "a mask of keys": Heads(1, "kernel", "k"),
    "a mask of queries and keys": Heads(2, "expanded", "qk"),
    "a mask of rows": Heads(1, "repeated", "bk"),
    "a mask of heads": Heads(2, "kernel", "hq"),
    "cross": Heads(1, "kernel", "none", cross=True),
    "cross with a mask": Heads(2, "expanded", "bqk", cross=True),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("plan", ["tp 4", *(pytest.param(name, marks=pytest.mark.slow) for name in [*PLANS][1:])])
@pytest.mark.parametrize("name", ATTENTION)
def test_heads_of_keys_that_tp_splits(name: str, plan: str) -> None:
    torch.manual_seed(0)
    trains_alike(ATTENTION[name], (torch.randn(ROWS, PLACES, WIDTH),), *PLANS[plan], steps=1)


class Images(nn.Module):
    """Convolutions, norms and pools of images that lie otherwise than they were made."""

    def __init__(self, lay: str) -> None:
        super().__init__()
        self.lay = lay
        self.up, self.down = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 4, 3, groups=2, bias=False)
        self.group, self.batch, self.layer = nn.GroupNorm(2, 8), nn.BatchNorm2d(4), nn.LayerNorm(4)

    def lying(self, x: Tensor) -> Tensor:
        if self.lay == "channels last":
            return x.contiguous(memory_format=torch.channels_last)
        if self.lay == "transposed":
            return x.transpose(2, 3).contiguous().transpose(2, 3)
        if self.lay == "expanded":
            return x[:, :1].expand(x.shape)
        return torch.cat([x, x], 3)[..., : x.shape[3]]

    def forward(self, x: Tensor) -> Tensor:
        x = self.lying(self.group(self.up(self.lying(x)))).relu()
        x = F.max_pool2d(self.lying(self.batch(self.down(x))), 2, 1)
        return self.layer(x.movedim(1, -1)).flatten(1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lay", ["channels last", "transposed", "expanded", "cut"])
def test_images(lay: str) -> None:
    torch.manual_seed(0)
    plan = shardc.fsdp("dp", threshold=0) | shardc.tp("tp", colwise=["up"], rowwise=["down"])
    trains_alike(Images(lay), (torch.randn(ROWS, 4, 10, 11),), {"dp": 2, "tp": 2}, plan, steps=1)
