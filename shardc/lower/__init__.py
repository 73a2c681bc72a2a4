"""Lowers forward and backward graphs to callables, by Inductor or op by op."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor, fx

from shardc.ir import comm_volume
from shardc.ir import graph as ir
from shardc.ir.emitted import joined, uses_of
from shardc.ir.executable import Compiled, Half
from shardc.ir.repeat import LEAST, Segment, cut, whole
from shardc.logs import BUCKETS
from shardc.lower.collective_calls import called, only_calls
from shardc.lower.compile_lock import in_turns
from shardc.lower.inductor import give_values, lowered, lowered_at_any_sizes, settings
from shardc.lower.kernels import at_end
from shardc.verify import check_all
from shardc.verify.halves import in_order
from shardc.verify.subject import Subject, no_rules

BACKENDS = ("inductor", "eager")


Run = Callable[[list[Tensor]], Sequence[object]]


@dataclass(frozen=True)
class Code:
    """A lowered local graph, or segment of one: its callable, and the generated source.

    Args:
        run: takes a list of local tensors, which it empties, and returns the results.
        source: the generated code; "" for a graph without ops.
    """

    run: Run
    source: str

    def __call__(self, inputs: list[Tensor]) -> Sequence[object]:
        # Nothing in here is differentiated, so ops need not check for it. For a wait, that check is most of its time.
        with torch._C._AutoDispatchBelowAutograd():
            return self.run(inputs)


def lower(*halves: Half, backend: str, by: str = "auto") -> list[Compiled]:
    """Lower the forward and backward graph of a step: each becomes a `Compiled`, a callable made of compiled
    segments.

    Args:
        halves: graphs at local shapes, whose placeholders have fake tensors as ``meta["val"]``.
        backend: "inductor" or "eager".
        by: "whole" compiles each graph as one; "blocks" compiles repeated blocks once; "auto" does so from four equal
            blocks on.
    """
    log_collectives(halves)
    if backend == "eager":
        return [Compiled(half, whole(half.gm), (_eager(half.gm),), half.plan) for half in halves]
    sized = {half: Code(*lowering) for half in halves if (lowering := lowered_at_any_sizes(half)) is not None}
    for half in halves if by != "whole" else ():
        give_values(half.gm)
    segments = {
        half: whole(half.gm) if by == "whole" or half in sized else cut(half.gm, LEAST if by == "auto" else 2)
        for half in halves
    }
    for half, row in segments.items():
        check_all(Subject(half.gm, half.mesh, no_rules), "cutting into segments", [partial(in_order, segments=row)])
    kinds = {segment.gm: half.kind for half in halves if half not in sized for segment in segments[half]}
    calls = {gm: Code(*called(gm)) for gm in kinds if only_calls(gm.graph)}
    cached_settings = cache(settings)
    with at_end():
        rest = {gm: kind for gm, kind in kinds.items() if gm not in calls}
        codes = calls | in_turns(rest, lambda gm, kind: Code(*lowered(gm, kind, cached_settings)))
    return [
        _compiled(half, segments[half], [sized[half]] if half in sized else [codes[x.gm] for x in segments[half]])
        for half in halves
    ]


def _compiled(half: Half, segments: tuple[Segment, ...], codes: Sequence[Code]) -> Compiled:
    """Join the compiled ``codes`` of the segments of ``half`` to one callable, a `Compiled`.

    If all segments have generated code, its arena is planned by the lifetimes of values in that code.
    """
    sources = dict.fromkeys(code.source for code in codes)
    compiled = Compiled(half, segments, tuple(codes), half.plan, "\n".join(sources))
    if not compiled.plan.slots or not all(sources):
        return compiled
    read = {source: uses_of(source) for source in sources}
    uses = [read[code.source] for code in codes]
    lifetimes = uses[0] if len(uses) == 1 else joined(uses, segments, compiled.takes, compiled.gives)
    leaving = lifetimes.argument_ends[len(lifetimes.argument_ends) - len(compiled.plan.last_reads) :]
    return replace(compiled, plan=compiled.plan.moved(lifetimes.spans, lifetimes.leaving, leaving))


def _eager(gm: fx.GraphModule) -> Run:
    """Return a callable that runs ``gm`` op by op."""

    def run(inputs: list[Tensor]) -> Sequence[object]:
        # Takes the inputs out of the list and lets go of each value after its last use.
        with torch.no_grad():
            return fx.Interpreter(gm).boxed_run(inputs)

    return run


def log_collectives(halves: Iterable[Half]) -> None:
    """Log to ``shardc.buckets`` the collectives of each graph by kind and axis: number, tensors, bytes of a rank."""
    if not BUCKETS.isEnabledFor(logging.INFO):
        return
    for half in dict.fromkeys(halves):
        groups: dict[tuple[str, str], list[tuple[int, int]]] = {}
        for node in half.graph.nodes:
            kind = comm_volume.collective_kind(node) if node.op == "call_function" else None
            if kind is not None:
                operands = [x for x in node.all_input_nodes if ir.is_tensor(x)]
                nbytes = sum(ir.value(x).nbytes for x in operands)
                over = ",".join(comm_volume.group_of(node, half.mesh)[0])
                groups.setdefault((kind, over), []).append((len(operands), nbytes))
        for (kind, over), of in groups.items():
            tensors, sizes = sum(count for count, _ in of), [nbytes for _, nbytes in of]
            BUCKETS.info(
                "%s: %d x %s over %s of %d tensors, %s to %s B a rank",
                half.kind, len(of), kind, over, tensors, f"{min(sizes):,}", f"{max(sizes):,}",
            )  # fmt: skip
