"""Ranks that do different things raise on every rank, at once and with what differs; they neither hang nor go on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc.errors import MeshError
from tests.ranks import run_ranks


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.drop = nn.Dropout(0.0)
        self.scale = 1.0

    def forward(self, x: Tensor, twice: bool = False, mask: Tensor | None = None) -> Tensor:
        x = self.down(self.drop(self.up(x).relu()) * self.scale)
        if mask is not None:
            x = x * mask
        return 2 * x if twice else x


def compiled(plan: str = "fsdp", **options: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    plans = {"fsdp": shardc.fsdp("dp"), "ddp": shardc.ddp("dp")}
    return shardc.compile(Two(), mesh, plans[plan], backend="eager", **options)


def step(module: Any, rows: int = 8, **kwargs: Any) -> None:
    module(torch.ones(rows, 4), **kwargs).sum().backward()


def rows(module: Any, rank: int) -> None:
    step(module, 8 if rank == 0 else 7)


def constant(module: Any, rank: int) -> None:
    step(module, twice=rank == 1)


def keyword(module: Any, rank: int) -> None:
    step(module, **({"mask": torch.ones(8, 4)} if rank == 1 else {}))


def training(module: Any, rank: int) -> None:
    module.train(rank == 0)
    step(module)


def no_grad(module: Any, rank: int) -> None:
    with torch.no_grad() if rank == 1 else nullcontext():
        loss = module(torch.ones(8, 4)).sum()
    loss.backward()


def no_sync(module: Any, rank: int) -> None:
    with module.no_sync() if rank == 1 else nullcontext():
        step(module)


def autocast(module: Any, rank: int) -> None:
    with torch.autocast("cpu", torch.bfloat16) if rank == 1 else nullcontext():
        loss = module(torch.ones(8, 4)).sum()
    loss.backward()


def frozen(module: Any, rank: int) -> None:
    module.up.weight.requires_grad_(rank == 0)
    step(module)


def backward(module: Any, rank: int) -> None:
    """Rank 1 forgets one backward, and comes with the next forward."""
    loss = module(torch.ones(8, 4)).sum()
    if rank == 0:
        loss.backward()
    step(module)


def attribute(module: Any, rank: int) -> None:
    """Rank 1 compiles again, while rank 0 waits in the forward's collectives."""
    module.scale = 1.0 + rank
    step(module)


SAYS = {
    rows: "input 'x': rank 0 has shape [8, 4], torch.float32, rank 1 has shape [7, 4], torch.float32",
    constant: "input 'twice': rank 0 has False, rank 1 has True",
    keyword: "input 'mask': rank 0 has none, rank 1 has shape [8, 4], torch.float32",
    training: "training: rank 0 has True x 4, rank 1 has False x 4",
    no_grad: "gradients: rank 0 has recorded, rank 1 has not recorded",
    no_sync: "left unreduced: rank 0 has nothing, rank 1 has down.bias, down.weight, up.bias, up.weight",
    autocast: "autocast: rank 0 has none, rank 1 has cpu torch.bfloat16",
    frozen: "grads: rank 0 has True x 4, rank 1 has False, True x 3",
    backward: "what they do: rank 0 has backward of call of Two (module 1 of the mesh), rank 1 has call of Two "
    "(module 1 of the mesh)",
}
COMPILES = "in what they do: rank 0 has run of the forward, rank 1 has compiled program"


def differs(way: Callable[[Any, int], None], before: int, plan: str) -> None:
    module = compiled(plan)
    for _ in range(before):
        step(module)
    if way is constant:  # both programs are known
        step(module, twice=True)
        step(module)
    with pytest.raises(MeshError) as caught:
        way(module, dist.get_rank())
    assert caught.value.what.endswith(SAYS[way]), caught.value.what
    assert caught.value.fix


@pytest.mark.slow
def test_each_rank_says_what_differs() -> None:
    """At the first call, where nothing is sent yet, and later, where ranks may wait for each other's messages."""
    run_ranks(2, *(partial(differs, way, *case) for way in SAYS for case in ((0, "ddp"), (3, "fsdp"))))


@pytest.mark.long
def test_each_rank_says_what_differs_under_other_plans() -> None:
    run_ranks(2, *(partial(differs, way, *case) for way in SAYS for case in ((0, "fsdp"), (3, "ddp"))))


def another_attribute() -> None:
    module = compiled()
    for _ in range(3):
        step(module)
    with pytest.raises(MeshError, match=COMPILES):
        attribute(module, dist.get_rank())


def one_compiles_for_long() -> None:
    """The others ask what it does, from their collectives, and hear that it does something else when it comes."""
    module, last = compiled(), dist.get_rank() == dist.get_world_size() - 1
    for _ in range(3):
        step(module)
    module.shardc.spec.groups.consistency._samples._patience = 2  # samples; the last rank comes after many of them
    if last:
        time.sleep(3)
    with pytest.raises(MeshError, match="in what they do: rank . has run of the forward, rank . has compiled program"):
        attribute(module, int(last))


def one_of_four_differs() -> None:
    """The others are in the middle of a step, and all of them name rank 2."""
    module, rank = compiled(), dist.get_rank()
    for _ in range(2):
        step(module)
    with pytest.raises(MeshError, match=r"rank \d has shape \[8, 4\], torch.float32, rank 2 has shape \[6, 4\]|"
                       r"rank 2 has shape \[6, 4\], torch.float32, rank \d has shape \[8, 4\]"):  # fmt: skip
        step(module, 6 if rank == 2 else 8)
    start = time.monotonic()
    with pytest.raises(MeshError, match="ranks differ at a call"):  # the groups are of no use any more
        step(module)
    assert time.monotonic() - start < 60, "a rank waited for the others"


def a_rank_that_is_ahead_hears_of_it() -> None:
    """Without collectives in the forward nothing holds rank 0 back; it raises at its next call."""
    module, rank = compiled("ddp"), dist.get_rank()
    x = torch.ones(8, 4)
    with torch.no_grad():
        for _ in range(3):
            module(x)
        with pytest.raises(MeshError, match=r"input 'x': rank 0 has shape \[8, 4\].*, rank 1 has shape \[2, 4\]"):
            while True:
                module(x if rank == 0 else torch.ones(2, 4))
                time.sleep(0.01)


def what_comes_after_is_compared_anew() -> None:
    """Nobody was in a collective: the ranks may go on."""
    module, rank = compiled(), dist.get_rank()
    with pytest.raises(MeshError):
        step(module, 8 - rank)
    step(module)
    step(module)


def each_rank_comes_once() -> None:
    """The thread that listens may answer for an act right before the rank itself comes to compare it."""
    module = compiled()
    consistency = module.shardc.spec.groups.consistency
    compare = consistency._compare

    def answered_first(act: Any) -> None:
        consistency.on_message(consistency._connected(), str(consistency.number))
        compare(act)
        came.append(int(consistency._store.add(f"{consistency._comparisons.key_prefix(consistency.number)}came", 0)))
        dist.barrier()

    came: list[int] = []
    consistency._compare = answered_first
    step(module)
    assert set(came) == {2}, came


def the_thread_that_listens_differs_first() -> None:
    """Rank 0 is told of the other rank, whoever of it came to compare."""
    module = compiled()
    consistency = module.shardc.spec.groups.consistency
    compare = consistency._compare

    def answered_first(act: Any) -> None:
        time.sleep(0.5)
        store = consistency._connected()  # as `_compare` begins
        store.set(f"{consistency._prefix}what/{act.key}", json.dumps(act.lines))
        consistency._waits_at = consistency.number
        consistency.on_message(consistency._connected(), str(consistency.number))
        compare(act)

    if dist.get_rank() == 1:
        consistency._compare = answered_first
    with pytest.raises(MeshError) as caught:
        rows(module, dist.get_rank())
    assert caught.value.what.endswith(SAYS[rows]), caught.value.what


def compared(module: Any) -> Callable[[], int]:
    """How often this rank compared since the last time."""
    consistency, counts = module.shardc.spec.groups.consistency, [0]
    compare = consistency._compare

    def counted(act: Any) -> None:
        counts[0] += 1
        compare(act)

    consistency._compare = counted

    def since() -> int:
        found, counts[0] = counts[0], 0
        return found

    return since


def what_repeats_is_not_announced() -> None:
    """Steps, also of three micro-batches of which the last reduces, and those of evaluation."""
    module = compiled()
    since = compared(module)
    for _ in range(4):
        step(module)
    assert since()
    for _ in range(10):
        step(module)
    assert since() == 0

    def accumulated() -> None:
        with module.no_sync():
            step(module)
            step(module)
        step(module)

    for _ in range(3):
        accumulated()
    assert since()
    for _ in range(5):
        accumulated()
    assert since() == 0
    with torch.no_grad():
        for _ in range(4):
            module(torch.ones(8, 4))
        since()
        for _ in range(5):
            module(torch.ones(8, 4))
    assert since() == 0


def test_two_ranks() -> None:
    run_ranks(
        2,
        another_attribute,
        one_compiles_for_long,
        a_rank_that_is_ahead_hears_of_it,
        what_comes_after_is_compared_anew,
        what_repeats_is_not_announced,
        each_rank_comes_once,
        the_thread_that_listens_differs_first,
    )


@pytest.mark.slow
def test_four_ranks() -> None:
    run_ranks(4, one_of_four_differs, one_compiles_for_long)
