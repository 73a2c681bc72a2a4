"""Ids that are out of range raise on a mesh as on one device, where the dim that they are looked up in is split too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardc
from tests.ranks import run_ranks
from tests.state import close

ROWS = 7  # which no axis here divides


class Lookup(nn.Module):
    """Something looked up in, or written to, a table that is split over its rows."""

    def __init__(self, how: Callable[[Tensor, Tensor], Tensor], rows: int) -> None:
        super().__init__()
        self.table, self.how = nn.Parameter(torch.randn(rows, 3)), how

    def forward(self, ids: Tensor) -> Tensor:
        return self.how(self.table, ids)


HOW: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "embedding": lambda table, ids: F.embedding(ids, table),
    "index_select": lambda table, ids: table.index_select(0, ids),
    "gather": lambda table, ids: table.gather(0, ids.unsqueeze(1).expand(-1, 3)),
    "index": lambda table, ids: table[ids],
    "scatter": lambda table, ids: table.scatter(0, ids.unsqueeze(1).expand(-1, 3), 0.5),
    "scatter_add": lambda table, ids: table.scatter_add(
        0, ids.unsqueeze(1).expand(-1, 3), torch.ones(len(ids), 3).double()
    ),
    "index_add": lambda table, ids: table.index_add(0, ids, torch.ones(len(ids), 3).double()),
    "index_put": lambda table, ids: table.index_put((ids,), torch.tensor(0.5).double()),
    "cross_entropy": lambda table, ids: F.cross_entropy(table.t().repeat(2, 1)[: len(ids)], ids),
}
WITH_NEGATIVES = ("index", "index_put")


@pytest.mark.parametrize("rows", [8, ROWS])
@pytest.mark.parametrize("name", HOW)
def test_as_one_device(name: str, rows: int) -> None:
    source = Lookup(HOW[name], rows).double()
    module = shardc.compile(source, shardc.Mesh(tp=2), shardc.Plan(params={"table": "@tp, _"}))
    module.load_state_dict(source.state_dict())
    sim = shardc.Simulation(module)
    low = -rows if name in WITH_NEGATIVES else -100 if name == "cross_entropy" else 0
    good = torch.tensor([0, 2, rows - 1, low])
    close(sim(good), source(good).detach())
    for bad in (rows, -rows - 1 if name in WITH_NEGATIVES else -1):
        ids = torch.tensor([0, 2, 1, bad])
        with pytest.raises((IndexError, RuntimeError)):
            source(ids)
        with pytest.raises(IndexError, match="out of range"):
            sim(ids)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(ROWS, 4), nn.Linear(4, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


def bad_ids(backend: str, which: str) -> None:
    """On real ranks, with the vocabulary split in the table or in the loss."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = shardc.Plan(params={"embed.weight": "@tp, _", "head.weight": "@tp, _", "head.bias": "@tp"})
    source = Classifier().double()
    module = shardc.compile(source, mesh, plan, loss=F.cross_entropy, backend=backend)
    ids, targets = torch.tensor([0, 6, 3, 1]), torch.tensor([7, -100, 0, 2])
    loss = module(ids, targets)
    close(loss.detach(), F.cross_entropy(source(ids), targets).detach())
    loss.backward()
    (ids if which == "ids" else targets)[2] = ROWS if which == "ids" else 8
    with pytest.raises(IndexError, match="out of range"):
        module(ids, targets)


def bad_ids_of_whole_tables(backend: str) -> None:
    """The same error where no table is split for compute, of torch's ops and of Inductor's code."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    good = torch.tensor([[0, 6], [7, 0]])  # ids, targets
    for row, size in ((0, ROWS), (1, 8)):
        module = shardc.compile(Classifier(), mesh, shardc.fsdp("dp"), loss=F.cross_entropy, backend=backend)
        bad = good.clone()
        bad[row, 1] = size
        with pytest.raises(IndexError, match="^(an index|index [78]) is out of range( for a dim of [78] elements)?$"):
            module(*bad)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_whole_tables_on_two_ranks(backend: str) -> None:
    run_ranks(2, partial(bad_ids_of_whole_tables, backend))


@pytest.mark.slow
def test_two_ranks() -> None:
    run_ranks(2, partial(bad_ids, "eager", "ids"))
    run_ranks(2, partial(bad_ids, "inductor", "targets"))
