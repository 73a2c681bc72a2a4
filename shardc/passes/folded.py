"""Folded: the graphs of the whole model from those of a few of its repeated blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from shardc._compat import LazyGraphModule
from shardc.errors import PlanError
from shardc.ir import graph as ir
from shardc.ir.reads import Reads
from shardc.ir.repeat import Repeat, short_name
from shardc.passes.hoist_grad_epilogue import HoistGradEpilogue
from shardc.passes.unfold import Unfold
from shardc.passes.unfold_names import NotPeriodic
from shardc.plan.bound import BoundPlan


@dataclass(frozen=True)
class Folded:
    """Relation between a program that was captured with a few repeated blocks and the whole model.

    Args:
        repeats: the runs of repeated blocks in the whole model.
        keep: number of blocks of each run that the program has.
        unfolds: one for each run, applied in order.
        bound: the plan, resolved against the whole model.
        reads: what a capture of all blocks would have read (guards).
        graphs: stage -> the graph of all blocks, as `whole` has computed it.
    """

    repeats: tuple[Repeat, ...]
    keep: int
    unfolds: tuple[Unfold, ...]
    bound: BoundPlan
    reads: Reads
    graphs: dict[str, fx.Graph] = field(default_factory=dict, repr=False, compare=False)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for reports: the runs of blocks that were folded."""
        return tuple(f"{each}: {each.count} blocks alike, analysed on {self.keep}" for each in self.repeats)

    def levels(self, few: Mapping[str, int]) -> dict[str, int]:
        """Returns the reshard level of each parameter of the whole model, given those of the captured blocks."""
        return {name: few[_counterpart(name, self.repeats, self.keep)] for name in self.bound.params}

    def whole(self, stage: str, graph: fx.Graph) -> fx.Graph:
        """Returns the graph of all blocks after ``stage``, given ``graph``, that of the captured ones.

        Gradient epilogues are hoisted first, since they have to stand in their blocks.

        Raises:
            PlanError: the blocks do not repeat node by node.
        """
        if stage not in self.graphs:
            graph = HoistGradEpilogue()(LazyGraphModule({}, ir.copied(graph))).graph
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

    def block_run(self, name: str) -> str:
        """Describes the run of equal blocks that the node ``name`` is in; "" if it is in none."""
        repeats = (each for each in self.repeats if any(name.startswith(f"{block}.") for block in each.names()))
        return "".join(f"{each.count} blocks alike, {each}" for each in list(repeats)[-1:])

    def joint(self, gm: fx.GraphModule) -> fx.GraphModule:
        """Returns the localized joint graph of the whole model."""
        graph = gm.graph
        for unfold in self.unfolds:
            graph = unfold.joint(graph)
        return LazyGraphModule(gm, graph)

    def halves(
        self, first: fx.GraphModule, second: fx.GraphModule | None
    ) -> tuple[fx.GraphModule, fx.GraphModule | None]:
        """Unfolds the forward (or inference) and the backward graph of a few blocks to those of the whole model."""
        forward, backward = first.graph, second and second.graph
        for unfold in self.unfolds:
            forward, backward = unfold.halves(forward, backward)
        return LazyGraphModule(first, forward), None if backward is None else LazyGraphModule(second, backward)

    def times(self, name: str) -> int:
        """Returns the number of nodes of the whole model that the node ``name`` stands for."""
        return 1 + sum(unfold.missing for unfold in self.unfolds if unfold.repeats(name))


def _counterpart(name: str, repeats: Sequence[Repeat], keep: int) -> str:
    """Maps a name of the whole model to the shortened one: itself, or its counterpart in the second block of its run.

    >>> [_counterpart(f"layers.{n}.w", [Repeat("layers", 0, 8)], 4) for n in (0, 2, 3, 7)]
    ['layers.0.w', 'layers.2.w', 'layers.1.w', 'layers.3.w']
    """
    for repeat in repeats:
        number, dot, rest = name.removeprefix(repeat.prefix).partition(".")
        inside = name.startswith(repeat.prefix) and number.isdecimal()
        if inside and repeat.first + keep - 1 <= int(number) < repeat.first + repeat.count - 1:
            name = f"{repeat.prefix}{repeat.first + 1}{dot}{rest}"
    return short_name(name, repeats, keep) or name
