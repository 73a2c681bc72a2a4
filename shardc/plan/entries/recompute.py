"""``recompute``: modules whose activations backward computes again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardc.errors import PlanError
from shardc.plan.calls import Call
from shardc.plan.entries.entry import Entry
from shardc.plan.match import must_match
from shardc.validate import check_fields


@dataclass(frozen=True)
class Recompute(Entry):
    """What the modules that ``glob`` matches compute is not kept for backward; see `shardc.recompute`."""

    glob: str

    def __post_init__(self) -> None:
        check_fields(self, PlanError, "", plan_entry=str(self))

    def regions(self, modules: Sequence[str]) -> list[str]:
        return must_match(self.glob, modules, "module", str(self))

    @property
    def call(self) -> Call:
        return "recompute", {"names": (self.glob,)}

    @property
    def group(self) -> tuple[tuple[str, ...], int]:
        return ("recompute",), 0

    @property
    def row(self) -> tuple[str, str, str]:
        return "recompute", self.glob, "activations"
