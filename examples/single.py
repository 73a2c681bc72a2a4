"""The same training on one device without shardc, and how far a sharded run is from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Tensor]
Batch = Callable[[int], tuple[Tensor, Tensor]]


def initialise(model: nn.Module) -> None:
    """Initialise every module that knows how to, in the order of ``model.apply``."""
    torch.manual_seed(0)
    model.apply(lambda module: module.reset_parameters() if hasattr(module, "reset_parameters") else None)


def train(model: nn.Module, loss: Loss, batch: Batch, steps: int, lr: float, backend: str) -> list[float]:
    """Train ``model`` in place on one device, through torch.compile for "inductor"; the loss of each step."""
    initialise(model)
    if backend == "inductor":  # whose kernels are a little less exact than eager ones, sharded or not
        model.compile(dynamic=False)
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


def compare(
    sharded: nn.Module, losses: Sequence[float], alone: nn.Module, loss: Loss, batch: Batch, lr: float, backend: str
) -> str:
    """Train ``alone`` as ``sharded`` was; the largest relative differences, of a parameter's values by their norm."""
    expected = train(alone, loss, batch, len(losses), lr, backend)
    in_loss = max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(losses, expected, strict=True))
    whole = {name: p.full_tensor() for name, p in sharded.named_parameters()}
    in_parameters = max(((whole[name] - p).norm() / p.norm()).item() for name, p in alone.named_parameters())
    return f"largest relative difference from one device: {in_loss:.1e} in loss, {in_parameters:.1e} in parameters"
