"""A GPT-2-style decoder: LayerNorm, one fused QKV projection, biases, GELU, learned positions, a tied embedding.

B batch, S sequence, D dim, H heads, E head size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc


@dataclass(frozen=True)
class GPT2Config:
    vocab: int = 64
    context: int = 32
    dim: int = 64
    layers: int = 2
    heads: int = 8
    dropout: float = 0.0


class Embedding(nn.Embedding):
    """``nn.Embedding`` with a small initial scale."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


class Attention(nn.Module):
    """Causal attention; ``qkv`` holds the queries, keys and values one after the other along its ``3 D`` rows."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.out = nn.Linear(config.dim, config.dim)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dropout(self.out(out.transpose(1, 2).flatten(-2)))


class FeedForward(nn.Module):
    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.up = nn.Linear(config.dim, 4 * config.dim)
        self.down = nn.Linear(4 * config.dim, config.dim)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(F.gelu(self.up(x), approximate="tanh")))


class Block(nn.Module):
    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(config.dim)
        self.attn = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.dim)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT2(nn.Module):
    """Tokens ``[B, S]`` to logits ``[B, S, V]``, ``S`` at most ``config.context``."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.embed = Embedding(config.vocab, config.dim)
        self.positions = Embedding(config.context, config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embed(tokens) + self.positions(positions))
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.embed.weight)


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy ``[]`` of logits ``[B, S, V]`` over the targets ``[B, S]`` that are not -100."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def gpt2_tp(axis: str, sequence: bool = False) -> shardc.Plan:
    """Heads, hidden features and vocabulary split over ``axis``; with ``sequence``, also the rest over the sequence.

    ``(3 _@tp)`` splits the fused projection over heads inside each of its three parts, so that the chunk into
    queries, keys and values stays local.
    """
    fused = {"layers.*.attn.qkv.weight": f"(3 _@{axis}), _", "layers.*.attn.qkv.bias": f"(3 _@{axis})"}
    plan = shardc.Plan(params=fused) | shardc.tp(
        axis, colwise=["layers.*.mlp.up"], rowwise=["layers.*.attn.out", "layers.*.mlp.down"], vocab=["embed"]
    )
    if not sequence:
        return plan
    split = ("embed", "layers.*.attn_norm", "layers.*.attn", "layers.*.mlp_norm", "layers.*.mlp", "norm")
    return plan | shardc.Plan(activations={f"{name}.output": f"~, @{axis}, _" for name in split})


def batch(config: GPT2Config, *, size: int = 8, length: int = 16, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Random ``(tokens, targets)``, both ``[size, length]``; each target is the token after it."""
    text = torch.randint(config.vocab, (size, length + 1), device=device)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def build(config: GPT2Config, device: str, targets: bool = False) -> tuple[GPT2, tuple[Tensor, ...]]:
    """The model and the arguments of one call, on ``device``; with those of ``loss``, if it is to have ``targets``."""
    with torch.device(device):
        return GPT2(config), batch(config, device=device)[: 2 if targets else 1]


def example(targets: bool = False) -> tuple[GPT2, tuple[Tensor, ...]]:
    """A small model on meta and the arguments of one call."""
    return build(GPT2Config(), "meta", targets)


def tiny(targets: bool = False) -> tuple[GPT2, tuple[Tensor, ...]]:
    """What ``example`` returns, with real values on the CPU."""
    return build(GPT2Config(), "cpu", targets)
