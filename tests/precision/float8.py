"""Linear layers in float8 on one device, written without shardc: what compiled modules have to compute."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
Quantised = tuple[Tensor, Tensor]  # numbers in float8, and what one of them counts


def quantised(x: Tensor, dim: int | None, dtype: torch.dtype) -> Quantised:
    """``x`` in float8, by the largest value of all of it, or along ``dim`` with a power of two."""
    top = torch.finfo(dtype).max
    largest = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = top / largest.float().clamp(min=1e-12)
    if dim is not None:
        scale = torch.ldexp(torch.ones_like(scale), torch.frexp(scale).exponent - 1)
    return (x.float() * scale).clamp(-top, top).to(dtype), 1 / scale


def in_blocks(x: Tensor) -> Tensor:
    """The numbers that ``x`` has in MX: in float8, with a power of two for each 32 along the last dim."""
    parts = x.float().unflatten(-1, (-1, 32))
    exponent = torch.frexp(x.abs().unflatten(-1, (-1, 32)).amax(-1, keepdim=True).float()).exponent - 1 - 8
    scale = torch.ldexp(torch.ones_like(parts[..., :1]), exponent.clamp(min=-127))
    return ((parts / scale).clamp(-448, 448).to(E4).to(scale) * scale).flatten(-2)


def product(a: Tensor, b: Tensor, scaling: str, of_a: torch.dtype = E4) -> Tensor:
    if scaling == "mxfp8":
        return (in_blocks(a).to(a) @ in_blocks(b.t()).to(a).t()).to(a)
    rows = scaling == "rowwise"
    (qa, ua), (qb, ub) = quantised(a, 1 if rows else None, of_a), quantised(b, 0 if rows else None, E4)
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    return (qa.to(wide) @ qb.to(wide) * ua * ub).to(a.dtype)


class Scaled(torch.autograd.Function):
    """``x @ weight.T`` with every product in float8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scaling: str) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        ctx.scaling = scaling
        return product(x, weight.t(), scaling)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        of_grad = E5 if ctx.scaling == "tensorwise" else E4
        return product(grad, weight, ctx.scaling, of_grad), product(grad.t(), x, ctx.scaling, of_grad), None


class Float8Linear(nn.Linear):
    scaling = "tensorwise"

    def forward(self, x: Tensor) -> Tensor:
        y = Scaled.apply(x.flatten(0, -2), self.weight.to(x.dtype), self.scaling).unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias


def on_one_device(model: nn.Module, scaling: str, where: Callable[[str], bool] = lambda name: True) -> nn.Module:
    """A copy of ``model`` whose linear layers are in float8, those that ``where`` names."""
    model = copy.deepcopy(model)
    for name, module in model.named_modules():
        if type(module) is nn.Linear and where(name):
            module.__class__ = Float8Linear
            module.scaling = scaling  # type: ignore[assignment]
    return model


class Block(nn.Module):
    def __init__(self, size: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.gate, self.up = nn.Linear(size, hidden, bias=False), nn.Linear(size, hidden)
        self.down = nn.Linear(hidden, size)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Net(nn.Module):
    """Blocks of which two layers share an input, and a head that plans leave as it is."""

    def __init__(self, size: int = 48, hidden: int = 96, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(size, hidden) for _ in range(layers))
        self.head = nn.Linear(size, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def case(size: int = 48, hidden: int = 96, rows: int = 12) -> tuple[Net, Tensor, Tensor]:
    """A model in float64, and its batch."""
    torch.manual_seed(0)
    return Net(size, hidden).double(), torch.randn(rows, 4, size).double(), torch.randn(rows, 4, 5).double()
