"""Microbatches on gloo ranks, with Inductor: training, clipping, accumulation by hand, outputs used outside."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import shardc
from shardc.errors import BackwardError, LayoutError
from tests.microbatches.programs import CASES, Case
from tests.microbatches.test_outputs import Alike, Averages, Features, Several
from tests.ranks import run_ranks


def trained(name: str, plan: shardc.Plan, backend: str = "inductor", within: float = 1e-9) -> None:
    """Three steps of AdamW with clipping, beside one device; then an evaluation."""
    torch.set_default_dtype(torch.float64)
    case: Case = CASES[name]()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    module = shardc.compile(case.model, mesh, plan, loss=case.loss, backend=backend)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (module, case.model)]
    for _ in range(3):
        loss = module(*module.shard_inputs(*case.args))
        loss.backward()
        expected, grads = case.reference()
        torch.testing.assert_close(loss.detach(), expected, rtol=within, atol=0)
        largest = max(float(grad.norm()) for grad in grads.values())
        for key, grad in grads.items():
            error = float((module.get_parameter(key).grad.full_tensor() - grad).norm())
            assert error < within * max(float(grad.norm()), 1e-6 * largest), f"{key}: {error}"
            case.model.get_parameter(key).grad = grad
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (module, case.model)]
        torch.testing.assert_close(norms[0].full_tensor(), norms[1], rtol=within, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        loss = module(*module.shard_inputs(*case.args))
        torch.testing.assert_close(loss, case.reference_loss(), rtol=1e-7, atol=0)


LEVEL_3, LEVEL_2 = shardc.fsdp("dp"), shardc.fsdp("dp", level=2)


def test_two_ranks() -> None:
    run_ranks(
        2,
        partial(trained, "masked", LEVEL_3 | shardc.microbatches(4), "eager"),
        partial(trained, "weight decay", LEVEL_3 | shardc.microbatches(8)),
        partial(trained, "weight decay", LEVEL_2 | shardc.microbatches(3)),
        accumulated,
        used_outside,
        changed_between,
        uneven_rows,
        inputs_and_outputs,
        partial(scaled, "eager"),
        partial(scaled, "inductor"),
        buffers_of_the_call,
        buffer_changed_between,
        shared_outputs,
    )


@pytest.mark.slow
def test_two_ranks_with_inductor() -> None:
    # Inductor computes rotary tables in float32.
    run_ranks(
        2,
        partial(trained, "masked", LEVEL_3 | shardc.microbatches(4), within=1e-5),
        partial(trained, "factor of all", LEVEL_2 | shardc.microbatches(2), within=1e-5),
        partial(trained, "images", LEVEL_3 | shardc.microbatches(4)),
    )


@pytest.mark.slow
def test_four_ranks() -> None:
    run_ranks(
        4,
        partial(trained, "masked", LEVEL_3 | shardc.microbatches(2), within=1e-5),
        partial(trained, "masked", LEVEL_2 | shardc.microbatches(3), "eager"),
        partial(trained, "token weights", LEVEL_2 | shardc.microbatches(4), "eager"),
    )


def setup(plan: shardc.Plan) -> tuple[torch.nn.Module, torch.nn.Module, list[torch.Tensor]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = Several().double()
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    batch = [torch.randn(16, 8, dtype=torch.float64), torch.randn(16, 4, dtype=torch.float64)]
    for x in batch:
        dist.broadcast(x, 0)
    return model, shardc.compile(model, mesh, plan), batch


def gradients_agree(module: torch.nn.Module, model: torch.nn.Module) -> None:
    for name, p in model.named_parameters():
        torch.testing.assert_close(module.get_parameter(name).grad.full_tensor(), p.grad, rtol=1e-9, atol=1e-14)


def accumulated() -> None:
    """Microbatches inside of batches that are accumulated by hand, with gradients reduced once."""
    model, module, batch = setup(shardc.fsdp("dp", level=1) | shardc.microbatches(2))
    local = module.shard_inputs(*batch)
    with module.no_sync():
        (module(*local)["loss"] / 2).backward()
    assert all(p.grad is None for p in module.parameters())
    (module(*local)["loss"] / 2).backward()
    model(*batch)["loss"].backward()
    gradients_agree(module, model)
    assert int(module.calls) == 2


def used_outside() -> None:
    model, module, batch = setup(shardc.fsdp("dp") | shardc.microbatches(2))
    local = module.shard_inputs(*batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = module(*local)
        (results["loss"] + results["out"].sum()).backward()
    expected = model(*batch)
    (expected["loss"] + expected["out"].sum() / 2).backward()
    gradients_agree(module, model)
    module.zero_grad()
    loss = module(*local)["loss"]
    loss.backward(retain_graph=True)
    loss.backward()
    model.zero_grad()
    (2 * model(*batch)["loss"]).backward()
    gradients_agree(module, model)
    with pytest.raises(BackwardError, match="already run"):
        loss.backward()


def changed_between() -> None:
    """A backward that runs the microbatches again needs the parameters of the forward; that of the loss does not."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = Features().double()
    module = shardc.compile(model, mesh, shardc.fsdp("dp") | shardc.microbatches(2), init_sync=True)
    x = torch.randn(8, 8, dtype=torch.float64)
    out = module(x)
    with torch.no_grad():
        module.first.weight.mul_(2)
    with pytest.raises(BackwardError, match=r"parameter 'first.weight' was modified in place"):
        out.sum().backward()
    out = module(x)
    module.first.weight.to_local().detach().mul_(2)
    with pytest.raises(BackwardError, match=r"parameter 'first.weight' was modified in place"):
        out.sum().backward()
    assert module.first.weight.grad is None


def agrees(module: torch.nn.Module, model: torch.nn.Module, loss: torch.Tensor, expected: torch.Tensor) -> None:
    """Runs both backwards and compares losses and gradients, which are cleared then."""
    loss.backward()
    expected.backward()
    whole = loss.full_tensor() if isinstance(loss, DTensor) else loss
    torch.testing.assert_close(whole.detach(), expected.detach(), rtol=1e-12, atol=0)
    gradients_agree(module, model)
    module.zero_grad()
    model.zero_grad()


def both(plan: shardc.Plan, **how: object) -> tuple[torch.nn.Module, torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = Features().double()
    module = shardc.compile(model, mesh, plan | shardc.microbatches(3), backend="eager", **how)
    return model, module, torch.randn(8, 8, dtype=torch.float64)


def uneven_rows() -> None:
    """Ranks pass 3 and 5 rows, which three microbatches do not divide."""
    how = {"loss": torch.nn.functional.mse_loss, "options": shardc.Options(uneven=True)}
    model, module, x = both(shardc.fsdp("dp"), **how)
    target = torch.randn(8, 4, dtype=torch.float64)
    for cut in (3, 4):
        rows = slice(0, cut) if dist.get_rank() == 0 else slice(cut, 8)
        agrees(module, model, module(x[rows], target[rows]), torch.nn.functional.mse_loss(model(x), target))


def inputs_and_outputs() -> None:
    """DTensors as inputs and outputs, and an input that requires a gradient: parts are padded, and joined again."""
    model, module, x = both(shardc.fsdp("dp") | shardc.Plan(dtensor_outputs=True))
    mine = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    for given in (x[mine], distribute_tensor(x, module.shardc.spec.device_mesh, [Replicate()])):
        out = module(given)
        agrees(module, model, (out * out).sum(), model(x).square().sum())
    wanted, local = x.clone().requires_grad_(), x[mine].clone().requires_grad_()
    out = module(local)
    agrees(module, model, (out * out).sum(), model(wanted).square().sum())
    torch.testing.assert_close(local.grad, wanted.grad[mine], rtol=1e-12, atol=0)


def of_ranks(model: torch.nn.Module, plan: shardc.Plan, backend: str) -> tuple[torch.nn.Module, torch.Tensor, slice]:
    """The compiled module, a batch, and this rank's rows of it."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    module = shardc.compile(model, mesh, plan | shardc.microbatches(4), backend=backend)
    rows = slice(8 * dist.get_rank(), 8 * dist.get_rank() + 8)
    return module, torch.randn(16, 8, dtype=torch.float64), rows


def scaled(backend: str) -> None:
    """A factor on the loss, with gradients that share memory: each is scaled once, and none of the user's tensors."""
    model = Alike().double()
    module, x, rows = of_ranks(model, shardc.ddp("dp"), backend)
    mine = x[rows].clone()
    agrees(module, model, 3 * module(mine), 3 * model(x))
    assert torch.equal(mine, x[rows])


def buffers_of_the_call() -> None:
    """A backward that runs the microbatches again reads buffers as they were before the call changed them."""
    model = Averages().double()
    module, x, rows = of_ranks(model, shardc.fsdp("dp") | shardc.Plan(reduce="sum"), "eager")
    for _ in range(2):
        module(x[rows]).square().sum().backward()
        model(x).square().sum().backward()
        gradients_agree(module, model)
        module.zero_grad()
        model.zero_grad()
    torch.testing.assert_close(module.scale, model.scale)


class Scaled(torch.nn.Module):
    """Reads a buffer that only its user changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


def buffer_changed_between() -> None:
    module, x, rows = of_ranks(Scaled().double(), shardc.fsdp("dp"), "eager")
    out = module(x[rows])
    module.scale.mul_(2.0)
    with pytest.raises(BackwardError, match=r"buffer 'scale' was modified in place"):
        out.sum().backward()


class Views(torch.nn.Module):
    """Returns a loss, a view of its input, and two results in one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = self.linear(x)
        return out.square().mean(), x[:, :2], out, out.view(-1)


def shared_outputs() -> None:
    """A write that reaches another tensor on one device raises, as it would not reach it here."""
    model = Views().double()
    module, x, rows = of_ranks(model, shardc.fsdp("dp"), "eager")
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            expected, results = model(x), module(x[rows])
            torch.testing.assert_close(results[1] + 0, expected[1][rows])
            torch.testing.assert_close((results[2] + 0).detach(), expected[2][rows].detach())
            for at in (1, 3):
                with torch.no_grad(), pytest.raises(LayoutError, match=f"output {at} of the module cannot be changed"):
                    results[at].mul_(2)
    results = module(x[rows])
    (results[0] + 0).backward()
    model(x)[0].backward()
    gradients_agree(module, model)
