"""A model with every kind of parameter, and what tests of a sharded module's state share."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardc
from shardc.runtime.full_params import unshard

BATCH = 4
PLANS = {
    "fsdp": ("dp", shardc.fsdp("dp")),
    "ddp": ("dp", shardc.ddp("dp")),
    # A fused weight is split inside of each of its three parts.
    "tp": ("tp", shardc.tp("tp", colwise=["mid"], rowwise=["back"]) | shardc.Plan(params={"fused": "(3 4@tp), _"})),
}


class Net(nn.Module):
    """Uneven, tied, fused, unused, 0-dim and empty parameters, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.Linear(5, 9)
        self.mid, self.back = nn.Linear(9, 12), nn.Linear(12, 5)
        self.head = nn.Linear(5, 9, bias=False)
        self.head.weight = self.odd.weight
        self.fused = nn.Parameter(torch.randn(12, 9))
        self.scale, self.empty = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.empty(0, 4))
        self.unused = nn.Linear(4, 4)
        self.register_buffer("offset", torch.randn(9))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.odd(x).tanh()
        q, k, v = F.linear(hidden, self.fused).chunk(3, dim=-1)
        hidden = self.mid(hidden) + torch.cat([q * k, k * v, v * q], -1)
        return self.head(self.back(hidden.tanh())) * self.scale + self.empty.sum() + self.offset


def model(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(BATCH, size, generator=generator, dtype=torch.float64) for size in (5, 9))  # type: ignore[return-value]


def sharded(source: nn.Module, plan: str, ranks: int = 2, loss: Any = F.mse_loss, more: Any = None) -> Any:
    """``source`` compiled under one of `PLANS` on a mesh of one axis."""
    axis, said = PLANS[plan]
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=(axis,))
    return shardc.compile(source, mesh, said | (more or shardc.Plan()), loss=loss, backend="eager")


def step(module: Any, source: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the same global batch on the sharded module and on one device; both losses."""
    ours = module(*module.shard_inputs(x, y))
    ours.backward()
    theirs = F.mse_loss(source(x), y)
    theirs.backward()
    return ours.detach(), theirs.detach()


def assert_same(module: Any, source: nn.Module, grads: bool = False) -> None:
    """Parameters (or gradients) and buffers equal one device's, by every name that they have."""
    for name, theirs in source.named_parameters(remove_duplicate=False):
        ours = module.get_parameter(name)
        first = next(n for n, p in source.named_parameters() if p is theirs)
        if grads:
            ours, theirs = ours.grad, theirs.grad
        assert (ours is None) == (theirs is None), name
        if ours is not None:
            assert isinstance(ours, DTensor), name
            close(unshard(ours, module.shardc.spec.storages[first]), theirs.detach(), name)
    for name, buffer in source.named_buffers():
        close(module.get_buffer(name), buffer, name)


def close(ours: Tensor, theirs: Tensor, what: str = "") -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12, msg=lambda text: f"{what}: {text}")
