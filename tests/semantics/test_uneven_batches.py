"""Ranks that pass different numbers of rows, where that was asked for: one device on all of the rows is the oracle."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc.errors import InputError, MeshError
from tests.ranks import run_ranks
from tests.state import assert_same, close

PLANS = {
    "ddp": lambda: shardc.ddp("dp"),
    "fsdp": lambda: shardc.fsdp("dp"),
    "hsdp": lambda: shardc.hsdp(shard="dp", replicate="rep"),
    "fsdp+tp": lambda: (
        shardc.fsdp("dp") | shardc.Plan(params={"0.weight": ("tp", None), "0.bias": ("tp",), "2.weight": (None, "tp")})
    ),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def loss(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out, target, ignore_index=3)


def compiled(plan: str, mesh: dict[str, int], source: nn.Module, **options: Any) -> Any:
    device_mesh = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    return shardc.compile(
        source, device_mesh, PLANS[plan](), backend="eager", options=shardc.Options(uneven=True), **options
    )


def rows_of(module: Any, counts: list[int], total: Tensor) -> Tensor:
    """This rank's rows of ``total``, where each block of the batch has as many as ``counts`` says."""
    mesh = module.shardc.spec.mesh
    axes = [axis for axis in mesh.axes if axis != "tp"]
    at = 0
    for axis in axes:
        at = at * mesh.size(axis) + mesh.index(axis, module.shardc.spec.rank)
    return total.split(counts)[at]


def equals_one_device(plan: str, mesh: dict[str, int], batches: list[list[int]]) -> None:
    source = model()
    module = compiled(plan, mesh, source, loss=loss)
    ours, theirs = (torch.optim.SGD(one.parameters(), lr=0.5) for one in (module, source))
    for at, counts in enumerate(batches):
        generator = torch.Generator().manual_seed(at)
        x = torch.randn(sum(counts), 6, generator=generator, dtype=torch.float64)
        y = torch.randint(4, (sum(counts),), generator=generator)
        value = module(rows_of(module, counts, x), rows_of(module, counts, y))
        expected = loss(source(x), y)
        close(value.detach(), expected.detach())
        value.backward()
        expected.backward()
        assert_same(module, source, grads=True)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        assert_same(module, source)


def with_model_that_returns_its_loss() -> None:
    """Sequence lengths are as they are; no output is split."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model()

        def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
            out = self.inner(x).square()
            return (out if weight is None else out * weight[:, None, None]).mean()

    source = Own()
    module = compiled("fsdp", {"dp": 2}, source)
    x, weight = torch.randn(5, 3, 6, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    value = module(rows_of(module, [1, 4], x), weight=rows_of(module, [1, 4], weight))
    close(value.detach(), source(x, weight).detach())
    value.backward()
    source(x, weight).backward()
    assert_same(module, source, grads=True)


def outputs_as_dtensors() -> None:
    source = model()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    plan = shardc.fsdp("dp") | shardc.Plan(dtensor_outputs=True)
    module = shardc.compile(source, mesh, plan, backend="eager", options=shardc.Options(uneven=True))
    x = torch.randn(6, 6, dtype=torch.float64)
    for counts in ([3, 3], [2, 4]):
        out = module(rows_of(module, counts, x))
        close(out.full_tensor().detach(), source(x).detach())


class Decoder(nn.Module):
    """Embedding, attention and, if asked for, batch norm; returns its loss."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.qkv, self.out = nn.Embedding(11, 8), nn.Linear(8, 24), nn.Linear(8, 11)
        self.norm = nn.BatchNorm1d(8) if norm else None

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = self.qkv(x).unflatten(-1, (2, 12)).transpose(1, 2).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        if self.norm is not None:
            x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return F.cross_entropy(self.out(x).flatten(0, 1), target.flatten())


def rank_without_rows(plan: str, norm: bool) -> None:
    """At the first call too, and where the other rank has a single row."""
    source = Decoder(norm).double()
    module = compiled(plan, {"dp": 2}, source)
    ours, theirs = (torch.optim.SGD(one.parameters(), lr=0.5) for one in (module, source))
    for counts in ([0, 1], [1, 0], [2, 2], [3, 0]):
        ids, target = torch.randint(11, (2, sum(counts), 5), generator=torch.Generator().manual_seed(sum(counts)))
        value, expected = module(rows_of(module, counts, ids), rows_of(module, counts, target)), source(ids, target)
        close(value.detach(), expected.detach())
        value.backward()
        expected.backward()
        assert_same(module, source, grads=True)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        assert_same(module, source)
    module.eval()
    source.eval()
    with torch.no_grad():
        close(module(rows_of(module, counts, ids), rows_of(module, counts, target)), source(ids, target))


def refused_before_capture() -> None:
    """Without the option, whatever the sizes; nothing is captured."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for counts in ((0, 5), (1, 0), (4, 3)):
        module = shardc.compile(model(), mesh, PLANS["fsdp"](), backend="eager", loss=loss)
        x, y = torch.ones(counts[rank], 6, dtype=torch.float64), torch.zeros(counts[rank], dtype=torch.long)
        with pytest.raises(MeshError) as caught:
            module(x, y)
        shapes = [f"rank {at} has shape [{count}, 6], torch.float64" for at, count in enumerate(counts)]
        assert caught.value.what.endswith(f"in input 'input': {', '.join(shapes)}"), caught.value.what
        assert "Options(uneven=True)" in (caught.value.fix or "")
        assert not module.shardc.programs


def refused() -> None:
    """What each rank would get a part of that is not its own, a gradient of rows that went elsewhere, other sizes."""
    rank = dist.get_rank()
    module = compiled("fsdp", {"dp": 2}, model())
    with pytest.raises(InputError, match="a rank's part of a split output would not be of its own rows"):
        module(torch.ones(2 + rank, 6, dtype=torch.float64))
    module = compiled("fsdp", {"dp": 2}, model(), loss=loss)
    x, y = torch.ones(2 + rank, 6, dtype=torch.float64), torch.zeros(2 + rank, dtype=torch.long)
    with pytest.raises(InputError, match="input 'input' needs a gradient"):
        module(x.requires_grad_(), y)
    with pytest.raises(MeshError, match=r"in input 'input': rank 0 has shape \[any, 6\].*rank 1 has shape \[any, 7\]"):
        module(torch.ones(2 + rank, 6 + rank, dtype=torch.float64), y)
    module.lower(torch.ones(4, 6, dtype=torch.float64), torch.zeros(4, dtype=torch.long))
    with pytest.raises(InputError, match="which the module was not lowered for"):
        module(x.detach(), y)


def other_rows_on_ranks_that_share_them() -> None:
    module = compiled("fsdp+tp", {"dp": 2, "tp": 2}, model(), loss=loss)
    rank = dist.get_rank() % 2
    with pytest.raises(InputError, match="rank 0 passes input 'input' of 2 rows, rank 1 of 3"):
        module(torch.ones(2 + rank, 6, dtype=torch.float64), torch.zeros(2 + rank, dtype=torch.long))


@pytest.mark.slow
def test_two_ranks() -> None:
    run_ranks(
        2,
        *(
            partial(equals_one_device, plan, {"dp": 2}, [[4, 4], [8, 10], [4, 3], [4, 4], [0, 5], [2, 0]])
            for plan in ("ddp", "fsdp")
        ),
        with_model_that_returns_its_loss,
        *(partial(rank_without_rows, *case) for case in (("fsdp", True), ("ddp", False))),
        outputs_as_dtensors,
        refused,
        refused_before_capture,
    )


@pytest.mark.slow
def test_four_ranks() -> None:
    run_ranks(
        4,
        partial(equals_one_device, "hsdp", {"rep": 2, "dp": 2}, [[4, 4, 4, 4], [3, 1, 2, 2], [4, 3, 2, 0]]),
        partial(equals_one_device, "fsdp+tp", {"dp": 2, "tp": 2}, [[4, 4], [3, 1], [2, 3]]),
        other_rows_on_ranks_that_share_them,
    )
