"""Symbolic group names on real ranks: members, order, coordinates, several meshes, Inductor."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import shardc
from shardc.errors import MeshError
from shardc.ir.mesh import Mesh
from shardc.runtime.groups import Groups
from tests.ranks import device_mesh, run_ranks

c10d = torch.ops._c10d_functional


def gathered(name: str, size: int) -> list[int]:
    """The global ranks of the group, in group order, as a collective through the registered name sees them."""
    mine = torch.tensor([dist.get_rank()])
    return c10d.wait_tensor(c10d.all_gather_into_tensor(mine, size, name)).tolist()


def check_members() -> None:
    mesh = Mesh(dp=2, tp=2)
    groups = Groups.of(device_mesh(mesh))
    rename = groups.add([("tp", "dp"), ("tp",), ("dp",)])
    assert rename == {f"shardc:{name}": f"shardc:{name}" for name in ("dp", "dp,tp", "tp")}
    for axes in (("dp",), ("tp",), ("dp", "tp")):
        expected = list(mesh.group(axes, dist.get_rank()))
        assert groups.ranks(axes) == expected
        assert gathered("shardc:" + ",".join(axes), len(expected)) == expected
    at = mesh.coordinate(dist.get_rank())
    assert groups.coordinate(("tp", "dp")).tolist() == [at["tp"] * 2 + at["dp"]]
    assert groups.coordinate(("dp",)).dtype == torch.int64


def check_parts() -> None:
    mesh = Mesh(tp=4)
    groups = Groups.of(device_mesh(mesh))
    groups.add([("tp:1x2",), ("tp:2x2",)])
    rank = dist.get_rank()
    assert gathered("shardc:tp:1x2", 2) == [rank % 2, rank % 2 + 2]
    assert gathered("shardc:tp:2x2", 2) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert groups.coordinate(("tp:2x2", "tp:1x2")).tolist() == [rank % 2 * 2 + rank // 2]


def check_second_mesh_has_its_own_names() -> None:
    first = Groups.of(device_mesh(Mesh(dp=2, tp=2)))
    second = Groups.of(device_mesh(Mesh(dp=4)))
    first.add([("dp",)])
    assert second.add([("dp",)]) == {"shardc:dp": "shardc.1:dp"}
    assert gathered("shardc:dp", 2) == first.ranks(("dp",))
    assert gathered("shardc.1:dp", 4) == [0, 1, 2, 3]
    assert Groups.of(device_mesh(Mesh(dp=4))) is second


def check_ranks_in_another_order() -> None:
    """Mesh rank r is global rank ``order[r]``; group order follows the mesh, not the global ranks."""
    order = torch.tensor([[3, 1], [0, 2]])
    groups = Groups.of(DeviceMesh("cpu", order, mesh_dim_names=("dp", "tp")))
    groups.add([("dp",), ("tp",), ("dp", "tp")])
    row, column = divmod(order.flatten().tolist().index(dist.get_rank()), 2)
    assert groups.rank == row * 2 + column
    assert gathered("shardc:tp", 2) == order[row].tolist()
    assert gathered("shardc:dp", 2) == order[:, column].tolist()
    assert gathered("shardc:dp,tp", 4) == [3, 1, 0, 2]


def check_part_of_the_world() -> None:
    ranks = [1, 3]
    mesh = DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=("dp",))
    if dist.get_rank() in ranks:
        Groups.of(mesh).add([("dp",)])
        assert gathered("shardc:dp", 2) == ranks
        return
    with pytest.raises(MeshError, match="is not on the mesh dp=2 of ranks"):
        Groups.of(mesh)


def check_meshes_that_some_ranks_are_on() -> None:
    """What ranks compare on a mesh does not depend on the meshes that some of them used before."""
    rank = dist.get_rank()
    alone = DeviceMesh("cpu", torch.tensor([0]), mesh_dim_names=("dp",))
    whole = [device_mesh(Mesh(dp=2)), device_mesh(Mesh(tp=2))]
    for mesh in [alone, *whole] if rank == 0 else whole:
        module = shardc.compile(torch.nn.Linear(4, 2), mesh, shardc.ddp(), backend="eager", init_sync=True)
        module(torch.ones(2, 4)).sum().backward()
        assert module.weight.grad.to_local().tolist() == [[2.0] * 4] * 2


def check_inductor() -> None:
    groups = Groups.of(device_mesh(Mesh(dp=2)))
    groups.add([("dp",)])

    def summed(x: torch.Tensor) -> torch.Tensor:
        return c10d.wait_tensor(c10d.all_reduce(x * 2, "sum", "shardc:dp")) + 1

    assert torch.compile(summed, fullgraph=True)(torch.ones(3) * (dist.get_rank() + 1)).tolist() == [7.0] * 3


def check_devices() -> None:
    """Of a mesh of GPUs over gloo, before a collective of its ends the process without a word."""
    mesh = device_mesh(Mesh(dp=2))
    mesh._device_type = "cuda"
    with pytest.raises(MeshError, match=r'the mesh dp=2 is of cuda devices, but gloo(.|\n)*"nccl"'):
        Groups.of(mesh)


@pytest.mark.slow
def test_four_ranks() -> None:
    """Each check is in a new world, where the names of the one before are free again."""
    run_ranks(
        4,
        check_members,
        check_parts,
        check_second_mesh_has_its_own_names,
        check_ranks_in_another_order,
        check_part_of_the_world,
    )


@pytest.mark.slow
def test_two_ranks() -> None:
    run_ranks(2, check_inductor)


def test_gloo_with_gpus() -> None:
    run_ranks(2, check_devices)


def test_meshes_that_some_ranks_are_on() -> None:
    run_ranks(2, check_meshes_that_some_ranks_are_on, timeout=timedelta(seconds=20))
