"""``precision``: the dtypes in which a model is computed and its gradients are reduced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shardc.errors import PlanError
from shardc.plan.calls import Call
from shardc.plan.entries.entry import Entry
from shardc.validate import check_fields

DTYPE_FIELDS = ("param", "reduce", "output", "buffers")


@dataclass(frozen=True)
class Precision(Entry):
    """The dtypes in which tensors are sent and computed; None leaves them as they are.

    Args:
        param: parameters are cast to it before their gather, and the model's floating-point inputs to it too.
        reduce: gradients are reduced in it; None: in ``param``.
        output: floating-point outputs are cast to it.
        buffers: floating-point buffers are cast to it.
        keep_low_precision_grads: leave reduced gradients in ``reduce`` instead of casting them back.
        full_precision_eval: compute in the parameters' own dtype while the module is in eval mode.
    """

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    buffers: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    full_precision_eval: bool = False

    def __post_init__(self) -> None:
        check_fields(self, PlanError, "", plan_entry="precision(...)")
        for name in DTYPE_FIELDS:
            dtype = getattr(self, name)
            if dtype is not None and not dtype.is_floating_point:
                raise PlanError(
                    f"{name}={dtype!r} is not a floating-point dtype",
                    plan_entry="precision(...)",
                    fix=f"write {name}=torch.bfloat16",
                )

    @property
    def key(self) -> tuple[str, ...]:
        return ("precision",)

    @property
    def settings(self) -> dict[str, Any]:
        return {"precision": self}

    @property
    def grads(self) -> torch.dtype | None:
        """The dtype that gradients are left in, None for each parameter's own."""
        return (self.reduce or self.param) if self.keep_low_precision_grads else None

    @property
    def said(self) -> dict[str, Any]:
        """The fields that are not at their defaults."""
        return super().call[1]

    @property
    def call(self) -> Call:
        return "precision", self.said

    @property
    def row(self) -> tuple[str, str, str]:
        return "precision", "all", ", ".join(f"{name} {value}" for name, value in self.said.items())
