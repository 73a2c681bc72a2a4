"""Lower: halves as callables, through Inductor or as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx

from shardc.ir.arena import MemoryPlan
from shardc.ir.emitted import joined, uses_of
from shardc.ir.executable import Half
from shardc.ir.graph import output_node
from shardc.ir.segments import LEAST, Segment, cut, whole
from shardc.lower.inductor import lowered
from shardc.lower.shared import in_turns
from shardc.lower.sized import lowered_at_any_sizes

BACKENDS = ("inductor", "eager")


@dataclass(frozen=True)
class Code:
    """A local graph that can be called, with a list of local tensors (emptied by the call); it gives a list of results.

    Args:
        run: what is called.
        source: that Inductor made; "" of no code.
    """

    run: Callable[[list[Tensor]], Sequence[Any]]
    source: str = ""

    def __call__(self, inputs: list[Tensor]) -> Sequence[Any]:
        if not self.source:
            return self.run(inputs)
        # Nothing in here is differentiated: no op has to look whether it is. Of a wait, that is most of its time.
        with torch._C._AutoDispatchBelowAutograd():
            return self.run(inputs)


@dataclass(frozen=True)
class Compiled:
    """A lowered half: code for each of its segments, which run in order.

    Args:
        segments, codes: alike segments have the same code.
        plan: where the results of its collectives lie, at the lines of the code where there is some.
        takes: the names of the half's placeholders.
        gives: what it returns: names of values, or constants.
        constants: the tensors that the half holds, by name.
    """

    segments: tuple[Segment, ...]
    codes: tuple[Code, ...]
    plan: MemoryPlan
    takes: tuple[str, ...] = ()
    gives: tuple[Any, ...] = ()
    constants: Mapping[str, Tensor] = field(default_factory=dict)

    def __call__(self, inputs: list[Tensor], enter: Callable[[Segment], None] = lambda _: None) -> Sequence[Any]:
        """Runs it on ``inputs``, which are emptied; ``enter`` is called in front of each segment."""
        if len(self.segments) == 1:
            return self.codes[0](inputs)
        values: dict[str, Any] = {**self.constants, **dict(zip(self.takes, inputs, strict=True))}
        inputs.clear()
        for segment, code in zip(self.segments, self.codes, strict=True):
            enter(segment)
            given = [values.pop(name) if name in segment.done else values[name] for name in segment.takes]
            values.update(zip(segment.gives, code(given), strict=True))
        return [values[x] if isinstance(x, str) else x for x in self.gives]

    @property
    def source_code(self) -> str:
        """What Inductor made, of all segments that differ; "" of no code."""
        return "\n".join(dict.fromkeys(code.source for code in self.codes))


def lower(*halves: Half, backend: str, by: str = "auto") -> list[Compiled]:
    """Halves of a step as something that runs.

    Args:
        halves: localized, with fake tensors as their placeholders' ``meta["val"]``.
        backend: "inductor" or "eager".
        by: Inductor lowers them "whole", by "blocks" that repeat, each kind once, or, "auto", by blocks where four are
            alike.
    """
    if backend == "eager":
        return [Compiled(whole(half.gm), (Code(_eager(half.gm)),), half.plan) for half in halves]
    sized = {half: Code(*made) for half in halves if (made := lowered_at_any_sizes(half)) is not None}
    segments = {
        half: whole(half.gm) if by == "whole" or half in sized else cut(half.gm, LEAST if by == "auto" else 2)
        for half in halves
    }
    kinds = {segment.gm: half.kind for half in halves if half not in sized for segment in segments[half]}
    codes = in_turns(kinds, lambda gm, kind: Code(*lowered(gm, kind)))
    return [
        _compiled(half, segments[half], [sized[half]] if half in sized else [codes[x.gm] for x in segments[half]])
        for half in halves
    ]


def _compiled(half: Half, segments: tuple[Segment, ...], codes: Sequence[Code]) -> Compiled:
    """``half`` by code for each of its segments, with its memory planned at the lifetimes of the code."""
    takes, plan = tuple(node.name for node in half.graph.find_nodes(op="placeholder")), half.plan
    gives = tuple(x.name if isinstance(x, fx.Node) else x for x in output_node(half.graph).args[0])
    if plan.slots and all(code.source for code in codes):
        read = {code.source: uses_of(code.source) for code in codes}
        uses = [read[code.source] for code in codes]
        found = uses[0] if len(uses) == 1 else joined(uses, segments, takes, gives)
        plan = plan.moved(found.spans, found.leaving, found.given[len(found.given) - len(plan.given) :])
    held = half.graph.find_nodes(op="get_attr") if len(segments) > 1 else ()
    constants = {node.name: attrgetter(str(node.target))(half.gm) for node in held}
    return Compiled(segments, tuple(codes), plan, takes, gives, constants)


def _eager(gm: fx.GraphModule) -> Callable[[list[Tensor]], Sequence[Any]]:
    def run(inputs: list[Tensor]) -> Sequence[Any]:
        # Takes the inputs out of the list and lets go of each value after its last use.
        with torch.no_grad():
            return fx.Interpreter(gm).boxed_run(inputs)

    return run
