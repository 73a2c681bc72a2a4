"""Ranks of a pipeline that raise, die, stop or pass other inputs: the others raise in time and name the stage."""

from __future__ import annotations

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

import shardc
from shardc.errors import MeshError
from shardc.ir.mesh import Mesh
from shardc.runtime.stage_link import StageLink
from tests.pipeline.programs import blocks
from tests.ranks import device_mesh, run_ranks

PP2 = Mesh(pp=2)
TIMEOUT = 15  # seconds: longer than one rank may be behind the others while all compile


def die() -> None:
    os._exit(3)


def stall() -> None:
    time.sleep(600)


def fail() -> None:
    raise ValueError("an error of the user's")


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def step(rank: int, faulty: int, fault: Callable[[], None], inside: bool, folder: str, mesh: Mesh, port: int) -> None:
    """Rank ``faulty`` has its fault in the fifth step, at its second receive or in front of it; the others write what
    they see. Ranks compare the inputs of the calls before.
    """
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    store.set_timeout(timedelta(seconds=4 * TIMEOUT))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=mesh.ranks, timeout=timedelta(seconds=TIMEOUT))
    case = blocks()
    plan = shardc.pp("pp", microbatches=4)
    module, args = shardc.compile(case.model, device_mesh(mesh), plan, loss=case.loss, backend="eager"), case.args
    for _ in range(4):
        module(*args).backward()
    receive, received = StageLink.receive, []

    def faulted(self: StageLink, message: object, before: int) -> object:
        received.append(message)
        if len(received) == 2:
            fault()
        return receive(self, message, before)

    if rank == faulty:
        if inside:
            StageLink.receive = faulted
        else:
            fault()
    begin = time.monotonic()
    try:
        module(*args).backward()
    except shardc.ShardcError as error:
        Path(folder, f"seen{rank}").write_text(str(error))
        assert time.monotonic() - begin < 2 * TIMEOUT, "it was told late"
        time.sleep(2 * TIMEOUT if mesh.ranks > 2 else 0)  # others still wait for what it has sent
        os._exit(0)
    os._exit(4)


def seen(faulty: int, fault: Callable[[], None], inside: bool, folder: Path, mesh: Mesh = PP2) -> dict[int, str]:
    """What each other rank raised; all are gone afterwards."""
    context = mp.get_context("spawn")
    # In this process, as a launcher has it: a rank that stops would take a file or a server of its own along.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = (faulty, fault, inside, str(folder), mesh, store.port)
    ranks = [context.Process(target=step, args=(rank, *given)) for rank in range(mesh.ranks)]
    others = [rank for rank in range(mesh.ranks) if rank != faulty]
    try:
        for process in ranks:
            process.start()
        for rank in others:
            ranks[rank].join(90 if mesh.ranks == 2 else 240)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    codes = {rank: ranks[rank].exitcode for rank in others}
    assert codes == dict.fromkeys(others, 0), "a rank hung, or raised nothing (4), or was told late (1)"
    return {rank: (folder / f"seen{rank}").read_text() for rank in others}


SAYS = {
    die: "Connection (closed|reset)|Read error|Broken pipe|writev|Socket closed",
    stall: "Timed out waiting",
}


@pytest.mark.parametrize("fault, faulty", [(die, 0), (die, 1), (stall, 0), (stall, 1)])
def test_a_rank_that_is_gone(fault: Callable[[], None], faulty: int, tmp_path: Path) -> None:
    first, *rest = seen(faulty, fault, True, tmp_path)[1 - faulty].splitlines()
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
    assert "look at rank 0 first" in seen(0, die, False, tmp_path)[1]


@pytest.mark.parametrize("faulty", [0, 1])
def test_a_rank_that_raises_inside_of_a_step(faulty: int, tmp_path: Path) -> None:
    text = seen(faulty, fail, True, tmp_path)[1 - faulty]
    assert f"look at rank {faulty} first" in text and 'plan entry: pp("pp", microbatches=4)' in text, text


FOUR = {"killed": (die, 1), "stopped": (stop, 2)}


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_all_of_four_ranks_raise(name: str, tmp_path: Path) -> None:
    """Also those that wait for a rank that waits for the one that is gone."""
    fault, faulty = FOUR[name]
    for rank, text in seen(faulty, fault, True, tmp_path, Mesh(pp=4)).items():
        assert f"look at rank {faulty} first" in text, f"rank {rank}: {text}"


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
