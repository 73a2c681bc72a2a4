"""Offloaded parameters: their host memory, and copies between host and device (`shardc.ir.comm`).

On an accelerator, each direction has its own stream, concurrent with compute and with the other direction:

    to_device   starts after the work already on the compute stream (whose memory the result may reuse);
                its wait blocks the compute stream, not the host
    to_host     starts after its operand is computed, and keeps the operand's memory until it is done;
                its wait blocks the host, which reads the result

Host memory is pinned if asked for; otherwise the driver copies through a buffer and the copy overlaps nothing. Host
memory must not change before a copy has read it: the runtime calls `settle` before a step returns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _register_work

from shardc.ir.comm import HOST

_library = torch.library.Library("shardc", "IMPL")


@dataclass(frozen=True)
class ParamLocation:
    """Location of a parameter, its gradient and its optimizer state between steps.

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
        """Device of its memory."""
        return HOST if self.entry else self.device

    def keep(self, x: Tensor) -> Tensor:
        """Moves ``x`` to this memory, unless it is in it."""
        placed = x.to(self.place)
        pin = self.entry and self.pinned and self.device.type != "cpu" and not placed.is_pinned()
        return placed.pin_memory() if pin else placed


class _Copy(dist.Work):
    """An asynchronous copy: the first wait calls ``arrive``; ``keep`` is alive until then."""

    def __init__(self, arrive: Callable[[], None], keep: tuple[Tensor, ...]) -> None:
        super().__init__()
        self._arrive: Callable[[], None] | None = arrive
        self._keep = keep

    def wait(self, timeout: Any = None) -> bool:
        arrive, self._arrive = self._arrive, None
        if arrive is not None:
            arrive()
        self._keep = ()
        return True


def _to_device(x: Tensor, device: str) -> Tensor:
    if device == "cpu":
        return x.clone(memory_format=torch.contiguous_format)
    module: Any = torch.get_device_module(device)
    copied = torch.empty(x.shape, dtype=x.dtype, device=device)
    compute, copies = module.current_stream(), _stream(copied.device, "to_device")
    copies.wait_stream(compute)
    with module.stream(copies):
        copied.copy_(x, non_blocking=True)
        done = copies.record_event()
    _reading().append(done)
    _register_work(copied, _Copy(lambda: module.current_stream().wait_event(done), (x, copied)))
    return copied


def _to_host(x: Tensor) -> Tensor:
    if x.device.type == "cpu":
        return x.clone(memory_format=torch.contiguous_format)
    module: Any = torch.get_device_module(x.device)
    compute, copies = module.current_stream(), _stream(x.device, "to_host")
    copied = torch.empty(x.shape, dtype=x.dtype, device=HOST, pin_memory=True)
    copies.wait_stream(compute)
    with module.stream(copies):
        copied.copy_(x, non_blocking=True)
        done = copies.record_event()
    x.record_stream(copies)
    _register_work(copied, _Copy(done.synchronize, (copied,)))
    return copied


def settle() -> None:
    """Waits until all copies that this thread started have read their host memory."""
    reading = _reading()
    while reading:
        reading.pop().synchronize()


_local = threading.local()


def _reading() -> list[Any]:
    """Returns this thread's events of copies that may still read host memory."""
    if not hasattr(_local, "reading"):
        _local.reading = []
    return _local.reading


_streams: dict[tuple[torch.device, str], Any] = {}


def _stream(device: torch.device, direction: str) -> Any:
    """Returns the stream for copies in one direction."""
    key = device, direction
    if key not in _streams:
        module: Any = torch.get_device_module(device)
        _streams[key] = module.Stream(device)
    return _streams[key]


_library.impl("to_device", _to_device, "CompositeExplicitAutograd")
_library.impl("to_host", _to_host, "CompositeExplicitAutograd")
