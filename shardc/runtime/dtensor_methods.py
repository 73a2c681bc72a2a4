"""Methods and attributes of DTensors that are no ops: values, text, copies and memory.

They replace torch's on the class, and change DTensors on meshes of compiled modules only.
"""

from __future__ import annotations

import sys
import warnings
from copy import deepcopy
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardc.errors import LayoutError, ShardcWarning
from shardc.runtime.gathered import gather, settle

meshes: WeakSet[DeviceMesh] = WeakSet()  # of compiled modules


def _is_ours(x: DTensor) -> bool:
    return x.device_mesh in meshes


def _tolist(self: DTensor) -> Any:
    return gather(self).tolist() if _is_ours(self) else Tensor.tolist(self)


def _numpy(self: DTensor, *, force: bool = False) -> Any:
    if not _is_ours(self):
        return Tensor.numpy(self, force=force)
    torch.empty(0, requires_grad=self.requires_grad).numpy(force=force)  # raises what torch does
    detached: Any = self.detach()
    out = gather(detached).cpu().numpy().copy()
    out.flags.writeable = False  # a write to it would not reach the shards
    return out


def _format(self: DTensor, spec: str) -> str:
    return format(self.item(), spec) if self.dim() == 0 and _is_ours(self) else Tensor.__format__(self, spec)


def _str(self: DTensor) -> str:
    """Text of a scalar's value; for other tensors the `repr` of this rank's shard, without communication."""
    if not _is_ours(self):
        return repr(self)
    detached: Any = self.detach()
    return str(gather(detached)) if self.dim() == 0 else repr(settle(detached))


def _deepcopy(self: DTensor, memo: dict[int, Any]) -> Any:
    """Copies a leaf into its own memory, with the same layout; torch's fails on DTensors."""
    if id(self) in memo:
        return memo[id(self)]
    if not self.is_leaf or not _is_ours(self):
        return _torch_deepcopy(self, memo)
    out: Any = DTensor(self._local_tensor.detach().clone(), self._spec, requires_grad=self.requires_grad)
    if isinstance(self, nn.Parameter):
        out = nn.Parameter(out.detach(), requires_grad=self.requires_grad)
    memo[id(self)] = out
    if self.grad is not None:
        out.grad = deepcopy(self.grad, memo)
    return out


def _set_data(self: DTensor, value: Tensor) -> None:
    """Copies ``value``, a DTensor or a plain tensor that is the same on all ranks, to the shards."""
    if not _is_ours(self) or not isinstance(value, Tensor):
        return _torch_data.__set__(self, value)
    local = value._local_tensor if isinstance(value, DTensor) else value
    if local is self._local_tensor:
        return
    for name in ("shape", "dtype", "device"):
        old, new = getattr(self, name), getattr(value, name)
        if old != new:
            raise LayoutError(
                f".data = would make a DTensor of {name} {old} one of {name} {new}; the compiled module takes no such",
                fix=f"assign a tensor of {name} {old}, or change the model and compile it again",
            )
    if torch._C._storage_Use_Count(local.untyped_storage()._cdata) > 2:  # its own, and the one asked for here
        warnings.warn(
            ".data = copied values to a sharded parameter, as it cannot use the memory of another tensor: what is "
            "later written to that tensor does not reach the parameter",
            ShardcWarning,
            stacklevel=2,
        )
    with torch.no_grad():
        self.detach().copy_(value)


def _memory(name: str, fix: str) -> Any:
    """Returns a method in place of ``name`` that refuses to expose memory, except to torch's own code."""
    torchs = getattr(Tensor, name)

    def method(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if not _is_ours(self) or (name == "data_ptr" and caller.partition(".")[0] == "torch"):
            return torchs(self, *args, **kwargs)
        raise LayoutError(f"{name} of a sharded parameter or gradient: no memory of this rank has all of it", fix=fix)

    return method


_PART = "use this rank's part, p.to_local(), or a copy of all of it, p.full_tensor()"
_torch_deepcopy = DTensor.__deepcopy__
_torch_data: Any = Tensor.data
METHODS: dict[str, Any] = {
    "tolist": _tolist,
    "numpy": _numpy,
    "__format__": _format,
    "__str__": _str,
    "__deepcopy__": _deepcopy,
    "data": property(_torch_data.__get__, _set_data),
    "data_ptr": _memory("data_ptr", f"{_PART}; to tell parameters apart, use id(p)"),
    **{name: _memory(name, _PART) for name in ("storage", "share_memory_", "__dlpack__")},
}
