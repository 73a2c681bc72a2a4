"""Repeated blocks: which children of a container do the same on the same shapes, one after the other.

Found by running the model on fake tensors, without tracing it, and writing down every torch function that it calls:
two blocks are alike when they hold alike tensors, call the same functions on the same things of their own, and are
reached in the same way from the block before. Names of classes and of models play no part.
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
    """``model`` with the first ``keep`` blocks of each run alone; the children after them are numbered anew."""
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
    """The runs of more than ``keep`` alike blocks, one a container, where the rest does not depend on their number.

    Args:
        model, args, kwargs, device, loss, dtypes: as `capture`'s.
        keep: the least number of blocks that stand for all.
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
        if not settled:  # a first call may leave things behind that later ones find
            whole, settled = record(dtypes), True
            continue
        repeats.pop()  # what comes of fewer blocks is another program: without the innermost, and the last
    return repeats


def _longest(record: Record, path: str, size: int) -> Repeat | None:
    """The longest run of alike blocks in a container, the first of the longest; None where there are none."""
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
    """Whether a function draws random numbers, which are others in each block."""
    func, (args, _), _ = event
    name = getattr(func, "__name__", "").strip("_")
    share = any(isinstance(x, float) and x > 0 for x in args)
    return name in _DRAW or ("dropout" in name and share and any(x is True for x in args))


def _canonical(events: Sequence[Any], name_of: Callable[[int, dict[int, int]], Any], extra: Sequence[Any] = ()) -> Any:
    """Events with each tensor replaced by what it is to them: one of their own results, or what ``name_of`` says."""
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
    """What a block does, in terms of what it takes and holds."""
    takes = {x.at: at for at, x in enumerate(call.takes) if isinstance(x, Token)}

    def name_of(token: int, local: dict[int, int]) -> Any:
        if token in record.names and record.names[token].startswith(f"{name}."):
            return "held", record.names[token].removeprefix(f"{name}.")
        if token in takes:
            return "taken", takes[token]
        return ("own", local[token]) if token in local and record.producers[token] >= call.enter else ("other", token)

    return _canonical(record.events[call.enter : call.exit], name_of, call.gives)


def _link(record: Record, before: Block, after: Block) -> Any:
    """How a block comes by what it takes, in terms of what the block before it took and gave."""
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
    """Whether what blocks of a run but the last make is used behind the run."""
    start, last = calls[run.first].enter, calls[run.first + run.count - 1]
    tail = [x for _, (args, _), _ in record.events[last.exit :] for x in args]
    gives = {x.at for x in last.gives if isinstance(x, Token)}
    used = {x.at for x in (*tail, *record.result[0]) if isinstance(x, Token)} - gives - set(record.names)
    return any(start <= record.producers[token] < last.enter for token in used)


def _outside(record: Record, repeats: Sequence[Repeat]) -> Any:
    """What a model does but for its repeated blocks."""
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
    """A held tensor's name, its child counted from the end of the run where it is behind it."""
    for prefix, repeat in shifts.items():
        number, dot, rest = name.removeprefix(prefix).partition(".")
        if name.startswith(prefix) and number.isdecimal() and int(number) >= repeat.first + repeat.count:
            return f"{prefix}+{int(number) - repeat.first - repeat.count}{dot}{rest}"
    return name
