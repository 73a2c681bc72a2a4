"""`shardc.shard`: the model itself becomes the compiled module, and what holds the model holds that."""

from __future__ import annotations

import copy
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
