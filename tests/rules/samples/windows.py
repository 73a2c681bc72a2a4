"""Samples of pooling, padding and resizing, forward and backward, made from their schemas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.rules.samples.values import Draw, Sample, overloads

aten = torch.ops.aten


def samples(op: str) -> Iterator[Sample]:
    """Samples of every overload of a rule on windows, with and without a batch where both are allowed."""
    name = op.split(".")[1]
    places = next(k for k in (1, 2, 3) if f"{k}d" in name)
    for overload in overloads(op):
        for lead in ((4, 2),) if "upsample" in name else ((4, 2), (2,)):
            yield _sample(overload, lead, places, Draw(op))


def _sample(overload: Any, lead: tuple[int, ...], places: int, draw: Draw) -> Sample:
    name = overload._opname
    given: dict[str, Any] = {"self": draw.normal(*lead, *[6] * places), **_numbers(name, places)}
    given["input"] = given["self"]
    if "indices" in {a.name for a in overload._schema.arguments} or name.endswith("_backward"):
        forward = getattr(aten, FORWARD.get(name, name.removesuffix("_backward")))
        whole = next(o for o in (getattr(forward, n) for n in forward.overloads()) if "out" not in o._overloadname)
        made = whole(*_arguments(whole, given)[0])
        out, given["indices"] = made if isinstance(made, tuple) else (made, None)
        given["grad_output"] = draw.normal(*out.shape)
        given["input_size"] = list(given["self"].shape)
        if name.startswith("max_unpool"):
            given["self"], given["output_size"] = out, [6] * places
    return Sample(overload, *_arguments(overload, given))


FORWARD = {"max_unpool2d": "max_pool2d_with_indices"}


def _numbers(name: str, places: int) -> dict[str, Any]:
    """Every number that some of these ops take."""
    resized = [9 if "upsample" in name else 3] * places
    pads = {"padding": [1, 2] * places} if "pad" in name else {"padding": [0] * places}
    return {
        **pads,
        "kernel_size": [2] * places,
        "stride": [2] * places,
        "dilation": [1] * places,
        "output_size": resized,
        "align_corners": False,
        "ceil_mode": False,
        "count_include_pad": True,
        "divisor_override": None,
    }


def _arguments(overload: Any, given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args: list[Any] = []
    for argument in overload._schema.arguments:
        value = given[argument.name] if argument.name in given else argument.default_value
        if argument.name.startswith("scale"):
            value = [1.5] * len(given["kernel_size"]) if argument.name == "scale_factors" else 1.5
        if overload._overloadname == "vec" and argument.name == "output_size":
            value = None
        assert value is not None or "Optional" in str(argument.type), f"no value for {argument.name} of {overload}"
        args.append(value)
    return tuple(args), {}
