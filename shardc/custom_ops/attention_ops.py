"""Attention ops for split sequences, with a causal mask by positions in the global sequence.

The causal mask of a kernel is by positions in its operands. That of `call` and `gradient` is by positions in the global
sequence, so their result is the same for any layout of queries and keys. On one rank (`shardc.rules.attention_rules`)
they are lowered to kernels on blocks of keys, whose outputs are combined by the log-sum-exp of their scores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardc.custom_ops.op_library import OpLibrary

aten = torch.ops.aten
# keys: number of keys before the padding. axis, method: axes, each with its method of `shardc.cp`. around: if an axis
# splits queries and keys, the keys pass round a ring of its ranks; else they are gathered. later: on one rank only.
_HOW = "bool causal, float scale, int keys, str axis='', str method='', bool around=False, Tensor? later=None"
_HALF = (torch.float16, torch.bfloat16)


def call(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float, keys: int,
    axis: str = "", method: str = "", around: bool = False,
    later: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (output of attention, log-sum-exp of each query's scores).

    Args:
        query: [b, h, q, e].
        key, value: [b, g, k, e] and [b, g, k, f]; h is a multiple of g.
        bias: added to the scores: [b, h, q, k], or broadcastable to it.
        causal: query i attends to keys 0 to i.
        scale: factor of the scores.
        keys: number of keys before the padding.
        axis, method, around: not used by the kernel; the op's rule reads them (see ``_HOW``).
        later: bool []: if true, query i attends to keys 0 to i - 1 only.

    Returns:
        output [b, h, q, f], and log-sum-exp of each query's scores [b, h, q]: 0 for a query that attends to no key, but
        -inf if that is because of ``later``.
    """
    if later is not None:
        return _call_later(query, key, value, bias, scale, keys, later)
    key, value, bias = _without_padding(key, value, bias, keys)
    if query.device.type == "cpu":
        out, sums = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=bias, scale=scale
        )
    elif query.device.type == "cuda" and query.dtype in _HALF and bias is None and _aligned(causal, query, key):
        out, sums, *_ = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False, scale=scale)
    else:
        scores = _scores(query, key, bias, causal, scale)
        sums = scores.logsumexp(-1)
        sums = sums.where(sums != -torch.inf, 0)
        out = ((scores - sums.unsqueeze(-1)).exp() @ _by_head(value, query).to(scores.dtype)).to(query.dtype)
    return _sequence_major(out), _sequence_major(sums)


def gradient(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, bias: Tensor | None,
    causal: bool, scale: float, keys: int, axis: str = "", method: str = "", around: bool = False,
    later: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of query, key and value in attention, given ``grad``, the gradient of the output of `call`.

    ``out`` and ``sums`` are the results of `call`, also of one on more keys than ``key`` has; other arguments are those
    of `call`.
    """
    if later is not None:
        return _gradient_later(grad, query, key, value, out, sums, bias, scale, keys, later)
    whole = key.shape[2]
    key, value, bias = _without_padding(key, value, bias, keys)
    if query.device.type == "cpu":
        gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, sums, 0.0, causal, attn_mask=bias, scale=scale
        )
    elif query.device.type == "cuda" and query.dtype in _HALF and bias is None and _aligned(causal, query, key):
        seed = torch.zeros(2, dtype=torch.uint64, device=query.device)
        sizes: tuple[int | None, ...] = (None, None, query.shape[2], key.shape[2])
        gradients = aten._scaled_dot_product_flash_attention_backward(
            grad, query, key, value, out, sums, *sizes, 0.0, causal, seed, seed[0], scale=scale
        )
    else:
        gradients = _written_out(grad, query, key, value, out, sums, _scores(query, key, bias, causal, scale), scale)
    dq, *rest = gradients
    dk, dv = (x if x.shape[2] == whole else torch.nn.functional.pad(x, (0, 0, 0, whole - x.shape[2])) for x in rest)
    return _sequence_major(dq), _sequence_major(dk), _sequence_major(dv)


def _call_later(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, keys: int, later: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute `call` with a causal mask in which query i attends to keys 0 to i or, if ``later`` is true, to i - 1
    only.
    """
    if later.device.type == "cpu":  # reading it does not synchronize
        if not later:
            return call(query, key, value, bias, True, scale, keys)
        out, sums = _fake_call(query, key, value)
        out[:, :, 0], sums[:, :, 0] = 0, -torch.inf
        if query.shape[2] > 1:
            out[:, :, 1:], sums[:, :, 1:] = call(query[:, :, 1:], key, value, bias, True, scale, keys)
        return out, sums
    out, sums = call(_rolled(query, later, -1), key, value, bias, True, scale, keys)
    out, sums = _rolled(out, later, 1), _rolled(sums, later, 1)
    return out, torch.where(_row_mask(sums, 0) & later, -torch.inf, sums)


def _gradient_later(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, bias: Tensor | None,
    scale: float, keys: int, later: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute `gradient` with a causal mask in which query i attends to keys 0 to i or, if ``later`` is true, to i - 1
    only.
    """
    rows = [grad, query, out, sums]
    if later.device.type == "cpu":
        if not later:
            return gradient(grad, query, key, value, out, sums, bias, True, scale, keys)
        dq, dk, dv = _fake_gradient(grad, query, key, value)
        if query.shape[2] == 1:
            return dq.zero_(), dk.zero_(), dv.zero_()
        dq[:, :, 0] = 0
        grad, query, out, sums = (x[:, :, 1:] for x in rows)
        dq[:, :, 1:], dk, dv = gradient(grad, query, key, value, out, sums, bias, True, scale, keys)
        return dq, dk, dv
    grad, query, out, sums = (_rolled(x, later, -1) for x in rows)
    last = _row_mask(sums, -1) & later  # the first query, which attends to nothing
    grad = torch.where(last.unsqueeze(-1), 0, grad)
    dq, dk, dv = gradient(grad, query, key, value, out, torch.where(last, torch.inf, sums), bias, True, scale, keys)
    return _rolled(dq, later, 1), dk, dv


def _rolled(x: Tensor, later: Tensor, by: int) -> Tensor:
    """Return ``x`` [b, h, q, ...], rolled by ``by`` places along the queries if ``later`` (bool []) is true, else as it
    is.
    """
    return _sequence_major(torch.where(later, x.roll(by, 2), x))


def _row_mask(sums: Tensor, row: int) -> Tensor:
    """Return a mask of the queries, bool [q], that is true only at query ``row`` (-1 is the last). ``sums`` [b, h, q]
    gives their number.
    """
    places = torch.arange(sums.shape[2], device=sums.device)
    return places == row % sums.shape[2]


def _without_padding(
    key: Tensor, value: Tensor, bias: Tensor | None, keys: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (key, value, bias), cut to the first ``keys`` keys; those after them are padding."""
    if keys == key.shape[2]:
        return key, value, bias
    return key[:, :, :keys], value[:, :, :keys], bias if bias is None or bias.shape[-1] == 1 else bias[..., :keys]


def _aligned(causal: bool, query: Tensor, key: Tensor) -> bool:
    """Return whether all attention kernels would apply the same mask: true without a causal mask, and with as many
    queries as keys. (Otherwise kernels differ in how they align the causal mask.)
    """
    return not causal or query.shape[2] == key.shape[2]


def _by_head(x: Tensor, query: Tensor) -> Tensor:
    """Repeat the keys or values ``x`` [b, g, k, e] to as many heads as ``query`` has: return [b, h, k, e]."""
    return x.repeat_interleave(query.shape[1] // x.shape[1], 1)


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Return the attention scores [b, h, q, k] with bias, in float32 at least. If ``causal``, scores of later keys are
    -inf.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) @ _by_head(key, query).to(wide).transpose(-1, -2) * scale
    scores = scores if bias is None else scores + bias
    if not causal:
        return scores
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    return scores.masked_fill(~seen, -torch.inf)


def _written_out(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, scores: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, computed by plain ops. ``grad`` is that of the output ``out``;
    ``sums`` are the log-sum-exps of the ``scores`` [b, h, q, k].
    """
    wide = scores.dtype
    weights, grad = (scores - sums.unsqueeze(-1)).exp(), grad.to(wide)
    shares = grad @ _by_head(value, query).to(wide).transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)
    shares = weights * shares * scale
    of_heads = [shares.transpose(-1, -2) @ query.to(wide), weights.transpose(-1, -2) @ grad]
    grouped = [x.unflatten(1, (key.shape[1], -1)).sum(2).to(key.dtype) for x in of_heads]
    return (shares @ _by_head(key, query).to(wide)).to(query.dtype), grouped[0], grouped[1]


def _sequence_major(x: Tensor) -> Tensor:
    """Return ``x`` [b, h, q, ...] with its memory in the order [b, q, h, ...], as models use it."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _fake_call(query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    b, h, q, _e = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    out, sums = query.new_empty(b, q, h, value.shape[3]), query.new_empty(b, q, h, dtype=wide)
    return out.transpose(1, 2), sums.transpose(1, 2)


def _fake_gradient(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (query, key, value))
    return dq, dk, dv


_library = OpLibrary("shardc_attention")
CALL = _library.define(
    f"call(Tensor query, Tensor key, Tensor value, Tensor? bias, {_HOW}) -> (Tensor, Tensor)", call, _fake_call
)
GRADIENT = _library.define(
    "gradient(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, Tensor? bias, "
    f"{_HOW}) -> (Tensor, Tensor, Tensor)",
    gradient,
    _fake_gradient,
)
