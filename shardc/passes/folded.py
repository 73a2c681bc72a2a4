"""Folded: what a program of a few alike blocks says of the whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from shardc._compat import LazyGraphModule
from shardc.errors import PlanError
from shardc.ir import graph as ir
from shardc.ir.reads import Reads
from shardc.ir.repeat import Repeat, short_name
from shardc.passes.settle import Settle
from shardc.passes.unfold import Unfold
from shardc.passes.unfold_names import NotPeriodic
from shardc.plan.bound import BoundPlan


@dataclass(frozen=True)
class Folded:
    """What a program of a few blocks says of the whole model.

    Args:
        repeats: the runs of blocks of the whole model.
        keep: how many blocks of each the program has.
        unfolds: for each run, on what the ones before it make.
        bound: the plan against the whole model.
        reads: what captures of all blocks would have looked at.
        graphs: what `whole` has made, by stage.
    """

    repeats: tuple[Repeat, ...]
    keep: int
    unfolds: tuple[Unfold, ...]
    bound: BoundPlan
    reads: Reads
    graphs: dict[str, fx.Graph] = field(default_factory=dict, repr=False, compare=False)

    @property
    def notes(self) -> tuple[str, ...]:
        """What was folded, for people."""
        return tuple(f"{each}: {each.count} blocks alike, analysed on {self.keep}" for each in self.repeats)

    def levels(self, few: Mapping[str, int]) -> dict[str, int]:
        """How each parameter of the whole model is gathered, by those of the blocks that were captured."""
        return {name: few[_counterpart(name, self.repeats, self.keep)] for name in self.bound.params}

    def whole(self, stage: str, graph: fx.Graph) -> fx.Graph:
        """``graph``, which is that of a few blocks after ``stage``, of the whole model, gradients beside their blocks.

        Raises:
            PlanError: the blocks do not repeat in it, node by node.
        """
        if stage not in self.graphs:
            graph = Settle()(LazyGraphModule({}, ir.copied(graph))).graph
            try:
                for repeat in self.repeats:
                    graph = Unfold(graph, repeat, self.keep).joint(graph)
            except NotPeriodic as error:
                raise PlanError(
                    f"after {stage}, {self.repeats[0]} do not repeat node by node ({error.what}), so that there is no "
                    "graph of all blocks",
                    fix="lower it without fold",
                ) from error
            self.graphs[stage] = graph
        return self.graphs[stage]

    def alike(self, name: str) -> str:
        """The blocks that the one that ``name`` is in is like; "" for what is in none."""
        repeats = (each for each in self.repeats if any(name.startswith(f"{block}.") for block in each.names()))
        return "".join(f"{each.count} blocks alike, {each}" for each in list(repeats)[-1:])

    def joint(self, gm: fx.GraphModule) -> fx.GraphModule:
        """The localized joint graph of the whole model."""
        graph = gm.graph
        for unfold in self.unfolds:
            graph = unfold.joint(graph)
        return LazyGraphModule(gm, graph)

    def halves(
        self, first: fx.GraphModule, second: fx.GraphModule | None
    ) -> tuple[fx.GraphModule, fx.GraphModule | None]:
        """The forward (or the inference) and the backward of the whole model."""
        forward, backward = first.graph, second and second.graph
        for unfold in self.unfolds:
            forward, backward = unfold.halves(forward, backward)
        return LazyGraphModule(first, forward), None if backward is None else LazyGraphModule(second, backward)

    def times(self, name: str) -> int:
        """How many nodes of the whole model the one of that name stands for."""
        return 1 + sum(unfold.missing for unfold in self.unfolds if unfold.repeats(name))


def _counterpart(name: str, repeats: Sequence[Repeat], keep: int) -> str:
    """What ``name`` is called in the shortened model, or, if it does without, its like in an inner block.

    >>> [_counterpart(f"layers.{n}.w", [Repeat("layers", 0, 8)], 4) for n in (0, 2, 3, 7)]
    ['layers.0.w', 'layers.2.w', 'layers.1.w', 'layers.3.w']
    """
    for repeat in repeats:
        number, dot, rest = name.removeprefix(repeat.prefix).partition(".")
        inside = name.startswith(repeat.prefix) and number.isdecimal()
        if inside and repeat.first + keep - 1 <= int(number) < repeat.first + repeat.count - 1:
            name = f"{repeat.prefix}{repeat.first + 1}{dot}{rest}"
    return short_name(name, repeats, keep) or name
