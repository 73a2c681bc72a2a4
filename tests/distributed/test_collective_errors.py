"""A rank that dies, stalls or raises in the middle of a step: the other raises in time, and names the collective."""

from __future__ import annotations

import inspect
import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc.errors import CollectiveError

# Seconds: longer than one rank may be behind the other while both compile.
TIMEOUTS = {"eager": 12, "inductor": 60}


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stall() -> None:
    time.sleep(600)


def fail() -> None:
    raise ValueError("an error of the user's")


def step(rank: int, fault: Callable[[], None], backend: str, direct: bool, folder: str) -> None:
    """Rank 1 has its fault between forward and backward of the second step; rank 0 writes what it sees."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=TIMEOUTS[backend]))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    module = shardc.compile(
        MLP(), mesh, shardc.fsdp("dp"), loss=F.mse_loss, backend=backend, options=shardc.Options(p2p_collectives=direct)
    )
    batch = module.shard_inputs(torch.ones(8, 8), torch.ones(8, 4))
    module(*batch).backward()
    loss = module(*batch)
    if rank == 1:
        fault()
    try:
        loss.backward()
    except CollectiveError as error:
        Path(folder, "seen").write_text(str(error))


def seen(fault: Callable[[], None], backend: str, folder: Path, direct: bool = True) -> str:
    """What rank 0 raised; both ranks are gone afterwards."""
    context = mp.get_context("spawn")
    ranks = [context.Process(target=step, args=(rank, fault, backend, direct, str(folder))) for rank in range(2)]
    try:
        for process in ranks:
            process.start()
        ranks[0].join(400)  # rank 1 may be stalled for longer
    finally:
        for process in ranks:
            process.kill()
            process.join()
    assert ranks[0].exitcode == 0, "rank 0 raised something else, or nothing"
    return (folder / "seen").read_text()


def source_line() -> str:
    lines, first = inspect.getsourcelines(MLP.forward)
    return f"{__file__}:{first + next(at for at, line in enumerate(lines) if 'tanh' in line)}"


# What gloo says of it.
SAYS = {
    die: "Connection (closed|reset) by peer|Read error",
    stall: "Timed out waiting",
    fail: "Connection (closed|reset)",
}


def expected(fault: Callable[[], None], text: str) -> None:
    first, *rest = text.splitlines()
    assert first.startswith("rank 0 was in all_gather over dp of %down.weight.full, in backward, when it failed: ")
    assert re.search(SAYS[fault], first), first
    assert rest == [
        '  plan entry: fsdp("dp", level=3)',
        f"  source: {source_line()}",
        "  fix: look at rank 1 first: it died, raised or came too late; then restart all ranks from the last "
        "checkpoint",
    ]


@pytest.mark.parametrize(
    "fault", [die, pytest.param(stall, marks=pytest.mark.slow), pytest.param(fail, marks=pytest.mark.long)]
)
def test_the_other_rank_names_the_collective(fault: Callable[[], None], tmp_path: Path) -> None:
    expected(fault, seen(fault, "eager", tmp_path))


@pytest.mark.long
def test_with_collectives_of_torch(tmp_path: Path) -> None:
    expected(die, seen(die, "eager", tmp_path, direct=False))


@pytest.mark.long
@pytest.mark.parametrize("fault", [die, stall, fail])
def test_in_the_code_of_inductor(fault: Callable[[], None], tmp_path: Path) -> None:
    expected(fault, seen(fault, "inductor", tmp_path))
