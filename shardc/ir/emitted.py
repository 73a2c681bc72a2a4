"""Reads code that Inductor generated: the order of its collectives, and the lifetimes of their results."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from torch import fx

from shardc.errors import VerifyError
from shardc.ir.comm import MOVES
from shardc.ir.comm_volume import arguments_of, collective_kind
from shardc.ir.layout import split_top
from shardc.ir.repeat import Segment

_CALL = re.compile(r"torch\.ops\.(?:_c10d_functional|shardc)\.(\w+)\.default\((.*)\)")
_NAME = re.compile(r"'([^']*)'")
_ASSIGNED = re.compile(r"(\w+) = ([^;]*)")
_ITEM = re.compile(r"(\w+)\[(\d+)\]$")
_DELETED = re.compile(r"\bdel (\w+)")
# Calls whose result has memory of its own; the result of any other expression may share memory with its names.
_MAKES = ("torch.ops._c10d_functional", "torch.ops.shardc", "extern_kernels.")
_SLOTS = re.compile(r"torch\.ops\.shardc\.\w+_coalesced\.default\(\[[^\]]*\].*\[([\d, ]+)\]\)")


def of_graph(graph: fx.Graph) -> list[str]:
    """Return each collective of a local graph, in order, as text: ``op(group)``, such as ``all_reduce(shardc:dp)``."""
    out = []
    for node in graph.nodes:
        if collective_kind(node) is not None:
            target: object = node.target
            out.append(f"{_functional(target._opname)}({arguments_of(node)['group_name']})")  # type: ignore[attr-defined]
    return out


def of_source(source: str) -> list[str]:
    """Return each collective in Inductor's code ``source`` as text, as `of_graph` does. An in-place op gets the name of
    its functional form.
    """
    out = []
    for name, arguments in _CALL.findall(source):
        if name not in ("wait_tensor", *MOVES.values()):
            out.append(f"{_functional(name)}({_NAME.findall(arguments)[-1]})")
    return out


def check_order(graph: fx.Graph, source: str) -> None:
    """Check that ``source`` starts the collectives in the order of ``graph``, on which the ranks agreed.

    Raises:
        VerifyError: a collective differs; the text names the first one.
    """
    for at, (expected, actual) in enumerate(zip_longest(of_graph(graph), of_source(source), fillvalue="nothing more")):
        if expected != actual:
            raise VerifyError(
                f"the compiled code starts {actual} as collective {at}, where the schedule has {expected}; "
                "ranks whose orders differ would wait for each other",
                fix='compile with backend="eager", or switch off the Inductor pass that reorders or rewrites it',
            )


def collective_at(lines: Sequence[str], number: int) -> int | None:
    """Return which collective line ``number`` of Inductor's code starts or waits for, as its index among all
    collectives.

    -1 - k stands for a wait for argument k, None for a line of anything else.

    Args:
        lines: the lines of the file.
        number: number of the line, from 1.
    """
    count, behind = 0, dict[str, int]()
    for line in lines[:number]:
        call, assigned = _CALL.search(line), _ASSIGNED.match(line.strip())
        position = None
        if line.rstrip().endswith(" = args"):
            arguments = re.findall(r"\w+", line.rstrip().removesuffix(" = args"))
            behind = {argument: -1 - at for at, argument in enumerate(arguments)}
        if call and call[1] == "wait_tensor":
            position = next((behind[name] for name in re.findall(r"\w+", call[2]) if name in behind), None)
        elif call and call[1] not in MOVES.values():
            position, count = count, count + 1
            # An in-place collective has its results in the memory of its operands.
            names = [assigned[1]] if assigned else re.findall(r"\bbuf\d+|\b\w+_\d+", call[2])
            behind.update(dict.fromkeys(names, position))
        elif assigned and (source := re.match(r"\w+", assigned[2])) and source[0] in behind:
            behind[assigned[1]] = behind[source[0]]
    return position if lines else None


@dataclass
class Uses:
    """Lifetimes of arena slots (memory of collectives' results, `shardc.ir.arena`) and of arguments in generated code.
    Times are line numbers of the generated function.

    Args:
        spans: slot -> (first line, last line) at which it is in use.
        argument_ends: for each argument, the last line at which its memory is in use.
        results: for each result, the slots that may hold it; -1 - k stands for the memory of argument k.
        waits: argument -> the line at which it is waited for.
        wires: for each result whose collective is waited for later, the memory that is in use until the wait; numbered
            as in ``results``.
        lines: number of lines of the code.
    """

    spans: dict[int, tuple[int, int]]
    argument_ends: list[int]
    results: list[set[int]]
    waits: dict[int, int]
    wires: list[set[int]]
    lines: int

    @property
    def leaving(self) -> set[int]:
        """Return the numbers of the arena slots whose memory holds a result of the function, which its caller keeps."""
        return {slot for result in self.results for slot in result if slot >= 0}


def uses_of(source: str) -> Uses:
    """Return the lifetimes (`Uses`) of collectives' results and of arguments in the function ``call`` of Inductor's
    code ``source``.

    A result is in use until the last name for its memory is deleted. Inductor fuses ops and reuses memory (``buf9 =
    buf8; del buf8  # reuse``), so lifetimes differ from the graph's.
    """
    reader, body = _LineReader(), _body(source)
    for at, line in enumerate(body):
        reader.read(at, line)
    spans, unnamed = reader.spans, reader.unnamed
    count = sum(slot < 0 for slot in spans)
    argument_ends = [spans.pop(-1 - number)[1] for number in range(count)]
    wires = [set().union(*(unnamed.get(slot, set()) for slot in result)) for result in reader.results]
    return Uses(spans, argument_ends, reader.results, reader.waits, wires, len(body))


class _LineReader:
    """Reads generated code line by line, and records which memory each variable may use, and until when. Slot -1 - k is
    the memory of argument k.

    Attributes:
        spans, results, waits: as in `Uses`, arguments among the slots.
        behind: variable -> the slots that may hold its value.
        slots_of: variable with a collective's list of results -> all slots of the collective.
        unnamed: slot of a result -> memory in use until the wait: its collective's slots without a variable, and its
            operands.
    """

    def __init__(self) -> None:
        self.spans: dict[int, tuple[int, int]] = {}
        self.results: list[set[int]] = []
        self.waits: dict[int, int] = {}
        self.behind: dict[str, set[int]] = {}
        self.slots_of: dict[str, list[int]] = {}
        self.unnamed: dict[int, set[int]] = {}

    def read(self, at: int, line: str) -> None:
        """Record what ``line``, the function's line number ``at``, does with memory: variables that it assigns, deletes
        or returns, and collectives that it starts or waits for.
        """
        if line.endswith(" = args"):
            arguments = re.findall(r"\w+", line.removesuffix(" = args"))
            self.behind |= {argument: {-1 - number} for number, argument in enumerate(arguments)}
        assigned = _ASSIGNED.match(line)
        name, value = (assigned[1], assigned[2].strip()) if assigned else ("", "")
        if started := _SLOTS.search(line):
            self.slots_of[name] = slots = [int(number) for number in started[1].split(",")]
            self.unnamed[slots[0]] = {*slots, *self._memory_of(value)}
            self.spans.update({slot: (at, at) for slot in slots})
        elif assigned:
            self._assign(name, value)
        if "wait_tensor.default(" in line:
            for slot in self._memory_of(line):
                self.waits.update({-1 - slot: at} if slot < 0 else {})
                _extend(self.spans, self.unnamed.get(slot, ()), at)
                self.unnamed.get(slot, set()).clear()
        if line.startswith("return"):
            returned = split_top(line.removeprefix("return").strip().removeprefix("(").removesuffix(")"))
            self.results = [self._memory_of(result) for result in returned if result]
        for memory in self.behind.values():
            _extend(self.spans, memory, at)
        for variable in _DELETED.findall(line):
            self.behind.pop(variable, None)

    def _assign(self, name: str, value: str) -> None:
        """Record that the variable ``name`` has the value of the expression ``value``, which starts no collective."""
        item = _ITEM.match(value)
        if item and (slots := self.slots_of.get(item[1])):  # a result of a collective
            slot = slots[int(item[2])] if int(item[2]) < len(slots) else slots[0]
            self.behind[name] = {slot}
            self.unnamed[slot] = self.unnamed[slots[0]]
            self.unnamed[slot].discard(slot)
        elif not any(word in value for word in _MAKES):
            self.behind[name] = self._memory_of(value)

    def _memory_of(self, text: str) -> set[int]:
        """Return the slots whose memory the variables named in ``text`` may use."""
        return {slot for name in re.findall(r"\w+", text) for slot in self.behind.get(name, ())}


def joined(
    uses: Sequence[Uses], segments: Sequence[Segment], arguments: Sequence[str], returned: Sequence[object]
) -> Uses:
    """Combine the `Uses` of a graph's segments, in order, into the `Uses` of the whole forward or backward graph.

    Args:
        uses: the `Uses` of each segment's code.
        arguments: names of the graph's placeholders.
        returned: the graph's outputs: names of values, or constants.
    """
    spans: dict[int, tuple[int, int]] = {}
    memory = {name: {-1 - at} for at, name in enumerate(arguments)}  # value -> slots and arguments that may hold it
    wires: dict[str, set[int]] = {}
    base = 0

    for use, segment in zip(uses, segments, strict=True):
        operands = [memory.get(name, set()) for name in segment.takes]
        for slots, at in zip(operands, use.argument_ends, strict=True):
            _extend(spans, slots, base + at)
        spans |= {segment.slot + slot: (base + first, base + end) for slot, (first, end) in use.spans.items()}
        for argument, at in use.waits.items():
            _extend(spans, wires.pop(segment.takes[argument], ()), base + at)
        for name, result, waiting in zip(segment.gives, use.results, use.wires, strict=True):
            memory[name] = set().union(*({segment.slot + x} if x >= 0 else operands[-1 - x] for x in result))
            wires[name] = set().union(*({segment.slot + x} if x >= 0 else operands[-1 - x] for x in waiting))
        base += use.lines
    results = [memory.get(x, set()) if isinstance(x, str) else set() for x in returned]
    for slots in results:
        _extend(spans, slots, base)
    argument_ends = [spans.pop(-1 - at, (0, 0))[1] for at in range(len(arguments))]
    return Uses(spans, argument_ends, results, {}, [set() for _ in results], base)


def _extend(spans: dict[int, tuple[int, int]], slots: Iterable[int], at: int) -> None:
    """Extend the lifetimes of ``slots`` in ``spans``, so that they last at least until line ``at``."""
    for slot in slots:
        first, last = spans.get(slot, (0, 0))
        spans[slot] = first, max(last, at)


def _body(source: str) -> list[str]:
    """Return the lines of the function ``call`` in generated code, stripped, up to its first return."""
    start = source.find("def call(")
    lines = source[start:].splitlines()[1:] if start >= 0 else []
    out = []
    for line in lines:
        out.append(line.strip())
        if out[-1].startswith("return"):
            break
    return out


def _functional(name: str) -> str:
    """Return the functional name of an op, without the suffix of its out or in-place form."""
    return name.removesuffix("_out").removesuffix("_")
