"""The op ``shardc_order::after(x, done)``, which orders computations: it returns a copy of ``x``, made when all of
``done`` have been computed.

It orders computations that no value orders. What reads the copy runs after what computes ``done``, in the schedule and
in Inductor, which would fuse them otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardc.custom_ops.op_library import OpLibrary


def _after(x: Tensor, done: Sequence[Tensor]) -> Tensor:
    """Return a copy of ``x``, made when all of ``done`` have been computed."""
    return x.clone(memory_format=torch.contiguous_format)


_library = OpLibrary("shardc_order")
AFTER = _library.define("after(Tensor x, Tensor[] done) -> Tensor", _after, tags=(torch.Tag.pt2_compliant_tag,))
