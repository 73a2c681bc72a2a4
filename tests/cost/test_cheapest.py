"""The planner against brute force: no sequence of up to three collectives moves fewer bytes."""

from __future__ import annotations

import pytest

from shardc.cost.model import CostModel
from shardc.cost.redistribute import steps, wire_bytes
from shardc.ir.mesh import Mesh
from tests.cost.exhaustive import wire_elements
from tests.layouts import every_layout

BYTES = CostModel(latency=1e-9, hop=0, bandwidth=1, memory_bandwidth=1e15, kinds=())


@pytest.mark.parametrize(
    ("mesh", "shape", "majors"),
    [
        (Mesh(a=2, b=2), (16,), (4,)),
        (Mesh(a=2, b=2), (8, 8), (4, 4)),
        (Mesh(a=2, b=2), (8, 4, 4), (4, 2, 2)),
        (Mesh(a=2, b=3), (36,), (6,)),
        (Mesh(a=2, b=3), (12, 12), (2, 6)),
        (Mesh(a=4, b=2), (64,), (8,)),
        (Mesh(a=4, b=2), (16, 16), (2, 4)),
        pytest.param(Mesh(a=2, b=2, c=2), (64,), (8,), marks=pytest.mark.slow),
        pytest.param(Mesh(a=2, b=3), (12, 6, 6), (2, 2, 2), marks=pytest.mark.long),
        pytest.param(Mesh(a=4, b=2), (8, 8, 8), (2, 4, 2), marks=pytest.mark.long),
        pytest.param(Mesh(a=2, b=2, c=2), (16, 16), (2, 4), marks=pytest.mark.long),
        pytest.param(Mesh(a=2, b=2, c=2), (8, 8, 8), (2, 2, 2), marks=pytest.mark.long),
    ],
    ids=str,
)
@pytest.mark.timeout(0)
def test_no_sequence_of_three_moves_less(mesh: Mesh, shape: tuple[int, ...], majors: tuple[int, ...]) -> None:
    layouts = every_layout(mesh, shape, majors)
    least = wire_elements(layouts)
    beaten = []
    for i, src in enumerate(layouts):
        for j, dst in enumerate(layouts):
            planned = wire_bytes(src, dst, 1, BYTES)
            if planned > least[i, j]:
                plan = [f"{step.kind}({','.join(step.axes)}) {step.dst}" for step in steps(src, dst, 1, BYTES)]
                beaten.append(f"{src} -> {dst}: {planned} elements by {plan}, {least[i, j]:.0f} suffice")
    assert not beaten, f"{len(beaten)} of {len(layouts) ** 2}\n" + "\n".join(beaten[:20])
