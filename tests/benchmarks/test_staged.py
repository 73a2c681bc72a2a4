"""The backend for ranks that share a GPU: trains as gloo does, with the collectives that torch runs on a GPU."""

from __future__ import annotations

import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

import shardc
from benchmarks.gpu import staged
from examples.models import llama

PLANS = {
    "ddp": shardc.ddp("x"), "fsdp": shardc.fsdp("x"), "tp+sp": llama.llama_tp("x", sequence=True),
}  # fmt: skip


def trains(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(staged.NAME, store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    torch.manual_seed(0)
    source, options = llama.Llama(llama.LlamaConfig()).double(), shardc.Options(p2p_collectives=False)
    x, y = llama.batch(llama.LlamaConfig())
    expected = llama.loss(source(x), y)
    expected.backward()
    for name, plan in PLANS.items():
        module = shardc.compile(source, mesh, plan, loss=llama.loss, backend="eager", options=options)
        loss = module(*module.shard_inputs(x, y))
        loss.backward()
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-9, atol=0, msg=name)
        for (at, param), other in zip(module.named_parameters(), source.parameters(), strict=True):
            torch.testing.assert_close(param.grad.full_tensor(), other.grad, rtol=1e-8, atol=1e-10, msg=f"{name} {at}")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(trains, (folder,), nprocs=2, start_method="spawn")
