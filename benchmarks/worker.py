"""One rank of one row, in a process of its own: steps when it is told to, and says what the step took."""

from __future__ import annotations

import logging
import os
import time
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import meters
from benchmarks.peers.row import Row
from benchmarks.work import PRECISION, Counted, Step, Work

# Ranks may compile at different speeds; a rank that is gone closes its connections and is noticed at once.
PATIENCE = timedelta(minutes=15)


@dataclass(frozen=True)
class Place:
    """Where a rank stands.

    Args:
        rank, ranks: of the world.
        address, port: of the store of the run.
        world: a name for the row's own part of the store.
        trace: print the traceback of what goes wrong.
        device: "cpu", or "cuda", of which each rank has one.
    """

    rank: int
    ranks: int
    address: str
    port: int
    world: str
    trace: bool
    device: str


@dataclass(frozen=True)
class Stepped:
    """What one step of one rank took: seconds, bytes that it sent, collectives that it started, and its loss.

    ``issued`` are the seconds until the step's call returned. On an accelerator that is the host's time.
    """

    seconds: float
    issued: float
    sent: int
    collectives: int
    loss: float


@dataclass(frozen=True)
class Failed:
    """What went wrong, in a line, and when (seconds since the epoch)."""

    text: str
    at: float


def run(row: Row, work: Work, place: Place, orders: Connection) -> None:
    """Follows orders, (what, number), until it is told to end.

    "step": trains on the batch of that number and answers with a `Stepped`; the first step builds the row first, and
    its seconds are of both. "restart peak": counts peak memory from here on. "peak": ends training and answers with
    the peak bytes. A failure is answered with a `Failed`, and then the process ends and waits for no other rank.
    """
    _quiet()
    try:
        _serve(row, work, place, orders)
    except BaseException as error:
        if place.trace:
            traceback.print_exc()
        text = " ".join(f"{type(error).__name__}: {error}".split())
        orders.send(Failed(text, time.time()))
    finally:
        orders.close()
        os._exit(0)


def _serve(row: Row, work: Work, place: Place, orders: Connection) -> None:
    store = dist.PrefixStore(place.world, dist.TCPStore(place.address, place.port, is_master=False))
    device = place.device
    torch.set_float32_matmul_precision(PRECISION[device])
    if device != "cpu":
        torch.get_device_module(device).set_device(place.rank % torch.get_device_module(device).device_count())
    backend = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.ranks, timeout=PATIENCE)
    mesh = init_device_mesh(device, (place.ranks,), mesh_dim_names=("tp" if row.whole_batch else "dp",))
    step: Step | None = None
    while True:
        order, number = orders.recv()
        if order == "step":
            tokens, targets = (x.to(device) for x in _batch(row, work, place, number))
            dist.barrier()
            meters.settle(device)
            sent, collectives = meters.bytes_sent(), meters.collectives_started()
            start = time.perf_counter()
            if step is None:
                step = row.build(work, mesh)
            loss = step(tokens, targets)
            issued = time.perf_counter() - start
            meters.settle(device)
            seconds = time.perf_counter() - start
            sent, collectives = meters.bytes_sent() - sent, meters.collectives_started() - collectives
            if isinstance(step, Counted):
                collectives = step.collectives()
            orders.send(Stepped(seconds, issued, sent, collectives, loss.item()))
        elif order == "restart peak":
            meters.restart_peak(device)
            orders.send(None)
        elif order == "peak":
            peak = meters.peak_memory(device)
            step = None
            orders.send(peak - meters.memory_left(device))
        else:
            return


def _batch(row: Row, work: Work, place: Place, number: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of the step of that number, as the row takes them on this rank."""
    tokens, targets = work.data(number, place.ranks)
    if row.whole_batch:
        return tokens, targets
    mine = slice(place.rank * work.batch, (place.rank + 1) * work.batch)
    return tokens[mine].clone(), targets[mine].clone()


def _quiet() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
