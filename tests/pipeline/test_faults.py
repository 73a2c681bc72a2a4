"""Ranks of a pipeline that raise, die, stop or pass other inputs: the others raise in time and name the stage."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import shardc
from shardc.errors import MeshError
from shardc.ir.mesh import Mesh
from shardc.runtime.stage_link import StageLink
from tests.pipeline.programs import blocks
from tests.ranks import device_mesh, run_ranks

TIMEOUT = 15  # seconds: longer than one rank may be behind the others while all compile


def die() -> None:
    os._exit(3)


def stall() -> None:
    time.sleep(600)


def fail() -> None:
    raise ValueError("an error of the user's")


def step(rank: int, faulty: int, fault: Callable[[], None], inside: bool, folder: str) -> None:
    """Rank ``faulty`` has its fault in the fifth step, at its second receive or in front of it; the other writes what
    it sees. Ranks compare the inputs of the calls before.
    """
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    store.set_timeout(timedelta(seconds=4 * TIMEOUT))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=TIMEOUT))
    case = blocks()
    module = shardc.compile(
        case.model, device_mesh(Mesh(pp=2)), shardc.pp("pp", microbatches=4), loss=case.loss, backend="eager"
    )
    for _ in range(4):
        module(*case.args).backward()
    receive, received = StageLink.receive, []

    def faulted(self: StageLink, message: object) -> object:
        received.append(message)
        if len(received) == 2:
            fault()
        return receive(self, message)

    if rank == faulty:
        if inside:
            StageLink.receive = faulted
        else:
            fault()
    try:
        module(*case.args).backward()
    except shardc.ShardcError as error:
        Path(folder, "seen").write_text(str(error))
    os._exit(0)


def seen(faulty: int, fault: Callable[[], None], inside: bool, folder: Path) -> str:
    """What the other rank raised; both are gone afterwards."""
    context = mp.get_context("spawn")
    ranks = [context.Process(target=step, args=(rank, faulty, fault, inside, str(folder))) for rank in range(2)]
    try:
        for process in ranks:
            process.start()
        ranks[1 - faulty].join(90)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    assert ranks[1 - faulty].exitcode == 0, "the rank hung"
    assert (folder / "seen").exists(), "the rank raised nothing"
    return (folder / "seen").read_text()


SAYS = {
    die: "Connection (closed|reset)|Read error|Broken pipe|writev|Socket closed",
    stall: "Timed out waiting",
}


@pytest.mark.parametrize("fault, faulty", [(die, 0), (die, 1), (stall, 0), (stall, 1)])
def test_a_rank_that_is_gone(fault: Callable[[], None], faulty: int, tmp_path: Path) -> None:
    first, *rest = seen(faulty, fault, True, tmp_path).splitlines()
    assert re.search(SAYS[fault], first), first
    where = rf"rank {1 - faulty}, at {1 - faulty} of the pipeline, .* rank {faulty}, at {faulty}, when it failed: "
    assert re.match(where, first), first
    assert rest == [
        '  plan entry: pp("pp", microbatches=4)',
        f"  fix: look at rank {faulty} first: it died, raised or came too late; then restart all ranks from the last "
        "checkpoint",
    ]


@pytest.mark.slow
def test_a_rank_that_is_gone_before_a_step(tmp_path: Path) -> None:
    assert "look at rank 0 first" in seen(0, die, False, tmp_path)


@pytest.mark.parametrize("faulty", [0, 1])
def test_a_rank_that_raises_inside_of_a_step(faulty: int, tmp_path: Path) -> None:
    text = seen(faulty, fail, True, tmp_path)
    assert f"look at rank {faulty} first" in text and 'plan entry: pp("pp", microbatches=4)' in text, text


def other_inputs(at: int) -> None:
    case = blocks()
    module = shardc.compile(
        case.model, device_mesh(Mesh(pp=2)), shardc.pp("pp", microbatches=4), loss=case.loss, backend="eager"
    )
    args = list(case.args)
    if dist.get_rank() == 1:
        args[at] = args[at] + 1
    with pytest.raises(MeshError, match=r"(?s)pp"):
        module(*args)


def other_shapes() -> None:
    case = blocks()
    module = shardc.compile(
        case.model, device_mesh(Mesh(pp=2)), shardc.pp("pp", microbatches=4), loss=case.loss, backend="eager"
    )
    module(*case.args).backward()
    rows = 16 if dist.get_rank() == 0 else 8
    with pytest.raises(MeshError):
        module(*(x[:rows] for x in case.args))


def inputs_at_0() -> None:
    other_inputs(0)


def targets() -> None:
    other_inputs(1)


def test_other_inputs() -> None:
    run_ranks(2, inputs_at_0, targets, other_shapes)
