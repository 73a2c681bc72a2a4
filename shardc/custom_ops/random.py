"""Random numbers that do not depend on the mesh: each is a hash of the step's key, the number of the draw and the
element's global index.

``shardc_random::key`` is the key of the step, a number that the runtime passes in, the same on all ranks.
``shardc_random::uniform`` draws a tensor, of which each rank computes its own elements. There is no state, so a draw
that is repeated on another rank or in backward gives the same numbers.

The hash is a multiply-xorshift mixer of 32-bit words (the constants are those of Chris Wellons' hash prospector,
``lowbias32``), applied once to each part of the counter, in 64-bit integers that never overflow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

from shardc.custom_ops.op_library import OpLibrary

aten = torch.ops.aten

WORD = 0xFFFFFFFF
# dtype -> number of random bits in its mantissa.
BITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}

T = TypeVar("T")  # a tensor, or what stands for it in a graph


def uniform(key: Tensor, stream: int, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return uniform random numbers in ``[0, 1)`` of shape ``size``, the same on every mesh.

    Args:
        key: key of the step, int64 [1].
        stream: number of the draw within its program.
        dtype: float64, float32, float16 or bfloat16.
    """
    index = torch.arange(prod(size), device=device).reshape(tuple(size))
    drawn: Tensor = uniform_at(lambda op, *args, **kwargs: op(*args, **kwargs), key, stream, index, prod(size), dtype)
    return drawn.reshape(tuple(size))


def uniform_at(call: Callable[..., T], key: T, stream: int, index: T, numel: int, dtype: torch.dtype) -> T:
    """Compute some elements of a random tensor of ``numel`` elements: return the numbers in ``[0, 1)`` at its flat
    indices ``index``. ``call`` runs each op, or inserts it in a graph.

    Args:
        call: runs an op, or inserts it in a graph.
        key: key of the step, int64 [1].
        stream: number of the draw within its program.
        index: flat positions, int64 of any shape.
    """
    first = _word(call, key, 2 * stream, index, numel)
    if dtype != torch.float64:
        bits = BITS[dtype]
        mantissa = call(aten.bitwise_right_shift.Tensor_Scalar, first, 32 - bits)
        return call(aten.mul.Tensor, call(aten._to_copy.default, mantissa, dtype=dtype), 2.0**-bits)
    second = _word(call, key, 2 * stream + 1, index, numel)
    major = call(aten.mul.Tensor, call(aten.bitwise_right_shift.Tensor_Scalar, first, 5), 1 << 26)
    mantissa = call(aten.add.Tensor, major, call(aten.bitwise_right_shift.Tensor_Scalar, second, 6))
    return call(aten.mul.Tensor, call(aten._to_copy.default, mantissa, dtype=dtype), 2.0**-53)


def _word(call: Callable[..., T], key: T, lane: int, index: T, numel: int) -> T:
    """Return 32 random bits for each flat index in ``index``, as an int64 below 2 ** 32. Another ``lane`` (a number)
    gives other, independent bits. ``call`` runs each op, or inserts it in a graph.
    """
    low = call(aten.bitwise_and.Scalar, key, WORD)
    high = call(aten.bitwise_and.Scalar, call(aten.bitwise_right_shift.Tensor_Scalar, key, 32), WORD)
    seed = _mix(call, call(aten.bitwise_xor.Scalar, low, _hash(lane)))
    other = _mix(call, call(aten.bitwise_xor.Tensor, high, seed))
    if numel > WORD:
        major = call(aten.bitwise_right_shift.Tensor_Scalar, index, 32)
        other = _mix(call, call(aten.bitwise_xor.Tensor, major, other))
        index = call(aten.bitwise_and.Scalar, index, WORD)
    mixed = _mix(call, call(aten.bitwise_xor.Tensor, index, seed))
    return _mix(call, call(aten.bitwise_xor.Tensor, mixed, other))


def _mix(call: Callable[..., T], x: T) -> T:
    """Return a hash of each 32-bit word in ``x``, computed by ops that ``call`` runs, or inserts in a graph. Different
    words have different hashes. Multipliers have 31 bits, so that products fit in int64.
    """
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        x = call(aten.bitwise_xor.Tensor, x, call(aten.bitwise_right_shift.Tensor_Scalar, x, shift))
        x = call(aten.bitwise_and.Scalar, call(aten.mul.Tensor, x, factor), WORD)
    return call(aten.bitwise_xor.Tensor, x, call(aten.bitwise_right_shift.Tensor_Scalar, x, 15))


def _hash(number: int) -> int:
    """Return a 32-bit hash of the integer ``number``. Hashes of neighbouring numbers are far apart."""
    x = (number * 0x9E3779B1) & WORD
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        x ^= x >> shift
        x = (x * factor) & WORD
    return x ^ (x >> 15)


def draw_key(*, device: torch.device | str = "cpu") -> Tensor:
    """Draw the key of a step, int64 [1], from torch's CPU generator. (All ranks then use the key of rank 0.)"""
    return torch.randint(2**63 - 1, (1,)).to(device)


def _fake_key(*, device: torch.device) -> Tensor:
    return torch.empty(1, dtype=torch.int64, device=device)


def _fake_uniform(key: Tensor, stream: int, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=dtype, device=device)


_library = OpLibrary("shardc_random")
_library.define("key(*, Device device) -> Tensor", draw_key, _fake_key)
_library.define(
    "uniform(Tensor key, int stream, SymInt[] size, *, ScalarType dtype, Device device) -> Tensor",
    uniform,
    _fake_uniform,
    tags=(torch.Tag.pt2_compliant_tag,),
)
