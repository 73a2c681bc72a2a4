"""What a process can say of itself: memory at its peak, bytes that it sent, collectives that it started."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_PROC = Path("/proc")


def bytes_sent() -> int:
    """Bytes that this process has written so far, gloo's share of a training step's is all but a few."""
    return _field("self/io", "wchar")


def collectives_started() -> int:
    """Collectives that this process has started so far, over all of its groups; a send and a receive count one each."""
    groups = [group for group in distributed_c10d._world.pg_map if isinstance(group, dist.ProcessGroup)]
    return sum(group._get_sequence_number_for_group() for group in groups)


def restart_peak() -> None:
    """Makes `peak_memory` count from here on."""
    (_PROC / "self/clear_refs").write_text("5")


def peak_memory() -> int:
    """The most resident bytes of this process since `restart_peak`."""
    return _field("self/status", "VmHWM") * 1024


def memory_left() -> int:
    """Resident bytes when all that can be freed is freed, without those of tensors that are alive still.

    Called when training is over and its objects are dropped, it gives what the interpreter, the libraries and the
    compiler's leavings take: what `peak_memory` is to be counted from.
    """
    torch._dynamo.reset()
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor) and type(found) in (torch.Tensor, torch.nn.Parameter):
            if found.device.type == "cpu" and found.layout is torch.strided:
                storage = found.untyped_storage()
                # What a compiler traced with has a size but no memory, and raises when asked where it is.
                with contextlib.suppress(RuntimeError):
                    storages[storage.data_ptr()] = storage.nbytes()
    ctypes.CDLL(None).malloc_trim(0)
    return _field("self/status", "VmRSS") * 1024 - sum(storages.values())


def available() -> int:
    """Bytes of this machine's memory that programs may still take."""
    return _field("meminfo", "MemAvailable") * 1024


def _field(file: str, name: str) -> int:
    """The number after ``name:`` in a file of ``/proc``."""
    for line in (_PROC / file).read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    raise KeyError(f"/proc/{file} has no {name}")
