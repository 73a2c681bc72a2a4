"""What torch's own tests do with ``fully_shard``, done with a compiled module on two ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import shardc
from tests.ranks import run_ranks
from tests.state import assert_same, close

FSDP, ROWS = shardc.fsdp("dp"), 4


class MLP(nn.Module):
    """Two layers, the width of which two ranks do not divide."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, width), nn.Linear(width, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Stack(nn.Module):
    """Blocks in a row; which of them run, how often, and how is up to ``order`` and ``call``."""

    def __init__(
        self,
        order: tuple[int, ...] = (0, 1, 2),
        call: Callable[[nn.Module, Tensor], Tensor] = lambda block, x: block(x),
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MLP() for _ in range(3))
        self.order, self.call = order, call

    def forward(self, x: Tensor) -> Tensor:
        for at in self.order:
            x = x + self.call(self.blocks[at], x)
        return x


def made(*arguments: Any) -> Stack:
    torch.manual_seed(0)
    return Stack(*arguments).double()


def compiled(source: nn.Module, plan: shardc.Plan = FSDP) -> Any:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    return shardc.compile(source, mesh, plan, backend="eager")


def batches(count: int) -> Iterator[Tensor]:
    for at in range(count):
        yield torch.randn(ROWS, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(at))


def part(module: Any, x: Tensor) -> Tensor:
    return module.shard_inputs(x) if hasattr(module, "shard_inputs") else x


Step = Callable[[Any, Any, Tensor, int], None]


def plain(module: Any, optimizer: Any, x: Tensor, at: int) -> None:
    optimizer.zero_grad()
    module(part(module, x)).square().mean().backward()
    optimizer.step()


def trains(step: Step, source: nn.Module, plan: shardc.Plan = FSDP, optim: Callable[..., Any] | None = None) -> None:
    """Some steps on both; parameters and gradients are the same after each."""
    module = compiled(source, plan)
    make = optim or partial(torch.optim.Adam, lr=0.05)
    pairs = [(one, make(one.parameters())) for one in (module, source)]
    for at, x in enumerate(batches(4)):
        for one, optimizer in pairs:
            step(one, optimizer, x, at)
        assert_same(module, source, grads=True)
        assert_same(module, source)


# --- the model


def models() -> None:
    trains(plain, made())
    trains(plain, made((0, 1, 0, 2, 1)))  # a block that runs several times
    trains(plain, made((0, 2)))  # one that does not
    trains(plain, made((0, 1, 2), lambda block, x: checkpoint(block, x, use_reentrant=False)))
    tied = made()
    tied.blocks[2].up.weight = tied.blocks[0].up.weight
    trains(plain, tied)
    trains(plain, made(), FSDP | shardc.Plan(params={"blocks.*.up.weight": "_, 6@dp"}))  # split over another dim


def frozen() -> None:
    """Other parameters in each step, and inside of a block."""

    def step(module: Any, optimizer: Any, x: Tensor, at: int) -> None:
        for name, param in module.named_parameters():
            param.requires_grad_(at % 2 == 0 or "bias" in name or f"blocks.{at}" in name)
        plain(module, optimizer, x, at)

    trains(step, made((0, 1, 0)))


# --- the step


def gradients_add_up() -> None:
    def step(module: Any, optimizer: Any, x: Tensor, at: int) -> None:
        optimizer.zero_grad(set_to_none=bool(at % 2))
        for scale in (1.0, 0.5):
            (module(part(module, x)).square().mean() * scale).backward()
        optimizer.step()

    trains(step, made())


def all_forwards_then_all_backwards() -> None:
    """Micro-batches as in pipelines; the last backward reduces."""

    def step(module: Any, optimizer: Any, x: Tensor, at: int) -> None:
        optimizer.zero_grad()
        losses = [module(part(module, x * scale)).square().mean() for scale in (1.0, 2.0, 3.0)]
        for loss in losses:
            loss.backward()
        optimizer.step()

    trains(step, made())


def optimizer_in_backward() -> None:
    """A hook of each parameter takes its step as soon as its gradient is there."""

    def both(parameters: Any) -> Any:
        parameters = list(parameters)
        own = {param: torch.optim.SGD([param], lr=0.05, momentum=0.9) for param in parameters}
        seen: list[nn.Parameter] = []

        def hook(param: nn.Parameter) -> None:
            seen.append(param)
            own[param].step()

        for param in parameters:
            param.register_post_accumulate_grad_hook(hook)
        return parameters, seen

    def step(module: Any, taken: Any, x: Tensor, at: int) -> None:
        parameters, seen = taken
        module.zero_grad()
        seen.clear()
        module(part(module, x)).square().mean().backward()
        assert len(seen) == len(parameters)

    trains(step, made(), optim=both)


def clipped() -> None:
    def step(module: Any, optimizer: Any, x: Tensor, at: int) -> None:
        optimizer.zero_grad()
        module(part(module, x)).square().mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1, foreach=bool(at % 2))
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        optimizer.step()

    norms: list[Tensor] = []
    trains(step, made(), FSDP)
    for ours, theirs in zip(norms[::2], norms[1::2], strict=True):
        close(ours, theirs, "norm")


def optimizers() -> None:
    trains(plain, made(), optim=partial(torch.optim.AdamW, lr=0.05, foreach=True))
    trains(plain, made(), optim=partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True))


def inside_of_another_module() -> None:
    """What is not compiled stands before and behind, is the same on both ranks, and is reduced by hand."""

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.first, self.last = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.inner(self.first(x)))

    source = made()
    theirs, ours = Outer(source), Outer(compiled(source))
    for x in batches(2):
        theirs.zero_grad()
        ours.zero_grad()
        theirs(x).square().mean().backward()
        ours(part(ours.inner, x)).square().mean().backward()
        assert_same(ours.inner, source, grads=True)
        for name in ("first", "last"):
            grad = getattr(ours, name).weight.grad.clone()
            torch.distributed.all_reduce(grad)
            close(grad / 2, getattr(theirs, name).weight.grad, name)


def evaluation_between_steps() -> None:
    def step(module: Any, optimizer: Any, x: Tensor, at: int) -> None:
        plain(module, optimizer, x, at)
        with torch.no_grad():
            module.eval()
            module(part(module, x))
            module.train()

    trains(step, made())


def one_forward_of_two() -> None:
    """The first forward's result is thrown away."""

    def step(module: Any, optimizer: Any, x: Tensor, at: int) -> None:
        module(part(module, x * 3))
        plain(module, optimizer, x, at)

    trains(step, made())


def gradients_by_name() -> None:
    source = made()
    module = compiled(source)
    x = next(batches(1))
    ours = torch.autograd.grad(module(part(module, x)).square().mean(), list(module.parameters()))
    theirs = torch.autograd.grad(source(x).square().mean(), list(source.parameters()))
    for (name, param), a, b in zip(module.named_parameters(), ours, theirs, strict=True):
        assert param.grad is None, name
        close(whole_of(module, name, a), b, name)


def whole_of(module: Any, name: str, x: Any) -> Tensor:
    return shardc.runtime.full_params.unshard(x, module.shardc.spec.storages[name])


# --- what is saved


def state_dicts() -> None:
    source = made()
    module = compiled(source)
    full = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True))
    for name, x in source.state_dict().items():
        close(full[name].full_tensor() if isinstance(full[name], DTensor) else full[name], x, name)
    other = made().requires_grad_(True)
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(2)
    set_model_state_dict(module, other.state_dict(), options=StateDictOptions(full_state_dict=True))
    assert_same(module, other)


def one_rank() -> None:
    """A mesh of this rank alone."""
    source = made()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("out", "dp"))["dp"]
    module = shardc.compile(source, mesh, FSDP, backend="eager")
    for x in batches(2):
        module(x).square().mean().backward()
        source(x).square().mean().backward()
    assert_same(module, source, grads=True)


def loss_of_the_model() -> None:
    """``F.mse_loss`` of outputs and of targets that are split as they are."""
    source = made()
    module = compiled(source)
    x, y = batches(2)
    F.mse_loss(module(part(module, x)), part(module, y)).backward()
    F.mse_loss(source(x), y).backward()
    assert_same(module, source, grads=True)


def test_models_and_steps() -> None:
    run_ranks(
        2, models, frozen, gradients_add_up, all_forwards_then_all_backwards, optimizer_in_backward, clipped,
        optimizers, inside_of_another_module, evaluation_between_steps, one_forward_of_two, gradients_by_name,
        state_dicts, one_rank, loss_of_the_model,
    )  # fmt: skip
