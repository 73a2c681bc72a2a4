"""``offload``: parameters that are kept in the host's memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from shardc.errors import PlanError
from shardc.plan.calls import Call
from shardc.plan.entries.entry import Entry
from shardc.plan.match import must_match
from shardc.plan.placed import Placed
from shardc.validate import check_fields


@dataclass(frozen=True)
class Offload(Entry):
    """The parameters that ``glob`` matches are kept on the host, or not; the fields are as in `shardc.offload`."""

    glob: str
    to: Annotated[str, Literal["host", "device"]] = "host"
    pin_memory: bool = True

    def __post_init__(self) -> None:
        check_fields(self, PlanError, "", plan_entry=str(self))

    @property
    def key(self) -> tuple[str, ...]:
        return ("offload", self.glob)

    def place(self, params: Mapping[str, Placed], names: Mapping[str, str]) -> dict[str, Placed]:
        found = {names[name] for name in must_match(self.glob, names, "parameter", str(self))}
        host, pinned = (str(self), self.pin_memory) if self.to == "host" else ("", True)
        return {name: replace(params[name], host=host, pinned=pinned) for name in found}

    @property
    def call(self) -> Call:
        options = super().call[1]
        return "offload", {"names": (options.pop("glob"),), **options}

    @property
    def group(self) -> tuple[tuple[str, ...], int]:
        return ("offload", self.to, str(self.pin_memory)), 0

    @property
    def row(self) -> tuple[str, str, str]:
        pinned = "" if self.pin_memory or self.to != "host" else ", not pinned"
        return "offload", self.glob, f"on the {self.to}{pinned}"
