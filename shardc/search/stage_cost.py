"""`parts_of`: the cost of each part of a model for one microbatch. `Player`: the step of a pipeline whose stages
consist of these parts.

A part is what no cut of `shardc.pp` divides: a module outside the repeated blocks, or a child of a block. Parts are
priced once for a layout and a size of microbatches, on a few of the blocks. Stages are sums of parts, so the step of
any cut and schedule is a play of lists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, groupby, pairwise

from torch import fx

from shardc.capture import shortened
from shardc.cost.hardware import Hardware
from shardc.ir import graph as ir
from shardc.ir.actions import advance
from shardc.ir.executable import BACKWARD, FIRST_FORWARD, FORWARD, KNOWN, LAST_BACKWARD, Half
from shardc.ir.module_paths import forward_name, is_in
from shardc.ir.schedules import RECEIVES, SENDS, Action, Kind, Schedule, in_flight
from shardc.plan.pipeline_stages import blocks_of
from shardc.report.inspected import InspectedProgram
from shardc.search.captured_model import CapturedModel

LASTING = ("parameters", "optimizer", "gradients", "gathered")
TRIES = 400  # cuts that are played in a search for the fastest


@dataclass(frozen=True)
class Part:
    """The predicted costs of one part of the model on one rank, for the choice of a cut into stages.

    Args:
        name: the first module in it, by which a plan names a cut in front of it.
        seconds: seconds of one microbatch by kind of computation.
        before, behind: seconds of what runs once, such as gathers for all microbatches.
        lasting: bytes that are allocated for the whole step.
        saved: bytes that a microbatch keeps from its forward to its backward.
        passing: other bytes at the peak.
        received: bytes of the values of a microbatch that it receives if a stage begins with it.
    """

    name: str
    seconds: Mapping[Kind, float]
    before: float = 0.0
    behind: float = 0.0
    lasting: int = 0
    saved: int = 0
    passing: int = 0
    received: int = 0

    @property
    def total(self) -> float:
        """Return the seconds of forward and backward of one microbatch."""
        return self.seconds[Kind.FORWARD] + self.seconds[Kind.BACKWARD]


def parts_of(captured_model: CapturedModel, program: InspectedProgram, hardware: Hardware) -> list[Part]:
    """Return the parts of the complete model in order, each with its predicted costs. A part (a module, or a child of a
    repeated block) is what no cut into stages divides.

    Args:
        captured_model: the captured model.
        program: the program of its captured blocks, in microbatches.
        hardware: the hardware of the prediction.
    """
    schedule, halves = program.first_and_last(hardware)
    step, phase = schedule.step, [half.phase for half in halves]
    runs = Counter(phase)  # the first and the last microbatch may run the same graph
    forward = next(half for half in halves if half.phase in (FIRST_FORWARD, FORWARD))
    names = _names(captured_model, forward)
    chains = {half: _chain(half, names) for half in dict.fromkeys(halves)}
    sums: dict[str, dict[tuple[object, bool], float]] = {name: {} for name in names}
    ends = (*schedule.clock[1:], schedule.seconds)
    run = 0
    for at, (op, start, end) in enumerate(zip(step.ops, schedule.clock, ends, strict=True)):
        while run + 1 < len(step.begins) and at >= step.begins[run + 1]:
            run += 1
        if end > start:
            name = _part(names, op.node)
            key = phase[run], op.node in chains[halves[run]]
            sums[name][key] = sums[name].get(key, 0.0) + (end - start) / runs[phase[run]]
    sizes: dict[str, dict[str, int]] = {name: {} for name in names}
    for x in schedule.memory.tensors_at_peak:
        of_part = sizes[_part_name(names, x.module or x.name)]
        of_part[x.owner] = of_part.get(x.owner, 0) + x.bytes
    received = _crossing(forward, names)
    few = [_priced(name, sums[name], sizes[name], received[name]) for name in names]
    return list(_unfolded(captured_model, few))


def _names(captured_model: CapturedModel, forward: Half) -> list[str]:
    """Return the names of the parts of the captured model (blocks, or their children if these run in order), in the
    model's order.
    """
    order: dict[str, int] = {}  # module -> the first op of it
    for at, node in enumerate(forward.graph.nodes):
        if node.op == "call_function" and ir.info(node).origin.phase == "forward":
            name = ir.info(node).origin.module
            while name:
                order.setdefault(name, at)
                name = name.rpartition(".")[0]
    model, out = captured_model.source.model, []
    with shortened(model, captured_model.repeats):
        for name, _ in blocks_of(model):
            children = model.get_submodule(name).named_children()
            inside = [f"{name}.{key}" for key, child in children if any(True for _ in child.parameters())]
            runs = [order.get(child, -1) for child in inside]
            in_order = len(inside) > 1 and runs == sorted(runs) and runs[0] >= 0
            out += inside if in_order else [name]
    return out


def _part_name(names: Sequence[str], module: str) -> str:
    """Return the name of the model's part, one of ``names``, that contains the module or value called ``module``.

    What is in a block and in none of its parts counts to the first part of the block. Everything else counts to the
    last part of all.
    """
    name = forward_name(module)
    while name:
        for part in names:
            if is_in(part, name):
                return part
        name = name.rpartition(".")[0]
    return names[-1]


def _part(names: Sequence[str], node: fx.Node) -> str:
    """Return the name of the model's part, one of ``names``, that contains the op or value ``node``."""
    record = ir.info(node)
    return _part_name(names, record.origin.module or record.name)


def _chain(half: Half, names: Sequence[str]) -> frozenset[fx.Node]:
    """Return the ops of the backward ``half`` that compute the gradients of the model's first part, ``names[0]``. They
    run through all blocks, the last block first.
    """
    results = ((role.name, x) for role, x in ir.outputs(half.graph))
    return frozenset(ir.ancestors(x for name, x in results if name and _part_name(names, name) == names[0]))


def _crossing(forward: Half, names: Sequence[str]) -> dict[str, int]:
    """Return the bytes that a stage which begins with a part receives for one microbatch, for each part in ``names``:
    part -> bytes of the values that earlier parts compute, and that it or later parts read.

    Values that are computed from inputs alone or from parameters alone are not counted.
    """
    computed: dict[fx.Node, tuple[bool, bool]] = {}
    at_part: dict[fx.Node, int] = {}
    first: dict[str, int] = {}
    for at, node in enumerate(forward.graph.nodes):
        if node.op == "placeholder":
            is_param = ir.role(node).kind in ("param", KNOWN)
            computed[node] = (is_param, not is_param)
        elif node.op == "call_function":
            of = [computed.get(x, (False, False)) for x in node.all_input_nodes]
            computed[node] = any(x for x, _ in of), any(x for _, x in of)
            if all(computed[node]):
                at_part[node] = at
                first.setdefault(_part(names, node), at)
    out = dict.fromkeys(names, 0)
    for node, at in at_part.items():
        last = max((at_part.get(user, -1) for user in node.users), default=-1)
        for name, begin in first.items():
            if at < begin <= last and (value := ir.info(node).value) is not None and not isinstance(value, tuple):
                out[name] += value.nbytes
    return out


def _priced(name: str, sums: Mapping[tuple[object, bool], float], sizes: Mapping[str, int], received: int) -> Part:
    """Return the `Part` ``name`` of the model with its predicted costs, from the seconds ``sums``, the memory ``sizes``
    and the bytes ``received`` from the part before.

    Args:
        sums: (phase, whether gradients of earlier parts need the ops) -> seconds of its ops.
        sizes: owner of memory -> its bytes at the peak.
        received: bytes of a microbatch that a cut in front of the part sends.
    """

    def of(phase: object) -> float:
        return sums.get((phase, True), 0.0) + sums.get((phase, False), 0.0)

    backward = BACKWARD if of(BACKWARD) else LAST_BACKWARD
    forward = FORWARD if of(FORWARD) else FIRST_FORWARD
    for_inputs = sums.get((backward, True), 0.0)
    seconds = {
        Kind.FORWARD: of(forward), Kind.BACKWARD: of(backward), Kind.BACKWARD_INPUT: for_inputs,
        Kind.BACKWARD_WEIGHT: of(backward) - for_inputs,
    }  # fmt: skip
    lasting = sum(size for owner, size in sizes.items() if owner in LASTING)
    saved = sizes.get("activations", 0)
    return Part(
        name, seconds, max(0.0, of(FIRST_FORWARD) - of(forward)), max(0.0, of(LAST_BACKWARD) - of(backward)), lasting,
        saved, sum(sizes.values()) - lasting - saved, received,
    )  # fmt: skip


def _unfolded(captured_model: CapturedModel, few: Sequence[Part]) -> Iterator[Part]:
    """Yield the parts of all blocks of the model. Blocks that were not captured have the costs of the second captured
    block.
    """
    repeats = captured_model.repeats
    placed = [(part, *(repeats.place(part.name) or (None, 0, ""))) for part in few]
    for run, group in groupby(placed, lambda row: row[1]):
        rows = list(group)
        if run is None:
            yield from (replace(part, name=repeats.whole(part.name)) for part, *_ in rows)
            continue
        for block in range(run.count):
            source = 0 if block == 0 else repeats.keep - 1 if block == run.count - 1 else 1
            yield from (replace(part, name=run.name(block, rest)) for part, _, at, rest in rows if at == source)


@dataclass(frozen=True)
class Played:
    """A cut of the model into pipeline stages, with its predicted step.

    Args:
        starts: the first part of each stage.
        seconds: of the step.
        memory: bytes of the rank that needs most.
    """

    starts: tuple[int, ...]
    seconds: float
    memory: int


@dataclass
class Player:
    """Predicts the step of a pipeline for any cut of the model: plays the lists of a schedule with the costs of parts.

    Args:
        schedule: the lists of all ranks.
        parts: the parts of the model.
        message: (seconds of a message before its first byte, further seconds per byte).
        limit: bytes of memory of a rank.
        played: places at which the stages begin -> the step with that cut, as far as played.
    """

    schedule: Schedule
    parts: Sequence[Part]
    message: tuple[float, float]
    limit: float
    played: dict[tuple[int, ...], Played] = field(default_factory=dict)

    def fastest(self) -> Played | None:
        """Return the cut into stages with the fastest step, of the cuts tried that fit in memory; if none fits, the cut
        that needs least memory. None if the model has too few places to cut.

        Starting at the cut whose slowest stage is fastest, cuts are moved while that is better.
        """
        if len(self._places) < self.schedule.stages - 1:
            return None
        best, moved = self.play(self._balanced()), True
        while moved:
            moved = False
            for starts in self._neighbours(best.starts):
                if starts not in self.played and len(self.played) < TRIES:
                    if self._sort_key(now := self.play(starts)) < self._sort_key(best):
                        best, moved = now, True
                        break
        return best

    def _neighbours(self, starts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yield cuts near ``starts``, the cut by the first part of each stage: some consecutive stages begin one or two
        possible places earlier or later.
        """
        at = [self._places.index(start) for start in starts[1:]]
        for by in (-1, 1, -2, 2):
            for first in range(len(at)):
                for last in range(first + 1, len(at) + 1):
                    near = [*at[:first], *(place + by for place in at[first:last]), *at[last:]]
                    if near[0] >= 0 and near[-1] < len(self._places) and all(a < b for a, b in pairwise(near)):
                        yield 0, *(self._places[place] for place in near)

    @cached_property
    def _places(self) -> list[int]:
        """Return the indices of the parts of the model at which a stage may begin, besides the first."""
        return [at for at in range(1, len(self.parts)) if self._can_begin(at)]

    def _sort_key(self, played: Played) -> tuple[bool, float, tuple[int, ...]]:
        """Return the sort key of a cut into stages: cuts that fit in memory come first, sorted by seconds, then cuts
        that do not fit, sorted by memory.
        """
        fits = played.memory <= self.limit
        return not fits, round(played.seconds, 9) if fits else played.memory, played.starts

    def _can_begin(self, at: int) -> bool:
        """Return whether a stage may begin at part ``at``. Inside a block it may only if no more bytes are sent there
        than at the beginning of the block.
        """
        name = self.parts[at].name.rpartition(".")[0]
        first = next(part for part in self.parts if part.name.rpartition(".")[0] == name)
        return self.parts[at].received <= first.received or self.parts[at] is first or not first.received

    def _balanced(self) -> tuple[int, ...]:
        """Return the cut in which the slowest stage is as fast as possible, as the index of the first part of each
        stage.
        """
        before = [0.0, *accumulate(part.total for part in self.parts)]  # seconds of all parts in front of each
        # Start of the last stage so far -> (seconds of the slowest stage in front of it, starts of the stages).
        cuts: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
        for _ in range(self.schedule.stages - 1):
            longer: dict[int, tuple[float, tuple[int, ...]]] = {}
            for end in self._places:
                options = [
                    (max(slowest, before[end] - before[start]), (*starts, end))
                    for start, (slowest, starts) in cuts.items()
                    if start < end
                ]
                if options:
                    longer[end] = min(options)
            cuts = longer
        return min((max(slowest, before[-1] - before[start]), starts) for start, (slowest, starts) in cuts.items())[1]

    def play(self, starts: tuple[int, ...]) -> Played:
        """Return the predicted step of the cut whose stages begin at the parts ``starts``."""
        if starts not in self.played:
            stages = [self.parts[a:b] for a, b in pairwise((*starts, len(self.parts)))]
            self.played[starts] = Played(starts, self._seconds(stages), self._memory(stages))
        return self.played[starts]

    def _seconds(self, stages: Sequence[Sequence[Part]]) -> float:
        """Return the seconds of a step whose stages consist of the parts ``stages``. They are those that `clock` (the
        simulation of any schedule) would return, but faster, since hundreds of cuts are tried.
        """
        schedule, (latency, byte) = self.schedule, self.message
        durations = [{kind: sum(part.seconds[kind] for part in parts) for kind in parts[0].seconds} for parts in stages]
        sends = [latency + byte * parts[0].received for parts in stages]
        before = [0.0] * schedule.ranks
        after = [0.0] * schedule.ranks
        for stage, parts in enumerate(stages):
            before[schedule.rank_of[stage]] += sum(part.before for part in parts)
            after[schedule.rank_of[stage]] += sum(part.behind for part in parts)
        now, (runs, peers) = before, self._in_order
        arrivals = [0.0] * len(peers)
        free: dict[tuple[int, int], float] = {}
        for rank, kind, stage, number in runs:
            if kind in SENDS:
                link = rank, peers[number]
                seconds = sends[stage + 1] if kind == Kind.SEND_FORWARD else sends[stage]
                arrivals[number] = free[link] = max(now[rank], free.get(link, 0.0)) + seconds
            elif number >= 0:
                now[rank] = max(now[rank], arrivals[number])
            else:
                now[rank] += durations[stage][kind]
        return max(a + b for a, b in zip(now, after, strict=True))

    @cached_property
    def _in_order(self) -> tuple[list[tuple[int, Kind, int, int]], list[int]]:
        """Return an order in which the actions of all ranks can run, for fast simulation of many cuts: (actions, rank
        that receives each message).

        An action is (rank, kind, stage, number of its message or -1).
        """
        numbers: dict[Action, int] = {}
        runs: list[tuple[int, Kind, int, int]] = []

        def run(rank: int, at: int, action: Action) -> bool:
            if action.kind in RECEIVES and action not in numbers:
                return False
            if action.kind in SENDS:
                numbers[action.other_end] = len(numbers)
            message = action.other_end if action.kind in SENDS else action
            runs.append((rank, action.kind, action.stage, numbers.get(message, -1)))
            return True

        advance(self.schedule, run)
        return runs, [self.schedule.rank_of[action.stage] for action in numbers]

    def _memory(self, stages: Sequence[Sequence[Part]]) -> int:
        """Return the peak bytes of the rank that needs most, if the stages consist of the parts ``stages``."""
        saved = [sum(part.saved for part in parts) for parts in stages]
        out = []
        for rank, counts in enumerate(self._in_flight):
            parts = [part for stage, of in enumerate(stages) if self.schedule.rank_of[stage] == rank for part in of]
            flight = max(sum(number * saved[stage] for stage, number in count) for count in counts)
            out.append(sum(part.lasting for part in parts) + flight + max(part.passing for part in parts))
        return max(out)

    @cached_property
    def _in_flight(self) -> list[set[tuple[tuple[int, int], ...]]]:
        """For each rank, the set of states that it passes through in a step. A state has the number of microbatches in
        flight on each of the rank's stages: ((stage, number), ...).
        """
        return [{tuple(sorted(count.items())) for count in in_flight(row)} for row in self.schedule.lists]
