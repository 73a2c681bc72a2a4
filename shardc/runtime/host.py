"""Host memory: asynchronous copies of offloaded tensors from and to it, settings of malloc and garbage collection.

On an accelerator, each direction has its own stream, concurrent with compute and with the other direction:

    to_device   starts after the work already on the compute stream (whose memory the result may reuse);
                its wait blocks the compute stream, not the host
    to_host     starts after its operand is computed, and keeps the operand's memory until it is done;
                its wait blocks the host, which reads the result. If the host does not read it (``read``), the wait
                blocks the compute stream, which may reuse the operand's memory from then on

Host memory is pinned if asked for; otherwise the driver copies through a buffer and the copy overlaps nothing. Host
memory must not change before a copy has read it: the runtime calls `settle` before a step returns.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _register_work

from shardc.ir.comm import HOST

# The largest block that moves glibc's thresholds, DEFAULT_MMAP_THRESHOLD_MAX, less malloc's header.
_BLOCK = (32 << 20) - 8192
_M_TRIM_THRESHOLD = -1  # of malloc.h
_OBJECTS = 20_000  # new objects per collection, instead of Python's 700


@cache
def keep_heap() -> None:
    """Makes glibc keep the memory that a step frees, so that the next step takes no page faults (thousands a step).

    Glibc gives the heap's top back to the system when more than a threshold is free, M_TRIM_THRESHOLD, and takes blocks
    above another, M_MMAP_THRESHOLD, from the system each time. Freeing a block raises the second to its size, up to
    32 MiB (mallopt(3)), so this frees such a block once per process, untouched. Then it turns the first off. Larger
    blocks go back to the system as before. It does nothing if thresholds are set by hand, or under another malloc.
    """
    torch.empty(_BLOCK, dtype=torch.uint8)
    if not any(name in os.environ for name in ("MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")):
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's
        if mallopt is not None:
            mallopt(_M_TRIM_THRESHOLD, -1)


@contextmanager
def cheap_garbage_collection() -> Iterator[None]:
    """Context manager that makes garbage collection cheap: it skips objects that exist already, and runs less often.

    The objects of a compile trigger full collections, which would traverse all of torch: a tenth of the time to the
    first step.
    """
    if gc.get_freeze_count():  # an outer block or the user froze it
        yield
        return
    thresholds = gc.get_threshold()
    gc.freeze()  # objects that exist now are not traversed
    gc.set_threshold(max(thresholds[0], _OBJECTS) if thresholds[0] else 0, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


_library = torch.library.Library("shardc", "IMPL")


@dataclass(frozen=True)
class ParamLocation:
    """The device on which a parameter, its gradient and its optimizer state are between steps.

    Args:
        device: device on which the program runs.
        entry: plan entry that offloads it to the host; "" if none does.
        pinned: whether host memory is pinned; ignored if the device is a CPU.
    """

    device: torch.device
    entry: str = ""
    pinned: bool = True

    @property
    def place(self) -> torch.device:
        """Device of the parameter between steps: the host if it is offloaded, else ``device``."""
        return HOST if self.entry else self.device

    def keep(self, x: Tensor) -> Tensor:
        """Returns ``x`` on the device `place`, pinned if the location requires that. Copies only if needed."""
        placed = x.to(self.place)
        pin = self.entry and self.pinned and self.device.type != "cpu" and not placed.is_pinned()
        return placed.pin_memory() if pin else placed


class Completion(dist.Work):
    """Work handle of an asynchronous operation. The first ``wait()`` calls ``finish``, which waits for the operation,
    then drops ``keep``, the tensors that had to live until then.
    """

    def __init__(self, finish: Callable[[], None], keep: Sequence[Tensor]) -> None:
        super().__init__()
        self._finish: Callable[[], None] | None = finish
        self._keep = keep

    def wait(self, timeout: object = None) -> bool:
        finish, self._finish = self._finish, None  # torch may call this several times
        if finish is not None:
            finish()
        self._keep = ()
        return True


class _Copies(threading.local):
    """Device events of this thread, one for each copy to a device that may still be reading host memory."""

    def __init__(self) -> None:
        self.reading: list[torch.Event] = []


_copies = _Copies()


def _to_device(x: Tensor, device: str) -> Tensor:
    """Starts an asynchronous copy of the host tensor ``x`` to ``device``, and returns the copy. It may be used only
    after a wait for it.
    """
    if device == "cpu":
        return x.clone(memory_format=torch.contiguous_format)
    module: Any = torch.get_device_module(device)
    copied = torch.empty(x.shape, dtype=x.dtype, device=device)
    compute, copies = module.current_stream(), _stream(copied.device, "to_device")
    # Earlier work of the compute stream may still use the memory of the result.
    copies.wait_stream(compute)
    with module.stream(copies):
        copied.copy_(x, non_blocking=True)
        done = copies.record_event()
    # Until the copy is done the host memory must not change: `settle` waits for it.
    _copies.reading.append(done)
    _register_work(copied, Completion(lambda: module.current_stream().wait_event(done), (x, copied)))
    return copied


def _to_host(x: Tensor, read: bool = True) -> Tensor:
    """Starts an asynchronous copy of ``x`` to pinned host memory, and returns the copy. It may be read only after a
    wait for it.

    Args:
        read: the host reads the result; else only copies to the device do, which start after the compute stream's work.
    """
    if x.device.type == "cpu":
        return x.clone(memory_format=torch.contiguous_format)
    module: Any = torch.get_device_module(x.device)
    compute, copies = module.current_stream(), _stream(x.device, "to_host")
    copied = torch.empty(x.shape, dtype=x.dtype, device=HOST, pin_memory=True)
    copies.wait_stream(compute)  # which computes `x`
    with module.stream(copies):
        copied.copy_(x, non_blocking=True)
        done = copies.record_event()
    if read:
        # Nothing else keeps `x` until the copy is done: its memory is reused only after that.
        x.record_stream(copies)
        _register_work(copied, Completion(done.synchronize, (copied,)))
    else:
        _register_work(copied, Completion(lambda: module.current_stream().wait_event(done), (x, copied)))
    return copied


def settle() -> None:
    """Waits until all copies to a device that this thread started have read their host memory."""
    while _copies.reading:
        _copies.reading.pop().synchronize()


_streams: dict[tuple[torch.device, str], torch.Stream] = {}


def _stream(device: torch.device, direction: str) -> torch.Stream:
    """Returns the stream of an accelerator for copies in one direction, "to_device" or "to_host"."""
    key = device, direction
    if key not in _streams:
        module: Any = torch.get_device_module(device)
        _streams[key] = module.Stream(device)
    return _streams[key]


_library.impl("to_device", _to_device, "CompositeExplicitAutograd")
_library.impl("to_host", _to_host, "CompositeExplicitAutograd")
