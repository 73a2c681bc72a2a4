"""`Ep`, of ``ep``: splits modules whose parameters have one slice for each expert over an axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from shardc.plan.entries.entry import BatchEntry, Call
from shardc.plan.match import matching, must_match
from shardc.plan.placed import Placed
from shardc.validate import Range


@dataclass(frozen=True)
class Ep(BatchEntry):
    """Splits the experts of the modules that ``glob`` matches over ``axis``, and the batch, too.

    The other fields are those of `shardc.ep`.
    """

    constructor = "ep"
    identity = ("axis", "glob")

    glob: str
    dispatch: Annotated[str, Literal["auto", "gather", "send", "bounded"]] = "auto"
    capacity: float = 0.0
    chunks: Annotated[int, Range(1)] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.capacity != 0) != (self.dispatch == "bounded"):
            raise self.error(
                f"a capacity requires dispatch='bounded', and the dispatch is {self.dispatch!r}"
                if self.capacity
                else "dispatch='bounded' needs a capacity: the rows of a block that is sent",
                fix='write dispatch="bounded", capacity=1.5: room for one and a half times the rows of an even load',
            )
        if self.dispatch == "bounded" and self.capacity < 1:
            raise self.error(
                f"a capacity of {self.capacity} has no room for the rows of an even load",
                fix="write a capacity of 1.0 or more",
            )

        if self.chunks > 1 and self.dispatch not in ("send", "bounded"):
            raise self.error(
                f"chunks={self.chunks} cut the rows that are sent, and the dispatch is {self.dispatch!r}",
                fix='write dispatch="send", or dispatch="bounded" with a capacity, or leave chunks out',
            )

    def applies_to(self, module: str) -> bool:
        """Return whether the entry applies to the experts of module ``module``."""
        return bool(matching(self.glob, (module,)))

    def place(self, params: Mapping[str, Placed], names: Mapping[str, str]) -> dict[str, Placed]:
        modules: dict[str, list[str]] = {}
        for name in names:
            modules.setdefault(name.rpartition(".")[0], []).append(name)
        placed: dict[str, Placed] = {}
        for module in must_match(self.glob, modules, "module with parameters", str(self)):
            for name in modules[module]:
                param = params[names[name]]
                if len(param.shape) < 2:
                    raise self.error(
                        f"parameter {name!r} of shape {param.shape} has no dim for experts",
                        fix="match only modules with all experts' weights in one tensor, the experts first",
                    )
                placed[names[name]] = param.split(0, self.axis, str(self)).keeping(self.axis)
        return placed

    @property
    def call(self) -> Call:
        options = {name: value for name, value in super().call[1].items() if name in ("dispatch", "capacity", "chunks")}
        return self.constructor, {"axis": self.axis, "experts": self.glob, **options}

    @property
    def row(self) -> tuple[str, str, str]:
        how = "" if self.dispatch == "auto" else f", {self.dispatch}{f' {self.capacity:g}' if self.capacity else ''}"
        how += f" in {self.chunks} chunks" if self.chunks > 1 else ""
        return "experts", self.glob, f"over {self.axis}{how}"
