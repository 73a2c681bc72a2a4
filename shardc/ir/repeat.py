"""Repeated blocks of a model (`Repeats`), and the division of a graph into segments, where equal segments are compiled
once (`cut`).

A segment is a run of consecutive ops, so the order that was scheduled and certified stays. A started collective, a
prefetched gather or a partial gradient may be a result of one segment and an argument of a later one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from operator import getitem

from torch import Tensor, fx

from shardc._compat import LazyGraphModule, cache_method
from shardc.ir import graph as ir
from shardc.ir.comm import IN_MESSAGES, WAIT
from shardc.ir.comm_volume import collective_kind
from shardc.ir.module_paths import name_in


@dataclass(frozen=True)
class Repeat:
    """A run of repeated blocks: consecutive numbered children of a container, such as ``layers.2`` to ``layers.7``.

    Args:
        path: qualified name of the container.
        first: number of the child that is the first block.
        count: number of blocks.
    """

    path: str
    first: int
    count: int

    @property
    def prefix(self) -> str:
        """Return the prefix of the children's qualified names, before their numbers."""
        return f"{self.path}." if self.path else ""

    def name(self, block: int, rest: str = "") -> str:
        """Return the qualified name of block number ``block`` of the run, followed by ``rest``, the rest of a name in
        that block.
        """
        return f"{self.prefix}{self.first + block}{rest}"

    def names(self) -> list[str]:
        """Return the qualified names of the blocks."""
        return [self.name(block) for block in range(self.count)]

    def split(self, name: str) -> tuple[int, str] | None:
        """Return (index of the block in this run, rest of the name) for ``name``, the name of something in a block.
        None if it is outside the container or before the run; the index of a later child is ``count`` or more.

        >>> Repeat("layers", 2, 6).split("layers.3.up.weight")
        (1, '.up.weight')
        """
        number, dot, rest = ((name_in(name, self.path) if self.path else name) or "").partition(".")
        if not number.isdecimal() or int(number) < self.first:
            return None
        return int(number) - self.first, f"{dot}{rest}"

    def __str__(self) -> str:
        return f"{self.name(0)} to {self.name(self.count - 1)}"


@dataclass(frozen=True)
class Repeats:
    """The runs of repeated blocks of a model. A *shortened* model has only the first ``keep`` blocks of each run. Runs
    of one container are in the order of its children.
    """

    runs: tuple[Repeat, ...] = ()
    keep: int = 0

    def __iter__(self) -> Iterator[Repeat]:
        return iter(self.runs)

    def __bool__(self) -> bool:
        return bool(self.runs)

    def place(self, name: str) -> tuple[Repeat, int, str] | None:
        """Return (run, index of the block, rest of the name) for ``name``, a name in the shortened model. None if it is
        in no block of a run.
        """
        pairs = zip(self.runs, self.shortened, strict=True)
        places = ((run, *place) for run, short in pairs if (place := short.split(name)) and place[0] < self.keep)
        return next(places, None)

    @property
    def missing(self) -> dict[str, int]:
        """Return container -> the number of its blocks that the shortened model lacks."""
        counts: Counter[str] = Counter()
        for run in self.runs:
            counts[run.path] += run.count - self.keep
        return dict(counts)

    @cached_property
    def shortened(self) -> Repeats:
        """Return the runs as they are in the shortened model, each with ``keep`` blocks."""
        before = (Repeats(self.runs[:at], self.keep).missing for at in range(len(self.runs)))
        runs = zip(self.runs, before, strict=True)
        return Repeats(
            tuple(Repeat(run.path, run.first - out.get(run.path, 0), self.keep) for run, out in runs), self.keep
        )

    def short(self, name: str) -> str | None:
        """Convert ``name``, a name in the full model, to the same object's name in the shortened model. None if its
        block is left out there.

        The last block of the shortened model stands for the last one.

        >>> blocks = Repeats((Repeat("layers", 0, 8),), 4)
        >>> [blocks.short(f"layers.{n}.w") for n in (0, 2, 3, 6, 7, 8)]
        ['layers.0.w', 'layers.2.w', None, None, 'layers.3.w', 'layers.4.w']
        """
        for run in reversed(self.runs):  # a run's numbers are those of the full model, in which others stand before it
            block, rest = run.split(name) or (0, "")
            if self.keep - 1 <= block < run.count - 1:
                return None
            if block >= self.keep:
                name = run.name(block - run.count + self.keep, rest)
        return name

    def counterpart(self, name: str) -> str:
        """Convert ``name``, a name in the full model, to the name that stands for it in the shortened model. The second
        block stands for all blocks that are left out.

        >>> blocks = Repeats((Repeat("layers", 0, 8),), 4)
        >>> [blocks.counterpart(f"layers.{n}.w") for n in (0, 2, 3, 7)]
        ['layers.0.w', 'layers.2.w', 'layers.1.w', 'layers.3.w']
        """
        for run in self.runs:
            block, rest = run.split(name) or (0, "")
            if self.keep - 1 <= block < run.count - 1:
                name = run.name(1, rest)
        return self.short(name) or name

    def whole(self, name: str) -> str:
        """Convert ``name``, a name in the shortened model, to the name in the full model: the inverse of `short`."""
        for run in self.runs:
            block, rest = run.split(name) or (0, "")
            if block >= self.keep:
                name = run.name(block + run.count - self.keep, rest)
        return name


class Marks:
    """Numbers nodes by op and types (`mark`). Nodes with equal numbers may correspond to each other in repeated
    blocks.
    """

    def __init__(self) -> None:
        self._ids: dict[object, int] = {}

    @cache_method
    def kind(self, node: fx.Node) -> int:
        """Return a number for the type of a node's value (see `type_of`). Equal types have equal numbers."""
        return self._id(type_of(node.meta.get("val")))

    @cache_method
    def mark(self, node: fx.Node) -> int:
        """Return a number for what a node computes. Nodes have equal numbers if their op, constants, and types of
        operands and results are equal.

        Slots of messages do not count: they are numbered through the graph.
        """
        args = node.args[:-1] if node.target in IN_MESSAGES else node.args
        written = fx.node.map_arg((args, node.kwargs), lambda x: f"%{self.kind(x)}")
        return self._id((node.target, repr(written), self.kind(node)))

    @cache_method
    def operands(self, node: fx.Node) -> list[fx.Node]:
        """Return the operands of ``node`` in order; an operand that is read twice is there twice."""
        nodes: list[fx.Node] = []
        fx.node.map_arg((node.args, node.kwargs), nodes.append)
        return nodes

    def _id(self, key: object) -> int:
        """Return a number for ``key``. Equal keys have equal numbers."""
        return self._ids.setdefault(key, len(self._ids))


def type_of(value: object) -> object:
    """Return a comparable description of an example value: (dtype, shape, stride, device) of a tensor, (class, text) of
    a constant, and a tuple of these for a list or tuple.
    """
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.stride(), value.device
    if isinstance(value, list | tuple):
        return tuple(map(type_of, value))
    return type(value), repr(value)


# Least number of equal segments for which a cut pays.
LEAST = 4
# Least length of a run of collectives and waits that becomes a segment of its own.
CALLS = 64


@dataclass(frozen=True)
class Segment:
    """Consecutive ops of a forward or backward graph, as a graph of their own.

    Args:
        gm: the graph, which equal segments share. Its collectives number their slots from the segment's first.
        takes, gives: names of the half's nodes that are the graph's placeholders and outputs.
        done: names in ``takes`` that no later segment reads.
        slot, collective: number of slots, and of collectives, in earlier segments.
    """

    gm: fx.GraphModule
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    done: frozenset[str]
    slot: int = 0
    collective: int = 0


def whole(gm: fx.GraphModule) -> tuple[Segment, ...]:
    """Return the division of ``gm`` into a single `Segment`, the complete graph."""
    return (Segment(gm, (), (), frozenset()),)


def cut(gm: fx.GraphModule, least: int = LEAST) -> tuple[Segment, ...]:
    """Cut a graph into segments where its ops repeat, so that equal segments share one graph. If fewer than ``least``
    segments are equal, return the whole graph as one segment.

    Args:
        gm: a local graph in the order in which it runs; not changed.
    """
    half = _Cutter(gm)
    borders = half.borders(0, len(half.nodes), least)
    if not borders:
        return whole(gm)
    rows = half.runs_of_calls()
    edges = {at for row in rows for at in row} - {0, len(half.nodes)}
    borders = sorted(edges.union(at for at in borders if not any(start < at < stop for start, stop in rows)))
    ends = [*borders, len(half.nodes)]
    keys = [half.key(start, stop) for start, stop in zip([0, *borders], ends, strict=True)]
    counts = Counter(keys)
    if max(counts.values()) < least:
        return whole(gm)
    # Two neighbours that equal no other segment are joined.
    pairs = zip(borders, keys, keys[1:], strict=False)
    cuts = [at for at, before, behind in pairs if at in edges or counts[before] > 1 or counts[behind] > 1]
    modules: dict[object, fx.GraphModule] = {}
    out = []
    for start, stop in zip([0, *cuts], [*cuts, len(half.nodes)], strict=True):
        if (key := half.key(start, stop)) not in modules:
            modules[key] = LazyGraphModule({}, half.graph(start, stop))
        out.append(half.segment(start, stop, modules[key]))
    return tuple(out)


class _Cutter:
    """Analysis of a graph for `cut`. It works on the graph's ops in order, each getitem directly after the op whose
    result it selects.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self.nodes = _in_order(gm.graph)
        self.marks = Marks()
        self.place = {node: at for at, node in enumerate(self.nodes)}
        returned = set(ir.output_node(gm.graph).all_input_nodes)
        self.last: dict[fx.Node, float] = {}
        for node in gm.graph.nodes:
            uses = [self.place[user] for user in node.users if user in self.place]
            self.last[node] = float("inf") if node in returned else max(uses, default=-1)
        self.crossing = self._crossing()
        starts = [len(node.args[-1]) if node.target in IN_MESSAGES else 0 for node in self.nodes]
        slots = accumulate(starts, initial=0)
        collectives = accumulate((collective_kind(node) is not None for node in self.nodes), initial=0)
        self.before = list(zip(slots, collectives, strict=True))  # by position, the numbers of both in earlier ops

    def _crossing(self) -> list[float]:
        """Return, for a cut before each op, the bytes of the tensors that cross it: earlier ops compute them, and later
        ops read them. Results of collectives that are still in flight do not count.

        It is infinite if a value that is no tensor crosses the cut.
        """
        change = [0.0] * (len(self.nodes) + 2)
        barred = [0] * (len(self.nodes) + 2)
        for at, node in enumerate(self.nodes):
            until = max((self.place[user] for user in node.users if user in self.place), default=at)
            value = node.meta.get("val")
            if isinstance(value, Tensor):
                size = 0 if _is_started(node) else value.numel() * value.element_size()
                change[at + 1] += size
                change[until + 1] -= size
            else:
                barred[at + 1] += 1
                barred[until + 1] -= 1
        out, live_bytes, bars = [], 0.0, 0
        for more, bar in zip(change, barred, strict=True):
            live_bytes, bars = live_bytes + more, bars + bar
            out.append(float("inf") if bars else live_bytes)
        return out

    def borders(self, start: int, stop: int, least: int) -> list[int]:
        """Return the positions, in order, at which to cut the ops from ``start`` to ``stop``: between repeats of a run
        of ops, if at least ``least`` repeats follow one another.

        They are between the repeats of the longest run that repeats at least ``least`` times and, by recursion, before
        and after that run.
        """
        repeat = _longest([self.marks.mark(node) for node in self.nodes[start:stop]], least)
        if repeat is None:
            return []
        first, period, length = repeat
        first += start
        # At the offset with the fewest bytes across a border in the middle, so that few fusions are prevented.
        middle = first + length // period // 2 * period
        offset = min(range(period), key=lambda at: (self.crossing[middle + at], at))
        cuts = list(range(first + offset, first + length + 1, period))
        if any(self.crossing[at] == float("inf") for at in cuts):
            return []
        left, right = self.borders(start, cuts[0], least), self.borders(cuts[-1], stop, least)
        return sorted({*left, *cuts, *right} - {0, len(self.nodes)})

    def runs_of_calls(self) -> list[tuple[int, int]]:
        """Return (start, stop) of each run of at least `CALLS` successive nodes that do nothing but start collectives
        and wait for them.
        """
        rows, at = [], 0
        for calls, nodes in groupby(self.nodes, is_call):
            start, at = at, at + len(list(nodes))
            if calls and at - start >= CALLS and max(self.crossing[start], self.crossing[at]) < float("inf"):
                rows.append((start, at))
        return rows

    def segment(self, start: int, stop: int, gm: fx.GraphModule) -> Segment:
        """Return ops ``start`` to ``stop`` as a `Segment` that runs ``gm``, the graph of these or of equal ops."""
        takes, gives = self._ports(start, stop)
        done = frozenset(node.name for node in takes if self.last[node] < stop and node.op != "get_attr")
        return Segment(gm, tuple(x.name for x in takes), tuple(x.name for x in gives), done, *self.before[start])

    def _ports(self, start: int, stop: int) -> tuple[list[fx.Node], list[fx.Node]]:
        """Return two lists for ops ``start`` to ``stop``: the operands that earlier ops compute, and the results that
        later ops read.
        """
        inside = self.nodes[start:stop]
        inside_set = set(inside)
        takes = dict.fromkeys(x for node in inside for x in node.all_input_nodes if x not in inside_set)
        return list(takes), [node for node in inside if self.last[node] >= stop]

    def key(self, start: int, stop: int) -> object:
        """Return a key of ops ``start`` to ``stop``: what they compute, their data flow and the types of their inputs.
        Segments with equal keys can share one graph.
        """
        takes, gives = self._ports(start, stop)
        number = {node: -1 - at for at, node in enumerate(takes)}
        number |= {node: at for at, node in enumerate(self.nodes[start:stop])}
        first, _ = self.before[start]
        ops = []
        for node in self.nodes[start:stop]:
            slots = node.args[-1] if node.target in IN_MESSAGES else ()
            operands = tuple(number[x] for x in self.marks.operands(node))
            ops.append((self.marks.mark(node), operands, tuple(slot - first for slot in slots)))
        return tuple(ops), tuple(map(self.marks.kind, takes)), tuple(number[node] for node in gives)

    def graph(self, start: int, stop: int) -> fx.Graph:
        """Return a new graph with copies of ops ``start`` to ``stop``. Its placeholders are their operands from
        outside.
        """
        takes, gives = self._ports(start, stop)
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        for at, node in enumerate(takes):
            env[node] = graph.placeholder(f"arg{at}")
            env[node].meta = dict(node.meta)
        first, _ = self.before[start]
        for at, node in enumerate(self.nodes[start:stop]):
            env[node] = copy = graph.node_copy(node, env.__getitem__)
            copy.name = f"x{at}"
            if node.target in IN_MESSAGES:
                numbers = node.args[-1]
                copy.args = (*copy.args[:-1], [number - first for number in numbers])
        graph.output(tuple(env[node] for node in gives))
        return graph


def _in_order(graph: fx.Graph) -> list[fx.Node]:
    """Return the ops of a graph in order, each getitem directly after the op whose result it selects."""
    out: list[fx.Node] = []

    def add(node: fx.Node) -> None:
        out.append(node)
        for user in node.users:
            if user.target is getitem and user.args[0] is node:
                add(user)

    for node in graph.nodes:
        if node.op == "call_function" and node.target is not getitem:
            add(node)
    return out


def _is_started(node: fx.Node) -> bool:
    """Return whether ``node`` starts a collective, or selects (``getitem``) a result of a node that starts one."""
    source = node.args[0] if node.target is getitem else node
    return isinstance(source, fx.Node) and collective_kind(source) is not None


def is_call(node: fx.Node) -> bool:
    """Return whether ``node`` starts a collective, selects a result of one, or waits for one."""
    return _is_started(node) or node.target is WAIT


def _longest(marks: Sequence[int], least: int) -> tuple[int, int, int] | None:
    """Find a repetition in a sequence of ops, given the mark of each (`Marks`). Return (start, period, length) of the
    repetition that leaves the fewest ops to compile; None if none has ``least`` repeats.

    In a repetition, each op equals the op ``period`` later. Candidate periods are distances at which rare marks recur.
    """
    places: dict[int, list[int]] = {}
    for at, mark in enumerate(marks):
        places.setdefault(mark, []).append(at)
    distances = Counter(
        b - a
        for positions in places.values()
        if len(positions) >= least
        for a, b in zip(positions, positions[1:], strict=False)
    )
    best, most = None, 0
    for period, _ in distances.most_common(64):
        for start, stop in _runs(marks, period):
            saved = (stop - start) // period * period
            if stop - start >= (least - 1) * period and saved > most:
                best, most = (start, period, stop - start), saved
    return best


def _runs(marks: Sequence[int], period: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each longest run of positions at which ``marks`` repeats: the mark at a position equals
    the mark ``period`` later.
    """
    start = None
    for at in range(len(marks) - period):
        if marks[at] != marks[at + period]:
            if start is not None:
                yield start, at
            start = None
        elif start is None:
            start = at
    if start is not None:
        yield start, max(len(marks) - period, start)
