"""Traps of training by ranks, by name, in simulation; tests/distributed/test_traps.py has those of real ranks.

Covered elsewhere: the dtype of accumulation (tests/distributed/test_no_sync.py, the_sum_is_kept_in_reduce), a
micro-batch that leaves a parameter unused (test_accumulation.py, unused_in_one_micro_batch; test_no_sync.py,
what_the_last_step_does_not_use_is_reduced_too), a world of one rank (test_accumulation.py, test_one_rank).
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from shardc.ir.comm_volume import collective_kind
from tests.models.alike import trains_alike

DP, HYBRID = {"dp": 4}, {"rep": 2, "dp": 2}
MEANS = {
    "ddp": (DP, shardc.ddp("dp")),
    "fsdp level 1": (DP, shardc.fsdp("dp", level=1)),
    "fsdp level 2": (DP, shardc.fsdp("dp", level=2)),
    "fsdp level 3": (DP, shardc.fsdp("dp")),
    "hsdp": (HYBRID, shardc.hsdp()),
    "hsdp level 1": (HYBRID, shardc.hsdp(level=1)),
    "ddp and fsdp": (HYBRID, shardc.ddp("rep") | shardc.fsdp("dp")),
    "parts": (DP, shardc.fsdp("dp", shard_size=2)),
    "parts, some whole": (DP, shardc.fsdp("dp", shard_size=2, overrides={"0.bias": 1, "2.*": 4})),
    "in float32": (DP, shardc.fsdp("dp", shard_size=2) | shardc.precision(reduce=torch.float32)),
}
SUMS = {
    "hsdp_plan": (DP, shardc.hsdp_plan()),
    "hsdp_plan in parts": (DP, shardc.hsdp_plan(2, threshold=0, optimizer_level="level3")),
    "fsdp told to": (DP, shardc.fsdp("dp") | shardc.Plan(reduce="sum")),
}


@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("name", [*MEANS, *SUMS])
def test_mean_by_default_sum_where_hsdp_says_so_and_divided_once(name: str, reduce: str) -> None:
    """The gradients of each rank's own loss, of which there is none in the graph."""
    mesh, plan = {**MEANS, **SUMS}[name]
    if reduce != ("mean" if name in MEANS else "sum"):
        plan |= shardc.Plan(reduce=reduce)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4)).double()
    sim = shardc.Simulation(shardc.compile(model, shardc.Mesh(mesh), plan, backend="eager"))
    x, y = torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    out = sim(x)
    shards = zip(out.chunk(4), y.chunk(4), strict=True)
    sim.backward(torch.cat([2 * (mine - target) / target.numel() for mine, target in shards]))
    losses = torch.stack([F.mse_loss(model(a), b) for a, b in zip(x.chunk(4), y.chunk(4), strict=True)])
    getattr(losses, reduce)().backward()
    for parameter, param in model.named_parameters():
        close = {"rtol": 1e-5, "atol": 1e-7} if name == "in float32" else {"rtol": 1e-12, "atol": 1e-14}
        torch.testing.assert_close(sim.grad(parameter), param.grad, **close)


class Row(nn.Module):
    """Four weights of one size, of which each is gathered for one product."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(8, 8)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = (x @ weight).tanh()
        return x


@pytest.mark.parametrize(("size", "buckets"), [(255, 4), (256, 4), (511, 4), (512, 2), (513, 2), (1024, 1)])
def test_a_bucket_that_fills_exactly(size: int, buckets: int) -> None:
    """A gather makes 256 bytes: two fill a bucket of 512 exactly, and are in it; one byte less takes one."""
    options = shardc.Options(bucket_size=size)
    module = shardc.compile(
        Row(), shardc.Mesh(dp=2), shardc.fsdp("dp"), loss=F.mse_loss, backend="eager", options=options
    )
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    forward = module.lower(x, y).forward
    gathers = [node for node in forward.graph.nodes if collective_kind(node) == "all_gather"]
    assert len(gathers) == buckets
    sim = shardc.Simulation(module)
    torch.testing.assert_close(sim(x, y), F.mse_loss(Row.forward(module, x), y).detach())


class Odds(nn.Module):
    """Nothing but a 0-dim parameter, empty ones and one of a single element."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.one = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(1))
        self.empty, self.flat = nn.Parameter(torch.empty(0, 4)), nn.Parameter(torch.empty(3, 0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.one + (self.empty @ x.t()).sum() + self.flat.sum()


@pytest.mark.parametrize("name", [name for name in MEANS if name not in ("parts, some whole", "in float32")])
def test_parameters_of_no_dim_of_no_element_and_of_one(name: str) -> None:
    mesh, plan = MEANS[name]
    trains_alike(Odds(), (torch.randn(8, 4),), mesh, plan)
