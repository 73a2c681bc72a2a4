"""``tp``: modules whose weights, and so whose products, are split over an axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from shardc.errors import PlanError
from shardc.ir.mesh import Mesh
from shardc.plan.calls import Call
from shardc.plan.entries.entry import Entry
from shardc.plan.match import must_match
from shardc.plan.placed import Placed
from shardc.validate import check_fields

STYLES = ("colwise", "rowwise", "vocab")


@dataclass(frozen=True)
class Tp(Entry):
    """The modules that ``glob`` matches are computed split over ``axis``, in one of `STYLES`."""

    axis: str
    style: Annotated[str, Literal["colwise", "rowwise", "vocab"]]
    glob: str

    def __post_init__(self) -> None:
        check_fields(self, PlanError, "", plan_entry=str(self))

    @property
    def key(self) -> tuple[str, ...]:
        return ("tp", self.axis, self.glob)

    @property
    def axes(self) -> tuple[str, ...]:
        return (self.axis,)

    def check(self, mesh: Mesh, batch: Mapping[str, Entry]) -> None:
        super().check(mesh, batch)
        if self.axis in batch:
            raise PlanError(
                f"axis {self.axis!r} is given to TP and to {batch[self.axis]}",
                plan_entry=str(self),
                fix="use one axis for the batch and another for TP",
            )

    def place(self, params: Mapping[str, Placed], names: Mapping[str, str]) -> dict[str, Placed]:
        modules = [name.rpartition(".")[0] for name in names if name.rpartition(".")[2] == "weight"]
        dims: dict[str, int] = {}
        for module in must_match(self.glob, modules, "module with a weight", str(self)):
            prefix = f"{module}." if module else ""
            dims[names[f"{prefix}weight"]] = 1 if self.style == "rowwise" else 0
            if self.style == "colwise" and f"{prefix}bias" in names:
                dims[names[f"{prefix}bias"]] = 0
        return {name: self._split(params[name], dim) for name, dim in dims.items()}

    def _split(self, param: Placed, dim: int) -> Placed:
        if dim >= param.layout.ndim:
            raise PlanError(
                f"parameter {param.name!r} of shape {param.shape} has no dim {dim} for {self.style} to split",
                plan_entry=str(self),
                fix="match only modules whose weight is a matrix",
            )
        return param.split(dim, self.axis, str(self))

    @property
    def call(self) -> Call:
        return "tp", {"axis": self.axis, self.style: [self.glob]}

    @property
    def group(self) -> tuple[tuple[str, ...], int]:
        return ("tp", self.axis), STYLES.index(self.style)

    @property
    def row(self) -> tuple[str, str, str]:
        return f"tp {self.style}", self.glob, f"over {self.axis}"
