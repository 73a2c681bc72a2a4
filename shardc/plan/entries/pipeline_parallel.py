"""`Pp`, of ``pp``: cuts the model into stages, which lie on different coordinates of a mesh axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from shardc.errors import PlanError
from shardc.ir.mesh import Mesh
from shardc.ir.schedules import ORDERS, Schedule, schedule
from shardc.plan.entries.entry import Call, CheckedEntry, Entry
from shardc.validate import Range, near


@dataclass(frozen=True)
class Pp(CheckedEntry):
    """Cuts the model into stages over ``axis``, and runs them as ``schedule`` says.

    The fields are those of `shardc.pp`.
    """

    constructor = "pp"
    identity = ()

    axis: str
    schedule: str = "1f1b"
    microbatches: Annotated[int, Range(2)] | None = None
    cut: str | tuple[str, ...] = "auto"
    stages_per_rank: Annotated[int, Range(1)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule not in ORDERS:
            raise self.error(f"there is no schedule {self.schedule!r}", fix=near(self.schedule, ORDERS))
        if isinstance(self.cut, str) and self.cut != "auto":
            raise self.error(
                f"cut={self.cut!r} is neither a list of globs nor 'auto'",
                fix=f"write cut=[{self.cut!r}]",
            )

    @property
    def axes(self) -> tuple[str, ...]:
        return (self.axis,)

    @property
    def settings(self) -> dict[str, object]:
        count = {} if self.microbatches is None else {"microbatches": self.microbatches}
        return {"pp": self, **count}

    def check(self, mesh: Mesh, batch: Mapping[str, Entry]) -> None:
        if self.axis in batch:
            raise self.error(
                f"{batch[self.axis]} splits the batch over {self.axis!r}, the axis of the stages",
                fix="give the stages an axis of their own",
            )

    def lists(self, ranks: int, microbatches: int, trains: bool = True) -> Schedule:
        """Return the schedule of a step (``trains``) or of a call without gradients: a list of actions for each rank.

        Raises:
            PlanError: the schedule does not have these numbers of stages and microbatches.
        """
        try:
            return schedule(self.schedule, ranks, microbatches, self.stages_per_rank, trains)
        except PlanError as error:
            raise PlanError(error.what, plan_entry=str(self), fix=error.fix) from error

    @property
    def call(self) -> Call:
        name, arguments = super().call
        return name, arguments | ({"cut": list(self.cut)} if isinstance(self.cut, tuple) else {})

    @property
    def row(self) -> tuple[str, str, str]:
        cut = "" if self.cut == "auto" else f", cut in front of {', '.join(self.cut)}"
        return "pp", f"stages over {self.axis}", f"{self.schedule}{cut}"
