"""Steps that reduce no gradients: what they leave alone, and that the sum equals the one big batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardc
from tests.ranks import run_ranks
from tests.state import assert_same, batch, model

MICRO = 3
LEVELS = {
    "ddp": shardc.ddp("dp"),
    "fsdp1": shardc.fsdp("dp", level=1),
    "fsdp2": shardc.fsdp("dp", level=2),
    "fsdp3": shardc.fsdp("dp", level=3),
}


def compiled(source: nn.Module, plan: shardc.Plan, backend: str = "eager") -> Any:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    return shardc.compile(source, mesh, plan, loss=F.mse_loss, backend=backend)


def big_batch() -> tuple[Tensor, Tensor]:
    xs, ys = zip(*(batch(seed) for seed in range(MICRO)), strict=True)
    return torch.cat(xs), torch.cat(ys)


def micro(module: Any, seed: int) -> None:
    (module(*module.shard_inputs(*batch(seed))) / MICRO).backward()


def adds_up(module: Any, source: nn.Module) -> None:
    """Micro-batches under no_sync and a last one without have the gradients of the big batch."""
    x, y = big_batch()
    with module.no_sync():
        for seed in range(MICRO - 1):
            micro(module, seed)
    micro(module, MICRO - 1)
    F.mse_loss(source(x), y).backward()
    assert_same(module, source, grads=True)


def reductions(module: Any) -> set[int]:
    """How many collectives the backward of each program has that end in a gradient."""
    programs = tuple(module.shardc.programs.values())
    return {
        sum("reduce" in str(node.target) or "all_to_all" in str(node.target) for node in program.backward.graph.nodes)
        for program in programs
        if program.backward is not None
    }


def some_are_held_back(name: str) -> None:
    """Under ``no_sync(glob)`` the gradients that the glob matches are held back, and the others are reduced."""
    source = model()
    module = compiled(source, LEVELS[name])
    names = [each for each, _ in module.named_parameters()]
    glob = "mid.*"
    held = {each for each in names if each.startswith("mid.")}
    assert held and held != set(names)
    with pytest.raises(shardc.ShardcError, match="matches no parameter"):
        module.no_sync("nothing.*")
    with module.no_sync(glob):
        for seed in range(MICRO - 1):
            micro(module, seed)
        without = {each for each, p in module.named_parameters() if p.grad is None}
        assert without - {"unused.weight", "unused.bias"} == held
    micro(module, MICRO - 1)
    x, y = big_batch()
    F.mse_loss(source(x), y).backward()
    assert_same(module, source, grads=True)
    assert not module.shardc.params.sync.sums


def sums_equal_the_big_batch(name: str) -> None:
    """Two steps of AdamW, each of some backwards under no_sync and a last one without."""
    source = model()
    module = compiled(source, LEVELS[name])
    ours, theirs = (torch.optim.AdamW(one.parameters(), lr=0.1) for one in (module, source))
    x, y = big_batch()
    for _ in range(2):
        with module.no_sync():
            for seed in range(MICRO - 1):
                micro(module, seed)
                assert all(p.grad is None for p in module.parameters())
        micro(module, MICRO - 1)
        F.mse_loss(source(x), y).backward()
        assert_same(module, source, grads=True)
        assert not module.shardc.params.sync.sums
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        assert_same(module, source)
    assert reductions(module) == {0}, "these backwards leave all gradients unreduced"


def only_what_is_whole_waits(name: str) -> None:
    """set_requires_grad_sync(False) holds back the gradients of levels 0 and 1, and no others."""
    source = model()
    module = compiled(source, LEVELS[name])
    x, y = big_batch()
    module.set_requires_grad_sync(False)
    for seed in range(MICRO - 1):
        micro(module, seed)
    waits = name in ("ddp", "fsdp1")
    used = [p for n, p in module.named_parameters() if not n.startswith("unused")]
    assert all((p.grad is None) == waits for p in used)
    module.set_requires_grad_sync(True)
    micro(module, MICRO - 1)
    F.mse_loss(source(x), y).backward()
    assert_same(module, source, grads=True)


def sums_of_a_split_model() -> None:
    """Gradients that are split over tp, whole, and pending over dp alone."""
    source = model()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = shardc.fsdp("dp") | shardc.tp("tp", colwise=["mid"], rowwise=["back"])
    module = shardc.compile(source, mesh, plan, loss=F.mse_loss, backend="eager")
    adds_up(module, source)


class Halves(nn.Module):
    """Uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(5, 9), nn.Linear(5, 9)

    def forward(self, x: Tensor, second: bool) -> Tensor:
        return self.two(x) if second else self.one(x)


def what_the_last_step_does_not_use_is_reduced_too() -> None:
    torch.manual_seed(0)
    source = Halves().double()
    module = compiled(source, LEVELS["fsdp3"])
    for at, second in enumerate((False, True, True)):
        x, y = batch(at)
        local_x, local_y = module.shard_inputs(x, y)
        with module.no_sync() if at < 2 else torch.enable_grad():
            module(local_x, second, local_y).backward()
        F.mse_loss(source(x, second), y).backward()
    assert_same(module, source, grads=True)


class Equal(nn.Module):
    """Two parameters whose gradients are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(9)), nn.Parameter(torch.zeros(9))

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(-1, keepdim=True) + self.a + self.b


def gradients_that_share_memory() -> None:
    source = Equal().double()
    module = compiled(source, LEVELS["ddp"])
    adds_up(module, source)


def the_sum_is_kept_in_reduce() -> None:
    source = model().float()
    said = shardc.precision(param=torch.bfloat16, reduce=torch.float32)
    module = compiled(source, LEVELS["fsdp3"] | said)
    x, y = (tensor.float() for tensor in batch())
    with module.no_sync():
        module(*module.shard_inputs(x, y)).backward()
    assert {kept.dtype for kept in module.shardc.params.sync.sums.values()} == {torch.float32}
    module(*module.shard_inputs(x, y)).backward()
    F.mse_loss(source(x), y).backward()
    for name, param in module.named_parameters():
        expected = source.get_parameter(name).grad
        if expected is not None and expected.numel():
            assert param.grad.dtype == torch.float32
            error = (param.grad.full_tensor() - 2 * expected).norm() / (2 * expected).norm()
            assert error < 5e-2, (name, error)


def through_inductor() -> None:
    source = model()
    module = compiled(source, LEVELS["fsdp2"], backend="inductor")
    adds_up(module, source)


@pytest.mark.slow
def test_two_ranks() -> None:
    run_ranks(
        2,
        *(partial(check, name) for name in LEVELS for check in (sums_equal_the_big_batch, only_what_is_whole_waits)),
        partial(some_are_held_back, "fsdp2"),
        partial(some_are_held_back, "fsdp3"),
        what_the_last_step_does_not_use_is_reduced_too,
        gradients_that_share_memory,
        the_sum_is_kept_in_reduce,
        through_inductor,
    )


@pytest.mark.slow
def test_four_ranks() -> None:
    run_ranks(4, sums_of_a_split_model)
