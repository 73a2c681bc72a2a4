"""`Cp`, of ``cp``: splits the sequence of inputs and activations over an axis; attention communicates over it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from shardc.plan.entries.entry import BatchEntry
from shardc.plan.match import matching


@dataclass(frozen=True)
class Cp(BatchEntry):
    """Splits dim ``dim`` (the sequence) of inputs over ``axis``. The other fields are the arguments of `shardc.cp`."""

    constructor = "cp"
    identity = ("axis", "modules")

    method: Annotated[str, Literal["auto", "gather", "ring", "ulysses"]] = "auto"
    modules: str = "*"
    order: Annotated[str, Literal["auto", "striped", "contiguous"]] = "auto"
    dim: int = 1

    def __post_init__(self) -> None:
        if self.method == "heads":
            raise self.error('method "heads" has another name', fix='write method="ulysses"')
        super().__post_init__()
        if self.dim < 1:
            raise self.error(
                f"the sequence cannot be dim {self.dim} of the inputs, which has the batch if it is 0",
                fix="write dim=1, or the number of a later dim",
            )

    @property
    def sequence(self) -> tuple[int, str, bool]:
        striped = self.order == "striped" or self.order == "auto" and self.method != "ulysses"
        return self.dim, self.axis, striped

    def applies_to(self, module: str) -> bool:
        """Return whether the entry applies to the attention that ``module`` computes."""
        return self.modules == "*" or bool(matching(self.modules, (module,)))

    @property
    def row(self) -> tuple[str, str, str]:
        return "sequence", self.modules, f"dim {self.dim} over {self.axis}, {self.method}"
