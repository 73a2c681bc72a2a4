"""Samples of attention kernels: grouped and plain heads, causal and masked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardc.capture.flex import functions_of
from tests.rules.samples.values import Draw, Sample

aten = torch.ops.aten
BATCH, KEYS, WIDTH = 2, 8, 4

# heads of queries, heads of keys, causal, shape of the mask
CASES = [
    (4, 4, True, None),
    (8, 4, True, None),
    (4, 2, False, None),
    (4, 4, False, (1, 1, KEYS, KEYS)),
    (4, 4, False, (BATCH, 4, KEYS, KEYS)),
]


def samples(op: str) -> Iterator[Sample]:
    """Samples of a forward or backward rule."""
    kernel = op.removeprefix("aten._scaled_dot_product_").removesuffix("_backward")
    made = _on_cpu if kernel == "flash_attention_for_cpu" else _on_gpu
    yield from made(kernel, op.endswith("_backward"), Draw(op))


def _on_cpu(kernel: str, backward: bool, draw: Draw) -> Iterator[Sample]:
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    for heads, groups, causal, mask in CASES:
        q, k = draw.normal(BATCH, heads, KEYS, WIDTH), draw.normal(BATCH, groups, KEYS, WIDTH)
        v = draw.normal(*k.shape)
        masked = {"attn_mask": None if mask is None else draw.normal(*mask)}
        if not backward:
            yield Sample(forward, (q, k, v, 0.0, causal), masked)
            continue
        out, lse = forward(q, k, v, 0.0, causal, **masked)
        gradient = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        yield Sample(gradient, (draw.normal(*out.shape), q, k, v, out, lse, 0.0, causal), masked)


def of_a_sequence(op: str) -> Iterator[Sample]:
    """Samples of attention that knows places: with keys behind which there is filling, gathered and going round."""
    draw, backward = Draw(op), op.endswith("gradient")
    ops: Any = torch.ops.shardc_attention
    for around in (False, True):
        for heads, groups, causal, mask in CASES:
            for keys in (KEYS, KEYS - 1):
                q, k = draw.normal(BATCH, heads, KEYS, WIDTH), draw.normal(BATCH, groups, KEYS, WIDTH)
                v = draw.normal(*k.shape)
                bias = None if mask is None else draw.normal(*mask[:-1], keys)
                if bias is not None:
                    bias[..., 1, :] = float("-inf")  # a query that sees nothing
                said = (bias, causal, 0.5, keys, "", "", around)
                if not backward:
                    yield Sample(ops.call.default, (q, k, v, *said))
                    continue
                out, sums = ops.call.default(q, k, v, *said)
                yield Sample(ops.gradient.default, (draw.normal(*out.shape), q, k, v, out, sums, *said))


def _causal(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i > j  # the first query sees nothing


def _documents(batch: Tensor, head: Tensor, i: Tensor, j: Tensor, document: Tensor) -> Tensor:
    return (document[batch, i] == document[batch, j]) | (head + batch == j)


def _biased(score: Tensor, batch: Tensor, head: Tensor, i: Tensor, j: Tensor, bias: Tensor, cap: Tensor) -> Tensor:
    return cap * torch.tanh(score + bias[head, i - j + KEYS]) + batch


def of_functions(op: str) -> Iterator[Sample]:
    """Samples of ``flex_attention``: functions that read tensors by place, and gradients of these and of the sums."""
    draw, backward = Draw(op), op.endswith("gradient")
    ops: Any = torch.ops.shardc_attention
    for around, heads, groups, keys, reads in ((False, 4, 2, KEYS, True), (True, 2, 2, KEYS - 1, False)):
        q, k = draw.normal(BATCH, heads, KEYS, WIDTH), draw.normal(BATCH, groups, KEYS, WIDTH)
        v, document = draw.normal(*k.shape), draw.below(3, BATCH, KEYS)
        of_score = [draw.normal(heads, 2 * KEYS), draw.normal()] if reads else []
        of_mask = [document] if reads else []
        score, mask = (_biased, _documents) if reads else (lambda score, b, h, i, j: score, _causal)
        body = functions_of(q, score, of_score, mask, of_mask)
        assert body is not None
        how = ([*of_score, *of_mask], body, 0.5, keys, "", "", around)
        if not backward:
            yield Sample(ops.flex.default, (q, k, v, *how))
            continue
        out, sums = ops.flex.default(q, k, v, *how)
        given = (draw.normal(*out.shape), q, k, v, out, sums, draw.normal(*sums.shape) if reads else None)
        yield Sample(ops.flex_gradient.default, (*given, [0, 1] if reads else [], *how))


def _on_gpu(kernel: str, backward: bool, draw: Draw) -> Iterator[Sample]:
    """In bfloat16, which all of these kernels take; backward is a function of any output and log-sum-exp."""
    heads, length, width = 4, 32, 16

    def bf16(*shape: int) -> Tensor:
        return draw.normal(*shape).bfloat16()

    q, k, v, out, grad = (bf16(BATCH, heads, length, width) for _ in range(5))
    bias = None if kernel == "flash_attention" else bf16(BATCH, heads, length, length)
    lse = 4 + draw.unit(BATCH, heads, length).float()
    seed, offset = torch.tensor(0), torch.tensor(0)
    for causal in (False, True):
        given: dict[tuple[str, bool], tuple[Any, ...]] = {
            ("flash_attention", False): (q, k, v, 0.0, causal),
            ("flash_attention", True): (
                grad, q, k, v, out, lse, None, None, length, length, 0.0, causal, _pair(), offset,
            ),
            ("efficient_attention", False): (q, k, v, bias, True, 0.0, causal),
            ("efficient_attention", True): (
                grad, q, k, v, bias, out, lse, seed, offset, 0.0, [True, True, True, True], causal,
            ),
            ("cudnn_attention", False): (q, k, v, None, True, 0.0, causal),
            ("cudnn_attention", True): (
                grad, q, k, v, out, lse[..., None], seed, offset, None, None, None, length, length, 0.0, causal,
            ),
        }  # fmt: skip
        name = f"_scaled_dot_product_{kernel}" + ("_backward" if backward else "")
        sample = Sample(getattr(aten, name).default, given[kernel, backward])
        yield replace(sample, device="cuda", tolerance=2e-2)


def _pair() -> Tensor:
    """The flash kernel's random state: a seed and an offset."""
    return torch.zeros(2, dtype=torch.uint64)
