"""Models with attention as people write it: blocks of torch, one's own spellings, masks, biases, tables and losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, CLASSES = 16, 4, 11
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return scores.masked_fill(~causal(q.shape[-2]), float("-inf")).softmax(-1) @ v


def soft_capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = 5 * ((q @ k.transpose(-1, -2)) / 10).tanh()
    return (scores + torch.where(causal(q.shape[-2]), 0.0, -1e30)).softmax(-1) @ v


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k).div(2)
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)


def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    place = torch.arange(q.shape[-2])
    near = (place[:, None] - place).abs() <= 2
    return F.scaled_dot_product_attention(q, k, v, attn_mask=near)


def alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    place = torch.arange(q.shape[-2])
    slopes = 2.0 ** -torch.arange(1, HEADS + 1, dtype=q.dtype)
    bias = -(place[:, None] - place).abs() * slopes[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.masked_fill(~causal(q.shape[-2]), float("-inf")))


def rotary(x: Tensor) -> Tensor:
    angles = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * 10 ** -torch.linspace(0, 1, x.shape[-1] // 2)
    sin, cos = angles.to(x.dtype).sin(), angles.to(x.dtype).cos()
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def interleaved(x: Tensor) -> Tensor:
    angles = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * torch.linspace(0.1, 1, x.shape[-1] // 2).to(x.dtype)
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(-2)


def linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return (q @ (k.transpose(-1, -2) @ v)) / (q @ k.sum(-2, keepdim=True).transpose(-1, -2))


ATTENTION: dict[str, Attend] = {
    "plain": F.scaled_dot_product_attention,
    "causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "scaled": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3),
    "rotary": lambda q, k, v: F.scaled_dot_product_attention(rotary(q), rotary(k), v, is_causal=True),
    "complex rotary": lambda q, k, v: F.scaled_dot_product_attention(interleaved(q), interleaved(k), v, is_causal=True),
    "one head of keys": lambda q, k, v: F.scaled_dot_product_attention(
        q, k.mean(1, True), v.mean(1, True), enable_gqa=True, is_causal=True),
    "repeated heads": lambda q, k, v: F.scaled_dot_product_attention(
        q, k[:, ::2].repeat_interleave(2, 1), v[:, ::2].repeat_interleave(2, 1), is_causal=True),
    "expanded heads": lambda q, k, v: F.scaled_dot_product_attention(
        q, k[:, :1].expand_as(q), v[:, :1].expand_as(q), is_causal=True),
    "other width of values": lambda q, k, v: torch.cat(
        [F.scaled_dot_product_attention(q, k, v[..., :2]), F.scaled_dot_product_attention(q, k, v[..., 2:])], -1),
    "normed": lambda q, k, v: F.scaled_dot_product_attention(F.normalize(q, dim=-1), F.rms_norm(k, k.shape[-1:]), v),
    "twice": lambda q, k, v: F.scaled_dot_product_attention(F.scaled_dot_product_attention(q, k, v), k, v),
    "differential": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    - 0.3 * F.scaled_dot_product_attention(q.roll(1, 1), k.roll(1, 1), v, is_causal=True),
    "a key more": lambda q, k, v: F.scaled_dot_product_attention(
        q, torch.cat([torch.ones_like(k[:, :, :1]), k], 2), torch.cat([torch.zeros_like(v[:, :, :1]), v], 2)),
    "backwards": lambda q, k, v: F.scaled_dot_product_attention(q, k.flip(2), v.flip(2), is_causal=True),
    "written out": written_out,
    "soft cap": soft_capped,
    "einsum": by_einsum,
    "window": windowed,
    "alibi": alibi,
    "linear": linear,
}  # fmt: skip


class Packed(nn.Module):
    """One product for queries, keys and values; then the attention of that name."""

    def __init__(self, attention: str) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(ATTENTION[self.attention](q, k, v).transpose(1, 2).reshape(x.shape))


class Of(nn.Module):
    """A block over the sequence, and the squares of what it gives as its loss."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.norm = block, nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.norm(self.block(x)) - y).square().mean()


class Torch(nn.Module):
    """torch's own block, with the mask that it wants."""

    def __init__(self, block: nn.Module, **given: Any) -> None:
        super().__init__()
        self.block, self.given = block, given

    def forward(self, x: Tensor) -> Tensor:
        given = {key: make(x) for key, make in self.given.items()}
        if isinstance(self.block, nn.MultiheadAttention):
            return x + self.block(x, x, x, need_weights=False, **given)[0]
        if isinstance(self.block, (nn.TransformerDecoderLayer, nn.TransformerDecoder)):
            return self.block(x, x.flip(1), **given)
        return self.block(x, **given)


class Latents(nn.Module):
    """A few queries of its own read the sequence, and the sequence reads them (Perceiver)."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(3, WIDTH))
        self.q, self.kv, self.back = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        def heads(x: Tensor) -> Tensor:
            return x.unflatten(-1, (2, -1)).transpose(1, 2)

        k, v = map(heads, self.kv(x).chunk(2, -1))
        read = F.scaled_dot_product_attention(heads(self.q(self.latents.expand(x.shape[0], -1, -1))), k, v)
        k, v = map(heads, self.back(read.transpose(1, 2).flatten(2)).chunk(2, -1))
        return x + F.scaled_dot_product_attention(heads(self.q(x)), k, v).transpose(1, 2).flatten(2)


class Classes(nn.Module):
    """A token in front whose output alone is read (ViT)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.places = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Parameter(torch.randn(64, WIDTH))
        self.block, self.head = Packed("plain"), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1)
        x = self.block(x + self.places[: x.shape[1]])
        return self.head(x[:, :1]) + x[:, 1:]


class Shared(nn.Module):
    """One block many times, then a mean over the sequence that all of it reads; a convolution beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.conv = Packed("causal"), nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.block(x)
        mixed = self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        return mixed + x.mean(1, keepdim=True) * torch.linspace(0, 1, x.shape[1])[:, None].to(x.dtype)


class NextToken(nn.Module):
    """A loss of the token after each, in two spellings, with weights of classes."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Packed("causal"), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.head(self.block(x))
        ids = x[..., :CLASSES].argmax(-1)
        loss = F.cross_entropy(scores[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), label_smoothing=0.1)
        after = F.pad(ids[:, 1:], (0, 1), value=-100)
        return loss + F.cross_entropy(scores.transpose(1, 2), after, reduction="sum") / 7 + 0 * x


def layer(kind: type[nn.Module], **options: Any) -> nn.Module:
    return kind(WIDTH, HEADS, 24, dropout=0.0, batch_first=True, **options)


def square(x: Tensor) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)


def ends(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1]) >= x.shape[1] - 1 - torch.arange(x.shape[0])[:, None]


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: lambda name=name: Packed(name) for name in ATTENTION},  # type: ignore[misc]
    "two layers": lambda: nn.Sequential(Packed("causal"), nn.Linear(WIDTH, WIDTH), nn.GELU(), Packed("plain")),
    "encoder": lambda: Torch(nn.TransformerEncoder(layer(nn.TransformerEncoderLayer), 2)),
    "encoder, causal": lambda: Torch(layer(nn.TransformerEncoderLayer, norm_first=True), src_mask=square),
    "encoder, padding": lambda: Torch(layer(nn.TransformerEncoderLayer), src_key_padding_mask=ends),
    "decoder": lambda: Torch(layer(nn.TransformerDecoderLayer), tgt_mask=square),
    "multihead": lambda: Torch(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)),
    "multihead, keys of its own": lambda: Torch(
        nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, add_bias_kv=True)
    ),
    "multihead, causal": lambda: Torch(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), attn_mask=square),
    "latents": Latents,
    "classes": Classes,
    "shared": Shared,
    "next token": NextToken,
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return Of(MODELS[name]()).double().train()
