"""`shardc.shard`: the model itself becomes the compiled module, and what holds the model holds that."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardc
from shardc.errors import InputError, PlanError
from tests.ranks import run_ranks


class Tied(nn.Module):
    """A tied head, a module at two places, a buffer, and a list that holds a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.table.weight
        self.inner = nn.Linear(4, 4)
        self.again = self.inner
        self.register_buffer("scale", torch.tensor(2.0))
        self.listed = [self.inner.bias]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.again(self.inner(self.table(x))) * self.scale)


def check_trained_as_before() -> None:
    """An optimizer and a scheduler of the model, made before, train it."""
    torch.manual_seed(0)
    model = Tied().double()
    other = copy.deepcopy(model)
    parts, bias = dict(model.named_modules()), model.inner.bias
    handles = [each.register_forward_hook(lambda _, args, out: out * 3) for each in (model, other)]
    trained = []
    for each in (model, other):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1)
        trained.append((each, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)))

    assert shardc.shard(model, shardc.mesh(device="cpu")) is model
    assert dict(model.named_modules()) == parts and model.listed[0] is model.inner.bias is not bias
    assert all(isinstance(p, DTensor) for p in model.parameters()) and model.head.weight is model.table.weight

    tokens = torch.arange(8).view(4, 2)
    for step in range(4):
        if step == 2:
            assert [handle.remove() for handle in handles] == [None, None] and not model._forward_hooks
        losses = []
        for each, optimizer, scheduler in trained:
            optimizer.zero_grad()
            local = each.shardc.shard_inputs(tokens) if each is model else tokens
            loss = each(local).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
    for name, p in other.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).full_tensor(), p.data, rtol=1e-10, atol=1e-10)


def test_trained_as_before() -> None:
    run_ranks(2, check_trained_as_before)


Loss = Callable[[], Tensor]


def adds_a_group(params: list[Any], loss: Loss) -> None:
    """Of old parameters, after the first step."""
    optimizer = torch.optim.SGD(params[:1], lr=0.1)
    for at in (1, 2):
        loss().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        if at == 1:
            optimizer.add_param_group({"params": params[1:], "lr": 0.5})


def clips(params: list[Any], loss: Loss) -> float:
    optimizer = torch.optim.SGD(params, lr=0.1)
    loss().backward()  # type: ignore[no-untyped-call]
    norm = nn.utils.clip_grad_norm_(params, 0.01)
    optimizer.step()
    return float(norm)


def unscales(params: list[Any], loss: Loss) -> float:
    optimizer, scaler = torch.optim.SGD(params, lr=0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss()).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(params, 0.01)
    scaler.step(optimizer)
    return float(norm)


def penalizes(params: list[Any], loss: Loss) -> None:
    optimizer = torch.optim.SGD(params, lr=0.1)
    loss().backward()  # type: ignore[no-untyped-call]
    (0.1 * sum(p.square().sum() for p in params)).backward()
    optimizer.step()


def averages(params: list[Any], loss: Loss) -> float:
    average = [torch.zeros_like(p) for p in params]
    for mean, p in zip(average, params, strict=True):
        mean.lerp_(p.data, 0.5)
    return sum(float(mean.square().sum()) for mean in average)


def updates_by_hand(params: list[Any], loss: Loss) -> None:
    loss().backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for p in params:
            p -= 0.1 * p.grad
            p.grad = None
    params[0].data = params[0].data * 2


def freezes(params: list[Any], loss: Loss) -> None:
    params[0].requires_grad_(False)
    params[1].requires_grad = False
    loss().backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD(params, lr=0.1).step()


def hooks(params: list[Any], loss: Loss) -> float:
    params[1].register_hook(lambda grad: grad * 3)
    return sum(float(grad.square().sum()) for grad in torch.autograd.grad(loss(), params))


USES = (adds_a_group, clips, unscales, penalizes, averages, updates_by_hand, freezes, hooks)


def check_old_parameters() -> None:
    """What was taken of the model before stands for what is there now."""
    mesh, x = shardc.mesh(device="cpu"), torch.arange(16, dtype=torch.float64).view(4, 4) / 16
    for use in USES:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        other = copy.deepcopy(model)
        old = list(model.parameters())
        shardc.shard(model, mesh, backend="eager")
        ours = use(old, lambda model=model: model(model.shardc.shard_inputs(x)).square().mean())
        theirs = use(list(other.parameters()), lambda other=other: other(x).square().mean())
        assert ours == (theirs and pytest.approx(theirs, rel=1e-9)), use.__name__
        for name, p in other.named_parameters():
            now = model.get_parameter(name)
            torch.testing.assert_close(now.full_tensor(), p.data, msg=lambda m, use=use: f"{use.__name__}: {m}")
            assert now.requires_grad == p.requires_grad


def test_old_parameters() -> None:
    run_ranks(2, check_old_parameters)


def check_optimizer_with_state() -> None:
    """State of whole parameters does not fit shards."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    shardc.shard(model, shardc.mesh(device="cpu"), backend="eager")
    model(torch.ones(1, 4)).sum().backward()
    before = model.weight.full_tensor().clone()
    with pytest.raises(InputError, match=r"AdamW has state of parameter 'weight' from before shardc\.shard(.|\n)*fix"):
        optimizer.step()
    assert torch.equal(model.weight.full_tensor(), before)


def test_optimizer_with_state() -> None:
    run_ranks(2, check_optimizer_with_state)


def check_second_gradients() -> None:
    with pytest.raises(InputError, match="parameter 'weight' has a gradient"):
        model = nn.Linear(4, 2)
        model(torch.ones(1, 4)).sum().backward()
        shardc.shard(model, shardc.mesh(device="cpu"))


def test_a_model_with_gradients() -> None:
    run_ranks(1, check_second_gradients)


@pytest.mark.parametrize("plan", [shardc.fsdp("tp"), shardc.Plan(params={"bias": ("dp", None)}), shardc.ddp()])
def test_nothing_is_changed_before_an_error(plan: shardc.Plan) -> None:
    model = nn.Linear(4, 2)
    before = {name: copy.copy(value) for name, value in vars(model).items()}
    with pytest.raises(PlanError):
        shardc.shard(model, shardc.Mesh(dp=2, cp=2), plan)
    assert type(model) is nn.Linear and vars(model) == before


def test_a_function() -> None:
    function: Any = torch.nn.functional.relu
    with pytest.raises(InputError, match=r"is a function, which has nothing to shard(.|\n)*shardc\.compile"):
        shardc.shard(function, shardc.Mesh(dp=2))


def test_on_an_abstract_mesh() -> None:
    model = shardc.shard(nn.Linear(8, 4), shardc.Mesh(dp=2))
    assert "all_gather(%weight, axis=dp)" in model.shardc.lower(torch.empty(4, 8)).text()  # type: ignore[union-attr]
