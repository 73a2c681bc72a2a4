"""Each decomposition of our own equals the op in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardc.capture.decompositions import OWN

aten = torch.ops.aten


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def convolution(bias: bool, **given: Any) -> tuple[Any, ...]:
    geometry = {"stride": [2, 1], "padding": [1, 0], "dilation": [1, 2], "transposed": False, "output_padding": [0, 0]}
    geometry |= given
    return draw(2, 4, 6, 7), draw(6, 4, 3, 2), draw(6) if bias else None, *geometry.values(), 1


def convolution_backward(mask: list[bool]) -> tuple[Any, ...]:
    x, weight, bias, *geometry = convolution(bias=True)
    y = aten.convolution.default(x, weight, bias, *geometry)
    return draw(*y.shape), x, weight, [6], *geometry, mask


def nll_backward(
    reduction: int, weighted: bool, shape: tuple[int, ...] = (6, 5), ignore: int = -100
) -> tuple[Any, ...]:
    x, weight = draw(*shape), torch.rand(shape[1], dtype=torch.float64) if weighted else None
    target = torch.randint(shape[1], (shape[0], *shape[2:]))
    target[0] = ignore
    forward = aten.nll_loss2d_forward if len(shape) == 4 else aten.nll_loss_forward
    out, total = forward.default(x, target, weight, reduction, ignore)
    return draw(*out.shape), x, target, weight, reduction, ignore, total


def weight_norm_backward(dim: int) -> tuple[Any, ...]:
    v, g = draw(3, 4, 2), draw(*[n if d == dim else 1 for d, n in enumerate((3, 4, 2))])
    return draw(3, 4, 2), v, g, aten._weight_norm_interface.default(v, g, dim)[1], dim


x = draw(4, 5, 6)
CASES: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (aten.mean.default, (x,), {}),
    (aten.mean.dim, (x, [0, -1], True), {}),
    (aten.mean.dim, (x.float(), [1]), {"dtype": torch.float64}),
    (aten.var_mean.correction, (x, [1]), {"correction": 0}),
    (aten.var_mean.correction, (x,), {"keepdim": True}),
    (aten.var.correction, (x, [0, 2]), {"correction": 2}),
    (aten.addmm.default, (draw(6), draw(4, 5), draw(5, 6)), {"beta": 0.5, "alpha": 2}),
    (aten.addmm.default, (draw(6), draw(4, 5), draw(5, 6)), {"beta": 0}),
    (aten.chunk.default, (x, 4, 1), {}),
    (aten.convolution.default, convolution(bias=True), {}),
    (aten.convolution_backward.default, convolution_backward([True, True, True]), {}),
    (aten.convolution_backward.default, convolution_backward([False, True, True]), {}),
    (aten.convolution_backward.default, convolution_backward([False, False, True]), {}),
    (aten.nll_loss_backward.default, nll_backward(1, weighted=False), {}),
    (aten.nll_loss_backward.default, nll_backward(1, weighted=True, ignore=3), {}),
    (aten.nll_loss_backward.default, nll_backward(0, weighted=True), {}),
    (aten.nll_loss_backward.default, nll_backward(2, weighted=False), {}),
    (aten.nll_loss2d_backward.default, nll_backward(1, weighted=True, shape=(2, 5, 3, 4)), {}),
    (aten.nll_loss2d_backward.default, nll_backward(0, weighted=False, shape=(2, 5, 3, 4)), {}),
    (aten.slice_backward.default, (draw(4, 2, 6), [4, 5, 6], 1, 1, 3, 1), {}),
    (aten.slice_backward.default, (draw(4, 2, 6), [4, 5, 6], -2, -2, 2**63 - 1, 1), {}),
    (aten.slice_backward.default, (draw(4, 3, 6), [4, 5, 6], 1, 0, 5, 2), {}),
    (aten.slice_backward.default, (draw(4, 2, 6), [4, 5, 6], 1, 1, 2**63 - 1, 2), {}),
    (aten.slice_backward.default, (draw(4, 5, 2), [4, 5, 6], -1, 2, 4, 1), {}),
    (aten.slice_backward.default, (draw(4, 5, 2), [4, 5, 8], -1, 0, 6, 4), {}),
    (aten.slice_backward.default, (draw(4, 5, 2), [4, 5, 8], -1, 3, 8, 4), {}),
    (aten.select_backward.default, (draw(4, 6), [4, 5, 6], 1, -2), {}),
    (aten.full_like.default, (x, 2.5), {}),
    (aten.full_like.default, (x, 2), {"dtype": torch.int64}),
    (aten.index_put.default, (x, [None, torch.rand(5) > 0.5], draw()), {}),
    (aten.index_put.default, (x, [torch.rand(4, 5) > 0.5], draw(1)), {}),
    (aten.constant_pad_nd.default, (x, [0, -4]), {}),
    (aten.constant_pad_nd.default, (x, [-1, 2, 0, -1], 3.0), {}),
    (aten._weight_norm_interface_backward.default, weight_norm_backward(0), {}),
    (aten._weight_norm_interface_backward.default, weight_norm_backward(2), {}),
    (aten._efficientzerotensor.default, ([2, 3],), {"dtype": torch.float64}),
    (aten._linalg_det.default, (draw(3, 4, 4),), {}),
    (aten._linalg_det.default, (draw(4, 4).mT,), {}),
    (aten._linalg_slogdet.default, (draw(3, 4, 4),), {}),
    (aten._linalg_slogdet.default, (draw(3, 5, 5).mT,), {}),
]


@pytest.mark.parametrize(("op", "args", "kwargs"), CASES, ids=lambda value: str(value) if callable(value) else "")
def test_decomposition_equals_the_op(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    made, expected = OWN[op](*args, **kwargs), op(*args, **kwargs)
    many = isinstance(expected, (tuple, list))
    for got, want in zip(made if many else [made], expected if many else [expected], strict=True):
        assert (got is None) == (want is None or want.numel() == 0)
        if got is not None:
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_what_needs_no_decomposition_is_left_alone() -> None:
    x, weight, _, *geometry = convolution(bias=False)
    assert OWN[aten.convolution.default](x, weight, None, *geometry) is NotImplemented
    assert OWN[aten.index_put.default](x, [torch.tensor([0])], draw(), False) is NotImplemented
    assert OWN[aten.constant_pad_nd.default](draw(4), [1, 0]) is NotImplemented
    untested = set(OWN) - {op for op, _, _ in CASES}
    assert untested == set()
