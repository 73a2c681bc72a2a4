"""What the planner plans, for the changes of layout that programs are made of."""

from __future__ import annotations

import pytest

from shardc.cost.model import CostModel
from shardc.cost.redistribute import seconds, steps, wire_bytes
from shardc.errors import LayoutError
from shardc.ir import ops
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.ir.steps import broken_step
from tests.layouts import every_layout

COST = CostModel()
BYTES = CostModel(latency=1e-9, hop=0, bandwidth=1, memory_bandwidth=1e15, kinds=())
MESH = Mesh(dp=2, tp=4)


def plan(src: str, dst: str, mesh: Mesh = MESH, cost: CostModel = COST) -> list[str]:
    found = steps(Layout.parse(src, mesh), Layout.parse(dst, mesh), 4, cost)
    return [f"{s.kind}({','.join(filter(None, [*s.axes, s.op]))}) {s.dst} {s.wire_bytes(4)}B" for s in found]


@pytest.mark.parametrize(
    ("src", "dst", "planned"),
    [
        # A TP weight under FSDP gathered for its use, and its gradient scattered.
        ("[1024@(tp,dp),512]", "[1024@tp,512]", ["all_gather(dp) [1024@tp,512] 262144B"]),
        ("[1024@tp,512]{sum:dp}", "[1024@(tp,dp),512]", ["reduce_scatter(dp,sum) [1024@(tp,dp),512] 262144B"]),
        # Sequence parallel: a row-parallel matmul's pending sum, scattered over the sequence, then gathered.
        ("[8@dp,128,64]{sum:tp}", "[8@dp,128@tp,64]", ["reduce_scatter(tp,sum) [8@dp,128@tp,64] 98304B"]),
        ("[8@dp,128@tp,64]", "[8@dp,128,64]", ["all_gather(tp) [8@dp,128,64] 98304B"]),
        # Ulysses: sequence to heads.
        ("[8@dp,512@tp,16,64]", "[8@dp,512,16@tp,64]", ["all_to_all(tp) [8@dp,512,16@tp,64] 1572864B"]),
        # HSDP: scattered inside, then summed across.
        (
            "[4096,1024]{sum:dp,sum:tp}",
            "[4096@tp,1024]",
            [
                "reduce_scatter(tp,sum) [4096@tp,1024]{sum:dp} 12582912B",
                "all_reduce(dp,sum) [4096@tp,1024] 4194304B",
            ],
        ),
        # A fused projection: from split as one to split inside each of three.
        (
            "[4096@dp,3072@tp]",
            "[4096@dp,(3 1024@tp)]",
            ["all_to_all(tp) [4096@(dp,tp),3072] 4718592B", "all_to_all(tp) [4096@dp,(3 1024@tp)] 4718592B"],
        ),
        # Nothing moves.
        ("[16,16]", "[16@dp,16@tp]", ["shard(dp,tp) [16@dp,16@tp] 0B"]),
        ("[16@dp,16]", "[16@dp,16]{sum:tp}", ["to_partial(tp,sum) [16@dp,16]{sum:tp} 0B"]),
        ("[16@dp,16]{sum:tp}", "[16@dp,16]{sum:tp}", []),
    ],
)
def test_plans_of_programs(src: str, dst: str, planned: list[str]) -> None:
    assert plan(src, dst) == planned


def test_axes_exchange_places_as_whole_shards() -> None:
    mesh = Mesh(a=4, b=4)
    assert plan("[1024@a,1024@b]", "[1024@b,1024@a]", mesh, BYTES) == ["permute_ranks(a,b) [1024@b,1024@a] 262144B"]
    assert plan("[1024@a,1024]", "[1024@b,1024]", mesh, BYTES) == ["permute_ranks(a,b) [1024@b,1024] 1048576B"]


def test_an_axis_moves_in_parts() -> None:
    moved = plan("[64@tp,64]", "[64@tp:1x2,64@tp:2x2]", cost=BYTES)
    assert moved == ["all_to_all(tp:2x2) [64@tp:1x2,64@tp:2x2] 2048B"]


@pytest.mark.parametrize(
    "mesh", [Mesh(a=2, b=3), Mesh(a=4, b=2), pytest.param(Mesh(a=2, b=2, c=2), marks=pytest.mark.slow)], ids=str
)
def test_every_step_is_a_legal_step(mesh: Mesh) -> None:
    layouts = every_layout(mesh, (12 if mesh.size("b") == 3 else 16,), (2,))
    for src in layouts:
        for dst in layouts:
            at = src
            for step in steps(src, dst, 4, BYTES):
                assert step.src == at
                broken = broken_step(ops.MARKERS[step.kind], step.src, step.dst, step.axes, step.op or "sum")
                assert broken is None, f"{src} -> {dst}: {step}: {broken}"
                at = step.dst
            assert at == dst


def test_seconds_and_bytes_are_those_of_the_steps() -> None:
    src, dst = Layout.parse("[512@(dp,tp),64]", MESH), Layout.parse("[512,64@dp]{sum:tp}", MESH)
    found = steps(src, dst, 2, COST)
    assert seconds(src, dst, 2, COST) == sum(step.seconds(2, COST) for step in found)
    assert wire_bytes(src, dst, 2, COST) == sum(step.wire_bytes(2) for step in found) > 0


def test_tensors_without_elements_move_nothing() -> None:
    assert plan("[0,16@dp]", "[0,16@tp]") == ["shard() [0,16@tp] 0B"]


def test_other_shapes_and_meshes_are_errors() -> None:
    with pytest.raises(LayoutError, match=r"cannot go from \[16,32\] to \[16,64\]: global shapes"):
        plan("[16,32]", "[16,64]")
    with pytest.raises(LayoutError, match="use one mesh for both"):
        steps(Layout.parse("[16]", MESH), Layout.parse("[16]", Mesh(dp=2)), 4, COST)
