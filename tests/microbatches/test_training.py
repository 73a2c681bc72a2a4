"""Training with microbatches as users write it: hooks, scalers, schedulers, frozen and tied parameters, checkpoints."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc.errors import InputError
from tests.experts import models
from tests.integrations import test_trainer as trainer
from tests.ranks import device_mesh, run_ranks

FSDP = shardc.fsdp("dp")
PLAN = FSDP | shardc.microbatches(4)


class Tied(nn.Module):
    """Logits by the embedding's own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.middle, self.head = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(x if x.is_floating_point() else self.tokens(x))))


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100)


def tied() -> tuple[Tied, list[Tensor]]:
    """The model and a batch of 16 rows, of which the first half has few targets."""
    torch.manual_seed(0)
    x, target = torch.randint(12, (16, 5)), torch.randint(12, (16, 5))
    target[:8, 1:] = -100
    return Tied().double(), [x, target]


def compiled(
    plan: shardc.Plan = PLAN, freeze: str | tuple[str, ...] = (), **options: Any
) -> tuple[Any, nn.Module, list[Tensor]]:
    """The compiled module on two ranks, the same model on one device, and the batch."""
    model, batch = tied()
    for name, p in model.named_parameters():
        p.requires_grad_(not freeze or not name.startswith(freeze))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    return shardc.compile(model, mesh, plan, loss=cross_entropy, **options), model, batch


def one_device(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def same_gradients(module: nn.Module, model: nn.Module, factor: float = 1.0) -> None:
    for name, p in model.named_parameters():
        grad = module.get_parameter(name).grad
        if p.grad is None:
            assert grad is None, name
        else:
            torch.testing.assert_close(grad.full_tensor(), factor * p.grad, rtol=1e-9, atol=1e-13)


# --- on simulated ranks


def simulated(model: nn.Module, plan: shardc.Plan = PLAN, loss: Callable[..., Tensor] | None = cross_entropy) -> Any:
    return shardc.Simulation(shardc.compile(model, shardc.Mesh(dp=2), plan, loss=loss, backend="eager"))


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_fewer_rows_than_ranks_times_microbatches(rows: int) -> None:
    model, (x, target) = tied()
    sim = simulated(model)
    loss = sim(x[-rows:], target[-rows:])
    sim.backward()
    expected = one_device(model, [x[-rows:], target[-rows:]])
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    for name, p in model.named_parameters():
        torch.testing.assert_close(sim.grad(name), p.grad, rtol=1e-9, atol=1e-13)


class AcrossRows(nn.Module):
    """Rows that read others: gradients too are those of other microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        y = self.linear(x)
        return ((y.cumsum(0) - target) ** 2).mean() + (y.flip(0) * target).mean() + y.std()


@pytest.mark.parametrize("rows", [16, 13])
def test_rows_that_read_others(rows: int) -> None:
    torch.manual_seed(0)
    model = AcrossRows().double()
    batch = torch.randn(2, rows, 8, dtype=torch.float64)
    sim = simulated(model, loss=None)
    loss = sim(*batch)
    sim.backward()
    expected = model(*batch)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    for name, p in model.named_parameters():
        torch.testing.assert_close(sim.grad(name), p.grad, rtol=1e-9, atol=1e-13)


class Narrow(nn.Module):
    """A loss in the dtype of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) ** 2).mean()


def test_a_narrow_loss_is_added_up_in_float32() -> None:
    """In bfloat16 the 256 equal terms of this loss would stop to add up: 8 bits hold a sum of 256, and no more."""
    torch.manual_seed(0)
    model, x = Narrow(), torch.ones(512, 4)
    for count in (1, 256):
        plan = FSDP | shardc.microbatches(count) | shardc.precision(param=torch.bfloat16, reduce=torch.float32)
        loss = shardc.Simulation(shardc.compile(model, shardc.Mesh(dp=2), plan, backend="eager"))(x)
        assert loss.dtype == torch.bfloat16
        torch.testing.assert_close(loss.float(), model(x).detach(), rtol=2e-2, atol=0)


def test_marked_sizes() -> None:
    model = Narrow().double()
    sim = shardc.Simulation(shardc.compile(model, shardc.Mesh(dp=2), PLAN, backend="eager"))
    for rows in (16, 12, 7):
        x = torch.randn(rows, 4, dtype=torch.float64)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(sim(x), model(x).detach(), rtol=1e-12, atol=0)


def test_a_search_predicts_microbatches() -> None:
    model, batch = tied()
    arguments: dict[str, Any] = {"loss": cross_entropy, "hardware": "h100"}
    found = shardc.find_plan(model, shardc.Mesh(dp=2), *batch, plan=shardc.microbatches(4), **arguments)
    assert "microbatches(4)" in str(found.plan)
    module = shardc.compile(model, shardc.Mesh(dp=2), found.plan, loss=cross_entropy, backend="eager")
    assert module.lower(*batch).schedule("h100").seconds == pytest.approx(found.schedule.seconds)


# --- on two ranks


def one_row() -> None:
    """A batch that is smaller than the number of ranks: nothing is left for the microbatches but the first."""
    for _ in range(2):
        module, model, batch = compiled()
        few = [x[-1:] for x in batch]
        loss, expected = module(*module.shard_inputs(*few)), one_device(model, few)
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-9, atol=0)
        loss.backward()
        expected.backward()
        same_gradients(module, model)
        with torch.no_grad():
            torch.testing.assert_close(module(*module.shard_inputs(*few)), expected.detach(), rtol=1e-9, atol=0)


def frozen(name: str | tuple[str, ...]) -> None:
    module, model, batch = compiled(freeze=name)
    loss = module(*module.shard_inputs(*batch))
    expected = one_device(model, batch)
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-12, atol=0)
    if expected.requires_grad:
        loss.backward()
        expected.backward()
        same_gradients(module, model)
    else:
        assert not loss.requires_grad


def input_gradient() -> None:
    module, model, batch = compiled(backend="eager")
    x = torch.randn(16, 5, 8, dtype=torch.float64)
    dist.broadcast(x, 0)
    local = [part.clone() for part in module.shard_inputs(x, batch[1])]
    local[0].requires_grad_()
    module(*local).backward()
    whole = x.requires_grad_()
    one_device(model, [whole, batch[1]]).backward()
    assert whole.grad is not None
    mine = whole.grad.chunk(2)[dist.get_rank()]
    torch.testing.assert_close(local[0].grad, mine, rtol=1e-9, atol=1e-13)


def scaled_clipped_scheduled() -> None:
    """A factor on the loss, hooks on parameters, clipping by torch, a scheduler, `autograd.grad`, `retain_graph`."""
    module, model, batch = compiled()
    local, called = module.shard_inputs(*batch), list[str]()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (module, model)]
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.5**step) for o in optimizers]
    hooked = module.get_parameter("middle.weight")
    hooked.register_hook(lambda grad: called.append("gradient"))
    hooked.register_post_accumulate_grad_hook(lambda p: called.append("accumulated"))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=True)
    for _ in range(3):
        loss, expected = module(*local), one_device(model, batch)
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-9, atol=0)
        scaler.scale(loss).backward()
        (1024 * expected).backward()
        same_gradients(module, model)
        for m in (module, model):
            for p in m.parameters():
                p.grad.div_(1024)
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (module, model)]
        torch.testing.assert_close(norms[0].full_tensor(), norms[1], rtol=1e-9, atol=0)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert called == ["gradient", "accumulated"] * 3
    weights = [m.get_parameter("middle.weight") for m in (module, model)]
    loss, expected = module(*local), one_device(model, batch)
    (first,) = torch.autograd.grad(loss, weights[0], retain_graph=True)
    (second,) = torch.autograd.grad(loss, weights[0])
    (right,) = torch.autograd.grad(expected, weights[1])
    for grad in (first, second):
        torch.testing.assert_close(grad.full_tensor(), right, rtol=1e-9, atol=1e-13)


def steps_in_backward() -> None:
    """Hooks that step an optimizer of each parameter as soon as its gradient is there."""
    module, model, batch = compiled(backend="eager")

    def stepped(parameter: nn.Parameter) -> None:
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        def step(_: Tensor) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)

    for parameter in module.parameters():
        stepped(parameter)
    reference = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss, expected = module(*module.shard_inputs(*batch)), one_device(model, batch)
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-9, atol=0)
        loss.backward()
        expected.backward()
        reference.step()
        reference.zero_grad()


def between_plain_layers() -> None:
    """A layer of each rank in front of the module, and the loss outside of it."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    pairs = []
    for _ in range(2):
        torch.manual_seed(0)
        pairs.append([nn.Linear(8, 8).double(), nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double()])
    (mine, inner), (front, model) = pairs
    module = shardc.compile(inner, mesh, PLAN, backend="eager")
    x, target = torch.randn(2, 16, 8, dtype=torch.float64)
    local = [whole.chunk(2)[dist.get_rank()] for whole in (x, target)]
    F.mse_loss(module(mine(local[0])), local[1]).backward()
    F.mse_loss(model(front(x)), target).backward()
    same_gradients(module, model)
    assert mine.weight.grad is not None
    dist.all_reduce(mine.weight.grad)
    torch.testing.assert_close(mine.weight.grad / 2, front.weight.grad, rtol=1e-9, atol=1e-13)


def scaler_steps() -> None:
    """`GradScaler.unscale_` and `step`, which look for infinities in DTensors."""
    module, model, batch = compiled()
    optimizer, reference = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, model))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(module(*module.shard_inputs(*batch))).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    one_device(model, batch).backward()
    reference.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(module.get_parameter(name).full_tensor(), p, rtol=1e-9, atol=1e-13)


def accumulated() -> None:
    """Batches of other sizes, accumulated by hand, with two calls before one backward."""
    module, model, batch = compiled(FSDP | shardc.microbatches(2))
    parts = [[x[:10] for x in batch], [x[10:] for x in batch]]
    losses = [module(*module.shard_inputs(*part)) for part in parts]
    (losses[0] / 3 + 2 * losses[1]).backward()
    expected = [one_device(model, part) for part in parts]
    (expected[0] / 3 + 2 * expected[1]).backward()
    same_gradients(module, model)


def evaluated() -> None:
    """Evaluation between forward and backward, with other sizes; a fresh loss in the end."""
    module, model, batch = compiled()
    loss = module(*module.shard_inputs(*batch))
    module.eval()
    for rows in (16, 6, 5):
        few = [x[-rows:] for x in batch]
        with torch.no_grad():
            torch.testing.assert_close(module(*module.shard_inputs(*few)), one_device(model, few), rtol=1e-9, atol=0)
        with torch.inference_mode():
            torch.testing.assert_close(module(*module.shard_inputs(*few)), one_device(model, few), rtol=1e-9, atol=0)
    module.train()
    loss.backward()
    one_device(model, batch).backward()
    same_gradients(module, model)


def values_and_gradients() -> None:
    module, model, batch = compiled()
    value, grads = shardc.value_and_grad(module)(*module.shard_inputs(*batch))
    expected = one_device(model, batch)
    expected.backward()
    torch.testing.assert_close(value, expected.detach(), rtol=1e-9, atol=0)
    for name, grad in grads.items():
        torch.testing.assert_close(grad.full_tensor(), model.get_parameter(name).grad, rtol=1e-9, atol=1e-13)
    assert all(p.grad is None for p in module.parameters())


def checkpoints() -> None:
    """State of a run without microbatches goes on in one with them, and back."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    plans = [FSDP, PLAN, shardc.ddp("dp") | shardc.microbatches(2)]
    model, batch = tied()
    reference = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for at, plan in enumerate(plans):
        module, _, _ = compiled(plan, backend="eager")
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        if at:
            states = dict(zip(("model", "optimizer"), get_state_dict(module, optimizer), strict=True))
            dcp.load(states, checkpoint_id=Path(folder[0]) / str(at - 1))
            set_state_dict(module, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
        loss, expected = module(*module.shard_inputs(*batch)), one_device(model, batch)
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-9, atol=0)
        for x, o in ((loss, optimizer), (expected, reference)):
            x.backward()
            o.step()
            o.zero_grad()
        states = dict(zip(("model", "optimizer"), get_state_dict(module, optimizer), strict=True))
        dcp.save(states, checkpoint_id=Path(folder[0]) / str(at))


def steps() -> None:
    """`train_step`: update, clipping with its norm, and scheduler in one call."""
    module, model, batch = compiled()
    optimizers = [shardc.optim.wrap(torch.optim.AdamW, module, lr=0.1), torch.optim.AdamW(model.parameters(), lr=0.1)]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in optimizers]
    step = shardc.train_step(module, optimizers[0], max_norm=0.1, scheduler=schedulers[0])
    assert step.norm is None
    for at in range(3):
        loss, expected = step(*module.shard_inputs(*batch)), one_device(model, batch)
        expected.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizers[1].step()
        optimizers[1].zero_grad()
        schedulers[1].step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-9, atol=0)
        torch.testing.assert_close(step.norm, norm, rtol=1e-9, atol=0)
        assert schedulers[0].get_last_lr() == [0.1 * 0.5 ** (at + 1)]
    before = step.norm
    with module.no_sync():
        step(*module.shard_inputs(*batch))
    assert step.norm is before and schedulers[0].last_epoch == 3
    measured = shardc.train_step(module, optimizers[0], max_norm=math.inf)
    measured(*module.shard_inputs(*batch))
    assert float(measured.norm) > 0
    with pytest.raises(InputError, match="the scheduler is of another optimizer"):
        shardc.train_step(module, optimizers[0], scheduler=schedulers[1])
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizers[0])
    with pytest.raises(InputError, match="steps on a metric"):
        shardc.train_step(module, optimizers[0], scheduler=plateau)


def experts(mesh: shardc.Mesh, plan: shardc.Plan) -> None:
    """Gradients, and `expert_tokens`: the counts of all microbatches of the last step."""
    model = models.build("own")
    module = shardc.compile(models.build("own"), device_mesh(mesh), plan | shardc.microbatches(2), backend="eager")
    for at in range(2):
        given = models.batch(8)
        given["input_ids"] = given["input_ids"].roll(at, 1)
        loss, expected = module(**module.shard_inputs(**given)[1])["loss"], model(**given)["loss"]
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-9, atol=0)
        loss.backward()
        expected.backward()
        same_gradients(module, model)
        routed = model.router(model.embed(given["input_ids"]).flatten(0, 1)).softmax(-1).topk(2).indices
        (counts,) = shardc.expert_tokens(module).values()
        torch.testing.assert_close(counts, routed.flatten().bincount(minlength=8))


def trained_by_trainer(name: str, plan: shardc.Plan, backend: str, more: dict[str, Any], expected: Any) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    module = shardc.compile(trainer.MODELS[name](), mesh, plan | shardc.microbatches(2), backend=backend)
    with tempfile.TemporaryDirectory() as folder:
        lines = trainer.logged(trainer.launched(module, "fsdp", folder, more))
    trainer.forget()
    trainer.same_lines(lines, expected)


@pytest.mark.slow
def test_trainer_logs_what_one_process_logs() -> None:
    """Losses, norms, learning rates and metrics, with accumulation of the Trainer's own and with evaluation."""
    cases = [
        ("llama", FSDP, "inductor", trainer.ACCUMULATED),
        ("bert", shardc.ddp("dp"), "eager", trainer.EVALUATED),
    ]
    run_ranks(2, *(partial(trained_by_trainer, *case, trainer.one_process(case[0], dict(case[3]))) for case in cases))


def test_on_two_ranks() -> None:
    run_ranks(
        2,
        one_row,
        partial(frozen, "tokens"),
        partial(frozen, "middle"),
        partial(frozen, ("tokens", "middle")),
        input_gradient,
        scaled_clipped_scheduled,
        scaler_steps,
        steps_in_backward,
        between_plain_layers,
        accumulated,
        evaluated,
        values_and_gradients,
        steps,
        partial(experts, shardc.Mesh(dp=2), FSDP),
        partial(experts, shardc.Mesh(ep=2), shardc.fsdp("ep") | shardc.ep("ep", "experts", dispatch="send")),
        checkpoints,
    )
