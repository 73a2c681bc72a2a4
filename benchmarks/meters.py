"""What a process can say of itself: memory at its peak, bytes that it sent, collectives that it started.

Of an accelerator, memory is what torch's allocator has given out on it.
"""

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


def settle(device: str) -> None:
    """Waits until the device has done what it was given."""
    if device != "cpu":
        torch.get_device_module(device).synchronize()


def restart_peak(device: str) -> None:
    """Makes `peak_memory` count from here on."""
    if device == "cpu":
        (_PROC / "self/clear_refs").write_text("5")
    else:
        torch.get_device_module(device).reset_peak_memory_stats()


def peak_memory(device: str) -> int:
    """The most bytes on the device since `restart_peak`: of the host, this process's resident ones."""
    if device == "cpu":
        return _field("self/status", "VmHWM") * 1024
    return int(torch.get_device_module(device).max_memory_allocated())


def memory_left(device: str) -> int:
    """Resident bytes when all that can be freed is freed, without those of tensors that are alive still; 0 elsewhere.

    Called when training is over and its objects are dropped, it gives what the interpreter, the libraries and the
    compiler's leavings take: what `peak_memory` is to be counted from.
    """
    if device != "cpu":
        return 0
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
