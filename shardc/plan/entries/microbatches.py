"""`Microbatches`, of ``microbatches``: runs the batch of each rank in parts, one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from shardc.errors import PlanError
from shardc.ir.mesh import MICRO, Mesh
from shardc.plan.constructor_calls import Call
from shardc.plan.entries.entry import Entry
from shardc.validate import Range, check_fields


@dataclass(frozen=True)
class Microbatches(Entry):
    """Splits dim 0 of the inputs of each rank into ``count`` microbatches, by an axis of the mesh (`Mesh.timed`).

    The fields are those of `shardc.microbatches`.
    """

    count: Annotated[int, Range(1)]
    reduce: Literal["step", "microbatch"] = "step"

    def __post_init__(self) -> None:
        check_fields(self, PlanError, "", plan_entry=str(self))

    @property
    def key(self) -> tuple[str, ...]:
        return ("microbatches",)

    @property
    def settings(self) -> dict[str, object]:
        return {"microbatches": self.count, "reduce_in": self.reduce}

    def check(self, mesh: Mesh, batch: Mapping[str, Entry]) -> None:
        if MICRO in mesh and not mesh.time:
            raise PlanError(
                f"{MICRO!r} is the axis of microbatches, and the mesh {mesh} has one of that name",
                plan_entry=str(self),
                fix="give the axis of the mesh another name",
            )

    @property
    def call(self) -> Call:
        return "microbatches", super().call[1]

    @property
    def row(self) -> tuple[str, str, str]:
        reduced = ", gradients reduced for each" if self.reduce == "microbatch" else ""
        return "microbatches", "inputs", f"dim 0 in {self.count}, one after the other{reduced}"
