"""Folding: captures and plans a few of a model's repeated blocks, and replicates the result.

Capture, planning and the cut into forward and backward run on a model with few blocks. The graphs are then unfolded to
all blocks (`shardc.passes.unfold`), and bucketing, scheduling and predictions run on these. Blocks are equivalent if
they compute the same (`shardc.capture.repeats`) and have the same plan settings.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from typing import Any

from shardc.capture import Dtypes, find_repeats, shortened
from shardc.errors import ShardcWarning
from shardc.ir.gc_control import uncollected
from shardc.ir.reads import Lookup, Read, Reads
from shardc.ir.repeat import Repeat, short_name
from shardc.joint import Joint, Request, build_joint
from shardc.passes.folded import Folded
from shardc.passes.unfold import Unfold
from shardc.passes.unfold_names import NotPeriodic
from shardc.plan.ports import ActivationPin
from shardc.plan.resolve import ParamPlan
from shardc.program import Program

# Number of captured blocks per run: the first and last may differ from the inner ones, of which two are compared.
KEEP = (4, 6)


def build_folded(request: Request, make: Callable[[Joint, Folded | None], Program]) -> Program:
    """Compiles a few of a model's repeated blocks and replicates the result; the whole model if none repeat.

    The whole model is also compiled if the graphs of its blocks differ; with ``fold=True`` a warning says why.
    """
    why: NotPeriodic | None = None
    model, options = request.model, request.options
    if options.budget_bytes() > 0 and options.fold:
        text = f"memory_budget={options.memory_budget} may treat alike blocks differently: nothing is folded"
        warnings.warn(ShardcWarning(text), stacklevel=2)
    for keep in KEEP if options.budget_bytes() <= 0 else ():
        repeats = repeats_of(request, keep)
        if not repeats:
            break
        few = few_of(request, repeats, keep)
        with shortened(model, repeats, keep):
            joint = build_joint(few)
        try:
            with uncollected():
                stored = {name: p.dtype for name, p in model.named_parameters()}
                bound = replace(joint.bound, params=request.params, stored=stored, deferred=request.deferred)
                reads = unfolded_reads(joint.captured.reads, repeats, keep, Lookup(model, request.loss))
                program = make(joint, Folded(tuple(repeats), keep, unfolds_of(joint, repeats, keep), bound, reads))
                program.step()
            return program
        except NotPeriodic as error:
            why = error
    if why is not None and options.fold:
        text = f"alike blocks are not folded: {why.what}"
        warnings.warn(ShardcWarning(text), stacklevel=2)
    return make(build_joint(request), None)


def few_of(request: Request, repeats: Sequence[Repeat], keep: int) -> Request:
    """Returns the request for the shortened model, with ``keep`` blocks of each repeated run."""
    params = {short_name(name, repeats, keep): found for name, found in request.params.items()}
    pins = [(short_name(pin.module, repeats, keep), pin) for pin in request.activations()]
    regions = [short_name(name, repeats, keep) for name in request.recomputed()]
    return replace(
        request,
        params={name: found for name, found in params.items() if name is not None},
        pins=[replace(pin, module=name) for name, pin in pins if name is not None],
        regions=[name for name in regions if name is not None],
        traced_in=request.dtypes.shortened(repeats, keep),
        deferred=request.deferred.renamed(lambda name: short_name(name, repeats, keep)),
    )


def unfolds_of(joint: Joint, repeats: Sequence[Repeat], keep: int) -> tuple[Unfold, ...]:
    """Returns the `Unfold` of each run of repeated blocks, for the local joint graph of the shortened model."""
    unfolds: list[Unfold] = []
    graph = joint.local.graph
    for number, repeat in enumerate(repeats):
        if number:
            graph = unfolds[-1].joint(graph)
        unfolds.append(Unfold(graph, repeat, keep))
    return tuple(unfolds)


def unfolded_reads(reads: Reads, repeats: Sequence[Repeat], keep: int, at: Lookup) -> Reads:
    """Extends the reads (guards) of the captured blocks to all blocks of each run.

    Args:
        at: looks reads up in the whole model.

    Raises:
        NotPeriodic: a read has another value in some block, which might have changed its capture.
    """
    if repeats and any(re.search(r"\._modules\['\d+'\]", name) for name, _ in reads.sets):
        raise NotPeriodic(f"forward sets {reads.sets[0][0]}, which may be of one block")
    merged = reads.entries
    for repeat in repeats:
        copies = [copy for read in merged for copy in _read_of_blocks(read, repeat, keep, at)]
        merged = tuple(dict.fromkeys(copies))
    return replace(reads, entries=tuple(sorted(merged, key=str)))


def _read_of_blocks(read: Read, run: Repeat, keep: int, at: Lookup) -> list[Read]:
    """Copies a guard ``read`` of the shortened model to every block of the run; NotPeriodic if values differ."""
    container = "model" + "".join(f"._modules[{part!r}]" for part in run.path.split(".") if part)
    # Every second part is the index of a child of the container.
    parts = re.split(rf"(?<={re.escape(container)}\._modules\[')(\d+)(?='\])", read.expression)
    texts, numbers = parts[::2], [int(number) for number in parts[1::2]]
    inside = {number for number in numbers if run.first <= number < run.first + keep}
    by_number = rf"{re.escape(container)}(?!\._modules\['\d+'\])\S*\[\d+\]"  # contents of a block may be numbered
    if len(inside) > 1 or re.search(by_number, read.expression):
        raise NotPeriodic(f"the model reads {read}, which is not of one block by name")

    def of(block: int) -> Read:
        behind = run.first + keep
        new = [block if n in inside else n + (run.count - keep) * (n >= behind) for n in numbers]
        return replace(read, expression="".join(chain(*zip_longest(texts, map(str, new), fillvalue=""))))

    copies = [of(run.first + block) for block in range(run.count if inside else 1)]
    if len(values := {at.text(each) for each in copies}) > 1:
        raise NotPeriodic(f"{read} is not the same in all blocks: {', '.join(sorted(values)[:3])}")
    return copies


def repeats_of(request: Request, keep: int) -> list[Repeat]:
    """Returns the runs of repeated blocks, which compute the same and have the same plan settings."""
    pins, dtypes, regions = request.activations(), request.dtypes, request.recomputed()
    candidates = find_repeats(
        request.model, request.args, request.kwargs, device=request.device, keep=keep, loss=request.loss, dtypes=dtypes
    )
    out = []
    for repeat in candidates:
        entries = [_plan_settings(name, request.params, pins, regions, dtypes) for name in repeat.names()]
        starts = [0, *(at for at in range(1, repeat.count) if entries[at] != entries[at - 1]), repeat.count]
        runs = [Repeat(repeat.path, repeat.first + a, b - a) for a, b in zip(starts, starts[1:], strict=False)]
        longest = max(runs, key=lambda run: run.count)
        if longest.count > keep:
            out.append(longest)
    return out


def _plan_settings(
    block: str, params: Mapping[str, ParamPlan], pins: Sequence[ActivationPin], regions: Sequence[str], dtypes: Dtypes
) -> Any:
    """Returns the plan's settings for ``block``, by names within it: equal for blocks that may be folded."""
    inside = f"{block}."
    return (
        {name.removeprefix(inside): found for name, found in params.items() if name.startswith(inside)},
        [
            replace(pin, module=pin.module.removeprefix(block))
            for pin in pins
            if pin.module == block or pin.module.startswith(inside)
        ],
        [name.removeprefix(block) for name in regions if f"{name}.".startswith(inside)],
        dtypes.within(block),
    )
