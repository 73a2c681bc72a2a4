"""`Tp`, of ``tp``: splits the weights of modules, and thereby their matrix products, over an axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from shardc.ir.mesh import Mesh
from shardc.plan.entries.entry import Call, CheckedEntry, Entry
from shardc.plan.match import must_match
from shardc.plan.placed import Placed

STYLES = ("colwise", "rowwise", "vocab")
PACKED = "in_proj_weight"  # in `torch.nn.MultiheadAttention`: the stacked weights of queries, keys and values


@dataclass(frozen=True)
class Tp(CheckedEntry):
    """Splits the modules that ``glob`` matches over ``axis``, in one of `STYLES`.

    The packed weight of a `torch.nn.MultiheadAttention` is matched by its own name: ``attn.in_proj_weight``.
    """

    constructor = "tp"
    identity = ("axis", "glob")

    axis: str
    style: Annotated[str, Literal["colwise", "rowwise", "vocab"]]
    glob: str

    @property
    def axes(self) -> tuple[str, ...]:
        return (self.axis,)

    def check(self, mesh: Mesh, batch: Mapping[str, Entry]) -> None:
        super().check(mesh, batch)
        if shared := [entry for axis, entry in batch.items() if mesh.overlap(axis, self.axis)]:
            raise self.error(
                f"axis {self.axis!r} is given to TP and to {shared[0]}",
                fix="use one axis for the batch and another for TP",
            )

    def place(self, params: Mapping[str, Placed], names: Mapping[str, str]) -> dict[str, Placed]:
        weights = [name for name in names if name.rpartition(".")[2] in ("weight", PACKED)]
        of = {name if _is_packed(name) else name.rpartition(".")[0]: name for name in weights}
        placed: dict[str, Placed] = {}
        for match in must_match(self.glob, of, "module with a weight", str(self)):
            weight, packed = of[match], _is_packed(of[match])
            if packed and self.style != "colwise":
                raise self.error(
                    f"{weight!r} has the weights of queries, keys and values, which only colwise can split",
                    fix=f"write colwise={[self.glob]!r}, and rowwise for the module's out_proj",
                )
            dims = {names[weight]: 1 if self.style == "rowwise" else 0}
            bias = f"{weight.removesuffix('weight')}bias"
            if self.style == "colwise" and bias in names:
                dims[names[bias]] = 0
            for name, dim in dims.items():
                placed[name] = self._split_parts(params[name]) if packed else self._split(params[name], dim)
        return placed

    def _split_parts(self, param: Placed) -> Placed:
        """Return ``param``, whose dim 0 stacks the weights of queries, keys and values, with each of the three split
        over the axis. If the axis does not divide them, they stay whole, with a warning.
        """
        dims = [f"(3 _@{self.axis})", *("_" for _ in param.shape[1:])]
        return param.by_spec(", ".join(dims), str(self))

    def _split(self, param: Placed, dim: int) -> Placed:
        """Return the parameter's layouts with ``dim`` split over this entry's axis. Raises PlanError if it has no such
        dim.
        """
        if dim >= param.layout.ndim:
            raise self.error(
                f"parameter {param.name!r} of shape {param.shape} has no dim {dim} for {self.style} to split",
                fix="match only modules whose weight is a matrix",
            )
        return param.split(dim, self.axis, str(self))

    @property
    def call(self) -> Call:
        return self.constructor, {"axis": self.axis, self.style: [self.glob]}

    @property
    def group(self) -> tuple[tuple[str, ...], int]:
        return ("tp", self.axis), STYLES.index(self.style)

    @property
    def row(self) -> tuple[str, str, str]:
        return f"tp {self.style}", self.glob, f"over {self.axis}"


def _is_packed(name: str) -> bool:
    """Return whether the parameter ``name`` stacks the weights of queries, keys and values."""
    return name.rpartition(".")[2] == PACKED
