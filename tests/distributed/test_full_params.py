"""Whole views of a sharded module, and its gradients' norm, equal one device's."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardc.errors import BackwardError, InputError, LayoutError
from tests.ranks import run_ranks
from tests.state import assert_same, batch, close, model, sharded, step


def full_state(plan: str) -> None:
    source = model()
    found, expected = sharded(source, plan).full_state_dict(), source.state_dict()
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert type(found[name]) is torch.Tensor
        close(found[name], value, name)
    assert found["head.weight"] is found["odd.weight"]
    model(seed=9).load_state_dict(found)


def whole_inside_of_a_block(plan: str) -> None:
    source = model()
    module = sharded(source, plan)
    before = dict(module.named_parameters(remove_duplicate=False))
    with module.summon_full_params():
        for name, param in module.named_parameters(remove_duplicate=False):
            assert type(param) is nn.Parameter and not isinstance(param, DTensor)
            close(param.detach(), source.get_parameter(name).detach(), name)
        assert module.head.weight is module.odd.weight
        with pytest.raises(LayoutError, match="parameter 'fused' was replaced by a Parameter .* summon_full_params"):
            module(*module.shard_inputs(*batch()))
        for one in (module, source):
            with torch.no_grad():
                one.odd.weight.add_(1)
                one.fused.mul_(2)
    after = dict(module.named_parameters(remove_duplicate=False))
    assert all(after[name] is before[name] for name in before)
    assert_same(module, source)
    with module.summon_full_params(writeback=False), torch.no_grad():
        module.fused.zero_()
    assert_same(module, source)
    with pytest.raises(LayoutError, match=r"parameter 'fused' of shape \[12, 9\] was replaced by a tensor of shape"):
        with module.summon_full_params():
            module.odd.bias = nn.Parameter(torch.zeros(9))
            module.fused = nn.Parameter(torch.zeros(3))
    assert_same(module, source)


def for_the_first_rank(plan: str) -> None:
    source = model()
    module = sharded(source, plan)
    found, first = module.full_state_dict(rank0_only=True), dist.get_rank() == 0
    assert list(found) == (list(source.state_dict()) if first else [])
    for name, value in found.items():
        assert type(value) is torch.Tensor
        close(value, source.state_dict()[name], name)
    assert not first or found["head.weight"] is found["odd.weight"]


def gradients_inside_of_a_block(plan: str) -> None:
    source = model()
    module = sharded(source, plan)
    with pytest.raises(BackwardError, match="with_grads"), module.no_sync():
        module(*module.shard_inputs(*batch())).backward()
        module.summon_full_params(with_grads=True)
    module.zero_grad()
    step(module, source, *batch())
    with module.summon_full_params(with_grads=True):
        for name, param in module.named_parameters():
            theirs = source.get_parameter(name).grad
            assert (param.grad is None) == (theirs is None), name
            if theirs is not None:
                close(param.grad, theirs, name)
        for one in (module, source):
            one.fused.grad.mul_(2)
            one.odd.bias.grad = None
            one.unused.weight.grad = torch.ones(4, 4, dtype=torch.float64)
    assert_same(module, source, grads=True)
    with module.summon_full_params(with_grads=True, writeback=False):
        module.fused.grad.zero_()
    assert_same(module, source, grads=True)
    with module.summon_full_params():
        assert all(param.grad is None for param in module.parameters())
    assert_same(module, source, grads=True)


def clips_as_one_device(plan: str) -> None:
    source = model()
    module = sharded(source, plan)
    for order, largest in ((2.0, 0.1), (1.0, 0.1), (3.0, 1e9), (float("inf"), 0.01)):
        for one in (module, source):
            one.zero_grad()
        step(module, source, *batch())
        # torch has no infinity norm of an empty tensor.
        some = [param for param in source.parameters() if param.numel()]
        theirs = nn.utils.clip_grad_norm_(some, largest, order)
        mine = module.clip_grad_norm_(largest, order)
        assert type(mine) is torch.Tensor
        close(mine, theirs, f"norm of order {order}")
        assert_same(module, source, grads=True)
    for one in (module, source):
        one.zero_grad()
    step(module, source, *batch())
    theirs = nn.utils.clip_grad_norm_(source.parameters(), 0.1)
    close(nn.utils.clip_grad_norm_(module.parameters(), 0.1).full_tensor(), theirs, "torch's own")
    assert_same(module, source, grads=True)


def clipping_refuses() -> None:
    module = sharded(model(), "fsdp")
    close(module.clip_grad_norm_(1.0), torch.tensor(0.0))
    step(module, model(), *batch())
    with torch.no_grad():
        module.scale.grad.fill_(float("nan"))
    kept = module.fused.grad.to_local().clone()
    with pytest.raises(RuntimeError, match="is nan, so they cannot be clipped"):
        module.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert torch.equal(module.fused.grad.to_local(), kept)
    with pytest.raises(InputError, match="norm_type is 0, not a number above 0"):
        module.clip_grad_norm_(1.0, 0)


@pytest.mark.slow
def test_two_ranks() -> None:
    checks = (
        full_state,
        for_the_first_rank,
        whole_inside_of_a_block,
        gradients_inside_of_a_block,
        clips_as_one_device,
    )
    run_ranks(2, *(partial(check, plan) for plan in ("fsdp", "tp") for check in checks), clipping_refuses)
