"""Inputs that are each rank's own (`shardc.per_rank`): one device on the concatenated inputs is the oracle."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import shardc
from shardc.errors import MeshError, PlanError
from shardc.plan import parse_plan
from tests.ranks import run_ranks
from tests.state import assert_same, close


class Graph(nn.Module):
    """Messages along edges, added up at their targets; a mean over nodes."""

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.out, self.dim = nn.Linear(4, 8), nn.Linear(8, 1), dim

    def forward(self, x: Tensor, edges: Tensor, weight: Tensor | None = None) -> Tensor:
        hidden = self.up(x).tanh()
        source, target = edges.unbind(1 - self.dim)
        messages = hidden.index_select(0, source)
        if weight is not None:
            messages = messages * weight[:, None]
        hidden = hidden.index_add(0, target, messages)
        return self.out(hidden + hidden[target[:1]]).square().mean()


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out = nn.EmbeddingBag(11, 4, mode="mean"), nn.Linear(4, 3)

    def forward(self, ids: Tensor, offsets: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.out(self.table(ids, offsets)), target)


def compiled(source: nn.Module, inputs: Any, mesh: dict[str, int] | None = None, **options: Any) -> Any:
    mesh = mesh or {"dp": dist.get_world_size()}
    device_mesh = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    plan = shardc.fsdp("dp") | shardc.Plan(inputs=inputs)
    options = shardc.Options(**options)
    return shardc.compile(source, device_mesh, plan, backend="eager", options=options)


def graph(nodes: int, edges: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(nodes, 4, generator=generator, dtype=torch.float64)
    weight = torch.randn(edges, generator=generator, dtype=torch.float64)
    return x, torch.randint(nodes, (2, edges), generator=generator), weight


def joined(graphs: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """One graph of all, as a loader of one device makes it."""
    starts = [sum(len(x) for x, *_ in graphs[:at]) for at in range(len(graphs))]
    edges = [edges + start for (_, edges, _), start in zip(graphs, starts, strict=True)]
    return torch.cat([x for x, *_ in graphs]), torch.cat(edges, 1), torch.cat([weight for *_, weight in graphs])


def trains_alike(module: Any, source: nn.Module, own: tuple[Tensor, ...], whole: tuple[Tensor, ...]) -> None:
    value, expected = module(*own), source(*whole)
    close(value.detach(), expected.detach())
    value.backward()
    expected.backward()
    assert_same(module, source, grads=True)


def graphs(inputs: Any, mesh: dict[str, int] | None = None) -> None:
    """Each rank has a graph of its own, of as many nodes and edges."""
    source = Graph().double()
    module = compiled(source, inputs, mesh)
    at = module.shardc.spec.mesh.index("dp", module.shardc.spec.rank)
    parts = [graph(6, 10, seed) for seed in range(module.shardc.spec.mesh.size("dp"))]
    trains_alike(module, source, parts[at], joined(parts))


def graphs_of_other_sizes() -> None:
    """Edges in rows, whose number may differ."""
    source = Graph(dim=0).double()
    module = compiled(source, {"edges": shardc.per_rank(dim=0)}, uneven=True)
    parts = [graph(5, 7, 0), graph(3, 10, 1)]
    own, whole = parts[dist.get_rank()], joined(parts)
    trains_alike(module, source, (own[0], own[1].t(), own[2]), (whole[0], whole[1].t(), whole[2]))


def bags() -> None:
    """Offsets, of which the last may be the end; targets are split as ever."""
    source = Bags().double()
    module = compiled(source, {"offsets": shardc.per_rank})
    ids, target = torch.randint(11, (12,)), torch.randint(3, (6,))
    offsets = torch.tensor([[0, 2, 6], [0, 1, 4]])
    own = ids.chunk(2)[dist.get_rank()], offsets[dist.get_rank()], target.chunk(2)[dist.get_rank()]
    trains_alike(module, source, own, (ids, torch.tensor([0, 2, 6, 6, 7, 10]), target))


def refused() -> None:
    """A rank may hear of it from the other one, as a MeshError."""
    rank, edges = dist.get_rank(), {"edges": shardc.per_rank}
    x, own, _ = graph(6, 10, rank)
    with pytest.raises(shardc.ShardcError, match="input 'edges' is relative to 'nodes', which is no input"):
        compiled(Graph().double(), {"edges": shardc.per_rank(relative_to="nodes")})(x, own)
    with pytest.raises(shardc.ShardcError, match="no dim 2"):
        compiled(Graph().double(), {"edges": shardc.per_rank(dim=2)})(x, own)
    module = compiled(Graph().double(), edges)
    with pytest.raises(shardc.ShardcError, match="'edges' is a DTensor"):
        module(x, DTensor.from_local(own, module.shardc.spec.device_mesh, [Shard(1)], run_check=False))
    with pytest.raises(shardc.ShardcError, match="'edges' is each rank's own"):
        module.shard_inputs(x, own)
    with pytest.raises(MeshError, match=r"input 'edges': rank 0 has shape \[2, 10\].*rank 1 has shape \[2, 9\]"):
        module(x, own[:, rank:])


def a_row_that_no_rank_has() -> None:
    """It is none of the next rank's, and raises as it does on one device."""
    module = compiled(Graph().double(), {"edges": shardc.per_rank})
    x, own, _ = graph(6, 10, 0)
    own[0, 3] = 6
    with pytest.raises((IndexError, RuntimeError, MeshError)):
        module(x, own)


@pytest.mark.parametrize(
    "spec", [shardc.per_rank, shardc.per_rank(1, "x"), shardc.per_rank(0, None)], ids=["bare", "named", "alone"]
)
def test_text_and_file(spec: Any) -> None:
    plan = shardc.fsdp("dp") | shardc.Plan(inputs={"edges": spec, "x": ("dp", None)})
    assert shardc.Plan.from_json(plan.to_json()) == parse_plan(str(plan)) == plan
    assert "per_rank(" in plan.describe()


def test_it_is_for_inputs() -> None:
    for argument in ("params", "outputs", "activations"):
        with pytest.raises(PlanError, match="per_rank is a spec for inputs only"):
            shardc.Plan(**{argument: {"x": shardc.per_rank}})


@pytest.mark.slow
def test_two_ranks() -> None:
    run_ranks(
        2,
        *(partial(graphs, {"edges": spec}) for spec in (shardc.per_rank, shardc.per_rank(1, "x"))),
        graphs_of_other_sizes,
        bags,
        refused,
        a_row_that_no_rank_has,
    )


@pytest.mark.slow
def test_four_ranks() -> None:
    run_ranks(4, partial(graphs, {"edges": shardc.per_rank}, {"dp": 2, "tp": 2}))
