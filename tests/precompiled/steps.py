"""Training steps of compiled modules, as hashes that are equal only where every bit is. Run as a program too."""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from tests.state import batch, model

PLAN = shardc.fsdp("dp") | shardc.tp("tp", colwise=["mid"], rowwise=["back"])
MESH = shardc.Mesh(dp=2, tp=2)


class Mixed(nn.Module):
    """A loss with a constant that is too large for a program's text."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.randn(9, 9, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out @ self.table, y)


def simulated(precompiled: Any = ()) -> tuple[Any, shardc.Simulation]:
    module = shardc.compile(model(), MESH, PLAN, loss=Mixed(), backend="eager", precompiled=precompiled)
    return module, shardc.Simulation(module)


def trained(sim: shardc.Simulation) -> str:
    """A hash of losses, gradients and parameters of two steps, and of an evaluation."""
    optimizer = sim.optimizers(lambda shards: torch.optim.AdamW(shards, lr=0.1))
    found = []
    for at in range(2):
        found.append(sim(*batch(at)))
        sim.backward()
        found += [sim.grad(name) for name in sorted(sim.grads)]
        optimizer()
    found += [sim.param(name) for name in sorted(sim.params)]
    found.append(sim(*batch(9), grad=False))
    return digest(found)


def digest(tensors: list[Tensor]) -> str:
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(repr(tensor.detach().double().reshape(-1).tolist()).encode())
    return total.hexdigest()


if __name__ == "__main__":
    loaded = shardc.load(sys.argv[1])
    module, sim = simulated(loaded)
    print(trained(sim))
    assert list(module.shardc.programs.values()) == [loaded], "the saved program was not used"
