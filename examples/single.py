"""The same training on one device without shardc, and how far a sharded run is from it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Tensor]
Batch = Callable[[int], tuple[Tensor, Tensor]]


def initialise(model: nn.Module) -> None:
    """Initialise every module that knows how to, in the order of ``model.apply``."""
    torch.manual_seed(0)
    model.apply(lambda module: module.reset_parameters() if hasattr(module, "reset_parameters") else None)


def train(model: nn.Module, loss: Loss, batch: Batch, steps: int, lr: float) -> list[float]:
    """Train ``model`` in place on one device; the loss of each step."""
    initialise(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for step in range(steps):
        tokens, targets = batch(step)
        value = loss(model(tokens), targets)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def parameter_difference(sharded: nn.Module, alone: nn.Module) -> float:
    """Over all parameters, the largest difference relative to the largest entry of that parameter."""
    ours = {name: p.full_tensor() for name, p in sharded.named_parameters()}
    return max(
        ((ours[name] - p).abs().max() / p.abs().max().clamp_min(1e-30)).item() for name, p in alone.named_parameters()
    )
