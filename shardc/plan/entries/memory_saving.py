"""`ChunkedLoss`, `Offload` and `Save`, of ``chunked_loss``, ``offload``, ``save`` and ``recompute``: device memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from shardc.errors import PlanError
from shardc.plan.constructor_calls import Call
from shardc.plan.entries.entry import Entry
from shardc.plan.match import must_match
from shardc.plan.placed import Placed, SavePolicy
from shardc.validate import Range, check_fields


@dataclass(frozen=True)
class Offload(Entry):
    """Keeps the parameters that ``glob`` matches on the host, or exempts them from an earlier entry. The fields are the
    arguments of `shardc.offload`.
    """

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
class Save(Entry):
    """Chooses where activations of modules are kept for backward. The fields are the arguments of `shardc.save`."""

    glob: str
    where: Annotated[str, Literal["host", "device", "recompute"]]
    ops: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, PlanError, "", plan_entry=str(self))

    def saves(self, modules: Sequence[str]) -> list[SavePolicy]:
        matches = must_match(self.glob, modules, "module", str(self))
        return [SavePolicy(name, self.where, self.ops, str(self)) for name in matches]

    @property
    def call(self) -> Call:
        if self.where == "recompute" and not self.ops:
            return "recompute", {"names": (self.glob,)}
        return "save", {"names": (self.glob,), "on": self.where, **({"ops": list(self.ops)} if self.ops else {})}

    @property
    def group(self) -> tuple[tuple[str, ...], int] | None:
        return None if self.ops else (("save", self.where), 0)

    @property
    def row(self) -> tuple[str, str, str]:
        what = f"results of {', '.join(self.ops)}" if self.ops else "activations"
        if self.where == "recompute":
            return "recompute", self.glob, what
        return "save", self.glob, f"{what} on the {self.where}"


@dataclass(frozen=True)
class ChunkedLoss(Entry):
    """Computes logits and their loss in ``chunks`` parts of the rows (tokens), one part after another
    (`shardc.chunked_loss`).
    """

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
