"""A residual multi-layer perceptron for regression."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc


@dataclass(frozen=True)
class MLPConfig:
    features: int = 32
    hidden: int = 64
    outputs: int = 16
    layers: int = 2


class Block(nn.Module):
    """``x + down(relu(up(x)))`` on ``[batch, features]``."""

    def __init__(self, config: MLPConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.features, config.hidden)
        self.down = nn.Linear(config.hidden, config.features)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x)))


class MLP(nn.Module):
    """``[batch, features]`` to ``[batch, outputs]``."""

    def __init__(self, config: MLPConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.head = nn.Linear(config.features, config.outputs)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error over the whole batch."""
    return F.mse_loss(outputs, targets)


def mlp_tp(axis: str) -> shardc.Plan:
    """Each block split over ``axis`` in the middle: one all-reduce per block forward and one backward."""
    return shardc.tp(axis, colwise=["layers.*.up"], rowwise=["layers.*.down"])


def batch(config: MLPConfig, *, size: int = 16, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Random ``(inputs, targets)``: ``[size, features]`` and ``[size, outputs]``."""
    return torch.randn(size, config.features, device=device), torch.randn(size, config.outputs, device=device)


def build(config: MLPConfig, device: str, targets: bool = False) -> tuple[MLP, tuple[Tensor, ...]]:
    """The model and the arguments of one call, on ``device``; with those of ``loss``, if it is to have ``targets``."""
    with torch.device(device):
        return MLP(config), batch(config, device=device)[: 2 if targets else 1]


def example(targets: bool = False) -> tuple[MLP, tuple[Tensor, ...]]:
    """A small model on meta and the arguments of one call."""
    return build(MLPConfig(), "meta", targets)


def tiny(targets: bool = False) -> tuple[MLP, tuple[Tensor, ...]]:
    """What ``example`` returns, with real values on the CPU."""
    return build(MLPConfig(), "cpu", targets)
