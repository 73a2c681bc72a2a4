"""`ChunkedLoss`, `Offload` and `Save`, of ``chunked_loss``, ``offload``, ``save`` and ``recompute``: device memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from shardc.plan.entries.entry import Call, CheckedEntry
from shardc.plan.match import must_match
from shardc.plan.placed import Placed, SavePolicy
from shardc.validate import Range


@dataclass(frozen=True)
class Offload(CheckedEntry):
    """Keeps the parameters that ``glob`` matches on the host, or exempts them from an earlier entry. The fields are the
    arguments of `shardc.offload`.
    """

    constructor = "offload"
    identity = ("glob",)

    glob: str
    to: Annotated[str, Literal["host", "device"]] = "host"
    pin_memory: bool = True

    def place(self, params: Mapping[str, Placed], names: Mapping[str, str]) -> dict[str, Placed]:
        matches = {names[name] for name in must_match(self.glob, names, "parameter", str(self))}
        host, pinned = (str(self), self.pin_memory) if self.to == "host" else ("", True)
        return {name: replace(params[name], host=host, pinned=pinned) for name in matches}

    @property
    def call(self) -> Call:
        options = super().call[1]
        return self.constructor, {"names": (options.pop("glob"),), **options}

    @property
    def group(self) -> tuple[tuple[str, ...], int]:
        return ("offload", self.to, str(self.pin_memory)), 0

    @property
    def row(self) -> tuple[str, str, str]:
        pinned = "" if self.pin_memory or self.to != "host" else ", not pinned"
        return "offload", self.glob, f"on the {self.to}{pinned}"


@dataclass(frozen=True)
class Save(CheckedEntry):
    """Chooses where activations of modules are kept for backward. The fields are the arguments of `shardc.save`."""

    glob: str
    where: Annotated[str, Literal["host", "device", "recompute"]]
    ops: tuple[str, ...] = ()

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
class ChunkedLoss(CheckedEntry):
    """Computes logits and their loss in ``chunks`` parts of the rows (tokens), one part after another
    (`shardc.chunked_loss`).
    """

    constructor = "chunked_loss"
    identity = ()

    chunks: Annotated[int, Range(1)] = 8

    @property
    def settings(self) -> dict[str, object]:
        return {"chunked_loss": self.chunks}

    @property
    def row(self) -> tuple[str, str, str]:
        return "loss", "logits", f"in {self.chunks} chunks of rows, one after the other"
