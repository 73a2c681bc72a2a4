"""Outputs as DTensors: the loss that is computed of them is the global one, and so are the gradients."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardc
from tests.ranks import run_ranks
from tests.state import assert_same, batch, close, model, sharded

DTENSORS = shardc.Plan(dtensor_outputs=True)


def loss_of_dtensors(plan: str, reduce: str, outputs: str | None, placement: object) -> None:
    source = model()
    said = DTENSORS | shardc.Plan(reduce=reduce, outputs=outputs)
    module = sharded(source, plan, loss=None, more=said)
    x, y = batch()
    out = module(module.shard_inputs(x))
    assert isinstance(out, DTensor) and out.placements == (placement,) and out.shape == y.shape
    close(out.full_tensor(), source(x))
    target = distribute_tensor(y, out.device_mesh, out.placements)
    # Sums, so that the gradient's scale is plain to see; it is the global loss's, whatever ``reduce`` says.
    ours, theirs = ((out - target) ** 2).sum(), ((source(x) - y) ** 2).sum()
    close(ours.full_tensor(), theirs)
    ours.backward()
    theirs.backward()
    assert_same(module, source, grads=True)


def loss_in_the_graph() -> None:
    source = model()
    module = sharded(source, "fsdp", more=DTENSORS)
    x, y = batch()
    ours, theirs = module(*module.shard_inputs(x, y)), F.mse_loss(source(x), y)
    assert isinstance(ours, DTensor) and ours.placements == (Replicate(),)
    close(ours.full_tensor(), theirs)
    ours.backward()
    theirs.backward()
    assert_same(module, source, grads=True)


class Parts(nn.Module):
    """A tree of outputs: floats split and whole, integers, a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> dict[str, object]:
        hidden = self.up(x)
        return {"hidden": hidden, "best": (hidden.argmax(-1), hidden.square().mean()), "kind": 3}


def tree_of_outputs() -> None:
    torch.manual_seed(0)
    source, x = Parts().double(), torch.randn(4, 6, dtype=torch.float64)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    module = shardc.compile(source, mesh, shardc.fsdp("dp") | DTENSORS, backend="eager")
    ours, theirs = module(module.shard_inputs(x)), source(x)
    assert ours["kind"] == 3
    assert ours["hidden"].placements == ours["best"][0].placements == (Shard(0),)
    assert ours["best"][1].placements == (Replicate(),)
    for mine, other in ((ours["hidden"], theirs["hidden"]), *zip(ours["best"], theirs["best"], strict=True)):
        close(mine.full_tensor(), other)
    assert not ours["best"][0].requires_grad
    (ours["hidden"].sum() + ours["best"][1]).backward()
    (theirs["hidden"].sum() + theirs["best"][1]).backward()
    assert_same(module, source, grads=True)
    with torch.no_grad():
        found = module(module.shard_inputs(x))["hidden"]
    assert isinstance(found, DTensor) and not found.requires_grad
    close(found.full_tensor(), theirs["hidden"].detach())


@pytest.mark.slow
def test_two_ranks() -> None:
    run_ranks(
        2,
        partial(loss_of_dtensors, "fsdp", "mean", None, Shard(0)),
        partial(loss_of_dtensors, "fsdp", "sum", None, Shard(0)),
        partial(loss_of_dtensors, "fsdp", "mean", "...", Replicate()),
        partial(loss_of_dtensors, "tp", "mean", None, Replicate()),
        loss_in_the_graph,
        tree_of_outputs,
    )
