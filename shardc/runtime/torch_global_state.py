"""Global state of torch that a model is traced under, and that selects the program of a call."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.utils._device import DeviceContext

from shardc.errors import InputError


class TorchGlobalState(NamedTuple):
    """States of torch that have a say in which ops a model is made of.

    Args:
        autocast: the type of each device on which it is on, and its dtype there.
        default_dtype: of tensors that are made without one.
        deterministic: whether algorithms must be, and whether others only warn.
        matmul_precision: of float32.
        attention: for each kind of kernel, whether it may be chosen.
        default_device: of tensors that are made without one; empty where it is torch's.
    """

    autocast: tuple[tuple[str, torch.dtype], ...]
    default_dtype: torch.dtype
    deterministic: tuple[bool, bool]
    matmul_precision: str
    attention: tuple[bool, ...]
    default_device: str

    @classmethod
    def now(cls, device: torch.device) -> TorchGlobalState:
        """Reads the current state, for a program on ``device``.

        Raises:
            InputError: a mode is active that sees each function of torch, and may compute something else.
        """
        flags = torch._C
        kinds = dict.fromkeys((device.type, "cpu"))
        return cls(
            tuple([(kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)]),
            torch.get_default_dtype(),
            (flags._get_deterministic_algorithms(), flags._get_deterministic_algorithms_warn_only()),
            flags._get_float32_matmul_precision(),
            (flags._get_math_sdp_enabled(), flags._get_flash_sdp_enabled(), flags._get_mem_efficient_sdp_enabled(),
             flags._get_cudnn_sdp_enabled()),
            _default_device() if flags._len_torch_function_stack() else "",
        )  # fmt: skip


def _default_device() -> str:
    modes = [torch._C._get_function_stack_at(at) for at in range(torch._C._len_torch_function_stack())]
    for mode in modes:
        if not isinstance(mode, DeviceContext):
            raise InputError(
                f"a compiled module is called under {type(mode).__qualname__}, a TorchFunctionMode: it would see none "
                "of the functions that forward calls",
                fix="leave the mode before the call, or enter it inside of forward",
            )
    return str(modes[-1].device)
