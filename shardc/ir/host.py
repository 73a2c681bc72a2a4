"""Ops of local graphs that copy between host and device memory.

    to_device(x, device)   copies host memory to this rank's device of that type
    to_host(x)             copies device memory to the host

Both start a copy, which ``wait_tensor`` waits for, as for a collective. They are implemented in
`shardc.runtime.host`. If the device is a CPU, both are real copies within the same memory.
"""

from __future__ import annotations

import torch
from torch import fx

_library = torch.library.Library("shardc", "FRAGMENT")
_library.define("to_device(Tensor x, str device) -> Tensor")
_library.define("to_host(Tensor x) -> Tensor")

HOST = torch.device("cpu")
MOVES = {torch.ops.shardc.to_device.default: "to_device", torch.ops.shardc.to_host.default: "to_host"}
NAMES = tuple(MOVES.values())


def _to_device_fake(x: torch.Tensor, device: str) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=device)


def _to_host_fake(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=HOST)


torch.library.register_fake("shardc::to_device", _to_device_fake)
torch.library.register_fake("shardc::to_host", _to_host_fake)


def move_kind(node: fx.Node) -> str | None:
    """Return ``to_device`` or ``to_host`` if ``node`` starts such a copy, else None."""
    return MOVES.get(node.target) if node.op == "call_function" else None
