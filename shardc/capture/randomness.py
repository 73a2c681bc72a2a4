"""Random ops as draws that do not depend on the mesh (`shardc.ir.random`) and what is made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from math import log1p, pi
from typing import Any

import torch
from torch import Tensor

import shardc.ir.random  # noqa: F401  (defines the ops)

aten = torch.ops.aten
Shape = Sequence[int]


def random_decompositions() -> dict[Any, Callable[..., Any]]:
    """op overload -> decomposition, for one trace: each draw of it has a stream of its own."""
    draws = _Draws()
    return {
        aten.native_dropout.default: draws.native_dropout,
        aten.bernoulli.default: lambda p: draws.bernoulli(p, p),
        aten.bernoulli.p: draws.bernoulli,
        aten.bernoulli.Tensor: draws.bernoulli,
        aten.rand.default: lambda size, **how: draws.uniform(size, **_made(how)),
        aten.rand_like.default: lambda x, **how: draws.uniform(x.shape, **_made(how, x)),
        aten.uniform.default: lambda x, low=0.0, high=1.0: draws.between(x, low, high),
        aten.randn.default: lambda size, **how: draws.normal(size, **_made(how)),
        aten.randn_like.default: lambda x, **how: draws.normal(x.shape, **_made(how, x)),
        aten.normal_functional.default: lambda x, mean=0.0, std=1.0: draws.gaussian(x, mean, std),
        aten.normal.Tensor_float: lambda mean, std=1.0: draws.gaussian(mean, mean, std),
        aten.normal.float_Tensor: lambda mean, std: draws.gaussian(std, mean, std),
        aten.normal.Tensor_Tensor: lambda mean, std: draws.gaussian(aten.add.Tensor(mean, std), mean, std),
        aten.log_normal.default: lambda x, mean=1.0, std=2.0: aten.exp.default(draws.gaussian(x, mean, std)),
        aten.randint.default: lambda high, size, **how: draws.integers(0, high, size, **how),
        aten.randint.low: lambda low, high, size, **how: draws.integers(low, high, size, **how),
        aten.randint_like.default: lambda x, high, **how: draws.integers(0, high, x.shape, **_made(how, x)),
        aten.randint_like.low_dtype: lambda x, low, high, **how: draws.integers(low, high, x.shape, **_made(how, x)),
        aten.randperm.default: draws.permutation,
        aten.exponential.default: draws.exponential,
        aten.geometric.default: draws.geometric,
        aten.cauchy.default: draws.cauchy,
    }


def _made(how: dict[str, Any], like: Tensor | None = None) -> dict[str, Any]:
    """The dtype and device that a factory was asked for."""
    dtype = how.get("dtype") or (torch.get_default_dtype() if like is None else like.dtype)
    device = how.get("device") or (torch.device("cpu") if like is None else like.device)
    return {"dtype": dtype, "device": device}


class _Draws:
    """The random ops of one trace."""

    def __init__(self) -> None:
        self._streams = count()

    def uniform(self, size: Shape, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        key = torch.ops.shardc_random.key.default(device=device)
        return torch.ops.shardc_random.uniform.default(key, next(self._streams), list(size), dtype=dtype, device=device)

    def _exact(self, x: Tensor) -> Tensor:
        """Uniform numbers shaped like ``x``, fine enough for a comparison or a logarithm whatever its dtype."""
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        return self.uniform(x.shape, dtype=dtype, device=x.device)

    def between(self, x: Tensor, low: float, high: float) -> Tensor:
        unit = self.uniform(x.shape, dtype=x.dtype, device=x.device)
        return aten.add.Scalar(aten.mul.Scalar(unit, high - low), low)

    def bernoulli(self, x: Tensor, p: Tensor | float) -> Tensor:
        """1 with probability ``p``, else 0, in the dtype of ``x``."""
        less = aten.lt.Tensor if isinstance(p, Tensor) else aten.lt.Scalar
        return aten._to_copy.default(less(self._exact(x), p), dtype=x.dtype)

    def native_dropout(self, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
        if train is False or p == 0:
            return aten.clone.default(x), aten.full.default(x.shape, True, dtype=torch.bool, device=x.device)
        mask = aten.ge.Scalar(self._exact(x), p)
        scale = 0.0 if p == 1 else 1.0 / (1.0 - p)
        zero = aten.full.default([], 0, dtype=x.dtype, device=x.device)
        return aten.where.self(mask, aten.mul.Tensor(x, scale), zero), mask

    def normal(self, size: Shape, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The cosine branch of Box and Muller."""
        fine = torch.float64 if dtype == torch.float64 else torch.float32
        radius, angle = (self.uniform(size, dtype=fine, device=device) for _ in range(2))
        length = aten.sqrt.default(aten.mul.Scalar(aten.log1p.default(aten.neg.default(radius)), -2))
        drawn = aten.mul.Tensor(length, aten.cos.default(aten.mul.Scalar(angle, 2 * pi)))
        return drawn if fine == dtype else aten._to_copy.default(drawn, dtype=dtype)

    def gaussian(self, like: Tensor, mean: Tensor | float, std: Tensor | float) -> Tensor:
        drawn = self.normal(like.shape, dtype=like.dtype, device=like.device)
        return aten.add.Tensor(aten.mul.Tensor(drawn, std), mean)

    def integers(self, low: int, high: int, size: Shape, *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
        """From float64, whose 53 bits leave no number out of a range that is shorter."""
        unit = self.uniform(size, dtype=torch.float64, device=device or torch.device("cpu"))
        drawn = aten.add.Scalar(aten.floor.default(aten.mul.Scalar(unit, high - low)), low)
        return aten._to_copy.default(drawn, dtype=dtype or torch.int64)

    def permutation(self, n: int, *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
        unit = self.uniform([n], dtype=torch.float64, device=device or torch.device("cpu"))
        order = aten.sort.default(unit)[1]
        return order if dtype in (None, torch.int64) else aten._to_copy.default(order, dtype=dtype)

    def exponential(self, x: Tensor, rate: float = 1.0) -> Tensor:
        drawn = aten.div.Scalar(aten.log1p.default(aten.neg.default(self._exact(x))), -rate)
        return aten._to_copy.default(drawn, dtype=x.dtype)

    def geometric(self, x: Tensor, p: float) -> Tensor:
        """How many trials until the first success."""
        trials = aten.div.Scalar(aten.log1p.default(aten.neg.default(self._exact(x))), log1p(-p))
        return aten._to_copy.default(aten.add.Scalar(aten.floor.default(trials), 1), dtype=x.dtype)

    def cauchy(self, x: Tensor, median: float = 0.0, sigma: float = 1.0) -> Tensor:
        turned = aten.tan.default(aten.mul.Scalar(aten.sub.Scalar(self._exact(x), 0.5), pi))
        return aten._to_copy.default(aten.add.Scalar(aten.mul.Scalar(turned, sigma), median), dtype=x.dtype)
