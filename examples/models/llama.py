"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query causal attention, SwiGLU, an untied head.

B batch, S sequence, D dim, H heads, K key/value heads, E head size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    import shardc


@dataclass(frozen=True)
class LlamaConfig:
    vocab: int = 64
    dim: int = 64
    layers: int = 2
    heads: int = 16
    kv_heads: int = 8
    hidden: int = 128
    rope_theta: float = 10000.0
    checkpoint: bool = False  # backward computes each block again

    @property
    def head_size(self) -> int:
        return self.dim // self.heads


class Embedding(nn.Embedding):
    """``nn.Embedding`` with a small initial scale."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


def rotary_tables(length: int, config: LlamaConfig, like: Tensor) -> tuple[Tensor, Tensor]:
    """The cosines and sines ``[S, E]`` of positions ``0 .. length - 1``, in the dtype and on the device of ``like``."""
    exponents = torch.arange(0, config.head_size, 2, device=like.device, dtype=torch.float32) / config.head_size
    positions = torch.arange(length, device=like.device, dtype=torch.float32)
    angles = positions[:, None] * config.rope_theta**-exponents
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of features (``e`` and ``e + E/2``) of ``x`` ``[B, heads, S, E]`` by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    """Causal attention in which ``H / K`` query heads share one key/value head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.wq = nn.Linear(config.dim, config.heads * config.head_size, bias=False)
        self.wk = nn.Linear(config.dim, config.kv_heads * config.head_size, bias=False)
        self.wv = nn.Linear(config.dim, config.kv_heads * config.head_size, bias=False)
        self.wo = nn.Linear(config.heads * config.head_size, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).flatten(-2))


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden, bias=False)
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attn = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """Tokens ``[B, S]`` to logits ``[B, S, V]``."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        cos, sin = rotary_tables(tokens.shape[1], self.config, like=x)
        for layer in self.layers:
            x = checkpoint(layer, x, cos, sin, use_reentrant=False) if self.config.checkpoint else layer(x, cos, sin)
        return self.head(self.norm(x))


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy ``[]`` of logits ``[B, S, V]`` over the targets ``[B, S]`` that are not -100."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def llama_tp(axis: str, sequence: bool = False) -> shardc.Plan:
    """Heads, hidden features and vocabulary split over ``axis``; with ``sequence``, also the rest over the sequence."""
    import shardc  # here, so that the model needs torch alone

    plan = shardc.tp(
        axis,
        colwise=[f"layers.*.{name}" for name in ("attn.wq", "attn.wk", "attn.wv", "mlp.gate", "mlp.up")] + ["head"],
        rowwise=["layers.*.attn.wo", "layers.*.mlp.down"],
        vocab=["embed"],
    )
    if not sequence:
        return plan
    split = ("embed", "layers.*.attn_norm", "layers.*.attn", "layers.*.mlp_norm", "layers.*.mlp", "norm")
    return plan | shardc.Plan(activations={f"{name}.output": f"~, @{axis}, _" for name in split})


def batch(config: LlamaConfig, *, size: int = 8, length: int = 16, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Random ``(tokens, targets)``, both ``[size, length]``; each target is the token after it."""
    text = torch.randint(config.vocab, (size, length + 1), device=device)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def build(
    config: LlamaConfig, device: str, *, size: int = 8, length: int = 16, targets: bool = False
) -> tuple[Llama, tuple[Tensor, ...]]:
    """The model and the arguments of one call, on ``device``; with those of ``loss``, if it is to have ``targets``."""
    with torch.device(device):
        return Llama(config), batch(config, size=size, length=length, device=device)[: 2 if targets else 1]


def example(targets: bool = False) -> tuple[Llama, tuple[Tensor, ...]]:
    """A small model on meta and the arguments of one call."""
    return build(LlamaConfig(), "meta", targets=targets)


def tiny(targets: bool = False) -> tuple[Llama, tuple[Tensor, ...]]:
    """What ``example`` returns, with real values on the CPU."""
    return build(LlamaConfig(), "cpu", targets=targets)


def llama3_8b(layers: int = 32, targets: bool = False) -> tuple[Llama, tuple[Tensor, ...]]:
    """Llama 3 8B (or its first ``layers`` layers) on meta, with 8 sequences of 8,192 tokens."""
    config = LlamaConfig(128256, 4096, layers, heads=32, kv_heads=8, hidden=14336, rope_theta=500000.0)
    return build(config, "meta", size=8, length=8192, targets=targets)


def qwen3_14b(layers: int = 40, targets: bool = False) -> tuple[Llama, tuple[Tensor, ...]]:
    """A Llama of Qwen3 14B's sizes (or its first ``layers`` layers), without norms of queries and keys, on meta, with 8
    sequences of 8,192 tokens.
    """
    config = LlamaConfig(151936, 5120, layers, heads=40, kv_heads=8, hidden=17408, rope_theta=1000000.0)
    return build(config, "meta", size=8, length=8192, targets=targets)


def llama3_70b(layers: int = 80, size: int = 32, targets: bool = False) -> tuple[Llama, tuple[Tensor, ...]]:
    """Llama 3 70B (or its first ``layers`` layers) on meta, with ``size`` sequences of 8,192 tokens."""
    config = LlamaConfig(128256, 8192, layers, heads=64, kv_heads=8, hidden=28672, rope_theta=500000.0)
    return build(config, "meta", size=size, length=8192, targets=targets)


def llama3_405b(layers: int = 126, size: int = 2048, targets: bool = False) -> tuple[Llama, tuple[Tensor, ...]]:
    """Llama 3 405B (or its first ``layers`` layers) on meta, with ``size`` sequences of 8,192 tokens."""
    config = LlamaConfig(128256, 16384, layers, heads=128, kv_heads=8, hidden=53248, rope_theta=500000.0)
    return build(config, "meta", size=size, length=8192, targets=targets)
