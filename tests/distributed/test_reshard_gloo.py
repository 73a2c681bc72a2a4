"""Reshards on four gloo processes: what each rank gets is what lockstep says it gets."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

from shardc.cost.model import CostModel
from shardc.cost.redistribute import Step, steps
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.passes.lower.collectives import lower_collective
from shardc.runtime.groups import Groups
from shardc.runtime.sim.lockstep import Lockstep
from tests.eager import Eager
from tests.layouts import every_layout
from tests.ranks import device_mesh, run_ranks

BYTES = CostModel(latency=1e-9, hop=0, bandwidth=1, memory_bandwidth=1e15, kinds=())
PAIRS = 300
# (mesh, shape, sub-dims, size before padding): 13 rows of 7 are stored as 16 rows of 8.
TENSORS = [
    (Mesh(a=2, b=2), (16, 8), (4, 2), (13, 7)),
    (Mesh(a=2, b=2), (8, 4, 4), (2, 2, 2), (8, 4, 4)),
    (Mesh(a=4), (16, 16), (4, 4), (16, 16)),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64]

Case = tuple[torch.Tensor, Layout, Layout, tuple[Step, ...], bool]


Shape = tuple[int, ...]


def sample(mesh: Mesh, shape: Shape, majors: Shape, size: Shape, pairs: int) -> list[Case]:
    """Tensors, layouts and plans, the same on every rank; half of the floating-point tensors are not integers."""
    draw, generator = random.Random(0), torch.Generator().manual_seed(0)
    layouts = every_layout(mesh, shape, majors)
    cases = []
    for at in range(pairs):
        src, dst = draw.choice(layouts), draw.choice(layouts)
        dtype = DTYPES[at % len(DTYPES)]
        exact = at % 8 < 4 or not dtype.is_floating_point
        value = torch.randint(-16, 16, size, generator=generator).to(dtype)
        if not exact:
            value = value + torch.rand(size, generator=generator).to(dtype)
        padding = [n for have, want in zip(reversed(size), reversed(shape), strict=True) for n in (0, want - have)]
        plan = steps(src, dst, dtype.itemsize, BYTES if at % 3 else CostModel())
        cases.append((torch.nn.functional.pad(value, padding), src, dst, plan, exact))
    return cases


def reshards_as_lockstep_does(at: int, pairs: int) -> None:
    mesh, shape, majors, size = TENSORS[at]
    sim, groups = Lockstep(mesh), Groups.of(device_mesh(mesh))
    cases = sample(mesh, shape, majors, size, pairs)
    groups.add({step.axes for *_, plan, _ in cases for step in plan if step.axes})
    eager, generator = Eager(groups), torch.Generator().manual_seed(1)
    for tensor, src, dst, plan, exact in cases:
        values = sim.scatter_terms(tensor, src, generator)
        mine = values[groups.rank]
        for step in plan:
            values, mine = lower_collective(step, values, sim), lower_collective(step, mine, eager)
        expected = values[groups.rank]
        if exact:
            assert torch.equal(mine, expected), f"{src} -> {dst} {tensor.dtype}: {plan}"
        else:
            torch.testing.assert_close(mine, expected, msg=partial("{} -> {}: {}".format, src, dst))


@pytest.mark.slow
def test_gloo_ranks_get_what_lockstep_gives() -> None:
    run_ranks(4, *(partial(reshards_as_lockstep_does, at, PAIRS // len(TENSORS)) for at in range(len(TENSORS))))
