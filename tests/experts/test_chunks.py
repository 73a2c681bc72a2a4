"""Rows in chunks: one device's numbers, and one chunk's rows travel while another's are computed."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, fx, nn

import shardc
from shardc.custom_ops.expert_ops import RUN, RUN_GRADIENT
from shardc.errors import InputError, PlanError
from shardc.ir import graph as ir
from shardc.ir.comm import collective_of, waits_of
from shardc.ir.comm_volume import collective_kind
from shardc.ir.executable import Half
from tests.experts.alike import trains_alike
from tests.experts.models import Own, batch, build, experts_of, route

SEND, BLOCKS = {"dispatch": "send"}, {"dispatch": "bounded", "capacity": 4.0}


def plan(name: str, mesh: dict[str, int], chunks: int, way: dict[str, object]) -> shardc.Plan:
    data = [axis for axis in mesh if axis != "tp"]
    return shardc.fsdp(data) | shardc.ep("ep", experts_of(name), chunks=chunks, **way)


@pytest.mark.parametrize(
    "name, mesh, chunks, way",
    [
        ("own", {"ep": 2}, 2, SEND),
        ("own", {"ep": 2}, 5, BLOCKS),  # of 12 tokens
        ("own", {"dp": 2, "ep": 2}, 3, BLOCKS),
        ("own", {"ep": 3}, 40, SEND),  # more than tokens
        ("gpt-oss", {"ep": 2, "tp": 2}, 2, BLOCKS),
        pytest.param("qwen3-moe", {"dp": 2, "ep": 2}, 2, SEND, marks=pytest.mark.slow),
        pytest.param("deepseek-v3", {"ep": 4}, 3, BLOCKS, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_models(name: str, mesh: dict[str, int], chunks: int, way: dict[str, object]) -> None:
    trains_alike(partial(build, name), batch(), mesh, plan(name, mesh, chunks, way))


@pytest.mark.parametrize("way", [SEND, BLOCKS], ids=str)
def test_chunks_of_microbatches(way: dict[str, object]) -> None:
    mesh = {"ep": 2}
    trains_alike(partial(build, "own"), batch(8), mesh, plan("own", mesh, 2, way) | shardc.microbatches(2))


def test_each_chunk_has_its_room() -> None:
    """Half of a rank's tokens go to one rank: with room for an even load, that is too much for a chunk of these."""
    model, given = build("own", torch.float32), batch(8)
    route(model, "to few")
    with torch.no_grad():
        model.router.weight.zero_()
        model.router.weight[[0, 1, 4, 5]] = torch.tensor([[1.0], [0.9], [-1.0], [-0.9]])
        model.embed.weight[32:] *= -1
    given["input_ids"] = torch.where(torch.arange(48).view(8, 6) // 12 % 2 == 0, 1, 33)
    for chunks in (1, 2):
        way = {"dispatch": "bounded", "capacity": 1.0}
        sim = shardc.Simulation(
            shardc.compile(model, shardc.Mesh(ep=2), plan("own", {"ep": 2}, chunks, way), backend="eager")
        )
        if chunks == 1:
            sim(**given)
            sim.backward()
            continue
        sim(**given)
        with pytest.raises(InputError, match="has 24 rows .* room for 12"):
            sim.backward()


class Stack(nn.Module):
    """One layer, as a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Own(2048, 1408, 64, 6)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return self.layer(input_ids, labels)


def step(chunks: int, *entries: shardc.Plan) -> shardc.Program:
    """The experts of DeepSeek-V3 16B in one layer, over 8 ranks of 8,192 tokens."""
    with torch.device("meta"):
        model = Stack().bfloat16()
    plan = shardc.ep("ep", "layer.experts", dispatch="bounded", capacity=1.0, chunks=chunks)
    for entry in entries:
        plan |= entry
    ids = torch.zeros(8 * 8192, 1, dtype=torch.int64)
    return shardc.compile(model, shardc.Mesh(ep=8), plan, backend="eager").lower(input_ids=ids, labels=ids)


def test_rows_travel_while_others_are_computed() -> None:
    """In both halves: the rows of the second chunk under the first one's products, and the results the other way."""
    whole, halves = step(1), step(2)
    for half, kernel in zip(halves.step(), (RUN, RUN_GRADIENT), strict=True):
        first, second = (node for node in half.graph.nodes if node.target is kernel)
        assert any(_reads(first, start) for start in _in_flight(half, second))
        assert any(_reads(start, second) for start in _in_flight(half, first))
    before, after = (program.schedule("h100") for program in (whole, halves))
    assert after.exposed < 0.45 * before.exposed and after.seconds < 0.9 * before.seconds


def test_rows_travel_while_a_region_runs_again() -> None:
    """Where backward sends both the rows and their gradients, in the order in which products need them."""

    def waits(chunks: int) -> float:
        rows = step(chunks, shardc.recompute("layer")).schedule("h100").transfers
        return sum(row.exposed for row in rows if row.kind == "all_to_all" and row.phase == "backward")

    assert waits(2) < 0.25 * waits(1)


def _in_flight(half: Half, node: fx.Node) -> list[fx.Node]:
    """The large all-to-alls that are in flight while ``node`` runs."""
    place = {each: at for at, each in enumerate(half.graph.nodes)}
    return [
        start
        for start in half.graph.nodes
        if collective_kind(start) == "all_to_all"
        and ir.value(start).nbytes > 1 << 20
        and place[start] < place[node] < min(place[wait] for wait in waits_of(start))
    ]


def _reads(node: fx.Node, other: fx.Node) -> bool:
    """Whether what ``node`` gives goes into ``other``."""
    seen, work = set(), [other]
    while work:
        for x in work.pop().all_input_nodes:
            if x is node or collective_of(x) is node:
                return True
            if x not in seen:
                seen.add(x)
                work.append(x)
    return False


@pytest.mark.parametrize("dispatch", ["auto", "gather"])
def test_chunks_of_rows_that_are_not_sent(dispatch: str) -> None:
    with pytest.raises(PlanError, match="chunks=2 cut the rows that are sent"):
        shardc.ep("ep", "experts", dispatch=dispatch, chunks=2)


def test_plans_are_kept_as_text() -> None:
    entry = shardc.ep("ep", "experts", dispatch="send", chunks=2)
    assert str(entry) == 'ep("ep", experts="experts", dispatch="send", chunks=2)'
    assert shardc.Plan.from_json(entry.to_json()) == entry
