"""What around a call decides which program it runs: states of torch that a model is traced under."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Surroundings(NamedTuple):
    """States of torch that have a say in which ops a model is made of.

    Args:
        autocast: the type of each device on which it is on, and its dtype there.
        default_dtype: of tensors that are made without one.
        deterministic: whether algorithms must be, and whether others only warn.
        matmul_precision: of float32.
        attention: for each kind of kernel, whether it may be chosen.
    """

    autocast: tuple[tuple[str, torch.dtype], ...]
    default_dtype: torch.dtype
    deterministic: tuple[bool, bool]
    matmul_precision: str
    attention: tuple[bool, ...]

    @classmethod
    def now(cls, device: torch.device) -> Surroundings:
        """Those of this moment, for a program on ``device``."""
        own = torch._C
        kinds = dict.fromkeys((device.type, "cpu"))
        return cls(
            tuple([(kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)]),
            torch.get_default_dtype(),
            (own._get_deterministic_algorithms(), own._get_deterministic_algorithms_warn_only()),
            own._get_float32_matmul_precision(),
            (own._get_math_sdp_enabled(), own._get_flash_sdp_enabled(), own._get_mem_efficient_sdp_enabled(),
             own._get_cudnn_sdp_enabled()),
        )  # fmt: skip
