"""What experts are measured beside is right: loss and gradients are those of one device."""

from __future__ import annotations

import argparse
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import experts
from benchmarks.peers.expert_parallel import PRODUCTS, expert_parallel
from tests.models.alike import relative
from tests.ranks import run_ranks

OPTIONS = argparse.Namespace(width=64, inner=32, experts=8, choices=2)


def is_right(product: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    ids = torch.randint(0, 512, (4, 16), generator=torch.Generator().manual_seed(0))
    alone = experts.model(OPTIONS)
    loss = alone(input_ids=ids, labels=ids).loss
    loss.backward()
    module = expert_parallel(experts.model(OPTIONS), mesh, product, compiled=False)
    mine = ids.chunk(mesh.size())[mesh.get_local_rank()]
    made = module(input_ids=mine, labels=mine).loss
    made.backward()
    mean = made.detach().clone()
    dist.all_reduce(mean)
    assert relative(mean / mesh.size(), loss.detach()) < 1e-5
    for (name, param), theirs in zip(module.named_parameters(), alone.parameters(), strict=True):
        assert relative(param.grad.full_tensor(), theirs.grad, 1e-3) < 1e-4, name


@pytest.mark.slow
def test_the_peer_equals_one_device() -> None:
    run_ranks(2, *(partial(is_right, product) for product in PRODUCTS))


def test_the_table_has_ratios_to_the_base_and_to_the_best_peer() -> None:
    took = {"shardc/fsdp3": [(0.2, 100)], "shardc/fsdp+ep/send": [(0.1, 10)], "peer/ep/loop": [(0.25, 10)]}
    text = experts.table(took, dict.fromkeys(took, 1 << 20), {"fsdp2/blocks": "RuntimeError: no"})
    lines = [line.split() for line in text.splitlines()]
    assert lines[3][:5] == ["shardc/fsdp+ep/send", "100", "100", "0.50", "0.40"]
    assert text.endswith("fsdp2/blocks: RuntimeError: no")
