"""The code that Inductor emitted: its collectives, against those of the graph that it was given, and what they make."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from torch import fx

from shardc.errors import VerifyError
from shardc.ir.host import NAMES as MOVES
from shardc.ir.layout import split_top
from shardc.ir.segments import Segment
from shardc.ir.tally import arguments_of, collective_kind

_CALL = re.compile(r"torch\.ops\.(?:_c10d_functional|shardc)\.(\w+)\.default\((.*)\)")
_NAME = re.compile(r"'([^']*)'")
_ASSIGNED = re.compile(r"(\w+) = ([^;]*)")
_ITEM = re.compile(r"(\w+)\[(\d+)\]$")
_DELETED = re.compile(r"\bdel (\w+)")
# What a value that is assigned lies in memory of its own for.
_MAKES = ("torch.ops._c10d_functional", "torch.ops.shardc", "extern_kernels.")
_SLOTS = re.compile(r"torch\.ops\.shardc\.\w+_coalesced\.default\(\[[^\]]*\].*\[([\d, ]+)\]\)")


def of_graph(graph: fx.Graph) -> list[str]:
    """Return the collectives of a local graph in order: each one's op, with the group that it is over."""
    found = []
    for node in graph.nodes:
        if collective_kind(node) is not None:
            target: object = node.target
            found.append(f"{_plain(target._opname)}({arguments_of(node)['group_name']})")  # type: ignore[attr-defined]
    return found


def of_source(source: str) -> list[str]:
    """Return the same of the Python code of a compiled graph, whose collectives may be the in-place ones."""
    found = []
    for name, arguments in _CALL.findall(source):
        if name not in ("wait_tensor", *MOVES):
            found.append(f"{_plain(name)}({_NAME.findall(arguments)[-1]})")
    return found


def check_order(graph: fx.Graph, source: str) -> None:
    """Checks that ``source`` starts the collectives of ``graph`` in its order, which is what the ranks agreed on.

    Raises:
        VerifyError: names the first that differs.
    """
    for at, (asked, made) in enumerate(zip_longest(of_graph(graph), of_source(source), fillvalue="nothing more")):
        if asked != made:
            raise VerifyError(
                f"the compiled code starts {made} as collective {at}, where the schedule has {asked}; "
                "ranks whose orders differ would wait for each other",
                fix='compile with backend="eager", or switch off the Inductor pass that reorders or rewrites it',
            )


def collective_at(lines: Sequence[str], number: int) -> int | None:
    """Return which collective, counted from 0, compiled code starts or waits for at a line; None for other lines.

    -1 - k where it waits for what its argument k is.

    Args:
        lines: of the file.
        number: of the line, from 1.
    """
    count, behind = 0, dict[str, int]()
    for line in lines[:number]:
        call, assigned = _CALL.search(line), _ASSIGNED.match(line.strip())
        here = None
        if line.rstrip().endswith(" = args"):
            given = re.findall(r"\w+", line.rstrip().removesuffix(" = args"))
            behind = {argument: -1 - at for at, argument in enumerate(given)}
        if call and call[1] == "wait_tensor":
            here = next((behind[name] for name in re.findall(r"\w+", call[2]) if name in behind), None)
        elif call and call[1] not in MOVES:
            here, count = count, count + 1
            # One in place has its results where its operands were.
            names = [assigned[1]] if assigned else re.findall(r"\bbuf\d+|\b\w+_\d+", call[2])
            behind.update(dict.fromkeys(names, here))
        elif assigned and (source := re.match(r"\w+", assigned[2])) and source[0] in behind:
            behind[assigned[1]] = behind[source[0]]
    return here if lines else None


@dataclass
class Uses:
    """When compiled code uses the slots of its collectives (`shardc.ir.arena`) and its arguments.

    Args:
        spans: by slot, its first and last line.
        given: of each argument, the last line at which its memory is in use.
        results: of each result, the slots that it may lie in; -1 - k stands for the argument k.
        waits: the lines at which arguments are waited for, by argument.
        wires: of each result, what its collective uses until the wait, where that comes later; as in ``results``.
        lines: how many there are.
    """

    spans: dict[int, tuple[int, int]]
    given: list[int]
    results: list[set[int]]
    waits: dict[int, int]
    wires: list[set[int]]
    lines: int

    @property
    def leaving(self) -> set[int]:
        """The slots that are returned."""
        return {slot for found in self.results for slot in found if slot >= 0}


def uses_of(source: str) -> Uses:
    """Reads the lines of ``call``: a result is in use until the last name for its memory is deleted.

    Inductor fuses ops, and takes memory over for values of its own (``buf9 = buf8; del buf8  # reuse``), so that this
    may be later, or earlier, than in the graph.
    """
    spans: dict[int, tuple[int, int]] = {}
    behind: dict[str, set[int]] = {}  # by name, the slots and arguments that it may lie in
    made_by: dict[str, list[int]] = {}  # by name of a collective's list of results, all of its slots
    # By slot of a result, what is in use until the wait: its collective's slots that no name is for, and what it sends.
    unnamed: dict[int, set[int]] = {}
    results: list[set[int]] = []
    waits: dict[int, int] = {}
    body = _body(source)
    for at, line in enumerate(body):
        assigned, made = _ASSIGNED.match(line), _SLOTS.search(line)
        name, value = (assigned[1], assigned[2].strip()) if assigned else ("", "")
        if line.endswith(" = args"):
            for number, argument in enumerate(re.findall(r"\w+", line.removesuffix(" = args"))):
                behind[argument] = {-1 - number}
        if made:
            made_by[name] = [int(k) for k in made[1].split(",")]
            unnamed[made_by[name][0]] = {*made_by[name], *_behind(behind, value)}
            spans.update({slot: (at, at) for slot in made_by[name]})
        elif (item := _ITEM.match(value)) and item[1] in made_by:
            slots = made_by[item[1]]
            slot = slots[int(item[2])] if int(item[2]) < len(slots) else slots[0]
            behind[name] = {slot}
            unnamed[slot] = unnamed[slots[0]]
            unnamed[slot].discard(slot)
        elif assigned and not any(word in value for word in _MAKES):
            behind[name] = _behind(behind, value)
        if "wait_tensor.default(" in line:
            for slot in _behind(behind, line):
                waits.update({-1 - slot: at} if slot < 0 else {})
                spans.update({used: (spans.get(used, (0, 0))[0], at) for used in unnamed.get(slot, ())})
                unnamed.get(slot, set()).clear()
        if line.startswith("return"):
            returned = split_top(line.removeprefix("return").strip().removeprefix("(").removesuffix(")"))
            results = [_behind(behind, each) for each in returned if each]
        for gone in _DELETED.findall(line):
            for slot in behind.pop(gone, ()):
                spans[slot] = spans.get(slot, (0, 0))[0], at
        spans.update({slot: (spans.get(slot, (0, 0))[0], at) for held in behind.values() for slot in held})
    count = sum(slot < 0 for slot in spans)
    given = [spans.pop(-1 - number)[1] for number in range(count)]
    wires = [set().union(*(unnamed.get(slot, set()) for slot in found)) for found in results]
    return Uses(spans, given, results, waits, wires, len(body))


def joined(uses: Sequence[Uses], segments: Sequence[Segment], taken: Sequence[str], returned: Sequence[Any]) -> Uses:
    """Return the uses of a half whose segments run one after the other.

    Args:
        uses: of each segment's code.
        taken: the names of the half's placeholders.
        returned: what it returns: names of values, or constants.
    """
    spans: dict[int, tuple[int, int]] = {}
    held = {name: {-1 - at} for at, name in enumerate(taken)}  # by value, the slots and arguments that it may lie in
    wires: dict[str, set[int]] = {}
    base = 0

    def last(slots: Iterable[int], at: int) -> None:
        spans.update({slot: (spans.get(slot, (0, 0))[0], max(spans.get(slot, (0, 0))[1], at)) for slot in slots})

    for use, segment in zip(uses, segments, strict=True):
        given = [held.get(name, set()) for name in segment.takes]
        for slots, at in zip(given, use.given, strict=True):
            last(slots, base + at)
        spans |= {segment.slot + slot: (base + first, base + end) for slot, (first, end) in use.spans.items()}
        for argument, at in use.waits.items():
            last(wires.pop(segment.takes[argument], ()), base + at)
        for name, found, waiting in zip(segment.gives, use.results, use.wires, strict=True):
            held[name] = set().union(*({segment.slot + x} if x >= 0 else given[-1 - x] for x in found))
            wires[name] = set().union(*({segment.slot + x} if x >= 0 else given[-1 - x] for x in waiting))
        base += use.lines
    results = [held.get(x, set()) if isinstance(x, str) else set() for x in returned]
    for slots in results:
        last(slots, base)
    given_until = [spans.pop(-1 - at, (0, 0))[1] for at in range(len(taken))]
    return Uses(spans, given_until, results, {}, [set() for _ in results], base)


def _behind(behind: dict[str, set[int]], text: str) -> set[int]:
    """Return the slots behind the names in ``text``."""
    return {slot for name in re.findall(r"\w+", text) for slot in behind.get(name, ())}


def _body(source: str) -> list[str]:
    """Return the lines of the function ``call``, without what is indented deeper only to be in it."""
    start = source.find("def call(")
    lines = source[start:].splitlines()[1:] if start >= 0 else []
    out = []
    for line in lines:
        out.append(line.strip())
        if out[-1].startswith("return"):
            break
    return out


def _plain(name: str) -> str:
    return name.removesuffix("_out").removesuffix("_")
