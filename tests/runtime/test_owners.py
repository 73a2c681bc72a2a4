"""`Owners`: who updates which parameter, and where its shards lie in it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardc import _compat
from shardc.runtime.groups import Groups
from shardc.runtime.owned import Owned
from shardc.runtime.owners import Owners, update_cost

R = Replicate()


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


def param(mesh: DeviceMesh, shape: tuple[int, ...], *placements: Placement) -> DTensor:
    meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), torch.float32)
    return DTensor(torch.empty(0), _compat.dtensor_spec(mesh, placements, meta), requires_grad=False)


def test_the_load_is_balanced(mesh: DeviceMesh) -> None:
    shapes = [(512, 256), (128, 256), (128, 256), (256, 256), (688, 256), (688, 256), (256, 688)] * 4
    params = [param(mesh, shape, Shard(0), Shard(1)) for shape in shapes]
    params += [param(mesh, shape, Shard(0), R) for shape in shapes]
    owners = Owners(params, Groups.of(mesh)).owners
    load = dict.fromkeys(range(8), 0)
    for x, owner in zip(params, owners, strict=True):
        at = [p.owner if isinstance(p, Owned) else None for p in owner.placements]
        ranks = mesh.mesh[tuple(slice(None) if index is None else index for index in at)].flatten().tolist()
        assert owner.rank in ranks and len(ranks) == (1 if x.placements[1] != R else 2)
        for rank in ranks:
            load[rank] += update_cost(x.shape)
    assert max(load.values()) < 1.1 * sum(load.values()) / 8
    assert update_cost((8, 4)) == 8 * 4 * 4 and update_cost((2, 3, 4)) == 2 * 12 * 2 and update_cost((5,)) == 5


CUTS: list[tuple[tuple[int, ...], tuple[Placement, ...]]] = [
    ((16, 4), (Shard(0), Shard(0))),
    ((10, 3), (Shard(0), R)),
    ((3, 5), (Shard(0), Shard(1))),
    ((1, 1), (Shard(0), R)),
    ((24, 4), (_StridedShard(0, split_factor=3), R)),
    ((8, 12), (Shard(0), _StridedShard(1, split_factor=3))),
    ((8, 3, 2), (R, Shard(2))),
    ((7,), (Shard(0), R)),
    ((6, 4), (Owned(0), Shard(0))),
]


@pytest.mark.parametrize(("shape", "placements"), CUTS, ids=str)
def test_boxes_tile_the_tensor(mesh: DeviceMesh, shape: tuple[int, ...], placements: tuple[Placement, ...]) -> None:
    x = param(mesh, shape, *placements)
    (owner,) = Owners([x], Groups.of(mesh)).owners
    assert owner.is_local, "the first rank owns the only parameter"
    split = [at for at, placement in enumerate(placements) if placement != R]
    sizes = [mesh.size(at) if at in split else 1 for at in range(2)]
    assert list(owner.boxes) == [int(mesh.mesh[at]) for at in product(*map(range, sizes))]
    whole, pieces = torch.arange(x.numel()).view(shape), {}
    for rank, box in owner.boxes.items():
        pieces[rank] = whole[box.index]
        assert pieces[rank].shape == box.shape
    assert torch.cat([x.flatten() for x in pieces.values()]).sort().values.tolist() == whole.flatten().tolist()
    # The first rank's is that of torch.
    local = whole
    for at, placement in enumerate(placements):
        if placement != R:
            local = placement._split_tensor(local, mesh.size(at), with_padding=False)[0][0]  # type: ignore[attr-defined]
    assert torch.equal(pieces[0], local)
