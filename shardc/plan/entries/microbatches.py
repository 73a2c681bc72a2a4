"""`Microbatches`, of ``microbatches``: runs the batch of each rank in parts, one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from shardc.ir.mesh import MICRO, Mesh
from shardc.plan.entries.entry import CheckedEntry, Entry
from shardc.validate import Range


@dataclass(frozen=True)
class Microbatches(CheckedEntry):
    """Splits dim 0 of the inputs of each rank into ``count`` microbatches, by an axis of the mesh (`Mesh.timed`).

    The fields are those of `shardc.microbatches`.
    """

    constructor = "microbatches"
    identity = ()

    count: Annotated[int, Range(1)]
    reduce: Literal["step", "microbatch"] = "step"

    @property
    def settings(self) -> dict[str, object]:
        return {"microbatches": self.count, "reduce_in": self.reduce}

    def check(self, mesh: Mesh, batch: Mapping[str, Entry]) -> None:
        if MICRO in mesh and not mesh.time:
            raise self.error(
                f"{MICRO!r} is the axis of microbatches, and the mesh {mesh} has one of that name",
                fix="give the axis of the mesh another name",
            )

    @property
    def row(self) -> tuple[str, str, str]:
        reduced = ", gradients reduced for each" if self.reduce == "microbatch" else ""
        return "microbatches", "inputs", f"dim 0 in {self.count}, one after the other{reduced}"
