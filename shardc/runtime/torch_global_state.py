"""Global settings of torch that change what is captured, and so select the program of a call."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.utils._device import DeviceContext

from shardc.errors import InputError


class TorchGlobalState(NamedTuple):
    """Settings of torch that affect which ops a model consists of.

    Args:
        autocast: (device type, dtype) for each device type with autocast on.
        default_dtype: `torch.get_default_dtype`.
        deterministic: deterministic algorithms, and their warn-only mode.
        matmul_precision: float32 matmul precision.
        attention: which kinds of attention kernels are enabled.
        default_device: `torch.set_default_device`; "" if unset.
    """

    autocast: tuple[tuple[str, torch.dtype], ...]
    default_dtype: torch.dtype
    deterministic: tuple[bool, bool]
    matmul_precision: str
    attention: tuple[bool, ...]
    default_device: str

    @classmethod
    def now(cls, device: torch.device) -> TorchGlobalState:
        """Reads the current settings, for a program on ``device``.

        Raises:
            InputError: another TorchFunctionMode is active, which could change what forward computes.
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
