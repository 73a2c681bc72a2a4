"""`ChunkedLoss`, `Offload` and `Recompute`, of ``chunked_loss``, ``offload`` and ``recompute``: save device memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from shardc.errors import PlanError
from shardc.plan.constructor_calls import Call
from shardc.plan.entries.entry import Entry
from shardc.plan.match import must_match
from shardc.plan.placed import Placed
from shardc.validate import Range, check_fields


@dataclass(frozen=True)
class Offload(Entry):
    """Keeps the parameters that ``glob`` matches on the host, or not; the fields are those of `shardc.offload`."""

    glob: str
    to: Annotated[str, Literal["host", "device"]] = "host"
    pin_memory: bool = True

    def __post_init__(self) -> None:
        check_fields(self, PlanError, "", plan_entry=str(self))

    @property
    def key(self) -> tuple[str, ...]:
        return ("offload", self.glob)

    def place(self, params: Mapping[str, Placed], names: Mapping[str, str]) -> dict[str, Placed]:
        matches = {names[name] for name in must_match(self.glob, names, "parameter", str(self))}
        host, pinned = (str(self), self.pin_memory) if self.to == "host" else ("", True)
        return {name: replace(params[name], host=host, pinned=pinned) for name in matches}

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


@dataclass(frozen=True)
class Recompute(Entry):
    """Recomputes the activations of the modules that ``glob`` matches in backward (`shardc.recompute`)."""

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


@dataclass(frozen=True)
class ChunkedLoss(Entry):
    """Computes logits and their loss for one of ``chunks`` parts of the rows after another (`shardc.chunked_loss`)."""

    chunks: Annotated[int, Range(1)] = 8

    def __post_init__(self) -> None:
        check_fields(self, PlanError, "", plan_entry=str(self))

    @property
    def key(self) -> tuple[str, ...]:
        return ("chunked_loss",)

    @property
    def settings(self) -> dict[str, object]:
        return {"chunked_loss": self.chunks}

    @property
    def call(self) -> Call:
        return "chunked_loss", super().call[1]

    @property
    def row(self) -> tuple[str, str, str]:
        return "loss", "logits", f"in {self.chunks} chunks of rows, one after the other"
