"""One rank's builder: runs each op at once, over this rank's process groups."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from shardc.ir.comm import group_name
from shardc.runtime.groups import Groups


class Eager:
    """A builder (`shardc.passes.lower.collectives.Builder`) whose values are this rank's tensors.

    Args:
        groups: this rank's process groups; every group that is asked for has been added to them.
    """

    def __init__(self, groups: Groups) -> None:
        self.groups = groups

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    def coordinate(self, axes: tuple[str, ...]) -> torch.Tensor:
        return self.groups.coordinate(axes)

    def shape(self, x: torch.Tensor) -> tuple[int, ...]:
        return tuple(x.shape)

    def group(self, axes: tuple[str, ...]) -> tuple[int, str]:
        """(size, registered name) of this rank's group along ``axes``."""
        return prod(self.groups.mesh.size(axis) for axis in axes), self.groups.rename[group_name(axes)]
