"""Storage split over some ranks of an axis and whole over the rest: training, norms, state and checkpoints."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardc
from shardc.runtime.full_params import unshard
from tests.distributed.test_checkpoint import STEPS, adamw, resumes, state_of, train, trained
from tests.ranks import run_ranks
from tests.state import assert_same, batch, close, model

# One weight is split over all four ranks; of the small ones only what an override names is split at all.
PLAN = shardc.fsdp("dp", shard_size=2, threshold=200, overrides={"back.bias": 2, "fused": 4, "mid.*": 1})


def compiled(source: nn.Module, plan: shardc.Plan, axes: tuple[str, ...] = ("dp",), loss: Any = F.mse_loss) -> Any:
    sizes = (4,) if len(axes) == 1 else (2, 2)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=axes)
    return shardc.compile(source, mesh, plan, loss=loss, backend="eager")


def placements() -> None:
    module = compiled(model(), PLAN)
    shown = {name: list(param.placements) for name, param in module.named_parameters()}
    assert shown["odd.weight"] == [Replicate(), Shard(0)]
    assert shown["fused"] == [Shard(0), Shard(0)]
    assert shown["back.bias"] == [Replicate(), Shard(0)]
    assert shown["mid.weight"] == shown["odd.bias"] == shown["scale"] == [Replicate(), Replicate()]
    meshes = {param.device_mesh for param in module.parameters()}
    (mesh,) = meshes
    assert mesh.mesh_dim_names == ("dp_1x2", "dp_2x2")
    assert module.fused._local_tensor.shape == (3, 9)


def trains_as_one_device() -> None:
    source = model()
    module = compiled(source, PLAN)
    ours, theirs = adamw(module), adamw(source)
    for at in range(3):
        x, y = batch(at)
        module(*module.shard_inputs(x, y)).backward()
        F.mse_loss(source(x), y).backward()
        assert_same(module, source, grads=True)
        expected = nn.utils.clip_grad_norm_(source.parameters(), 0.1)
        if at == 1:  # torch's own, on the DTensors
            norm = nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            close(norm.full_tensor() if isinstance(norm, DTensor) else norm, expected)
        else:
            close(module.clip_grad_norm_(0.1), expected)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        assert_same(module, source)
    with module.summon_full_params():
        close(module.fused, source.fused)
    other = compiled(model(3), PLAN)
    other.load_state_dict(module.full_state_dict())
    assert_same(other, source)


def accumulates() -> None:
    source = model()
    module = compiled(source, PLAN)
    batches = [batch(at) for at in range(2)]
    with module.no_sync():
        (module(*module.shard_inputs(*batches[0])) / 2).backward()
    (module(*module.shard_inputs(*batches[1])) / 2).backward()
    F.mse_loss(source(torch.cat([x for x, _ in batches])), torch.cat([y for _, y in batches])).backward()
    assert_same(module, source, grads=True)


def checkpoints() -> None:
    """Saved with parts, loaded on a mesh of two axes and on one device; and the other way round."""
    source = trained()
    theirs = adamw(source)
    train(source, theirs, 0)
    plans = {
        "parts": (PLAN, ("dp",)),
        "hybrid": (shardc.hsdp(shard="dp", replicate="rep"), ("rep", "dp")),
    }
    folders = {}
    for name in ("parts", "hybrid"):
        shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(shared)
        module = compiled(trained(), *plans[name])
        ours = adamw(module)
        train(module, ours, 0)
        assert_same(module, source)
        dcp.save(state_of(module, ours), checkpoint_id=shared[0])
        folders[name] = shared[0]
    losses = train(source, theirs, STEPS)
    for saved, other in (("parts", "hybrid"), ("hybrid", "parts")):
        resumes(compiled(trained(7), *plans[other]), folders[saved], source, losses)
    resumes(trained(7), folders["parts"], source, losses)


def mean_is_divided_once() -> None:
    """Each rank's own mean loss, reduced over both parts of the axis: as FSDP2 over two axes; and twice, summed."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "dp"))
    peer = model()
    ignored = {peer.scale, peer.empty}  # FSDP2 takes no 0-dim parameters
    fully_shard(peer, mesh=mesh, ignored_params=ignored)
    x, y = (tensor.chunk(4)[dist.get_rank()] for tensor in batch())
    F.mse_loss(peer(x), y).backward()
    for plan, factor in ((PLAN, 1), (shardc.hsdp_plan(2, threshold=0, enable_grad_accumulation=True), 2 * 4)):
        module = compiled(model(), plan, loss=None)
        if factor != 1:
            F.mse_loss(module(x), y).backward()
            assert all(param.grad is None for param in module.parameters())
            module.set_requires_grad_sync(True)
        F.mse_loss(module(x), y).backward()
        for name, param in peer.named_parameters():
            if param.grad is not None and param not in ignored:
                mine = unshard(module.get_parameter(name).grad, module.shardc.spec.storages[name])
                close(mine, param.grad.full_tensor() * factor, name)


@pytest.mark.slow
def test_four_ranks() -> None:
    run_ranks(4, placements, trains_as_one_device, accumulates, mean_is_divided_once)


@pytest.mark.long
def test_four_ranks_checkpoints() -> None:
    run_ranks(4, checkpoints)
