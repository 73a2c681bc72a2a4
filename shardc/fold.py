"""Folding: captures and plans a few of a model's repeated blocks, and replicates the result.

Capture, planning and the cut into forward and backward run on a model with few blocks. The graphs are then unfolded to
all blocks (`shardc.passes.unfold`), and bucketing, scheduling and predictions run on these. Blocks are equivalent if
they compute the same (`shardc.capture.repeats`) and have the same plan settings.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby

from shardc.capture import find_repeats, shortened
from shardc.errors import ShardcWarning
from shardc.ir.gc_control import uncollected
from shardc.ir.guards import Lookup, Read, Reads
from shardc.ir.module_paths import name_in
from shardc.ir.repeat import Repeat, Repeats
from shardc.joint import Joint, Request, build_joint
from shardc.passes.unfold import Folded, NotPeriodic
from shardc.program import Program

# Numbers of captured blocks per run to try. The first and last may differ from the inner ones, two of which are
# compared.
KEEP = (4, 6)


def build_folded(request: Request, make: Callable[[Joint, Folded | None], Program]) -> Program:
    """Compiles a few of a model's repeated blocks with ``make`` and replicates their program. Compiles the whole
    model if no blocks repeat.

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
        few = few_of(request, repeats)
        with shortened(model, repeats):
            joint = build_joint(few)
        try:
            with uncollected():
                reads = unfolded_reads(joint.captured.reads, repeats, Lookup(model, request.loss))
                program = make(joint, folded_of(request, joint, repeats, reads))
                program.step()
            return program
        except NotPeriodic as error:
            why = error
    if why is not None and options.fold:
        text = f"alike blocks are not folded: {why.what}"
        warnings.warn(ShardcWarning(text), stacklevel=2)
    return make(build_joint(request), None)


def few_of(request: Request, repeats: Repeats) -> Request:
    """Returns ``request`` for the model shortened to a few of its repeated blocks."""
    params = {repeats.short(name): param for name, param in request.params.items()}
    pins = [(repeats.short(pin.module), pin) for pin in request.pins]
    saves = [(repeats.short(policy.module), policy) for policy in request.saves]
    return replace(
        request,
        params={name: param for name, param in params.items() if name is not None},
        pins=[replace(pin, module=name) for name, pin in pins if name is not None],
        saves=[replace(policy, module=name) for name, policy in saves if name is not None],
        traced_in=request.dtypes.shortened(repeats),
        deferred=request.deferred.renamed(repeats.short),
    )


def folded_of(request: Request, joint: Joint, repeats: Repeats, reads: Reads) -> Folded:
    """Returns the `Folded` of a shortened model: how its ``joint`` graph, of a few repeated blocks, extends to the
    whole model of ``request``.

    Args:
        reads: the reads (guards) of a capture of all blocks.

    Raises:
        NotPeriodic: the nodes of the blocks do not repeat.
    """
    stored = {name: p.dtype for name, p in request.model.named_parameters()}
    bound = replace(joint.bound, params=request.params, stored=stored, deferred=request.deferred)
    return Folded(repeats, joint.local.graph, bound, reads)


def unfolded_reads(reads: Reads, repeats: Repeats, at: Lookup) -> Reads:
    """Returns the reads (guards) of the whole model: ``reads``, those of a capture of a few blocks, repeated for every
    block of each run in ``repeats``.

    Args:
        at: looks up a read in the model with all blocks.

    Raises:
        NotPeriodic: a read has another value in some block, which might have changed its capture.
    """
    if repeats and any(re.search(r"\._modules\['\d+'\]", name) for name, _ in reads.sets):
        raise NotPeriodic(f"forward sets {reads.sets[0][0]}, which may be of one block")
    merged = reads.entries
    for run in repeats:
        copies = [copy for read in merged for copy in _read_of_blocks(read, run, repeats.keep, at)]
        merged = tuple(dict.fromkeys(copies))
    return replace(reads, entries=tuple(sorted(merged, key=str)))


def _read_of_blocks(read: Read, run: Repeat, keep: int, at: Lookup) -> list[Read]:
    """Return the guard ``read`` once for every block of ``run`` if it is about a captured block of that run. Else
    return it alone, with block numbers of the whole model.

    Raises:
        NotPeriodic: the values differ between blocks.
    """
    container = "model" + "".join(f"._modules[{part!r}]" for part in run.path.split(".") if part)
    child = rf"(?<={re.escape(container)}\._modules\[')\d+(?='\])"
    numbers = {int(number) for number in re.findall(child, read.expression)}
    inside = {number for number in numbers if run.first <= number < run.first + keep}
    by_number = rf"{re.escape(container)}(?!\._modules\['\d+'\])\S*\[\d+\]"  # contents of a block may be numbered
    if len(inside) > 1 or re.search(by_number, read.expression):
        raise NotPeriodic(f"the model reads {read}, which is not of one block by name")

    def of(block: int) -> Read:
        def renumbered(match: re.Match[str]) -> str:
            number = int(match[0])
            behind = number >= run.first + keep
            return str(block if number in inside else number + (run.count - keep) * behind)

        return replace(read, expression=re.sub(child, renumbered, read.expression))

    copies = [of(run.first + block) for block in range(run.count if inside else 1)]
    if len(values := {at.text(copy) for copy in copies}) > 1:
        raise NotPeriodic(f"{read} is not the same in all blocks: {', '.join(sorted(values)[:3])}")
    return copies


def repeats_of(request: Request, keep: int) -> Repeats:
    """Returns the runs of more than ``keep`` consecutive blocks that compute the same and that the plan treats
    alike.
    """
    equal_runs = find_repeats(
        request.model, request.args, request.kwargs, device=request.device, keep=keep, loss=request.loss,
        dtypes=request.dtypes,
    )  # fmt: skip
    parts = [part for run in equal_runs for part in alike_parts(request, run)]
    return Repeats(tuple(part for part in parts if part.count > keep), keep)


def alike_parts(request: Request, run: Repeat) -> list[Repeat]:
    """Splits ``run``, consecutive equal blocks, where the plan treats neighbouring blocks differently. Returns the
    pieces in order.
    """
    parts = [Repeat(run.path, run.first, 0)]
    for _, group in groupby(run.names(), lambda name: _plan_settings(name, request)):
        parts.append(Repeat(run.path, parts[-1].first + parts[-1].count, len(list(group))))
    return parts[1:]


def _plan_settings(block: str, request: Request) -> object:
    """Returns the plan's settings for the repeated ``block``, by names within the block. Blocks with equal settings may
    be folded.
    """
    params = {name_in(name, block): param for name, param in request.params.items()}
    pins = [(name_in(pin.module, block), pin) for pin in request.pins]
    saves = [(name_in(policy.module, block), policy) for policy in request.saves]
    return (
        {name: param for name, param in params.items() if name is not None},
        [replace(pin, module=name) for name, pin in pins if name is not None],
        [policy.comparable(name) for name, policy in saves if name is not None],
        request.dtypes.within(block),
    )
