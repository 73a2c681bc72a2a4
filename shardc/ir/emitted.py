"""The code that Inductor emitted: its collectives, against those of the graph that it was given, and what they make."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from torch import fx

from shardc.errors import VerifyError
from shardc.ir.host import NAMES as MOVES
from shardc.ir.tally import arguments_of, collective_kind

_CALL = re.compile(r"torch\.ops\.(?:_c10d_functional|shardc)\.(\w+)\.default\((.*)\)")
_NAME = re.compile(r"'([^']*)'")
_ASSIGNED = re.compile(r"(\w+) = ([^;]*)")
_ITEM = re.compile(r"(\w+)\[(\d+)\]$")
_DELETED = re.compile(r"\bdel (\w+)")
_SLOTS = re.compile(r"torch\.ops\.shardc\.\w+_coalesced\.default\(\[[^\]]*\].*\[([\d, ]+)\]\)")


def of_graph(graph: fx.Graph) -> list[str]:
    """The collectives of a local graph in order: each one's op, with the group that it is over."""
    found = []
    for node in graph.nodes:
        if collective_kind(node) is not None:
            target: object = node.target
            found.append(f"{_plain(target._opname)}({arguments_of(node)['group_name']})")  # type: ignore[attr-defined]
    return found


def of_source(source: str) -> list[str]:
    """The same of the Python code of a compiled graph, whose collectives may be the in-place ones."""
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
    """Which collective, counted from 0, compiled code starts or waits for at a line; None for other lines.

    Args:
        lines: of the file.
        number: of the line, from 1.
    """
    count, behind = 0, dict[str, int]()
    for line in lines[:number]:
        call, assigned = _CALL.search(line), _ASSIGNED.match(line.strip())
        here = None
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
    """When compiled code uses the slots of its collectives (`shardc.ir.arena`).

    Args:
        spans: by slot, its first and last line.
        leaving: the slots that it returns.
        given: of each argument, the last line at which it is there.
    """

    spans: dict[int, tuple[int, int]]
    leaving: set[int]
    given: list[int]


def uses_of(source: str) -> Uses:
    """Reads the lines of ``call``: a result is in use until the last name for its memory is deleted.

    Inductor fuses ops, and takes memory over for values of its own (``buf9 = buf8; del buf8  # reuse``), so that this
    may be later, or earlier, than in the graph.
    """
    found = Uses({}, set(), [])
    arguments: dict[str, int] = {}
    spans = found.spans
    behind: dict[str, set[int]] = {}  # by name, the slots that it may lie in
    results: dict[str, list[int]] = {}  # by name of a collective's list of results, all of its slots
    unnamed: dict[int, set[int]] = {}  # by slot of a result, those of its collective that no name is for
    last = 0
    for at, line in enumerate(_body(source)):
        assigned, made = _ASSIGNED.match(line), _SLOTS.search(line)
        name, value = (assigned[1], assigned[2].strip()) if assigned else ("", "")
        if line.endswith(" = args"):
            arguments = {argument: -1 for argument in re.findall(r"\w+", line.removesuffix(" = args"))}
        if made:
            results[name] = [int(k) for k in made[1].split(",")]
            spans.update({slot: (at, at) for slot in results[name]})
        elif (item := _ITEM.match(value)) and item[1] in results:
            slots = results[item[1]]
            slot = slots[int(item[2])] if int(item[2]) < len(slots) else slots[0]
            behind[name] = {slot}
            rest = unnamed.setdefault(slots[0], set(slots))
            rest.discard(slot)
            unnamed[slot] = rest
        elif assigned and "torch.ops._c10d_functional" not in value and "torch.ops.shardc" not in value:
            behind[name] = _behind(behind, value)
        if "wait_tensor.default(" in line:
            for slot in _behind(behind, line):
                spans.update({wire: (spans[wire][0], at) for wire in unnamed[slot]})
                unnamed[slot].clear()
        if line.startswith("return"):
            found.leaving = _behind(behind, line)
        for gone in _DELETED.findall(line):
            if gone in arguments:
                arguments[gone] = at
            for slot in behind.pop(gone, ()):
                spans[slot] = spans[slot][0], at
        spans.update({slot: (spans[slot][0], at) for held in behind.values() for slot in held})
        last = at
    found.given = [last if end < 0 else end for end in arguments.values()]
    return found


def _behind(behind: dict[str, set[int]], text: str) -> set[int]:
    """The slots behind the names in ``text``."""
    return {slot for name in re.findall(r"\w+", text) for slot in behind.get(name, ())}


def _body(source: str) -> list[str]:
    """The lines of the function ``call``, without what is indented deeper only to be in it."""
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
