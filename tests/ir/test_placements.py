"""Layouts and DTensor placements: each rank holds of a DTensor what the layout says, and back."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardc.errors import LayoutError
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.ir.placements import from_placements, to_placements
from shardc.runtime.shards import shard
from tests.layouts import every_layout

CASES = [
    (Mesh(a=4), (16, 8), (4, 2)),
    (Mesh(a=2, b=4), (16, 64), (2, 8)),
    (Mesh(a=3, b=2), (36, 12), (6, 2)),
    (Mesh(a=2, b=2, c=2), (16, 8), (2, 1)),
]


@pytest.fixture
def fake_world() -> Iterator[None]:
    logging.disable(logging.WARNING)
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(("mesh", "shape", "majors"), CASES, ids=str)
def test_dtensor_gives_each_rank_what_the_layout_says(
    mesh: Mesh, shape: tuple[int, ...], majors: tuple[int, ...], fake_world: None
) -> None:
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    with LocalTensorMode(mesh.ranks):
        device_mesh = init_device_mesh("cpu", tuple(size for _, size in mesh.shape), mesh_dim_names=mesh.axes)
        everywhere = LocalTensor(dict.fromkeys(range(mesh.ranks), whole))
        for layout in every_layout(mesh, shape, majors, ops=()):
            placements = to_placements(layout)
            local = distribute_tensor(everywhere, device_mesh, placements, src_data_rank=None).to_local()
            for rank, expected in enumerate(shard(whole, layout)):
                held = local._local_tensors[rank]
                assert torch.equal(held, expected), f"rank {rank} of {layout} as {placements}"


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "product"])
@pytest.mark.parametrize(("mesh", "shape", "majors"), CASES, ids=str)
def test_there_and_back(mesh: Mesh, shape: tuple[int, ...], majors: tuple[int, ...], op: str) -> None:
    for layout in every_layout(mesh, shape, majors, ops=(op,)):
        assert from_placements(mesh, shape, to_placements(layout)) == layout


@pytest.mark.parametrize(
    ("placements", "layout"),
    [
        ([Shard(0), Shard(0)], "[32@(dp,tp),32]"),
        # FSDP2 over TP: tp splits first.
        ([_StridedShard(0, split_factor=4), Shard(0)], "[32@(tp,dp),32]"),
        ([Replicate(), _StridedShard(1, split_factor=2)], "[32,(2 16@tp)]"),
        ([Partial("max"), Shard(-1)], "[32,32@tp]{max:dp}"),
    ],
)
def test_what_placements_are_in_text(placements: list[object], layout: str) -> None:
    mesh = Mesh(dp=2, tp=4)
    assert str(from_placements(mesh, (32, 32), placements)) == layout  # type: ignore[arg-type]


def test_what_the_other_side_cannot_say_is_an_error() -> None:
    mesh = Mesh(dp=2, tp=4)
    with pytest.raises(LayoutError, match=r"\[32@tp:1x2,32\] uses 'tp:1x2', a part of a mesh axis"):
        to_placements(Layout.parse("[32@tp:1x2,32]", mesh))
    with pytest.raises(LayoutError, match=r"S\(0\) on tp cannot split a tensor of shape \(6, 8\)"):
        from_placements(mesh, (6, 8), [Replicate(), Shard(0)])
    with pytest.raises(LayoutError, match="1 placements for the 2 axes"):
        from_placements(mesh, (8, 8), [Replicate()])
