"""`Groups` over a mesh with an axis of stages, on real ranks: those of one stage, and what all stages share."""

from __future__ import annotations

import copy
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardc
from shardc.errors import MeshError
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.runtime.events import Event
from shardc.runtime.groups import Groups
from tests.ranks import device_mesh, run_ranks

c10d = torch.ops._c10d_functional


def gathered(name: str, size: int) -> list[int]:
    """The global ranks of a registered group, in group order."""
    mine = torch.tensor([dist.get_rank()])
    return c10d.wait_tensor(c10d.all_gather_into_tensor(mine, size, name)).tolist()


def check_inside() -> None:
    on = device_mesh(Mesh(pp=2, dp=2, tp=2))
    groups, rank = Groups.of(on, stages="pp"), dist.get_rank()
    stage, mine = divmod(rank, 4)
    assert groups is Groups.of(on, stages="pp") is not Groups.of(on) and groups.whole is Groups.of(on)
    assert (groups.stages, groups.stage, groups.rank, groups.mesh) == ("pp", stage, mine, Mesh(pp=1, dp=2, tp=2))
    assert groups.everyone() == [stage * 4 + at for at in range(4)] == groups.of_stage(stage)
    assert groups.first == (rank == 0) and groups.of_stage(1) == [4, 5, 6, 7]
    assert dist.get_process_group_ranks(groups.along_stages()) == [mine, mine + 4]
    name = groups.add([("dp",)])["shardc:dp"]
    assert gathered(name, 2) == groups.ranks(("dp",)) == [stage * 4 + mine % 2, stage * 4 + 2 + mine % 2]
    assert groups.coordinate(("dp", "tp")).tolist() == [mine]
    if stage:  # the programs of stages differ in their groups
        axes = ("pp", "dp", "tp")
        assert gathered(groups.add([axes])["shardc:pp,dp,tp"], 4) == groups.ranks(axes) == groups.everyone()
        assert gathered(groups.add([("pp",)])["shardc:pp"], 1) == [rank]
    assert groups.rename["shardc:dp"] != groups.whole.add([("dp",)])["shardc:dp"]
    assert gathered(groups.whole.add([("pp", "tp")])["shardc:pp,tp"], 4) == groups.whole.ranks(("pp", "tp"))


def check_shared() -> None:
    on = device_mesh(Mesh(dp=2, pp=2))
    groups, rank = Groups.of(on, stages="pp"), dist.get_rank()
    assert (groups.stage, groups.rank, groups.everyone()) == (rank % 2, rank // 2, [rank % 2, 2 + rank % 2])
    assert groups.of_first(torch.tensor([rank + 7])).item() == 7
    assert groups.most(rank) == 3 and groups.any(rank == 2) and not groups.any(False)
    assert groups.consistency is groups.whole.consistency
    with pytest.raises(MeshError, match="rank"):
        groups.consistency.enter(Event((("event", "the same" if rank < 3 else "another"),)), ask=True)


def check_views() -> None:
    """The view that parameters are on has all stages, and the parts of the other axes."""
    groups = Groups.of(device_mesh(Mesh(pp=2, dp=2)), stages="pp")
    assert groups.view([Layout.parse("[4@dp]", groups.mesh)]) is Groups.of(groups.device_mesh).device_mesh
    four = Groups.of(DeviceMesh("cpu", torch.arange(4)[None], mesh_dim_names=("pp", "dp")), stages="pp")
    view = four.view([Layout.parse("[4@dp:2x2]", four.mesh)])
    assert view.mesh_dim_names == ("pp", "dp_1x2", "dp_2x2") and tuple(view.shape) == (1, 2, 2)


def check_interrupts() -> None:
    """An error of a rank of one stage reaches a collective inside another."""
    groups = Groups.of(device_mesh(Mesh(pp=2, dp=2)), stages="pp")
    name, rank = groups.add([("dp",)])["shardc:dp"], dist.get_rank()
    error, text = (ValueError, "of rank 0") if rank == 0 else (MeshError, "rank 0")
    if rank == 3:  # connections to it close before it hears why
        hears = groups.consistency._on_failure
        groups.consistency._on_failure = lambda *message: (time.sleep(0.3), hears(*message))[1]
    with (
        pytest.raises(error, match=text),
        groups.consistency.shares_errors(),
        groups.consistency.communicates("a step"),
    ):
        if rank == 0:
            raise ValueError("of rank 0")
        if rank == 2:
            dist.recv(torch.zeros(1), 0, groups.along_stages())
        else:  # rank 3 waits for rank 2, and rank 1 for rank 0
            gathered(name, 2)


def check_goes_on() -> None:
    """Behind an error of a call, the same program runs again, whose graphs have the names of a stage's groups."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    plan = shardc.fsdp("dp") | shardc.pp("pp", "gpipe", microbatches=2, cut=["2"])
    module = shardc.compile(
        copy.deepcopy(model), device_mesh(Mesh(pp=2, dp=2)), plan, loss=lambda y: y.square().mean(), backend="eager"
    )
    x = torch.randn(8, 4)
    whole = model(x).square().mean()
    for wrong in (False, True, True):
        if wrong:
            with pytest.raises(MeshError, match="input 'input'"):
                module(torch.randn(4, 5 if dist.get_rank() == 0 else 4))
        loss = module(module.shard_inputs(x))
        loss.backward()
        torch.testing.assert_close(loss.detach(), whole.detach())


def test_two_stages_of_two() -> None:
    run_ranks(4, check_shared, check_views, check_interrupts, check_goes_on)


@pytest.mark.slow
def test_two_stages_of_four() -> None:
    run_ranks(8, check_inside)
