"""Decomposes random ops into draws that do not depend on the mesh (`shardc.custom_ops.random`), and refuses all other
random ops.

Other random ops would draw on each rank separately: `refuse_draws`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from math import log1p, pi
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch._dynamo.exc import Unsupported
from torch._dynamo.variables import misc, user_defined
from torch._ops import OpOverload

import shardc.custom_ops.random  # noqa: F401  (defines the ops)
from shardc.capture.capture_errors import line_of
from shardc.errors import CaptureError
from shardc.ir.comm_volume import arguments_of
from shardc.ir.op_traits import draws

aten = torch.ops.aten
Shape = Sequence[int]


@contextmanager
def without_random_numbers() -> Iterator[None]:
    """Context manager in which Dynamo refuses calls of Python's ``random``, whose results would become constants of a
    program.
    """

    def refuse(tx: object, fn: object, *_: object) -> NoReturn:
        raise Unsupported(f"a random number of Python's, {getattr(fn, '__name__', fn)}")

    with patch.object(user_defined, "call_random_fn", refuse), patch.object(misc, "call_random_fn", refuse):
        yield


def random_decompositions() -> dict[OpOverload, Callable[..., object]]:
    """Return op overload -> decomposition of the random ops, for one trace. Each draw in the trace has a stream (random
    sequence) of its own.
    """
    # ``how`` has the keyword arguments of a factory op: dtype, device, layout and so on.
    draws = _Draws()
    return {
        aten.native_dropout.default: draws.native_dropout,
        aten.bernoulli.default: lambda p: draws.bernoulli(p, p),
        aten.bernoulli.p: draws.bernoulli,
        aten.bernoulli.Tensor: draws.bernoulli,
        aten.rand.default: lambda size, **how: draws.uniform(size, **_factory(how)),
        aten.rand_like.default: lambda x, **how: draws.uniform(x.shape, **_factory(how, x)),
        aten.uniform.default: lambda x, low=0.0, high=1.0: draws.between(x, low, high),
        aten.randn.default: lambda size, **how: draws.normal(size, **_factory(how)),
        aten.randn_like.default: lambda x, **how: draws.normal(x.shape, **_factory(how, x)),
        aten.normal_functional.default: lambda x, mean=0.0, std=1.0: draws.gaussian(x, mean, std),
        aten.normal.Tensor_float: lambda mean, std=1.0: draws.gaussian(mean, mean, std),
        aten.normal.float_Tensor: lambda mean, std: draws.gaussian(std, mean, std),
        aten.normal.Tensor_Tensor: lambda mean, std: draws.gaussian(aten.add.Tensor(mean, std), mean, std),
        aten.log_normal.default: lambda x, mean=1.0, std=2.0: aten.exp.default(draws.gaussian(x, mean, std)),
        aten.randint.default: lambda high, size, **how: draws.integers(0, high, size, **how),
        aten.randint.low: lambda low, high, size, **how: draws.integers(low, high, size, **how),
        aten.randint_like.default: lambda x, high, **how: draws.integers(0, high, x.shape, **_factory(how, x)),
        aten.randint_like.low_dtype: lambda x, low, high, **how: draws.integers(low, high, x.shape, **_factory(how, x)),
        aten.randperm.default: draws.permutation,
        aten.exponential.default: draws.exponential,
        aten.geometric.default: draws.geometric,
        aten.cauchy.default: draws.cauchy,
        aten.normal.float_float: lambda mean, std, size, **how: draws.spread(mean, std, size, **_factory(how)),
        aten.multinomial.default: draws.multinomial,
        aten.rrelu_with_noise_functional.default: draws.rrelu,
        aten.rrelu_with_noise_backward.default: _rrelu_backward,
    }


def _factory(how: Mapping[str, Any], like: Tensor | None = None) -> dict[str, Any]:
    """Return ``dtype`` and ``device`` as keyword arguments of an op that makes a tensor: from ``how`` or, where it has
    none, from ``like``, or torch's defaults.
    """
    dtype = how.get("dtype") or (torch.get_default_dtype() if like is None else like.dtype)
    device = how.get("device") or (torch.device("cpu") if like is None else like.device)
    return {"dtype": dtype, "device": device}


def _draw_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which to draw numbers for a result in ``dtype``: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def refuse_draws(graph: fx.Graph) -> None:
    """Raises CaptureError if an op of the graph draws from torch's generators, whose numbers differ from rank to
    rank.
    """
    for node in graph.nodes:
        if not draws(node.target) or node.target.namespace == "shardc_random":
            continue
        arguments = arguments_of(node)
        dropout_probabilities = [arguments[name] for name in ("dropout_p", "dropout") if name in arguments]
        only_for_dropout = "attention" in str(node.target) or "_rnn" in str(node.target)
        if only_for_dropout and not any(dropout_probabilities):
            continue
        raise CaptureError(
            f"{node.target} draws random numbers that would differ from rank to rank",
            source=line_of(node) or None,
            fix="write it with draws that do not depend on the mesh (rand, randn, bernoulli, dropout, multinomial, "
            "randint without a generator of its own), or pass the numbers in",
        )


def _rrelu_backward(
    grad: Tensor, x: Tensor, noise: Tensor, lower: float, upper: float, training: bool, self_is_result: bool
) -> Tensor:
    """Return the gradient of ``x`` in ``rrelu(x)``. In training, ``noise`` has the scales that the forward drew."""
    if training and upper - lower > 1e-6:
        return aten.mul.Tensor(grad, noise)
    return aten.where.self(aten.gt.Scalar(x, 0), grad, aten.mul.Tensor(grad, (lower + upper) / 2))


class _Draws:
    """Decompositions of random ops in one trace. Each draw has a number of its own, its stream, so that it is
    independent of the others.
    """

    def __init__(self) -> None:
        self._streams = count()

    def uniform(self, size: Shape, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Draws uniform numbers from 0 to 1. Each call uses a stream (random sequence) of its own."""
        key = torch.ops.shardc_random.key.default(device=device)
        return torch.ops.shardc_random.uniform.default(key, next(self._streams), list(size), dtype=dtype, device=device)

    def _uniform_like(self, x: Tensor) -> Tensor:
        """Draws uniform numbers from 0 to 1, shaped like ``x``, in float32 or float64 so that comparisons and
        logarithms are precise.
        """
        return self.uniform(x.shape, dtype=_draw_dtype(x.dtype), device=x.device)

    def between(self, x: Tensor, low: float, high: float) -> Tensor:
        """Draws uniform numbers from ``low`` to ``high``, shaped like ``x``."""
        unit = self.uniform(x.shape, dtype=x.dtype, device=x.device)
        return aten.add.Scalar(aten.mul.Scalar(unit, high - low), low)

    def bernoulli(self, x: Tensor, p: Tensor | float) -> Tensor:
        """Return random numbers shaped like ``x``, in its dtype: each is 1 with probability ``p``, else 0."""
        less = aten.lt.Tensor if isinstance(p, Tensor) else aten.lt.Scalar
        return aten._to_copy.default(less(self._uniform_like(x), p), dtype=x.dtype)

    def native_dropout(self, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
        """Return (``x`` after dropout, mask of the elements that are kept)."""
        if train is False or p == 0:
            return aten.clone.default(x), aten.full.default(x.shape, True, dtype=torch.bool, device=x.device)
        mask = aten.ge.Scalar(self._uniform_like(x), p)
        scale = 0.0 if p == 1 else 1.0 / (1.0 - p)
        zero = aten.full.default([], 0, dtype=x.dtype, device=x.device)
        return aten.where.self(mask, aten.mul.Tensor(x, scale), zero), mask

    def normal(self, size: Shape, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Draws standard normal numbers, by the cosine branch of the Box-Muller transform."""
        draw_dtype = _draw_dtype(dtype)
        u, v = (self.uniform(size, dtype=draw_dtype, device=device) for _ in range(2))
        radius = aten.sqrt.default(aten.mul.Scalar(aten.log1p.default(aten.neg.default(u)), -2))
        drawn = aten.mul.Tensor(radius, aten.cos.default(aten.mul.Scalar(v, 2 * pi)))
        return drawn if draw_dtype == dtype else aten._to_copy.default(drawn, dtype=dtype)

    def gaussian(self, like: Tensor, mean: Tensor | float, std: Tensor | float) -> Tensor:
        """Draws normal numbers of mean ``mean`` and standard deviation ``std``, shaped like ``like``."""
        drawn = self.normal(like.shape, dtype=like.dtype, device=like.device)
        return aten.add.Tensor(aten.mul.Tensor(drawn, std), mean)

    def spread(self, mean: float, std: float, size: Shape, **how: Any) -> Tensor:
        """Draws normal numbers of shape ``size``, with mean ``mean`` and standard deviation ``std``. ``how`` has their
        dtype and device.
        """
        return aten.add.Tensor(aten.mul.Tensor(self.normal(size, **how), std), mean)

    def multinomial(self, weights: Tensor, count: int, replacement: bool = False) -> Tensor:
        """Draws ``count`` indices with probabilities in proportion to ``weights``. Without ``replacement``, or for one
        index, it takes the winners of exponential races, else it inverts the cumulative weights.
        """
        if not replacement or count == 1:
            fine = aten._to_copy.default(weights, dtype=_draw_dtype(weights.dtype))
            # The largest weight / exponential is at an index with probability in proportion to its weight.
            races = aten.div.Tensor(fine, self.exponential(fine))
            return aten.topk.default(races, count, -1)[1]
        sums = aten.cumsum.default(weights, -1, dtype=torch.float64)
        total = aten.slice.Tensor(sums, -1, weights.shape[-1] - 1)  # the last sum, as a dim of one element
        shape = [*weights.shape[:-1], count]
        points = aten.mul.Tensor(self.uniform(shape, dtype=torch.float64, device=weights.device), total)
        index = aten.searchsorted.Tensor(sums, points, right=True)
        # A point that is rounded up to the total gets the last index that has a weight.
        return aten.minimum.default(index, aten.searchsorted.Tensor(sums, total))

    def rrelu(
        self, x: Tensor, noise: Tensor, lower: float = 0.125, upper: float = 1 / 3, training: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return (``x`` with its negative elements scaled, the scale of each element). The scales are drawn between
        ``lower`` and ``upper``. In evaluation all are their mean, and the second result is a copy of ``noise``.
        """
        if not training:
            scaled = aten.where.self(aten.gt.Scalar(x, 0), x, aten.mul.Tensor(x, (lower + upper) / 2))
            return scaled, aten.clone.default(noise)
        unit = aten.full.default([], 1, dtype=x.dtype, device=x.device)
        scales = aten.where.self(aten.gt.Scalar(x, 0), unit, self.between(x, lower, upper))
        return aten.mul.Tensor(x, scales), scales

    def integers(
        self,
        low: int,
        high: int,
        size: Shape,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        **_: object,
    ) -> Tensor:
        """Draws integers from ``low`` to ``high - 1``, by scaling float64 uniforms. Their 53 bits reach every number of
        a range below 2**53.
        """
        unit = self.uniform(size, dtype=torch.float64, device=device or torch.device("cpu"))
        drawn = aten.add.Scalar(aten.floor.default(aten.mul.Scalar(unit, high - low)), low)
        return aten._to_copy.default(drawn, dtype=dtype or torch.int64)

    def permutation(
        self, n: int, *, dtype: torch.dtype | None = None, device: torch.device | None = None, **_: object
    ) -> Tensor:
        """Draws a permutation of 0 to ``n - 1``: the order that sorts ``n`` uniform numbers."""
        unit = self.uniform([n], dtype=torch.float64, device=device or torch.device("cpu"))
        order = aten.sort.default(unit)[1]
        return order if dtype in (None, torch.int64) else aten._to_copy.default(order, dtype=dtype)

    def exponential(self, x: Tensor, rate: float = 1.0) -> Tensor:
        """Draws exponentially distributed numbers with rate ``rate``, shaped like ``x``. As in torch, none is 0."""
        drawn = aten.div.Scalar(aten.log1p.default(aten.neg.default(self._uniform_like(x))), -rate)
        # A uniform number may be 0, and in `multinomial` a weight of 0 divided by 0 would win the race.
        return aten.clamp_min.default(aten._to_copy.default(drawn, dtype=x.dtype), torch.finfo(x.dtype).tiny)

    def geometric(self, x: Tensor, p: float) -> Tensor:
        """Draws geometrically distributed numbers, shaped like ``x``: how many trials it takes to the first success,
        with probability ``p`` each.
        """
        trials = aten.div.Scalar(aten.log1p.default(aten.neg.default(self._uniform_like(x))), log1p(-p))
        return aten._to_copy.default(aten.add.Scalar(aten.floor.default(trials), 1), dtype=x.dtype)

    def cauchy(self, x: Tensor, median: float = 0.0, sigma: float = 1.0) -> Tensor:
        """Draws numbers of the Cauchy distribution with ``median`` and scale ``sigma``, shaped like ``x``."""
        turned = aten.tan.default(aten.mul.Scalar(aten.sub.Scalar(self._uniform_like(x), 0.5), pi))
        return aten._to_copy.default(aten.add.Scalar(aten.mul.Scalar(turned, sigma), median), dtype=x.dtype)
