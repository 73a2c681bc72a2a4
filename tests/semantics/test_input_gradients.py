"""Gradients of inputs: in the unit in which gradients of outputs come in, so that modules can stand in a row."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import shardc
from shardc.errors import BackwardError
from tests.ranks import run_ranks
from tests.state import assert_same, close

DP = {"dp": 2}
SUM = shardc.Plan(reduce="sum")


def pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh()).double(), nn.Linear(8, 4).double()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(4, n, dtype=torch.float64, generator=generator) for n in (6, 4))  # type: ignore[return-value]


def compiled(source: nn.Module, plan: shardc.Plan, mesh: dict[str, int], **options: Any) -> Any:
    made = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    return shardc.compile(source, made, plan, backend="eager", **options)


def loss_of(y: Tensor, target: Tensor, reduce: str) -> Tensor:
    return F.mse_loss(y, target, reduction=reduce)


def the_ranks_own(plan: shardc.Plan, reduce: str, mesh: dict[str, int]) -> None:
    """Without a loss: as under DDP, of this rank's own loss, whatever the parameters' gradients are scaled by."""
    _, source = pair()
    module = compiled(source, plan, mesh)
    x = torch.randn(4, 8, dtype=torch.float64)
    mine = module.shard_inputs(x).requires_grad_()
    target = module.shard_inputs(batch()[1].repeat(1, 2))[:, :4]
    loss_of(module(mine), target, reduce).backward()
    alone = mine.detach().clone().requires_grad_()
    loss_of(source(alone), target, reduce).backward()
    close(mine.grad, alone.grad)


def in_a_row(first: shardc.Plan, second: shardc.Plan, reduce: str, mesh: dict[str, int]) -> None:
    """Parameters of both have one device's gradients."""
    a, b = pair()
    ours = compiled(a, first, mesh), compiled(b, second, mesh)
    x, y = batch()
    loss_of(ours[1](ours[0](ours[0].shard_inputs(x))), ours[0].shard_inputs(y), reduce).backward()
    loss_of(b(a(x)), y, reduce).backward()
    assert_same(ours[0], a, grads=True)
    assert_same(ours[1], b, grads=True)


def whole_in_between(last: str) -> None:
    """What stands between is whole on every rank, and so is the loss, or each rank has its own of a split output."""
    a, b = pair()
    front = compiled(a, shardc.ddp("dp") | shardc.Plan(outputs="..."), DP)
    back = compiled(b, shardc.ddp("dp") | shardc.Plan(inputs="...", outputs=last), DP)
    x, y = batch()
    target = y if last == "..." else front.shard_inputs(y)
    loss_of(back(front(front.shard_inputs(x))), target, "mean").backward()
    loss_of(b(a(x)), y, "mean").backward()
    assert_same(front, a, grads=True)
    assert_same(back, b, grads=True)


def behind_a_local_module() -> None:
    """What DDP averages of a module in front is right."""
    a, b = pair()
    front = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh()).double())
    front.module.load_state_dict(a.state_dict())
    back = compiled(b, shardc.fsdp("dp"), {"dp": 2})
    x, y = (back.shard_inputs(t) for t in batch())
    loss_of(back(front(x)), y, "mean").backward()
    loss_of(b(a(batch()[0])), batch()[1], "mean").backward()
    assert_same(back, b, grads=True)
    for ours, theirs in zip(front.parameters(), a.parameters(), strict=True):
        close(ours.grad, theirs.grad)


def of_the_global_loss(scale: float) -> None:
    """With a loss in the graph it is one device's, whatever parameters' gradients are scaled by."""
    _, source = pair()
    plan = shardc.fsdp("dp") | shardc.Plan(grad_scale=scale)
    module = compiled(source, plan, {"dp": 2}, loss=F.mse_loss)
    x, y = torch.randn(4, 8, dtype=torch.float64), batch()[1]
    mine, target = module.shard_inputs(x, y)
    mine.requires_grad_()
    module(mine, target).backward()
    x.requires_grad_()
    F.mse_loss(source(x), y).backward()
    close(mine.grad, module.shard_inputs(x.grad))
    close(module.weight.grad.full_tensor(), source.weight.grad * scale)


def dtensors(plan: shardc.Plan, loss: Any) -> None:
    """The gradient of a DTensor is a DTensor: one device's, whatever the outputs are."""
    _, source = pair()
    module = compiled(source, plan, {"dp": 2}, loss=loss)
    x, y = torch.randn(4, 8, dtype=torch.float64), batch()[1]
    module.lower(x, *([y] if loss else []))
    mine = distribute_tensor(x, module.shardc.spec.device_mesh, [Shard(0)]).requires_grad_()
    target = distribute_tensor(y, module.shardc.spec.device_mesh, [Shard(0)])
    if loss:
        module(mine, target.to_local()).backward()
    elif plan.setting("dtensor_outputs"):
        ((module(mine) - target) ** 2).sum().div(y.numel()).backward()
    else:
        F.mse_loss(module(mine), target.to_local()).backward()
    x.requires_grad_()
    F.mse_loss(source(x), y).backward()
    assert isinstance(mine.grad, DTensor)
    close(mine.grad.full_tensor(), x.grad)
    assert_same(module, source, grads=True)


def a_global_loss_behind() -> None:
    """A module in front that averages over ranks' own losses is refused where the loss behind it is a global one."""
    a, b = pair()
    back = compiled(b, shardc.fsdp("dp"), {"dp": 2}, loss=F.mse_loss)
    x, y = (back.shard_inputs(t) for t in batch())
    front = compiled(a, shardc.ddp("dp"), {"dp": 2})
    with pytest.raises(BackwardError, match='reduce="sum"'):
        back(front(x) * 2, y).backward()
    summed = compiled(a, shardc.ddp("dp") | SUM, {"dp": 2})
    back.zero_grad()
    back(summed(x), y).backward()
    F.mse_loss(b(a(batch()[0])), batch()[1]).backward()
    assert_same(summed, a, grads=True)
    assert_same(back, b, grads=True)


class Sum(nn.Module):
    """A sum: the gradients of inputs and of the parameter have equal values."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x + y + self.shift) * 2


def gradients_share_no_memory(backend: str) -> None:
    module = shardc.compile(
        Sum(), init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)), shardc.ddp("dp"), backend=backend
    )
    x, y = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    tangent = torch.ones(4, 4)
    module(x, y).backward(tangent)
    for changed in (x.grad, y.grad, module.shift.grad.to_local(), tangent):
        others = [x.grad, y.grad, module.shift.grad.to_local(), tangent]
        before = [other.clone() for other in others]
        changed.add_(1)
        assert sum(not torch.equal(*pair) for pair in zip(others, before, strict=True)) == 1


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_one_rank(backend: str) -> None:
    run_ranks(1, partial(gradients_share_no_memory, backend))


@pytest.mark.slow
def test_two_ranks() -> None:
    run_ranks(
        2,
        partial(the_ranks_own, shardc.fsdp("dp"), "mean", DP),
        partial(the_ranks_own, shardc.ddp("dp") | SUM, "sum", DP),
        partial(the_ranks_own, shardc.ddp("dp") | shardc.Plan(grad_scale=0.5), "mean", DP),
        partial(in_a_row, shardc.fsdp("dp"), shardc.ddp("dp"), "mean", DP),
        partial(in_a_row, shardc.fsdp("dp") | SUM, shardc.ddp("dp") | SUM, "sum", DP),
        partial(whole_in_between, "..."),
        partial(whole_in_between, "@dp, _"),
        behind_a_local_module,
        partial(of_the_global_loss, 1.0),
        partial(of_the_global_loss, 0.25),
        partial(dtensors, shardc.fsdp("dp"), None),
        partial(dtensors, shardc.fsdp("dp"), F.mse_loss),
        partial(dtensors, shardc.fsdp("dp") | shardc.Plan(dtensor_outputs=True), None),
        a_global_loss_behind,
    )
