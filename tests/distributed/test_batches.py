"""`shardc.batches` on real ranks: one device on the same data is the oracle, for global batches and for own rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shardc
from shardc.errors import InputError, MeshError
from shardc.ir.mesh import Mesh
from tests.ranks import device_mesh, run_ranks
from tests.state import assert_same, close

LENGTH, ROWS = 8, 4  # of a global batch
TP = shardc.tp("tp", colwise=["up"], rowwise=["down"])


class Decoder(nn.Module):
    """Causal attention and an MLP; from token ids to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(11, 8), nn.Linear(8, 24)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 11)

    def forward(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        x = self.embed(ids)
        q, k, v = self.qkv(x).unflatten(-1, (2, 12)).transpose(1, 2).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.down(self.up(x).tanh()) * scale


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def build() -> nn.Module:
    torch.manual_seed(0)
    return Decoder().double()


def data() -> TensorDataset:
    draws = torch.Generator().manual_seed(1)
    return TensorDataset(*(torch.randint(11, (3 * ROWS, LENGTH), generator=draws) for _ in range(2)))


def named(rows: list[Any]) -> dict[str, Any]:
    ids, labels = torch.utils.data.default_collate(rows)
    return {"labels": labels, "ids": ids, "scale": 2.0}


PLANS = {
    "fsdp": lambda: shardc.fsdp("dp"),
    "hsdp": lambda: shardc.hsdp(shard="dp", replicate="rep"),
    "tp": lambda: TP,
    "cp": lambda: shardc.cp("cp"),
    "fsdp+tp": lambda: shardc.fsdp("dp") | TP,
    "fsdp+cp": lambda: shardc.fsdp("dp") | shardc.cp("cp"),
    "entries": lambda: shardc.ddp("dp") | shardc.Plan(inputs=(("dp", "tp"), None)),
    "found": lambda: shardc.auto(inputs=(data()[:ROWS]), hardware="cpu"),
}


def compiled(plan: str, mesh: dict[str, int], source: nn.Module) -> Any:
    return shardc.compile(source, device_mesh(Mesh(mesh)), PLANS[plan](), loss=loss_of, backend="eager")


def equals_one_device(plan: str, mesh: dict[str, int], own: bool, collate: Any = None) -> None:
    """Over two epochs: a sampler's order is the oracle's, as each part holds each ``parts``-th row."""
    source = build()
    module = compiled(plan, mesh, source)
    parts, _ = shardc.data_parts(module)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (module, source)]
    sampler = DistributedSampler(data(), *shardc.data_parts(module), shuffle=False) if own else None
    loader = DataLoader(data(), batch_size=ROWS // parts if own else ROWS, sampler=sampler, collate_fn=collate)
    batches = shardc.batches(loader, module)
    assert len(batches) == 3
    for _ in range(2):
        for mine, whole in zip(batches, DataLoader(data(), batch_size=ROWS, collate_fn=collate), strict=False):
            assert type(mine) is type(whole)
            if isinstance(whole, dict):
                assert list(mine) == list(whole) and mine["scale"] == 2.0
                ours, theirs = module(**mine), loss_of(source(whole["ids"], 2.0), whole["labels"])
            else:
                ours, theirs = module(*mine), loss_of(source(whole[0]), whole[1])
            close(ours.detach(), theirs.detach())
            for value, optimizer in zip((ours, theirs), optimizers, strict=True):
                value.backward()
                optimizer.step()
                optimizer.zero_grad()
    assert_same(module, source)


def ragged(ranks: int) -> Iterator[list[dict[str, Tensor]]]:
    """Batches as each rank's own collator pads them: of other lengths on each rank."""
    draws = torch.Generator().manual_seed(2)
    for _ in range(3):
        lengths = torch.randint(3, LENGTH, (ranks,), generator=draws).tolist()
        yield [
            {name: torch.randint(11, (2, n), generator=draws) for name in ("ids", "labels")} for n in lengths
        ]  # fmt: skip


def padded_to_the_longest(mesh: dict[str, int], plan: str = "fsdp") -> None:
    source = build()
    module = compiled(plan, mesh, source)
    count, mine = shardc.data_parts(module)
    batches = list(ragged(count))
    pad = {"ids": 0, "labels": -100}
    loader = [parts[mine] for parts in batches]
    for ours, theirs in zip(shardc.batches(loader, module, own_rows=True, pad=pad), batches, strict=True):
        longest = max(x["ids"].shape[1] for x in theirs)
        whole = {
            name: torch.cat([F.pad(x[name], (0, longest - x[name].shape[1]), value=fill) for x in theirs])
            for name, fill in pad.items()
        }
        value, expected = module(**ours), loss_of(source(whole["ids"]), whole["labels"])
        close(value.detach(), expected.detach())
        value.backward()
        expected.backward()
        assert_same(module, source, grads=True)


def raises(error: type[Exception], what: str, fix: str, run: Any) -> None:
    with pytest.raises(error) as caught:
        run()
    assert caught.value.what == what, caught.value.what  # type: ignore[attr-defined]
    assert fix in caught.value.fix, caught.value.fix  # type: ignore[attr-defined]


def refused() -> None:
    rank = dist.get_rank()
    module = compiled("fsdp", {"dp": 2}, build())
    x = torch.zeros(2, 5 + rank, dtype=torch.long)

    def run(loader: Any, **options: Any) -> None:
        for batch in shardc.batches(loader, module, **options):
            module(*batch)

    what = (
        "input 'ids' has other values on rank 1 than on rank 0; these differ along dp, and it is whole on every rank; "
        "other inputs that differ: target"
    )
    raises(MeshError, what, "own_rows=True", lambda: run([(torch.full((2, 4), rank), torch.full((2, 4), rank))]))
    what = "dim 1 of input 'target' is 5 on rank 0 and 6 on rank 1"
    raises(InputError, what, "pad={'target': 0}", lambda: run([(x, x)], own_rows=True, pad={"ids": 0}))
    what = "pad= names an input 'idz', which a batch does not have"
    raises(InputError, what, "did you mean 'ids'?", lambda: run([(x, x)], own_rows=True, pad={"idz": 0}))
    with pytest.raises(MeshError, match=r"in input 'ids'"):
        run([(x, x)], own_rows=True)
    y = torch.zeros(2, 4, dtype=torch.long)
    with pytest.raises(MeshError, match=r"the end of the batches of Decoder"):
        run([(y, y)] * (2 + rank), own_rows=True)
    sampler = DistributedSampler(data(), 4, rank)
    what = f"the loader's DistributedSampler deals out part {rank} of 4, and by the plan this rank has part {rank} of 2"
    raises(InputError, what, "*shardc.data_parts(module)", lambda: run(DataLoader(data(), sampler=sampler)))


def own_rows_of_a_per_rank_input() -> None:
    """Edges number each rank's own nodes; they are neither cut nor compared."""

    class Graph(nn.Linear):
        def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
            return super().forward(nodes)[edges[0]].sub(nodes[edges[1]]).square().sum()

    rank = dist.get_rank()
    torch.manual_seed(0)
    source = Graph(4, 4).double()
    plan = shardc.fsdp("dp") | shardc.Plan(inputs={"edges": shardc.per_rank(dim=1, relative_to="nodes")})
    module = shardc.compile(source, device_mesh(Mesh(dp=2)), plan, backend="eager")
    nodes = torch.randn(8, 4, dtype=torch.float64)
    edges = torch.tensor([[[0, 1, 2], [3, 3, 3]], [[1, 2, 0], [0, 0, 3]]])
    for batch in shardc.batches([{"nodes": nodes.chunk(2)[rank], "edges": edges[rank]}], module, own_rows=True):
        close(module(**batch).detach(), source(nodes, torch.cat([edges[0], edges[1] + 4], 1)).detach())


def test_two_ranks() -> None:
    run_ranks(
        2,
        partial(equals_one_device, "fsdp", {"dp": 2}, own=False),
        partial(equals_one_device, "fsdp", {"dp": 2}, own=True, collate=named),
        partial(equals_one_device, "tp", {"tp": 2}, own=True),
        partial(equals_one_device, "cp", {"cp": 2}, own=True),
        partial(equals_one_device, "found", {"dp": 2}, own=True),
        partial(padded_to_the_longest, {"dp": 2}),
        refused,
        own_rows_of_a_per_rank_input,
    )


@pytest.mark.slow
def test_four_ranks() -> None:
    run_ranks(
        4,
        *(
            partial(equals_one_device, plan, mesh, own=own, collate=collate)
            for plan, mesh in (
                ("hsdp", {"rep": 2, "dp": 2}),
                ("fsdp+tp", {"dp": 2, "tp": 2}),
                ("fsdp+cp", {"dp": 2, "cp": 2}),
                ("entries", {"dp": 2, "tp": 2}),
                ("found", {"a": 2, "b": 2}),
            )
            for own, collate in ((False, named), (True, None))
        ),
        *(partial(padded_to_the_longest, mesh, plan) for plan, mesh in (
            ("fsdp+tp", {"dp": 2, "tp": 2}), ("fsdp+cp", {"dp": 2, "cp": 2}))),
    )  # fmt: skip


def test_a_simulation_takes_the_same_loop() -> None:
    module = shardc.compile(build(), shardc.Mesh(dp=2, tp=2), PLANS["fsdp+tp"](), loss=loss_of, backend="eager")
    simulation, source, loader = shardc.Simulation(module), build(), DataLoader(data(), batch_size=ROWS)
    for mine, whole in zip(shardc.batches(loader, simulation), loader, strict=True):
        close(simulation(*mine).detach(), loss_of(source(whole[0]), whole[1]).detach())
    sampler = DistributedSampler(data(), 2, 0)
    with pytest.raises(InputError, match="takes global batches"):
        shardc.batches(DataLoader(data(), sampler=sampler), simulation)


def test_parts_of_inputs_that_lie_differently() -> None:
    plan = shardc.fsdp("dp") | shardc.Plan(inputs={"x": ("dp", None), "y": ("tp", None)})
    module = shardc.compile(nn.Bilinear(4, 4, 2), shardc.Mesh(dp=2, tp=2), plan)
    with pytest.raises(InputError, match="splits rows of inputs over different axes"):
        shardc.data_parts(module)
    with pytest.raises(InputError, match=r"^Linear is not from shardc\.compile"):
        shardc.data_parts(nn.Linear(2, 2))
