"""Samples of scans and matrix functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.rules.samples.values import Draw, Sample, overloads

aten = torch.ops.aten
f64 = torch.float64


def samples(op: str) -> list[Sample]:
    """The samples of a rule of scan or linalg."""
    name, draw = op.split(".")[1], Draw(op)
    for table in (_scans, _matrices):
        calls = table(draw)
        if name in calls:
            return [Sample(*_fitting(overload, call)) for overload in overloads(op) for call in calls[name]]
    return []


Arguments = dict[str, Any]


def _fitting(overload: Any, given: Arguments) -> tuple[Any, tuple[Any, ...], Arguments]:
    """``given``, by position or by keyword as the schema of the overload has them."""
    args: list[Any] = []
    kwargs: Arguments = {}
    left = {"stable": True, **given}
    for argument in overload._schema.arguments:
        value = left[argument.name] if argument.name in left else argument.default_value
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return overload, tuple(args), kwargs


def _scans(d: Draw) -> dict[str, list[Arguments]]:
    x = d.normal(4, 8, 2)
    along = [{"self": x, "dim": 1}, {"self": x, "dim": -1}, {"self": x, "dim": 0}]
    return {
        **dict.fromkeys("cumsum cumprod cummax cummin logcumsumexp sort argsort".split(), along),
        "topk": [{"k": 2, **call} for call in along],
        "msort": [{"self": x}],
        "linalg_cross": [{"self": d.normal(4, 3), "other": d.normal(4, 3), "dim": -1}],
        "histc": [{"self": x, "bins": 4, "min": -1, "max": 1}, {"self": x, "bins": 4}],
        "bincount": [{"self": d.below(4, 8)}, {"self": d.below(4, 8), "weights": d.normal(8)}],
    }


def _matrices(d: Draw) -> dict[str, list[Arguments]]:
    square = d.normal(4, 2, 3, 3)
    positive = square @ square.mT + 3 * torch.eye(3, dtype=f64)
    tall, right = d.normal(4, 2, 4, 3), d.normal(4, 2, 3, 5)
    lower = positive.tril()
    lu, pivots, _ = torch.linalg.lu_factor_ex(square)
    ld, exchanged, _ = torch.linalg.ldl_factor_ex(positive)

    def one(x: Tensor, **more: Any) -> list[Arguments]:
        return [{"self": x, "A": x, "input": x, **more}]

    complex_ = torch.complex(d.normal(4, 8), d.normal(4, 8))
    pair = d.normal(4, 8, 2)
    x1, x2 = d.normal(2, 4, 4), d.normal(2, 6, 4)
    bilinear = {"expand1": [1, 3], "expand2": [1, 2], "expand3": [0], "sumdim": [2, 3]}
    backward = {"expand1": [1, 3], "expand2": [2, 3], "expand3": [0], "sumdim": [1, 2]}
    return {
        **dict.fromkeys("linalg_inv_ex linalg_lu linalg_matrix_exp".split(), one(square)),
        **dict.fromkeys("linalg_lu_factor_ex linalg_eig".split(), one(square)),
        **dict.fromkeys("cholesky linalg_cholesky_ex _linalg_eigh linalg_ldl_factor_ex".split(), one(positive)),
        **dict.fromkeys("linalg_qr _linalg_svd".split(), one(tall)),
        "cholesky_inverse": one(lower),
        "cholesky_solve": [{"self": right, "input2": lower}],
        "_linalg_solve_ex": [{"A": square, "B": right}, {"A": square, "B": d.normal(3, 5)}],
        "linalg_lu_solve": [{"LU": lu, "pivots": pivots, "B": right}],
        "linalg_ldl_solve": [{"LD": ld, "pivots": exchanged, "B": right}],
        "lu_unpack": [{"LU_data": lu, "LU_pivots": pivots}],
        "linalg_solve_triangular": [{"self": lower, "B": right, "upper": False}],
        "triangular_solve": [{"self": right, "A": lower, "upper": False}],
        "_fft_c2c": [{"self": complex_, "dim": [1], "normalization": 0, "forward": True}],
        "_fft_r2c": [{"self": pair, "dim": [1], "normalization": 0, "onesided": True}],
        "_fft_c2r": [{"self": complex_, "dim": [1], "normalization": 0, "last_dim_size": 14}],
        **dict.fromkeys(("view_as_real", "view_as_real_copy"), one(complex_)),
        **dict.fromkeys(("view_as_complex", "view_as_complex_copy"), one(pair)),
        "_cdist_forward": [{"x1": d.normal(2, 4, 3), "x2": d.normal(2, 6, 3), "p": 2.0, "compute_mode": None}],
        "_cdist_backward": [
            {"grad": d.normal(2, 4, 6), "x1": x1, "x2": x2, "p": p, "cdist": torch.cdist(x1, x2, p)}
            for p in (1.0, 2.0, 3.0)
        ],
        "_trilinear": [
            {"i1": d.normal(4, 6), "i2": d.normal(4, 2), "i3": d.normal(8, 6, 2), **bilinear},
            {"i1": d.normal(4, 6), "i2": d.normal(4, 8), "i3": d.normal(8, 6, 2), **bilinear, **backward},
        ],
        "_int_mm": [{"self": d.below(5, 32, 16).to(torch.int8), "mat2": d.below(5, 16, 8).to(torch.int8)}],
    }
