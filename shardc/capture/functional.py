"""Functions of ``torch.nn.functional`` that are traced in another form than their own, which could not be sharded.

A bag of embeddings is a kernel over all bags at once; some losses look at values to check them, or are decomposed
wrongly by torch. What stands here gives the same results and gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import log, pi
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._decomp import decompositions
from torch.nn import _reduction as _Reduction

_embedding_bag = F.embedding_bag


def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Bags of one size, a row of ``input`` each, as lookups that are added up; they split over bags and over rows."""
    even = input.dim() == 2 and not input.is_nested and input.shape[1] > 0
    plain = offsets is None and max_norm is None and not sparse and not scale_grad_by_freq
    if not even or not plain or mode not in ("sum", "mean", "max"):
        return _embedding_bag(
            input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse, per_sample_weights,
            include_last_offset, padding_idx,
        )  # fmt: skip
    if per_sample_weights is not None and (mode != "sum" or per_sample_weights.shape != input.shape):
        raise ValueError(f"per_sample_weights {tuple(per_sample_weights.shape)} go with mode 'sum' and {input.shape}")
    rows = F.embedding(input, weight)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if padding_idx is None:
        return rows.sum(1) if mode == "sum" else rows.mean(1) if mode == "mean" else rows.max(1).values
    pad = (input == padding_idx % weight.shape[0]).unsqueeze(-1)
    if mode == "max":
        return rows.masked_fill(pad, float("-inf")).max(1).values.masked_fill(pad.all(1), 0.0)
    total = rows.masked_fill(pad, 0.0).sum(1)
    return total if mode == "sum" else total / pad.logical_not().sum(1).clamp(min=1)


def gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """Without the look at the variances, which are to be positive."""
    if isinstance(var, float):
        var = torch.full_like(input, var)
    if var.shape != input.shape and var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    elif var.shape != input.shape and not (
        var.ndim == input.ndim and sum(b for a, b in zip(input.shape, var.shape, strict=True) if a != b) == 1
    ):
        raise ValueError("var is of incorrect size")
    var = var + (var.clamp(min=eps) - var).detach()  # the gradient is as if nothing were clamped
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    return _reduced(loss + 0.5 * log(2 * pi) if full else loss, reduction)


def multilabel_margin_loss(
    input: Tensor, target: Tensor, size_average: Any = None, reduce: Any = None, reduction: str = "mean"
) -> Tensor:
    """The classes before the first -1 of a row are its labels; torch's decomposition adds margins of the others too."""
    if size_average is not None or reduce is not None:
        reduction = _Reduction.legacy_get_string(size_average, reduce)
    classes = torch.arange(input.shape[-1], device=target.device)
    known = (target == -1).cumsum(-1) == 0
    label = torch.where(known, target, 0)
    labelled = ((label.unsqueeze(-1) == classes) & known.unsqueeze(-1)).any(-2)
    margins = (1.0 - input.gather(-1, label).unsqueeze(-1) + input.unsqueeze(-2)).clamp_min(0)
    counted = known.unsqueeze(-1) & ~labelled.unsqueeze(-2)
    return _reduced(torch.where(counted, margins, 0.0).sum((-1, -2)) / input.shape[-1], reduction)


def _reduced(loss: Tensor, reduction: str) -> Tensor:
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not valid")
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def _one_layer_lstm(*_: Any) -> Callable[..., Any]:
    """The steps of a layer one by one: CPU kernels for all of them at once are one op, which could not be sharded."""
    return decompositions.one_layer_lstm


# Where it is looked up, by which name, what stands there meanwhile.
_OTHER_FORMS: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (F, "embedding_bag", embedding_bag),
    (F, "gaussian_nll_loss", gaussian_nll_loss),
    (F, "multilabel_margin_loss", multilabel_margin_loss),
    (decompositions, "select_one_layer_lstm_function", _one_layer_lstm),
)


@contextmanager
def other_forms() -> Iterator[None]:
    """Puts the functions of this file in the place of torch's."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in _OTHER_FORMS]
    try:
        for owner, name, function in _OTHER_FORMS:
            setattr(owner, name, function)
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)
