"""The op ``shardc_order::after(x, done)``, which orders computations: it returns a copy of ``x``, made when all of
``done`` have been computed.

It orders computations that no value orders. What reads the copy runs after what computes ``done``, in the schedule and
in Inductor, which would fuse them otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_library = torch.library.Library("shardc_order", "DEF")
_library.define("after(Tensor x, Tensor[] done) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))

AFTER = torch.ops.shardc_order.after.default


def _after(x: Tensor, done: Sequence[Tensor]) -> Tensor:
    """Return a copy of ``x``, made when all of ``done`` have been computed."""
    return x.clone(memory_format=torch.contiguous_format)


def _fake(x: Tensor, done: Sequence[Tensor]) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_library.impl("after", _after, "CompositeExplicitAutograd")
torch.library.register_fake("shardc_order::after", _fake, lib=_library)
