"""Messages through shared memory: in whatever order they are waited for, and never in memory that is still read."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardc
import shardc.runtime.direct  # noqa: F401  (the collectives)
from shardc.analysis.hardware import CPU
from shardc.analysis.staged import staged
from shardc.runtime import shared
from tests.ranks import run_ranks

direct, wait = torch.ops.shardc, torch.ops._c10d_functional.wait_tensor
RANKS = 3


def started(seed: int, number: int) -> tuple[list[Tensor], list[Tensor]]:
    """One collective, not waited for, and what it is to make; the same kind and shapes on all ranks."""
    rank, group = dist.get_rank(), dist.group.WORLD.group_name  # type: ignore[union-attr]
    choose = random.Random(f"{seed} {number}")
    shapes = [(RANKS * choose.randint(0, 2000), choose.randint(1, 9)) for _ in range(choose.randint(1, 4))]
    generator = torch.Generator().manual_seed(1000 * seed + number)
    everyone = [[torch.randint(-99, 99, shape, generator=generator).double() for shape in shapes] for _ in range(RANKS)]
    mine = [x.clone() for x in everyone[rank]]
    if choose.random() < 0.5:
        made = direct.all_gather_into_tensor_coalesced(mine, RANKS, group)
        return made, [torch.cat(each) for each in zip(*everyone, strict=True)]
    made = direct.reduce_scatter_tensor_coalesced(mine, "sum", RANKS, group)
    return made, [torch.stack(each).sum(0).chunk(RANKS)[rank] for each in zip(*everyone, strict=True)]


def any_order_is_right() -> None:
    """Some are waited for late, some in another order than they were started in, some never."""
    order = random.Random(5)
    flying: list[tuple[list[Tensor], list[Tensor]]] = []
    for number in range(200):
        flying.append(started(1, number))
        order.shuffle(flying)
        while len(flying) > 6:
            made, right = flying.pop()
            if order.random() < 0.1:
                continue  # nobody waits, on any rank
            for one, other in zip(made, right, strict=True):
                assert torch.equal(wait(one), other)
    channel = shared.channel(dist.group.WORLD)  # type: ignore[arg-type]
    assert channel is not None and channel.started == 200


def what_is_sent_may_change_at_once() -> None:
    x, group = torch.ones(RANKS * 1000), dist.group.WORLD.group_name  # type: ignore[union-attr]
    gathered = direct.all_gather_into_tensor_coalesced([x], RANKS, group)[0]
    dist.barrier()
    staged = x.clone()
    x.fill_(7)
    dist.barrier()
    # A rank's own part may be either; what came from peers was sent before.
    theirs = [part for at, part in enumerate(wait(gathered).chunk(RANKS)) if at != dist.get_rank()]
    assert all(torch.equal(part, staged) for part in theirs)


def steps_use_the_same_memory() -> None:
    def step() -> None:
        flying = [started(2, number) for number in range(20)]
        for made, right in flying:
            assert all(torch.equal(wait(one), other) for one, other in zip(made, right, strict=True))

    step()
    step()  # what was read in the first step is told in the second
    staged = shared.staged()
    for _ in range(5):
        step()
    assert shared.staged() == staged


def many_may_be_on_their_way() -> None:
    """More than the sockets hold: ranks that all send hear each other meanwhile."""
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    x = torch.arange(RANKS).double()
    flying = [direct.reduce_scatter_tensor_coalesced([x * at], "sum", RANKS, group)[0] for at in range(6000)]
    for at, one in enumerate(flying):
        assert torch.equal(wait(one), x[dist.get_rank()].view(1) * at * RANKS)


def a_peer_may_leave_early() -> None:
    """What it sent is there, even where it did not read everything itself."""
    group = dist.new_group()
    made = [direct.reduce_scatter_tensor_coalesced([torch.ones(RANKS)], "sum", RANKS, group.group_name) for _ in "ab"]
    dist.barrier()
    if dist.get_rank() == 1:
        shared.channel(group).close()  # type: ignore[union-attr]  # as its process's end does
    dist.barrier()
    if dist.get_rank() != 1:
        assert all(torch.equal(wait(x), torch.full((1,), float(RANKS))) for (x,) in made)


def a_group_that_is_made_again_is_another() -> None:
    for _ in range(2):
        group = dist.new_group()
        made = direct.all_reduce_coalesced([torch.ones(3)], "sum", group.group_name)
        made = direct.reduce_scatter_tensor_coalesced([torch.ones(RANKS)], "sum", RANKS, group.group_name)
        assert torch.equal(wait(made[0]), torch.full((1,), float(RANKS)))
        dist.barrier()
        dist.destroy_process_group(group)


def it_takes_what_is_predicted() -> None:
    """The most bytes that messages take in a step, to the byte; of buckets, of several dtypes, over two axes."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    plans = [
        shardc.ddp("dp"),
        shardc.fsdp("dp", level=2),
        shardc.fsdp("dp") | shardc.precision(param=torch.bfloat16, reduce=torch.float32),
    ]
    for plan in plans:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(48, 48) for _ in range(6)))
        options = shardc.Options(direct=True, bucket_size=20000, max_in_flight=40000)
        module = shardc.compile(model, mesh, plan, loss=F.mse_loss, options=options)
        batch = (torch.rand(6, 48), torch.rand(6, 48))
        predicted = staged(module.lower(*batch).schedule(CPU).step, shardc.Mesh(dp=RANKS))
        assert (predicted > 0) == (plan is not plans[0]), "more than two ranks all-reduce through gloo"
        for _ in range(3):
            shared.restart_peak()
            before = shared.peak()
            module(*module.shard_inputs(*batch)).backward()
            module.zero_grad()
        assert shared.peak() == max(predicted, before), plan
        assert module.memory().staged >= shared.peak()


CHECKS: list[Callable[[], None]] = [
    it_takes_what_is_predicted,  # first: what other groups still hold counts too
    any_order_is_right,
    what_is_sent_may_change_at_once,
    steps_use_the_same_memory,
    many_may_be_on_their_way,
    a_peer_may_leave_early,
    a_group_that_is_made_again_is_another,
]


def test_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDC_SHARED_MEMORY", "1")  # the ranks inherit it
    run_ranks(RANKS, *CHECKS)
