"""`shardc.value_and_grad` on real ranks, beside ``torch.func`` on one device."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call, grad_and_value

import shardc
from shardc.errors import BackwardError, InputError
from tests.ranks import run_ranks
from tests.state import PLANS, batch, close, model, sharded


def on_one_device(source: nn.Module, fn: Any, *args: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The value of ``fn(call, *args)``, where ``call`` is the model, and its gradients."""
    params = {name: param.detach() for name, param in source.named_parameters() if param.requires_grad}

    def of(values: Any) -> Tensor:
        return fn(lambda x: functional_call(source, values, (x,)), *args)

    grads, value = grad_and_value(of)(params)
    return value, grads


def same(module: Any, source: nn.Module, ours: Any, theirs: Any) -> None:
    """The same names in order, the same values, laid out like the parameters; ``.grad`` is as it was."""
    assert list(ours) == list(theirs) == [name for name, param in source.named_parameters() if param.requires_grad]
    for name, grad in ours.items():
        assert isinstance(grad, DTensor) and grad.placements == module.get_parameter(name).placements
        assert not grad.requires_grad
        close(grad.full_tensor(), theirs[name], name)
    assert all(param.grad is None for param in module.parameters())


def loss_in_the_program(plan: str, backend: str) -> None:
    source = model()
    source.back.weight.requires_grad_(False)
    module = sharded(source, plan)
    if backend == "inductor":
        module = shardc.compile(source, module.shardc.spec.device_mesh, PLANS[plan][1], loss=F.mse_loss)
    step = shardc.value_and_grad(module)
    for seed in range(2):
        x, y = batch(seed)
        value, grads = step(*module.shard_inputs(x, y))
        expected, theirs = on_one_device(source, lambda call, x, y: F.mse_loss(call(x), y), x, y)
        assert not value.requires_grad
        close(value, expected)
        same(module, source, grads, theirs)


def function_outside(plan: str) -> None:
    """A function that calls the module twice, on this rank's rows; the gradients are of the mean over the ranks."""
    source = model()
    module = sharded(source, plan, loss=None)

    def fn(call: Any, x: Tensor, y: Tensor) -> Tensor:
        return 3 * F.mse_loss(call(x), y) + call(x.cos()).square().mean()

    def with_outputs(call: Any, x: Tensor, y: Tensor) -> Any:
        return fn(call, x, y), {"seen": x, "out": call(x)}

    x, y = batch()
    mine = module.shard_inputs(x), y.chunk(2)[dist.get_rank()] if PLANS[plan][0] == "dp" else y
    expected, theirs = on_one_device(source, fn, x, y)
    value, grads = shardc.value_and_grad(module, fn)(*mine)
    dist.all_reduce(value)
    close(value / 2, expected)
    same(module, source, grads, theirs)
    (_, aux), grads = shardc.value_and_grad(module, with_outputs, has_aux=True)(*mine)
    assert aux["seen"] is not None and not aux["out"].requires_grad
    same(module, source, grads, theirs)


def of_dtensors() -> None:
    """The value of DTensors is that of all rows."""
    source = model()
    module = sharded(source, "fsdp", loss=None, more=shardc.Plan(dtensor_outputs=True))
    x, _ = batch()
    value, grads = shardc.value_and_grad(module, lambda call, x: call(x).square().mean())(module.shard_inputs(x))
    expected, theirs = on_one_device(source, lambda call, x: call(x).square().mean(), x)
    close(value.full_tensor(), expected)
    same(module, source, grads, theirs)


def beside_training() -> None:
    """``.grad`` is left as it was, also where there is one."""
    source = model()
    module = sharded(source, "fsdp")
    rows = module.shard_inputs(*batch())
    module(*rows).backward()
    before = {
        name: param.grad.to_local().clone() for name, param in module.named_parameters() if param.grad is not None
    }
    shardc.value_and_grad(module)(*rows)
    for name, grad in before.items():
        assert torch.equal(module.get_parameter(name).grad.to_local(), grad)


def refuses() -> None:
    source = model()
    module = sharded(source, "fsdp")
    rows = module.shard_inputs(*batch())
    step = shardc.value_and_grad(module)
    with module.no_sync():
        with pytest.raises(BackwardError, match="are not to be reduced"):
            step(*rows)
        module(*rows).backward()
    with pytest.raises(BackwardError, match=r"value_and_grad\(\) while the gradient of .* is held back"):
        step(*rows)
    module.zero_grad()
    step(*rows)
    with pytest.raises(InputError, match="needs target, and a call in training mode passes none"):
        step(rows[0])
    module.eval()
    with pytest.raises(InputError, match=r"the module returns a tensor of shape \[2, 9\]"):
        step(rows[0])
    module.train()
    with pytest.raises(InputError, match="fn returns a float"):
        shardc.value_and_grad(module, lambda call, *rows: 1.0)(*rows)
    with pytest.raises(InputError, match=r"fn returns \(value, aux\)"):
        shardc.value_and_grad(module, lambda call, *rows: call(*rows), has_aux=True)(*rows)
    for wrong in (lambda: shardc.value_and_grad(source), lambda: shardc.value_and_grad(module, "loss"),  # type: ignore
                  lambda: shardc.value_and_grad(module, has_aux=1)):  # type: ignore  # fmt: skip
        with pytest.raises(InputError):
            wrong()


def test_two_ranks() -> None:
    run_ranks(
        2,
        *(partial(loss_in_the_program, plan, "eager") for plan in PLANS),
        *(partial(function_outside, plan) for plan in PLANS),
        of_dtensors,
        beside_training,
        refuses,
    )


@pytest.mark.slow
def test_two_ranks_through_inductor() -> None:
    run_ranks(2, partial(loss_in_the_program, "fsdp", "inductor"))
