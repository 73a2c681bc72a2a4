"""Defines ``shardc_checks::in_range(index, size)``: returns ``index``, and raises IndexError if an entry is below 0 or
>= ``size``.

A rank with a shard of a table would take a wrong id for another rank's. On an accelerator it is a device assertion.
"""

from __future__ import annotations

import torch
from torch import Tensor

_library = torch.library.Library("shardc_checks", "DEF")
_library.define("in_range(Tensor index, SymInt size) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))

IN_RANGE = torch.ops.shardc_checks.in_range.default


def _in_range(index: Tensor, size: int) -> Tensor:
    if index.numel():
        low, high = torch.aminmax(index)
        if index.device.type == "cpu":
            if low < 0 or high >= size:
                wrong = int(low) if low < 0 else int(high)
                raise IndexError(f"index {wrong} is out of range for a dim of {size} elements")
        else:
            torch._assert_async((low >= 0) & (high < size))
    return index.clone()


def _fake(index: Tensor, size: int) -> Tensor:
    return torch.empty_like(index)


_library.impl("in_range", _in_range, "CompositeExplicitAutograd")
torch.library.register_fake("shardc_checks::in_range", _fake, lib=_library)
