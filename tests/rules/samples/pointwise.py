"""Samples of pointwise ops, made from their schemas: each overload, with and without broadcasting."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.rules.samples.values import Draw, Sample, overloads

INTEGER = "bitwise_not bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift gcd lcm".split()
LOGICAL = "logical_not logical_and logical_or logical_xor".split()
ABOVE_ONE = ("acosh", "special_zeta")
# Shapes of the tensor arguments in order; a third repeats the first.
SHAPES = (((4, 8), (4, 8)), ((2, 1, 4), (4, 1)), ((8,), ()))


def samples(op: str) -> Iterator[Sample]:
    """Samples of every overload of a pointwise rule's op."""
    for overload in overloads(op):
        for shapes in SHAPES:
            draw = Draw(str(overload))
            yield Sample(overload, *_arguments(overload, [*shapes, shapes[0]], draw))


def _arguments(overload: Any, shapes: list[tuple[int, ...]], draw: Draw) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    left = list(shapes)
    for argument in overload._schema.arguments:
        kind = str(argument.type)
        if "Tensor" in kind:
            shape = left.pop(0)
            if (overload._opname, argument.name) in (("copy", "src"), ("masked_fill", "value")):
                shape = args[0].shape[-1:] if argument.name == "src" else ()
            value: Any = _tensor(overload._opname, argument.name, shape, draw)
        elif argument.has_default_value() and argument.name not in GIVEN:
            continue
        else:
            value = GIVEN[argument.name] if argument.name in GIVEN else _number(overload._opname, argument.name, kind)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return tuple(args), kwargs


GIVEN: dict[str, Any] = {"dtype": torch.float64, "eps": 0.05, "min": 0.2, "max": 0.7}


def _tensor(name: str, argument: str, shape: tuple[int, ...], draw: Draw) -> Tensor:
    if argument in ("mask", "condition"):
        return draw.bools(*shape)
    if name in INTEGER:
        return 1 + draw.below(6, *shape)
    if name == "_conj":
        return torch.complex(draw.unit(*shape), draw.unit(*shape))
    if name in LOGICAL:
        return draw.bools(*shape)
    return draw.unit(*shape) + (1 if name in ABOVE_ONE else 0)


def _number(name: str, argument: str, kind: str) -> Any:
    if argument == "value" and name == "masked_fill":
        return 0
    if argument in ("rounding_mode", "approximate"):
        return "floor" if argument == "rounding_mode" else "tanh"
    if kind == "bool":
        return False
    if kind in ("int", "Optional[int]") or name in INTEGER:
        return 2
    if name in ABOVE_ONE:
        return 2.5
    return {"max": 0.7, "max_val": 0.7, "min": 0.2, "min_val": 0.2}.get(argument, 0.5)
