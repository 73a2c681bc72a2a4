"""Copies between pinned host memory and a GPU: on streams of their own, right whatever the order of events."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc.runtime import host
from shardc.runtime.host import ParamLocation
from tests.state import batch, model

pytestmark = pytest.mark.gpu
WAIT = torch.ops._c10d_functional.wait_tensor
SIZE = 1 << 24


def busy() -> None:
    """Work that keeps the compute stream for a tenth of a second and more."""
    torch.cuda._sleep(300_000_000)


def test_to_device_waits_on_the_stream_and_not_on_the_host() -> None:
    there = torch.arange(SIZE, dtype=torch.float32).pin_memory()
    for _ in range(2):  # a kernel is loaded when it is first launched, for which the host waits
        WAIT(torch.ops.shardc.to_device(there, "cuda")) * 2
    torch.cuda.synchronize()
    busy()
    started = torch.ops.shardc.to_device(there, "cuda")
    came = WAIT(started)
    doubled = came * 2  # on the compute stream, behind the copy
    assert not torch.cuda.current_stream().query(), "the host did not wait for any of it"
    host.settle()
    there.zero_()  # the device has read what it needs
    assert torch.equal(doubled.cpu(), torch.arange(SIZE, dtype=torch.float32) * 2)


def test_to_host_can_be_read_after_the_wait() -> None:
    made = torch.zeros(SIZE, device="cuda")
    busy()
    made += 3
    back = torch.ops.shardc.to_host(made)
    del made
    torch.full((SIZE,), 7.0, device="cuda")  # may not take the memory that is still being read
    back = WAIT(back)
    assert back.is_pinned() and bool((back == 3).all())


def test_memory_at_home_is_pinned_where_asked() -> None:
    cuda = torch.device("cuda", 0)
    assert ParamLocation(cuda, 'offload("*")').keep(torch.ones(4, device=cuda)).is_pinned()
    kept = ParamLocation(cuda, 'offload("*", pin_memory=False)', pinned=False).keep(torch.ones(4, device=cuda))
    assert kept.device.type == "cpu" and not kept.is_pinned()
    assert ParamLocation(cuda).keep(torch.ones(4)).device == cuda


@pytest.mark.parametrize("activations", [shardc.Plan(), shardc.save("", on="host")], ids=["on the device", "too"])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_trains_as_one_device(backend: str, activations: shardc.Plan) -> None:
    """A world of one GPU: parameters, gradients and optimizer state stay on the host."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        source = model().cuda()
        mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("dp",))
        plan = shardc.fsdp("dp") | shardc.offload() | activations
        module = shardc.compile(source, mesh, plan, loss=F.mse_loss, backend=backend)
        ours = shardc.optim.wrap(torch.optim.AdamW, module, lr=0.05)
        theirs = torch.optim.AdamW(source.parameters(), lr=0.05)
        for at in range(3):
            x, y = (tensor.cuda() for tensor in batch(at))
            module(x, y).backward()
            F.mse_loss(source(x), y).backward()
            mine, other = module.clip_grad_norm_(0.5), nn.utils.clip_grad_norm_(source.parameters(), 0.5)
            torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)
            for name, param in module.named_parameters():
                expected = source.get_parameter(name).grad
                assert (param.grad is None) == (expected is None)
                if expected is not None:
                    assert param.grad.to_local().device.type == "cpu"
                    torch.testing.assert_close(param.grad.to_local(), expected.cpu(), rtol=1e-9, atol=1e-12)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        for param, state in ours.state.items():
            assert param.to_local().is_pinned() or not param.numel()
            assert state["exp_avg"].to_local().device.type == "cpu"
        for name, whole in module.full_state_dict(device="cpu").items():
            torch.testing.assert_close(whole, source.state_dict()[name].cpu(), rtol=1e-9, atol=1e-12)
    finally:
        dist.destroy_process_group()
