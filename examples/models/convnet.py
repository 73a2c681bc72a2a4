"""A small residual convolutional network with batch normalisation, in the shape of ResNet."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc


@dataclass(frozen=True)
class ConvNetConfig:
    image: int = 16
    widths: tuple[int, ...] = (16, 32)
    classes: int = 16


class Block(nn.Module):
    """Two 3x3 convolutions around a shortcut, ``[B, inputs, h, w]`` to ``[B, outputs, h / stride, w / stride]``."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ConvNet(nn.Module):
    """Images ``[B, 3, image, image]`` to class scores ``[B, classes]``."""

    def __init__(self, config: ConvNetConfig) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, config.widths[0], 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(config.widths[0])
        widths = (config.widths[0], *config.widths)
        self.blocks = nn.ModuleList(
            Block(before, after, stride=1 if before == after else 2)
            for before, after in zip(widths, widths[1:], strict=False)
        )
        self.head = nn.Linear(config.widths[-1], config.classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(images)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=(2, 3)))


def loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy ``[]`` of scores ``[B, classes]`` against class numbers ``[B]``."""
    return F.cross_entropy(scores, targets)


def convnet_channels(axis: str) -> shardc.Plan:
    """The channels between each block's two convolutions split over ``axis``: one all-reduce per block forward."""
    return shardc.Plan(
        params={
            "blocks.*.conv1.weight": f"@{axis}, _, _, _",
            "blocks.*.norm1.weight": f"@{axis}",
            "blocks.*.norm1.bias": f"@{axis}",
            "blocks.*.conv2.weight": f"_, @{axis}, _, _",
        }
    )


def batch(config: ConvNetConfig, *, size: int = 8, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Random ``(images, classes)``: ``[size, 3, image, image]`` and ``[size]``."""
    images = torch.randn(size, 3, config.image, config.image, device=device)
    return images, torch.randint(config.classes, (size,), device=device)


def build(config: ConvNetConfig, device: str, targets: bool = False) -> tuple[ConvNet, tuple[Tensor, ...]]:
    """The model and the arguments of one call, on ``device``; with those of ``loss``, if it is to have ``targets``."""
    with torch.device(device):
        return ConvNet(config), batch(config, device=device)[: 2 if targets else 1]


def example(targets: bool = False) -> tuple[ConvNet, tuple[Tensor, ...]]:
    """A small model on meta and the arguments of one call."""
    return build(ConvNetConfig(), "meta", targets)


def tiny(targets: bool = False) -> tuple[ConvNet, tuple[Tensor, ...]]:
    """What ``example`` returns, with real values on the CPU."""
    return build(ConvNetConfig(), "cpu", targets)
