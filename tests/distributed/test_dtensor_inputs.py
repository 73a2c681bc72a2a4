"""Inputs that are DTensors, under a plan that speaks of inputs: resharded, whatever their placements are."""

from __future__ import annotations

import warnings
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import shardc
from tests.ranks import run_ranks
from tests.state import close

X = torch.linspace(-1, 1, 96, dtype=torch.float64).view(8, 12).sin()
PLACEMENTS = (Shard(0), Shard(1), Replicate(), Partial())
MESHES = {1: ((2,), ("dp",)), 2: ((2, 2), ("dp", "tp"))}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.layers(x) * scale


def square(out: Tensor) -> Tensor:
    return out.square().mean()


def placed(x: Tensor, mesh: Any, placements: Any) -> Any:
    """``x`` as a DTensor; of a pending sum each rank has another term."""
    whole = [Replicate() if p.is_partial() else p for p in placements]
    local = distribute_tensor(x, mesh, whole).to_local()
    for axis, placement in enumerate(placements):
        if placement.is_partial():
            local = local * (0.25, 0.75)[mesh.get_coordinate()[axis]]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=x.shape, stride=x.stride())


def resharded(dims: int, spec: str | None, loss: Any, rows: int = 8) -> None:
    warnings.simplefilter("ignore", shardc.ShardcWarning)  # rows that do not divide
    torch.manual_seed(0)
    source = Net().double()
    mesh = init_device_mesh("cpu", MESHES[dims][0], mesh_dim_names=MESHES[dims][1])
    said = shardc.Plan(inputs=spec and {"x": spec}, dtensor_outputs=loss is None)
    whole, scale = X[:rows].clone().requires_grad_(), torch.tensor(3.0, dtype=torch.float64)
    theirs = source(whole, scale)
    square(theirs).backward()
    for placements in product(PLACEMENTS, repeat=dims):
        # Neither lowered first nor told the global shapes; a plain input stands behind the DTensor.
        module = shardc.compile(source, mesh, shardc.fsdp("dp") | said, loss=loss, backend="eager")
        given = placed(X[:rows], mesh, placements).requires_grad_()
        out = module(given, scale)
        close(out.detach() if loss else out.full_tensor(), square(theirs) if loss else theirs)
        (out if loss else square(out).full_tensor()).backward()
        close(given.grad.full_tensor(), whole.grad, str(placements))
        for name, param in source.named_parameters():
            close(module.get_parameter(name).grad.full_tensor(), param.grad, f"{name} {placements}")


@pytest.mark.slow
def test_two_ranks() -> None:
    specs = ("@dp, _", "_, @dp", "_, _", None)
    run_ranks(2, *(partial(resharded, 1, spec, square, rows) for spec in specs for rows in (8, 5)))


@pytest.mark.long
def test_four_ranks() -> None:
    specs = ("@dp, _", "@tp, _", "_, @tp", "@(dp,tp), _", "_, _", "@dp, @tp", None)
    cases = product(specs, ((square, 8), (None, 6), (None, 5)))
    run_ranks(4, *(partial(resharded, 2, spec, loss, rows) for spec, (loss, rows) in cases))
