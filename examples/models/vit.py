"""A vision transformer: convolutional patches, pre-norm blocks, mean pooling.

B batch, N patches, D dim, H heads, E head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc


@dataclass(frozen=True)
class ViTConfig:
    image: int = 16
    patch: int = 4
    dim: int = 64
    layers: int = 2
    heads: int = 8
    classes: int = 16

    @property
    def patches(self) -> int:
        return (self.image // self.patch) ** 2


class Patches(nn.Module):
    """Images ``[B, 3, image, image]`` to patches with their positions, ``[B, N, D]``."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.project = nn.Conv2d(3, config.dim, config.patch, stride=config.patch)
        self.positions = nn.Parameter(torch.empty(config.patches, config.dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        return self.project(images).flatten(2).transpose(1, 2) + self.positions


class Attention(nn.Module):
    """Attention of every patch to every patch."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.q = nn.Linear(config.dim, config.dim)
        self.k = nn.Linear(config.dim, config.dim)
        self.v = nn.Linear(config.dim, config.dim)
        self.out = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for w in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.dim, 4 * config.dim)
        self.down = nn.Linear(4 * config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(config.dim)
        self.attn = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.dim)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class ViT(nn.Module):
    """Images ``[B, 3, image, image]`` to class scores ``[B, classes]``."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.patches = Patches(config)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(dim=1))


def loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy ``[]`` of scores ``[B, classes]`` against class numbers ``[B]``."""
    return F.cross_entropy(scores, targets)


def vit_tp(axis: str, sequence: bool = False) -> shardc.Plan:
    """Heads and hidden features split over ``axis``; with ``sequence``, also the rest over the patches."""
    plan = shardc.tp(
        axis,
        colwise=[f"layers.*.{name}" for name in ("attn.q", "attn.k", "attn.v", "mlp.up")],
        rowwise=["layers.*.attn.out", "layers.*.mlp.down"],
    )
    if not sequence:
        return plan
    split = ("patches", "layers.*.attn_norm", "layers.*.attn", "layers.*.mlp_norm", "layers.*.mlp", "norm")
    return plan | shardc.Plan(activations={f"{name}.output": f"~, @{axis}, _" for name in split})


def batch(config: ViTConfig, *, size: int = 8, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Random ``(images, classes)``: ``[size, 3, image, image]`` and ``[size]``."""
    images = torch.randn(size, 3, config.image, config.image, device=device)
    return images, torch.randint(config.classes, (size,), device=device)


def build(config: ViTConfig, device: str, targets: bool = False) -> tuple[ViT, tuple[Tensor, ...]]:
    """The model and the arguments of one call, on ``device``; with those of ``loss``, if it is to have ``targets``."""
    with torch.device(device):
        return ViT(config), batch(config, device=device)[: 2 if targets else 1]


def example(targets: bool = False) -> tuple[ViT, tuple[Tensor, ...]]:
    """A small model on meta and the arguments of one call."""
    return build(ViTConfig(), "meta", targets)


def tiny(targets: bool = False) -> tuple[ViT, tuple[Tensor, ...]]:
    """What ``example`` returns, with real values on the CPU."""
    return build(ViTConfig(), "cpu", targets)
