"""Dynamic sizes by name: which dims of which inputs change between calls."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from shardc import _compat
from shardc.errors import InputError
from shardc.validate import near


class DynamicDims:
    """The dims whose sizes change from call to call.

    Args:
        dims_by_input: input -> dim (negative counts from the end) -> name of its size; equal names are equal sizes.

    Attributes:
        names: the same, plus dims that ``torch._dynamo.mark_dynamic`` has marked.
    """

    def __init__(self, dims_by_input: Mapping[str, Mapping[int, str]]) -> None:
        self.names: dict[str, dict[int, str]] = {name: dict(dims) for name, dims in dims_by_input.items()}

    def mark(self, inputs: Sequence[tuple[str, Any]]) -> None:
        """Adds the dims of ``inputs`` that are marked as dynamic; each gets its own name, ``"x[0]"``."""
        for name, x in inputs:
            for dim in sorted(getattr(x, _compat.DYNAMIC_DIMS, ())):
                self.names.setdefault(name, {}).setdefault(dim, f"{name}[{dim}]")

    def of(self, inputs: Sequence[tuple[str, Any]]) -> tuple[dict[str, dict[int, str]], dict[str, int]]:
        """Resolves the dynamic dims of a call's inputs: input -> dim -> name, and the size of each name.

        Raises InputError if an input lacks a dim, or a name has two sizes.
        """
        dims: dict[str, dict[int, str]] = {}
        sizes: dict[str, int] = {}
        where: dict[str, str] = {}
        for name, x in inputs:
            for dim, size in self.names.get(name, {}).items():
                if not isinstance(x, Tensor) or not -x.dim() <= dim < x.dim():
                    what = f"a tensor of {x.dim()} dims" if isinstance(x, Tensor) else f"a {type(x).__name__}"
                    raise InputError(
                        f"dynamic names dim {dim} of input {name!r}, which is {what}",
                        fix="name a dim that it has, or leave it out of dynamic",
                    )
                at = dim % x.dim()
                dims.setdefault(name, {})[at] = size
                place = f"dim {at} of {name!r}"
                if sizes.setdefault(size, x.shape[at]) != x.shape[at]:
                    raise InputError(
                        f"size {size!r} is {sizes[size]} in {where[size]} and {x.shape[at]} in {place}",
                        fix="pass inputs of one size there, or give the two dims names of their own in dynamic",
                    )
                where.setdefault(size, place)
        return dims, sizes


def check_dynamic(dynamic: Any, model: nn.Module) -> None:
    """Raises InputError if ``dynamic`` is no dict of dicts, or names an input that the model does not take."""
    fix = 'write dynamic={"tokens": {0: "b", 1: "t"}}: input -> dim -> a name for its size'
    if not isinstance(dynamic, Mapping) or not all(isinstance(dims, Mapping) for dims in dynamic.values()):
        raise InputError(f"dynamic={dynamic!r} is not a dict of dicts", fix=fix)
    parameters = inspect.signature(model.forward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for name, dims in dynamic.items():
        head = str(name).partition(".")[0]
        if head not in parameters and not head.startswith("target"):
            hint = near(head, [*parameters, "target"], f"its inputs are {', '.join(parameters)}")
            raise InputError(f"dynamic names {name!r}, which {type(model).__name__} does not take", fix=hint)
        for dim, size in dims.items():
            if type(dim) is not int or not isinstance(size, str) or not size:
                raise InputError(f"dynamic says {dim!r}: {size!r} of {name!r}", fix=fix)
