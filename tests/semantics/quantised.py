"""Wrapper subclasses as libraries write them for quantised weights, and a model with adapters on such weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

aten = torch.ops.aten


def dequantised(x: Any) -> Any:
    return x.dequantize() if isinstance(x, Int8 | Shell) else x


class Int8(Tensor):
    """Rows of int8, each with a scale; ops other than copies are of the values that these stand for."""

    q: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, q: Tensor, scale: Tensor, dtype: torch.dtype, offset: float = 0.0) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, q.shape, dtype=dtype, device=q.device)  # type: ignore[attr-defined]

    def __init__(self, q: Tensor, scale: Tensor, dtype: torch.dtype, offset: float = 0.0) -> None:
        self.q, self.scale, self.offset = q, scale, offset

    @classmethod
    def of(cls, x: Tensor, offset: float = 0.0) -> Any:
        scale = x.abs().amax(-1, keepdim=True) / 127
        return cls((x / scale).round().to(torch.int8), scale, x.dtype, offset)

    def __tensor_flatten__(self) -> Any:
        return ["q", "scale"], {"dtype": self.dtype, "offset": self.offset}

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["q"], inner["scale"], context["dtype"], context["offset"])

    def dequantize(self) -> Tensor:
        return (self.q.to(self.scale.dtype) * self.scale + self.offset).to(self.dtype)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Int8({list(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        x, kwargs = args[0], kwargs or {}
        if func in (aten.detach.default, aten.clone.default, aten.alias.default, aten._to_copy.default):
            return cls(func(x.q), func(x.scale), kwargs.get("dtype") or x.dtype, x.offset)
        return func(*tree_map(dequantised, args), **tree_map(dequantised, kwargs))


class Shell(Tensor):
    """Holds a tensor that is a wrapper itself."""

    inside: Any

    @staticmethod
    def __new__(cls, inside: Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inside.shape, dtype=inside.dtype, device=inside.device)  # type: ignore[attr-defined]

    def __init__(self, inside: Tensor) -> None:
        self.inside = inside

    def __tensor_flatten__(self) -> Any:
        return ["inside"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["inside"])

    def dequantize(self) -> Tensor:
        return self.inside.dequantize()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Shell({self.inside})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten.clone.default, aten.alias.default, aten._to_copy.default):
            return cls(func(args[0].inside, **(kwargs or {})))
        return func(*tree_map(dequantised, args), **tree_map(dequantised, kwargs or {}))


def quantise(module: nn.Linear, kind: Any = Int8.of) -> None:
    """Puts a frozen quantised weight in the place of that of ``module``, and freezes its bias."""
    module.weight = nn.Parameter(kind(module.weight.detach()), requires_grad=False)
    if module.bias is not None:
        module.bias.requires_grad_(False)


class Adapted(nn.Module):
    """A frozen quantised layer, and a small one beside it that is trained."""

    def __init__(self, size: int, out: int) -> None:
        super().__init__()
        self.base = nn.Linear(size, out)
        self.down, self.up = nn.Linear(size, 2, bias=False), nn.Linear(2, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.up(self.down(x))
        return y


def adapted(kind: Any = Int8.of) -> nn.Module:
    """In float64; its adapters are trained, and nothing else."""
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(8, 16), nn.ReLU(), Adapted(16, 6)).double()
    for layer in (model[0], model[2]):
        quantise(layer.base, kind)
    return model


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.rand(8, 8, dtype=torch.float64), torch.rand(8, 6, dtype=torch.float64)


def loss(y: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(y, target)
