"""Finds repeated blocks: children of a container that compute the same on the same shapes, in sequence.

Runs the model on fake tensors, without tracing it, and records every torch function that it calls. Two blocks are
equal if they have equal tensor metadata, call the same functions on corresponding tensors, and get their arguments in
the same way from the block before. Names of classes and models play no part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from shardc.capture.calls import Block, Record, Token, numbered_containers, record_calls
from shardc.capture.dtypes import Dtypes
from shardc.capture.trace import Loss
from shardc.ir.repeat import Repeat

# Functions that draw; dropouts do where one of their arguments, ``training``, is true.
_DRAW = {
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli", "multinomial",
    "normal", "uniform", "exponential", "rrelu", "gumbel_softmax",
}  # fmt: skip


@contextlib.contextmanager
def shortened(model: nn.Module, repeats: Sequence[Repeat], keep: int) -> Iterator[None]:
    """Shortens each run of ``model`` to its first ``keep`` blocks, on entry; later children are renumbered."""
    containers = [(model.get_submodule(repeat.path), repeat) for repeat in repeats]
    saved = [dict(container._modules) for container, _ in containers]
    try:
        for container, repeat in containers:
            children = list(container._modules.values())
            remaining = children[: repeat.first + keep] + children[repeat.first + repeat.count :]
            container._modules.clear()
            container._modules.update({str(at): child for at, child in enumerate(remaining)})
        yield
    finally:
        for (container, _), before in zip(containers, saved, strict=True):
            container._modules.clear()
            container._modules.update(before)


def find_repeats(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    device: torch.device,
    keep: int,
    loss: Loss | None = None,
    dtypes: Dtypes,
) -> list[Repeat]:
    """Return the runs of more than ``keep`` equal blocks, one a container, on whose length nothing else depends.

    Args:
        model, args, kwargs, device, loss, dtypes: as `capture`'s.
        keep: the number of blocks that represent a run.
    """

    def record(dtypes: Dtypes) -> Record:
        calls = record_calls(model, args, kwargs, device, loss, dtypes, reuse=True)
        return record_calls(model, args, kwargs, device, loss, dtypes, reuse=False) if calls.changed else calls

    containers = [(path, size) for path, size in numbered_containers(model) if size > keep]
    if not containers:
        return []
    whole = record(dtypes)
    repeats: list[Repeat] = []
    for path, size in containers:
        if not any(f"{path}.".startswith(f"{block}.") for repeat in repeats for block in repeat.names()):
            run = _longest(whole, path, size)
            if run is not None and run.count > keep:
                repeats.append(run)
    settled = False
    while repeats:
        with shortened(model, repeats, keep):
            short = record(dtypes.shortened(repeats, keep))
        mine = [Repeat(repeat.path, repeat.first, keep) for repeat in repeats]
        if _outside(whole, repeats) == _outside(short, mine):
            break
        if not settled:  # a first call may leave state behind that later calls read
            whole, settled = record(dtypes), True
            continue
        repeats.pop()  # fewer blocks change the rest of the model: give up the last run
    return repeats


def _longest(record: Record, path: str, size: int) -> Repeat | None:
    """Return the longest run of equal blocks in a container (the first of several); None if there is none."""
    prefix = f"{path}." if path else ""
    names = [f"{prefix}{at}" for at in range(size)]
    if any(len(record.blocks[name]) != 1 for name in names):
        return None
    calls = [record.blocks[name][0] for name in names]
    if any(_draws(event) for call in calls for event in record.events[call.enter : call.exit]):
        return None
    if any(before.exit > after.enter for before, after in zip(calls, calls[1:], strict=False)):
        return None
    bodies = [_body(record, call, name) for call, name in zip(calls, names, strict=True)]
    links = [None, *(_link(record, before, after) for before, after in zip(calls, calls[1:], strict=False))]
    runs, first = [], 0
    for at in range(1, size + 1):
        a, b = (record.signatures[names[i]] for i in (first, at)) if at < size else (None, None)
        matches = a is not None and a == b and bodies[first] == bodies[at]
        if not matches or (at > first + 1 and links[at] != links[first + 1]):
            runs.append(Repeat(path, first, at - first))
            first = at
    runs = [run for run in runs if run.count > 1 and not _escapes(record, calls, run)]
    return max(runs, key=lambda run: (run.count, -run.first), default=None)


def _draws(event: Any) -> bool:
    """Whether a function draws random numbers, which differ from block to block."""
    func, (args, _), _ = event
    name = getattr(func, "__name__", "").strip("_")
    share = any(isinstance(x, float) and x > 0 for x in args)
    return name in _DRAW or ("dropout" in name and share and any(x is True for x in args))


def _canonical(events: Sequence[Any], name_of: Callable[[int, dict[int, int]], Any], extra: Sequence[Any] = ()) -> Any:
    """Return the events with each tensor replaced by its role, as ``name_of`` names it.

    Args:
        name_of: takes a token and the numbers of the events' own results.
        extra: more leaves to name, after the events.
    """
    local: dict[int, int] = {}

    def frozen(leaves: list[Any]) -> list[Any]:
        return [name_of(x.at, local) if isinstance(x, Token) else (type(x), x) for x in leaves]

    out = []
    for func, (args, args_spec), (results, results_spec) in events:
        frozen_args = frozen(args)
        for x in results:
            if isinstance(x, Token):
                local.setdefault(x.at, len(local))
        out.append((func, frozen_args, args_spec, frozen(results), results_spec))
    return out, frozen(list(extra))


def _body(record: Record, call: Block, name: str) -> Any:
    """Return the events of a block, in terms of its arguments, parameters and buffers."""
    takes = {x.at: at for at, x in enumerate(call.takes) if isinstance(x, Token)}

    def name_of(token: int, local: dict[int, int]) -> Any:
        if token in record.names and record.names[token].startswith(f"{name}."):
            return "held", record.names[token].removeprefix(f"{name}.")
        if token in takes:
            return "taken", takes[token]
        return ("own", local[token]) if token in local and record.producers[token] >= call.enter else ("other", token)

    return _canonical(record.events[call.enter : call.exit], name_of, call.gives)


def _link(record: Record, before: Block, after: Block) -> Any:
    """Return how a block's arguments are computed from the arguments and results of the block before it."""
    gives = {x.at: at for at, x in enumerate(before.gives) if isinstance(x, Token)}
    takes = {x.at: at for at, x in enumerate(before.takes) if isinstance(x, Token)}

    def name_of(token: int, local: dict[int, int]) -> Any:
        if token in gives:
            return "given", gives[token]
        if token in takes:
            return "taken before", takes[token]
        return ("own", local[token]) if token in local and record.producers[token] >= before.exit else ("other", token)

    return _canonical(record.events[before.exit : after.enter], name_of, after.takes)


def _escapes(record: Record, calls: Sequence[Block], run: Repeat) -> bool:
    """Whether tensors of a run, other than the last block's results, are used after the run."""
    start, last = calls[run.first].enter, calls[run.first + run.count - 1]
    tail = [x for _, (args, _), _ in record.events[last.exit :] for x in args]
    gives = {x.at for x in last.gives if isinstance(x, Token)}
    used = {x.at for x in (*tail, *record.result[0]) if isinstance(x, Token)} - gives - set(record.names)
    return any(start <= record.producers[token] < last.enter for token in used)


def _outside(record: Record, repeats: Sequence[Repeat]) -> Any:
    """Return the events of a model outside of its repeated blocks."""
    spans = []
    gives: dict[int, Any] = {}
    for number, repeat in enumerate(repeats):
        calls = [record.blocks[name][0] for name in repeat.names()]
        spans.append((calls[0].enter, calls[-1].exit))
        gives.update({x.at: (number, at) for at, x in enumerate(calls[-1].gives) if isinstance(x, Token)})
    shifts = {repeat.prefix: repeat for repeat in repeats}
    inputs = {token: at for at, token in enumerate(record.inputs)}
    events = [e for at, e in enumerate(record.events) if not any(start <= at < end for start, end in spans)]

    def name_of(token: int, local: dict[int, int]) -> Any:
        if token in record.names:
            return "held", _behind(record.names[token], shifts)
        if token in local:
            return "own", local[token]
        return ("given", gives[token]) if token in gives else ("input", inputs.get(token))

    return _canonical(events, name_of, record.result[0])


def _behind(name: str, shifts: dict[str, Repeat]) -> str:
    """Return a parameter's name; a child after the run is numbered from the end of the run."""
    for prefix, repeat in shifts.items():
        number, dot, rest = name.removeprefix(prefix).partition(".")
        if name.startswith(prefix) and number.isdecimal() and int(number) >= repeat.first + repeat.count:
            return f"{prefix}+{int(number) - repeat.first - repeat.count}{dot}{rest}"
    return name
