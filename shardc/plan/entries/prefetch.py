"""``Plan(prefetch=...)``: which modules' parameters are on their way while a module computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardc.errors import PlanError
from shardc.plan.calls import Call
from shardc.plan.entries.raw import Raw
from shardc.plan.forms import Form, quote
from shardc.plan.match import near_names, shorten
from shardc.validate import check_fields


@dataclass(frozen=True)
class Prefetch(Raw):
    """The gathers of parameters of ``modules`` start before ``module`` computes, in forward and in backward."""

    module: str
    modules: tuple[str, ...]

    def __post_init__(self) -> None:
        check_fields(self, PlanError, "", plan_entry=str(self))

    @property
    def key(self) -> tuple[str, str]:
        return ("prefetch", self.module)

    def pins(self, modules: Sequence[str]) -> dict[tuple[str, str, int | str], Form]:
        """Says nothing of activations; raises PlanError for a module that there is not."""
        for name in (self.module, *self.modules):
            if name not in modules:
                near = near_names(name, list(modules))
                fix = f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {shorten(list(modules))}"
                raise PlanError(f"there is no module {name!r}", plan_entry=str(self), fix=fix)
        return {}

    @property
    def call(self) -> Call:
        return "Plan", {"prefetch": {self.module: list(self.modules)}}

    @property
    def row(self) -> tuple[str, str, str]:
        return "prefetch", self.module, f"parameters of {', '.join(self.modules)}"

    def __str__(self) -> str:
        return f"prefetch[{quote(self.module)}] = [{', '.join(map(quote, self.modules))}]"
