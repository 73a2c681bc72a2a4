"""Ranks of a pipeline that raise, die, stop or pass other inputs: the others raise in time and name the stage."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
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
PIPELINE = shardc.pp("pp", microbatches=4)
PLANS = {
    "pp": PIPELINE,
    "fsdp": shardc.fsdp("dp") | PIPELINE,
    "ddp": shardc.ddp("dp") | PIPELINE,
    "tp": shardc.tp("tp", colwise=["blocks.*.0"], rowwise=["blocks.*.2"]) | PIPELINE,
}


def die() -> None:
    os._exit(3)


def stall() -> None:
    time.sleep(600)


def fail() -> None:
    raise ValueError("an error of the user's")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@dataclass(frozen=True)
class Trial:
    """Rank ``faulty`` has its fault in the fifth step, at its second receive or (not ``inside``) in front of it.

    Attributes:
        plan: of `PLANS`.
        keeper: the rank that keeps the store; by default the process of the test does, as a launcher.
    """

    faulty: int
    fault: Callable[[], None]
    inside: bool = True
    mesh: Mesh = PP2
    plan: str = "pp"
    keeper: int | None = None


def step(rank: int, trial: Trial, folder: str, port: int) -> None:
    """Runs four steps and the one with the fault. The others write what they see. Ranks compare inputs before."""
    torch.set_num_threads(1)
    mesh = trial.mesh
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == trial.keeper, wait_for_workers=False)
    store.set_timeout(timedelta(seconds=(4 if trial.inside else 2) * TIMEOUT))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=mesh.ranks, timeout=timedelta(seconds=TIMEOUT))
    case = blocks()
    plan, args = PLANS[trial.plan], case.args
    module = shardc.compile(case.model, device_mesh(mesh), plan, loss=case.loss, backend="eager")
    for _ in range(4):
        module(*args).backward()
    receive, received = StageLink.receive, []

    def faulted(self: StageLink, message: object, before: int) -> object:
        received.append(message)
        if len(received) == 2:
            trial.fault()
        return receive(self, message, before)

    if rank == trial.faulty:
        if trial.inside:
            StageLink.receive = faulted
        else:
            trial.fault()
    begin = time.monotonic()
    try:
        module(*args).backward()
    except shardc.ShardcError as error:
        Path(folder, f"seen{rank}").write_text(str(error))
        assert time.monotonic() - begin < (2 if trial.inside else 3) * TIMEOUT, "it was told late"
        while len([*Path(folder).glob("seen*")]) < mesh.ranks - 1 and time.monotonic() - begin < 3 * TIMEOUT:
            time.sleep(0.1)  # others still wait for what it has sent, or for itself
        os._exit(0)
    os._exit(4)


def seen(trial: Trial, folder: Path) -> dict[int, str]:
    """What each other rank raised; all are gone afterwards."""
    context, count = mp.get_context("forkserver"), trial.mesh.ranks
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    if trial.keeper is not None:
        del store  # it is free now
    ranks = [context.Process(target=step, args=(rank, trial, str(folder), port)) for rank in range(count)]
    others = [rank for rank in range(count) if rank != trial.faulty]
    try:
        for process in ranks:
            process.start()
        for rank in others:
            ranks[rank].join(90 if count == 2 else 240)
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
    first, *rest = seen(Trial(faulty, fault), tmp_path)[1 - faulty].splitlines()
    assert re.search(SAYS[fault], first), first
    where = rf"rank {1 - faulty} \(pp={1 - faulty}\) .* rank {faulty} \(pp={faulty}\) when it failed: "
    assert re.match(where, first), first
    assert rest == [
        '  plan entry: pp("pp", microbatches=4)',
        f"  fix: look at rank {faulty} (pp={faulty}) first: it died, raised or came too late; then restart all ranks "
        "from the last checkpoint",
    ]


@pytest.mark.slow
def test_a_rank_that_is_gone_before_a_step(tmp_path: Path) -> None:
    """The other one waits for it in the store, to compare inputs."""
    assert "look at rank 0 (pp=0) first" in seen(Trial(0, die, inside=False), tmp_path)[1]


@pytest.mark.parametrize("faulty", [0, 1])
def test_a_rank_that_raises_inside_of_a_step(faulty: int, tmp_path: Path) -> None:
    text = seen(Trial(faulty, fail), tmp_path)[1 - faulty]
    assert f"look at rank {faulty} (pp={faulty}) first" in text and 'plan entry: pp("pp", microbatches=4)' in text, text


PP4, DP, TP = Mesh(pp=4), Mesh(dp=2, pp=2), Mesh(pp=2, tp=2)
FOUR = {
    "killed": Trial(1, die, mesh=PP4),
    "stopped": Trial(2, stop, mesh=PP4),
    "fsdp, first killed": Trial(0, kill, mesh=DP, plan="fsdp"),
    "fsdp, last killed": Trial(3, kill, mesh=DP, plan="fsdp"),
    "fsdp, last stopped": Trial(3, stop, mesh=DP, plan="fsdp"),
    "fsdp, last busy": Trial(3, stall, mesh=DP, plan="fsdp"),
    "ddp, first killed": Trial(0, kill, mesh=DP, plan="ddp"),
    "ddp, first stopped": Trial(0, stop, mesh=DP, plan="ddp"),
    "tp, first stopped": Trial(0, stop, mesh=TP, plan="tp"),
    "tp, last killed": Trial(3, kill, mesh=TP, plan="tp"),
}


def all_raise(trial: Trial, folder: Path) -> None:
    """Also those that wait for a rank that waits for the one that is gone."""
    at = trial.mesh.index("pp", trial.faulty)
    for rank, text in seen(trial, folder).items():
        assert f"look at rank {trial.faulty} (pp={at}) first" in text, f"rank {rank}: {text}"


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_all_of_four_ranks_raise(name: str, tmp_path: Path) -> None:
    all_raise(FOUR[name], tmp_path)


@pytest.mark.medium
def test_all_raise_if_one_of_several_pipelines_is_stopped(tmp_path: Path) -> None:
    """Some wait in collectives, and some for messages. The groups of the mesh are made with a timeout of 30 minutes."""
    all_raise(Trial(0, stop, mesh=DP, plan="fsdp"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [kill, stop])
def test_all_raise_if_the_rank_that_keeps_the_store_is_gone(fault: Callable[[], None], tmp_path: Path) -> None:
    for text in seen(Trial(0, fault, mesh=DP, plan="fsdp", keeper=0), tmp_path).values():
        assert "the process that keeps the store (rank 0 (pp=0), or torchrun)" in text


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
