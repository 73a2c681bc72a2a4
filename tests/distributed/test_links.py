"""Buckets of a size that suits the links: what is measured of them, alike on all ranks, and what follows from it."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardc
from shardc.cost.model import CostModel, Messages
from shardc.errors import MeshError
from tests.ranks import run_ranks

MIB = 1 << 20
WEIGHTS = 12


def link(bandwidth: float) -> CostModel:
    return CostModel(messages=Messages(8e-4, 1.5e-4, 5e-5, 0.0, bandwidth, 0.2))


@pytest.mark.parametrize("bandwidth, size", [(118e6, int(20 * 1e-3 * 118e6)), (1.4e9, 8 * MIB)])
@pytest.mark.parametrize("direct", [None, True])
def test_a_slow_link_takes_small_buckets(bandwidth: float, size: int, direct: bool | None) -> None:
    options = shardc.Options(cost=link(bandwidth), p2p_collectives=direct)
    assert options.bucket_bytes() == pytest.approx(size, abs=1)
    assert options.in_flight_bytes() == 16 * MIB


def test_what_is_said_or_not_in_messages_is_not_sized_by_them() -> None:
    assert shardc.Options(cost=link(118e6), bucket_size=5).bucket_bytes() == 5
    assert (
        shardc.Options(cost=link(118e6), p2p_collectives=False).bucket_bytes()
        == shardc.Options().bucket_bytes()
        == 8 * MIB
    )


def test_another_device_is_refused() -> None:
    with pytest.raises(MeshError, match="this mesh is of 'cuda'"):
        shardc.measure_links(DeviceMesh("cuda", [0], mesh_dim_names=("dp",), _init_backend=False, _rank=0))


def all_have_the_same() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    cost = shardc.measure_links(mesh)
    assert cost.messages is not None and 1e6 < cost.messages.bandwidth < 1e12
    assert 0 < cost.messages.latency + cost.messages.call < 1
    everyone: list[object] = [None] * 4
    dist.all_gather_object(everyone, asdict(cost))
    assert everyone == [asdict(cost)] * 4
    # It is what a program may be compiled by: the ranks agree on its buckets. On a link of these latencies and a
    # bandwidth that makes them 512 KiB, the weights, 128 KiB each, fill several.
    sent = cost.messages
    latency = sent.latency + sent.call + sent.message
    slow = replace(cost, messages=sent._replace(bandwidth=2**19 / (20 * latency)))
    model = nn.Sequential(*(nn.Linear(128, 128, dtype=torch.float64) for _ in range(WEIGHTS)))
    x, y = torch.randn(2, 8, 128, dtype=torch.float64)
    module = shardc.compile(
        model, mesh, shardc.fsdp("dp"), loss=nn.functional.mse_loss, backend="eager", options=shardc.Options(cost=slow)
    )
    loss, expected = module(*module.shard_inputs(x, y)), nn.functional.mse_loss(model(x), y)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for name, p in model.named_parameters():
        torch.testing.assert_close(module.get_parameter(name).grad.full_tensor(), p.grad)
    (program,) = module.shardc.programs.values()
    gathers = [node for node in program.forward.graph.nodes if "all_gather" in str(node.target)]
    assert 1 < len(gathers) < WEIGHTS, gathers


def a_mesh_of_one_has_no_links() -> None:
    assert shardc.measure_links(init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))) == CostModel()


@pytest.mark.slow
def test_measured_on_ranks() -> None:
    run_ranks(4, all_have_the_same)
    run_ranks(1, a_mesh_of_one_has_no_links)
