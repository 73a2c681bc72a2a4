"""``set_requires_all_reduce(False)`` beside FSDP2's, on four ranks: gradients stay summed over the shards alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

import shardc
from shardc.ir.comm_volume import tally
from shardc.runtime.full_params import unshard
from tests.distributed.test_reshard_after_forward import model
from tests.ranks import run_ranks
from tests.state import close

MICRO = 3
PLANS = {
    "hsdp": (shardc.hsdp(shard="dp", replicate="rep"), ("rep", "dp")),
    "one_axis": (shardc.fsdp("dp", shard_size=2), ("dp",)),
    "bf16": (shardc.hsdp(shard="dp", replicate="rep") | shardc.precision(reduce=torch.float32), ("rep", "dp")),
}


def rows(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(8, n, generator=generator, dtype=torch.float64) for n in (7, 5))
    return x.chunk(4)[dist.get_rank()], y.chunk(4)[dist.get_rank()]


def compiled(plan: str, backend: str = "eager") -> Any:
    said, axes = PLANS[plan]
    mesh = init_device_mesh("cpu", (4,) if len(axes) == 1 else (2, 2), mesh_dim_names=axes)
    return shardc.compile(model(), mesh, said, loss=F.mse_loss, backend=backend)


def adds_up_as_fsdp2(plan: str, backend: str = "eager") -> None:
    theirs, ours = model(), compiled(plan, backend)
    fully_shard(theirs, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "dp")))
    for step in range(MICRO):
        last = step == MICRO - 1
        theirs.set_requires_all_reduce(last)
        ours.set_requires_all_reduce(last)
        F.mse_loss(theirs(rows(step)[0]), rows(step)[1]).backward()
        ours(*rows(step)).backward()
        assert last or all(param.grad is None for param in ours.parameters())
    for name, param in theirs.named_parameters():
        grad = unshard(ours.get_parameter(name).grad, ours.shardc.spec.storages[name])
        tolerance = 1e-5 if plan == "bf16" else 1e-9
        torch.testing.assert_close(grad, param.grad.full_tensor(), rtol=tolerance, atol=tolerance)


def what_is_sent(plan: str) -> None:
    ours = compiled(plan)
    axis = "dp" if plan == "hsdp" else "dp:2x2"
    ours.set_requires_all_reduce(False)
    ours(*rows(0)).backward()
    (program,) = [each for each in ours.shardc.programs.values() if each.deferred]
    sent = [row for row in tally(program.backward, program.mesh) if row.kind in ("reduce_scatter", "all_reduce")]
    assert {(row.kind, row.axis) for row in sent} == {("reduce_scatter", axis)}
    assert {x.shape for x in ours.shardc.params.sync.sums.values()} == {
        torch.Size(storage.local_shape) for storage in ours.shardc.spec.storages.values()
    }
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    with pytest.raises(shardc.ShardcError, match="set_requires_all_reduce"):
        optimizer.step()
    ours.zero_grad()
    optimizer.step()
    ours.set_requires_all_reduce(True)
    assert not ours.shardc.params.sync.deferred()


def mixes(plan: str) -> None:
    """A micro-batch held back whole, one of some parameters over replicas, and a full one are the three together."""
    ours, plain = compiled(plan), compiled(plan)
    with ours.no_sync():
        ours(*rows(0)).backward()
    ours.set_requires_all_reduce(False, "2.*")
    ours(*rows(1)).backward()
    assert ours.get_parameter("0.weight").grad is not None and ours.get_parameter("2.weight").grad is None
    ours.set_requires_all_reduce(True)
    ours(*rows(2)).backward()
    for step in range(3):
        plain(*rows(step)).backward()
    for name, param in plain.named_parameters():
        theirs, mine = (unshard(p.grad, plain.shardc.spec.storages[name]) for p in (param, ours.get_parameter(name)))
        close(mine, theirs, name)


# Before each backward: (which setting, to what); then what FSDP2 reduces over.
SETTINGS: list[tuple[list[tuple[str, bool]], set[str]]] = [
    ([("sync", False), ("all_reduce", False)], set()),
    ([("all_reduce", True)], set()),
    ([("all_reduce", False)], set()),
    ([("sync", True), ("all_reduce", False)], {"reduce_scatter"}),
    ([("sync", False)], set()),
    ([("sync", True)], {"reduce_scatter", "allreduce"}),
]


def composes_as_fsdp2() -> None:
    """With ``set_requires_grad_sync``, at level 1, where this holds back what FSDP2's holds back."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "dp"))
    theirs, plan = fully_shard(model(), mesh=mesh), shardc.hsdp(shard="dp", replicate="rep", level=1)
    ours = shardc.compile(model(), mesh, plan, loss=F.mse_loss, backend="eager")
    for step, (settings, reduced) in enumerate(SETTINGS):
        for name, value in settings:
            if name == "sync":
                theirs.set_requires_gradient_sync(value)
                ours.set_requires_grad_sync(value)
            else:
                theirs.set_requires_all_reduce(value)
                ours.set_requires_all_reduce(value)
        loss = F.mse_loss(theirs(rows(step)[0]), rows(step)[1])
        with CommDebugMode() as sent:
            loss.backward()
        kinds = {str(op) for op in sent.get_comm_counts()}
        assert {kind for kind in ("reduce_scatter", "allreduce") if any(kind in op for op in kinds)} == reduced, kinds
        held = ours.shardc.params.sync.unreduced()
        names = set(ours.shardc.params.sync.levels)
        assert held.whole == (set() if reduced else names), step
        assert held.scattered == (names if reduced == {"reduce_scatter"} else set()), step
        ours(*rows(step)).backward()
    for name, param in theirs.named_parameters():
        close(unshard(ours.get_parameter(name).grad, ours.shardc.spec.storages[name]), param.grad.full_tensor(), name)


def without_replicas() -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    ours = shardc.compile(model(), mesh, shardc.fsdp("dp"), loss=F.mse_loss, backend="eager")
    ours.set_requires_all_reduce(False)
    ours(*rows(0)).backward()
    assert all(param.grad is not None for param in ours.parameters())


@pytest.mark.slow
def test_four_ranks() -> None:
    checks = [partial(adds_up_as_fsdp2, plan) for plan in PLANS] + [partial(adds_up_as_fsdp2, "hsdp", "inductor")]
    checks += [partial(check, plan) for check in (what_is_sent, mixes) for plan in ("hsdp", "one_axis")]
    run_ranks(4, *checks)
    # In processes of their own: DTensor keeps meshes of a world that ended, and finds them again by their shape.
    run_ranks(4, composes_as_fsdp2, without_replicas)
