"""Each collective, called on four processes and in lockstep: the same tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardc.ir.comm import group_name
from shardc.ir.layout import REDUCE_OPS
from shardc.ir.mesh import Mesh
from shardc.runtime.groups import Groups
from shardc.runtime.sim.lockstep import Lockstep, PerRank
from tests.eager import Eager
from tests.ranks import device_mesh, run_ranks

MESH = Mesh(a=2, b=2)
c10d, direct = torch.ops._c10d_functional, torch.ops.shardc


def inputs(seed: int, *shape: int) -> PerRank:
    """A tensor of integers for each rank, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return PerRank(torch.randint(-9, 9, shape, generator=generator).float() for _ in range(MESH.ranks))


def of_dtype(x: PerRank, dtype: torch.dtype = torch.float64) -> PerRank:
    return PerRank(each.to(dtype) for each in x)


def calls(axes: tuple[str, ...], size: int) -> list[tuple[Any, list[Any], dict[str, Any]]]:
    """(collective, arguments before the group's name, further tensors) on groups of ``size`` ranks along ``axes``."""
    x, y = inputs(1, 4, 3), inputs(2, 8)
    found: list[tuple[Any, list[Any], dict[str, Any]]] = [
        (c10d.all_gather_into_tensor.default, [x, size], {}),
        (c10d.all_gather_into_tensor_out.default, [x, size], {"out": inputs(3, 4 * size, 3)}),
        (c10d.all_gather_into_tensor_coalesced.default, [[x, y], size], {}),
        (c10d.reduce_scatter_tensor_coalesced.default, [[x, y], "sum", size], {}),
        (c10d.all_reduce_coalesced.default, [[x, y], "sum"], {}),
        (direct.all_gather_into_tensor_coalesced.default, [[x, y, inputs(5), inputs(6, 0, 3)], size], {}),
        (direct.all_gather_into_tensor_coalesced.default, [[of_dtype(x, torch.bool), y, of_dtype(x)], size], {}),
        (c10d.all_reduce_.default, [inputs(4, 5), "sum"], {}),
        (c10d.broadcast.default, [x, 1], {}),
        (c10d.all_to_all_single.default, [x, [4 // size] * size, [4 // size] * size], {}),
        (torch.ops.shardc.permute_ranks.default, [x, [*range(1, size), 0]], {}),
    ]
    for op in REDUCE_OPS:
        found.append((c10d.all_reduce.default, [x, op], {}))
        found.append((c10d.reduce_scatter_tensor.default, [x, op, size], {}))
        found.append((direct.all_reduce_coalesced.default, [[x, y], op], {}))
        found.append((direct.reduce_scatter_tensor_coalesced.default, [[x, y], op, size], {}))
    return found


def of_rank(value: Any, rank: int) -> Any:
    if isinstance(value, PerRank):
        return value[rank].clone()
    return [of_rank(item, rank) for item in value] if isinstance(value, list) else value


def collectives_do_what_lockstep_does() -> None:
    sim, groups = Lockstep(MESH), Groups.of(device_mesh(MESH))
    eager, rank = Eager(groups), groups.rank
    for axes, size in ((("a",), 2), (("b",), 2), (("a", "b"), 4)):
        groups.add([axes])
        for op, args, further in calls(axes, size):
            mine = eager.call(
                op,
                *of_rank(args, rank),
                groups.rename[group_name(axes)],
                **{name: of_rank(value, rank) for name, value in further.items()},
            )
            made = sim.call(op, *args, group_name(axes), **further)[rank]
            for one, other in zip(*(x if isinstance(x, list) else [x] for x in (mine, made)), strict=True):
                assert torch.equal(c10d.wait_tensor(one), other), f"{op} over {axes}: {one}, lockstep {other}"


@pytest.mark.slow
def test_collectives_on_ranks_and_in_lockstep() -> None:
    run_ranks(MESH.ranks, collectives_do_what_lockstep_does)
