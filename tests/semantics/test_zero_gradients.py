"""Ops whose gradient is zero everywhere, in front of parameters that are split."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import shardc
from tests.models.alike import trains_alike


class Steps(nn.Module):
    def __init__(self, op: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.op = nn.Linear(8, 8), op

    def forward(self, x: Tensor) -> Tensor:
        return self.op(self.up(x))


@pytest.mark.parametrize("op", [torch.sgn, torch.sign, torch.floor], ids=lambda op: op.__name__)
def test_zero_gradients(op: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    trains_alike(Steps(op), (torch.randn(12, 8),), {"dp": 2}, shardc.ddp("dp"), steps=1)
