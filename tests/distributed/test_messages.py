"""Collectives in messages over gloo: tensors that share a message and those that do not, whatever their dtypes."""

from __future__ import annotations

import gc
import os
import random
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardc
import shardc.runtime.gloo.direct  # noqa: F401  (the collectives)
from shardc.ir.arena import LARGEST, Packing
from tests.ranks import run_ranks

direct, wait = torch.ops.shardc, torch.ops._c10d_functional.wait_tensor
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


def started(number: int, ranks: int) -> tuple[list[Tensor], list[Tensor]]:
    """One collective, not waited for, and what it is to make; the same kind and shapes on all ranks."""
    rank, group = dist.get_rank(), dist.group.WORLD.group_name  # type: ignore[union-attr]
    choose = random.Random(number)
    kind = choose.choice(("gather", "sum", "max", "avg", "all_sum", "all_avg"))
    most = choose.choice((9, 3000, 80_000))
    rows = [choose.randint(0, most) for _ in range(choose.randint(1, 7))]
    dtypes = [choose.choice(DTYPES) if kind == "gather" else torch.float64 for _ in rows]
    generator = torch.Generator().manual_seed(number)
    everyone = [
        [
            torch.randint(-9, 9, (ranks * n,), generator=generator).to(dtype)
            for n, dtype in zip(rows, dtypes, strict=True)
        ]
        for _ in range(ranks)
    ]
    mine, each = [x.clone() for x in everyone[rank]], [torch.stack(xs) for xs in zip(*everyone, strict=True)]
    if kind == "gather":
        return direct.all_gather_into_tensor_coalesced(mine, ranks, group), [xs.flatten() for xs in each]
    op = kind.removeprefix("all_")
    whole = [{"sum": xs.sum, "max": lambda at, xs=xs: xs.amax(at), "avg": xs.mean}[op](0) for xs in each]
    if kind.startswith("all_"):
        return direct.all_reduce_coalesced(mine, op, group), whole
    made = direct.reduce_scatter_tensor_coalesced(mine, op, ranks, group)
    return made, [x.chunk(ranks)[rank] if len(x) else x for x in whole]


def any_order_is_right(ranks: int) -> None:
    order = random.Random(ranks)
    flying: list[tuple[int, list[Tensor], list[Tensor]]] = []
    for number in range(120):
        flying.append((number, *started(number, ranks)))
        order.shuffle(flying)
        while len(flying) > (5 if number < 119 else 0):
            at, made, right = flying.pop()
            for one, other in zip(made, right, strict=True):
                assert torch.equal(wait(one), other), f"collective {at}"


def small_ones_share_a_message() -> None:
    """As many messages as the packing says, of as many bytes as there are elements."""
    group, sent = dist.group.WORLD, []
    assert group is not None
    real = vars(type(group))["send"]

    def counted(self: dist.ProcessGroup, tensors: list[Tensor], *rest: int) -> dist.Work:
        sent.append(tensors[0].nbytes)
        return real.__get__(self)(tensors, *rest)

    xs = [torch.ones(n) for n in (1, 7, LARGEST // 4, LARGEST // 4 + 1)] + [torch.ones(3, dtype=torch.bfloat16)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(group), "send", counted)
        for one in direct.all_gather_into_tensor_coalesced(xs, 2, group.group_name):
            wait(one)
    packing = Packing.of([(x.dtype, x.nbytes) for x in xs])
    assert len(sent) == packing.messages(len(xs)) == 2
    assert sorted(sent) == sorted([LARGEST + 4, 4 + 28 + LARGEST + 6])


def memory_is_free_once_waited_for() -> None:
    """Gloo's threads may hold what an all-reduce was handed for a while after it is done: its memory is free anyhow."""
    group, kept = dist.group.WORLD, []
    assert group is not None
    real = vars(type(group))["allreduce"]

    def held(self: dist.ProcessGroup, tensors: list[Tensor], *rest: object) -> dist.Work:
        kept.extend(tensors)
        return real.__get__(self)(tensors, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(group), "allreduce", held)
        made = direct.all_reduce_coalesced([torch.ones(5), torch.ones(0), torch.ones(2, 3)], "sum", group.group_name)
    memory = weakref.ref(made[0].untyped_storage())
    assert kept and [wait(one).unique().tolist() for one in made] == [[3.0], [], [3.0]]
    del made
    gc.collect()
    assert memory() is None


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)) for _ in range(3)))
        self.wide = nn.Linear(64, 2048)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(self.layers(x)).square().mean()


def loops() -> list[int]:
    tasks = [task for task in Path("/proc/self/task").iterdir() if "gloo_tcp" in (task / "comm").read_text()]
    return [int(task.name) for task in tasks]


def a_model_whose_parameters_share_messages(ranks: int, level: int, backend: str) -> None:
    """Gradients of one device; nothing strays from the planned memory, and what is observed is what was planned."""
    torch.manual_seed(0)
    model = Layers().double()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    for loop in loops():  # of checks before, whose loops the process keeps
        os.sched_setscheduler(loop, os.SCHED_OTHER, os.sched_param(0))
    module = shardc.compile(model, mesh, shardc.fsdp("dp", level=level), backend=backend)
    x = torch.randn(12, 64, dtype=torch.float64)
    mine = x.chunk(ranks)[dist.get_rank()]
    for _ in range(3):
        module.zero_grad()
        model.zero_grad()
        module(mine).backward()
        model(x).backward()
        for name, param in model.named_parameters():
            found = module.get_parameter(name).grad.full_tensor()
            assert torch.allclose(found, param.grad, rtol=1e-9, atol=1e-12), name
    assert loops() and all(os.sched_getscheduler(loop) == os.SCHED_BATCH for loop in loops())
    use = module.memory()
    assert use.strays == 0 and abs(use.observed - use.planned_peak) <= 0.05 * use.planned_peak, use
    plans = [compiled.plan for runner in module.shardc.cache.runners.values() for compiled in runner._compiled.values()]
    assert any(slot.name.endswith(".comes.wire") and slot.size for plan in plans for slot in plan.slots)


@pytest.mark.slow
def test_on_two_ranks() -> None:
    run_ranks(
        2, partial(any_order_is_right, 2), small_ones_share_a_message,
        *(partial(a_model_whose_parameters_share_messages, 2, level, backend)
          for level in (1, 3) for backend in ("eager", "inductor")),
    )  # fmt: skip


@pytest.mark.slow
def test_on_three_ranks() -> None:
    run_ranks(
        3, partial(any_order_is_right, 3), memory_is_free_once_waited_for,
        partial(a_model_whose_parameters_share_messages, 3, 3, "eager"),
    )  # fmt: skip
