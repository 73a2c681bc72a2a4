"""Search: the plan of least predicted time for one model on one mesh, within a limit of memory."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import combinations
from math import inf

from shardc.cost.hardware import Hardware
from shardc.errors import PlanError, ShardcError
from shardc.ir.flops import is_attention
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.passes.exact.chooser import Weights
from shardc.passes.exact.open import Free, OpenChoice
from shardc.passes.options import Options
from shardc.passes.unfold_names import NotPeriodic
from shardc.plan.constructors import cp, ddp, fsdp
from shardc.plan.entries import Fsdp
from shardc.plan.placed import ParamPlan, Placed
from shardc.plan.value import Plan
from shardc.report.predicted_schedule import Schedule
from shardc.search.fit import Fit, kept_whole
from shardc.search.opened import Laid, Opened
from shardc.search.pins import Pinner, borders
from shardc.search.within import LEAST, Within
from shardc.search.write import Writer
from shardc.solver import Infeasible, solve

COPIES = 4.0  # of a parameter: itself, its gradient and two of AdamW's
# What a second of parameters' gathers, and of their gradients' reductions, counts at first.
HIDDEN = ((0.2, 0.2), (0.05, 0.5))
ROUNDS = 3  # in which what a schedule leaves exposed prices the next
KEPT = 3  # plans of a round that are scheduled
MARGIN = 1.02  # of what a schedule takes, which hides some of what a sum counts
GLANCE = 1e8  # entries of tables that are gone through to see about what a mesh is worth


@dataclass(frozen=True)
class Tried:
    """A plan that was scheduled.

    Args:
        origin: "found", or the library's form that it is, or that was made to fit.
        over: the axes over which storage alone is split.
        value, bound: seconds that its solution costs, and that any would; 0 of what is no solution.
        variables: of its problem; 0 of what is no solution.
        build, solve: seconds that making and solving its problem took.
    """

    plan: Plan
    schedule: Schedule
    origin: str = "found"
    over: tuple[str, ...] = ()
    value: float = 0.0
    bound: float = 0.0
    variables: int = 0
    build: float = 0.0
    solve: float = 0.0

    @property
    def gap(self) -> float:
        return (self.value - self.bound) / self.value if self.value else 0.0

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.schedule.seconds

    @property
    def memory(self) -> int:
        """Bytes of a rank at the peak."""
        return self.schedule.memory.peak.total


@dataclass(frozen=True)
class Candidate:
    """A solution: its plan without pins, the layouts at modules' borders, and what it cost.

    Args:
        bytes: of memory that its sum counts, each of them for ``byte`` seconds.
    """

    plan: Plan
    borders: Mapping[str, Layout]
    over: tuple[str, ...]
    value: float
    bound: float
    variables: int
    build: float
    solve: float
    bytes: float
    byte: float

    def at(self, byte: float) -> float:
        """What it costs where a byte of memory costs ``byte``."""
        return self.value + (byte - self.byte) * self.bytes


@dataclass
class Opening(OpenChoice):
    """The problem of the graph ``laid``, which took ``seconds`` to state."""

    laid: Laid = field(kw_only=True)
    seconds: float = 0.0


@dataclass
class Search:
    """Searches the plans of a captured model on ``mesh``.

    Args:
        hand: what a person says of the plan already; it holds.
        memory: bytes that a rank has.
        prices: of a byte, at which solutions were expected to fit, by the axes that split storage alone.
        beyond: what the last plan that did not fit took at the peak beyond the bytes of its solution, by these axes.
    """

    opened: Opened
    mesh: Mesh
    hand: Plan
    hardware: Hardware
    memory: float
    options: Options
    tried: dict[str, Tried] = field(default_factory=dict)
    prices: dict[tuple[str, ...], float] = field(default_factory=dict)
    beyond: dict[tuple[str, ...], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.writer = Writer(self.opened.source.model, self.mesh, self.opened.repeats, self.opened.keep)
        self.pinner = Pinner(self.opened, self.writer, self.mesh, self.options)
        self.said = self.opened.params(self.mesh, self.hand)

    def forms(self) -> None:
        """Schedules what a person would write without looking."""
        for name, plan in self._forms():
            self._schedule(plan, name)
        if (best := self.best()) is not None:
            self._schedule(kept_whole(best.plan, self.hand), best.origin)

    def least(self) -> float:
        """Seconds that every solution costs, as far as a little work shows; inf where there is none."""
        gather, reduce = map(min, *HIDDEN)
        problem = self.problem(None, Weights(gather, reduce, self.opened.weight))
        try:
            return solve(problem.energy(LEAST), work=GLANCE).bound
        except Infeasible:
            return inf

    def run(self) -> Tried:
        """The fastest plan that fits, of what was scheduled before and what is found.

        Raises:
            PlanError: no plan fits; it says what the one that needs least takes.
        """
        weighed = [Weights(*hidden, of=self.opened.weight) for hidden in HIDDEN]
        for _ in range(ROUNDS):
            before = len(self.tried)
            for weights in weighed:
                self._solutions(weights)
            best = self.best()
            if best is not None and best.origin == "found":
                self._schedule(kept_whole(best.plan, self.hand), "found", best)
            if best is None or len(self.tried) == before:
                break
            weighed = [exposed(best.schedule, weighed[0], self.opened.source.shapes)]
        self._fit()
        if (best := self.best()) is None:
            least = min((t.memory for t in self.tried.values()), default=0)
            raise PlanError(
                f"no plan on {self.mesh} fits in {self.memory / 1e9:g} GB a rank: the smallest that was found takes "
                f"{least / 1e9:.3g} GB",
                fix="use more ranks, or a smaller batch",
            )
        return best

    def _try(self, candidate: Candidate) -> Tried | None:
        """Schedules a solution's plan; None if it cannot be written as one that its model and mesh take."""
        with suppress(ShardcError):
            return self._schedule(self.pinner.pinned(candidate.plan, candidate.borders), "found", candidate)
        return None

    def _fit(self) -> None:
        """Makes the fastest plan and the smallest one fit, if they are faster than the best that does."""
        tried = sorted(self.tried.values(), key=lambda t: (t.seconds, str(t.plan)))
        globs = [glob for glob, _ in self.writer.by_glob(dict.fromkeys(self.said, ""))]
        for start in (tried[0], min(tried, key=lambda t: t.memory)) if tried else ():

            def cost(plan: Plan, alike: bool, start: Tried = start) -> Tried | None:
                opened = self.opened
                if not alike and opened.repeats:
                    opened = Opened.of(opened.source, plan, self.mesh)
                return self._schedule(plan, start.origin, start, opened)

            host = not self.hardware.is_host
            Fit(self.opened.source.model, globs, self.hand, self.memory, host, cost, self.limit).run(start.plan)

    def limit(self) -> float:
        """Seconds of the fastest plan that fits."""
        best = self.best()
        return inf if best is None else best.seconds

    def best(self) -> Tried | None:
        fitting = [t for t in self.tried.values() if self._fits(t)]
        return min(fitting, key=lambda t: (round(t.seconds, 9), str(t.plan)), default=None)

    # --- solutions

    def _solutions(self, weights: Weights) -> None:
        """Schedules the fastest solutions that are expected to fit."""
        known: dict[tuple[str, ...], dict[float, Candidate]] = {over: {} for over in self._overs()}
        solved = [self._fastest(over, weights, points) for over, points in known.items()]
        for each in sorted((c for c in solved if c is not None), key=lambda c: c.at(0.0))[:KEPT]:
            over = each.over
            found = each if each.bytes <= self._room(over) else self._fastest(over, weights, known[over])
            while found is not None:
                tried = self._try(found)
                if tried is None or self._fits(tried):
                    break
                self.beyond[over] = tried.memory - found.bytes
                smaller = self._fastest(over, weights, known[over])
                found = smaller if smaller is not None and smaller.bytes < found.bytes else None

    def _fastest(self, over: tuple[str, ...], weights: Weights, known: dict[float, Candidate]) -> Candidate | None:
        """The fastest solution with storage split over ``over`` that is expected to fit, else the smallest.

        Prices of a byte begin at the one that sufficed before, with storage split over these axes or over others.
        """
        problem = cache(partial(self.problem, over, weights))
        within = Within(lambda price, ceiling: self._solved(problem(), price, ceiling), known)
        first = self.prices.get(over, min(self.prices.values(), default=LEAST))
        found = within.fastest(self._room(over), MARGIN * self.limit(), first)
        if found is not None:
            self.prices[over] = found.byte
        return found

    def _room(self, over: tuple[str, ...]) -> float:
        """The bytes of a solution whose plan is expected to fit, by what plans that did not fit took beyond theirs."""
        return self.memory - self.beyond.get(over, min(self.beyond.values(), default=0.0))

    def _fits(self, tried: Tried) -> bool:
        return tried.memory <= self.memory

    def _overs(self) -> Iterator[tuple[str, ...]]:
        """The sets of axes over which storage alone may be split: those that a hand's plan does not speak of."""
        said = set(self.hand.axes)
        by_hand = any(entry.batch for entry in self.hand.entries)  # an ``fsdp`` entry would split the batch further
        free = [axis for axis in self.mesh.axes if axis not in said and self.mesh.size(axis) > 1 and not by_hand]
        for count in range(len(free), -1, -1):
            yield from combinations(free, count)

    def problem(self, over: tuple[str, ...] | None, weights: Weights) -> Opening:
        """The choice of layouts, with storage split further over ``over`` or not; None: each parameter's over any."""
        start = time.perf_counter()
        laid = self.opened.graph(self.mesh, self.hand, replace(self.options, cost=self.hardware), None)
        storages = self._anywhere if over is None else partial(self._storages, over)
        free = Free(over or (), storages, tuple(self._batches()), COPIES)
        made = Opening(laid.problem, laid.graph, weights, free, laid=laid)
        made.seconds = time.perf_counter() - start
        return made

    def _solved(self, problem: Opening, byte: float, ceiling: float) -> Candidate | None:
        """The solution of least value, where a byte costs ``byte``, if there is one below ``ceiling``."""
        start = time.perf_counter()
        try:
            solution = solve(problem.energy(byte), ceiling=ceiling)
        except Infeasible:
            return None
        solved = time.perf_counter()
        problem.apply(solution.labels)
        over = problem.free.over
        plan = self.hand | self.writer.plan(
            problem.stored(solution.labels), over, problem.batch(solution.labels), 3, self.opened.source.inputs
        )
        return Candidate(
            plan, borders(problem.laid), over, solution.value, solution.bound, solution.variables, problem.seconds,
            solved - start, problem.bytes(solution.labels), byte,
        )  # fmt: skip

    def _storages(self, over: Sequence[str], name: str, compute: Layout) -> list[Layout]:
        """Where a parameter, by its name in the captured model, may be stored: nowhere else than a hand's plan says."""
        said = self.said[name]
        if said.storage_cause or said.host or (said.compute_cause and compute != said.compute):
            return []
        return storages(over, name, compute)

    def _anywhere(self, name: str, compute: Layout) -> list[Layout]:
        """Where a parameter may be stored with storage split over any axes."""
        overs = [over for over in self._overs() if not set(over) & set(compute.bound)]
        return list(dict.fromkeys(layout for over in overs for layout in self._storages(over, name, compute)))

    def _batches(self) -> Iterator[tuple[str, ...]]:
        """The sets of axes that may split the batch."""
        if any(entry.batch for entry in self.hand.entries):
            return
        said = set(self.hand.axes)
        free = [axis for axis in self.mesh.axes if axis not in said]
        for count in range(len(free) + 1):
            yield from combinations(free, count)

    # --- schedules

    def _forms(self) -> Iterator[tuple[str, Plan]]:
        """The library's forms."""
        if self.hand.entries:
            return
        axes = [axis for axis in self.mesh.axes if self.mesh.size(axis) > 1]
        whole = Plan()
        for axis in axes:
            whole |= ddp(axis)
        yield "ddp", whole
        yield "fsdp", fsdp(tuple(axes)) if axes else whole
        graph = self.opened.captured.graph.graph
        for axis in axes if any(n.op == "call_function" and is_attention(n.target) for n in graph.nodes) else ():
            yield "fsdp and cp", fsdp(tuple(axes)) | cp(axis)
        for axis in axes:
            rest = tuple(a for a in axes if a != axis)
            try:
                tensor = Plan.from_hf(self.opened.source.model, axis)
            except PlanError:
                break
            yield "fsdp and from_hf", (fsdp(rest) if rest else Plan()) | tensor

    def _schedule(
        self, plan: Plan, origin: str, candidate: Candidate | Tried | None = None, opened: Opened | None = None
    ) -> Tried | None:
        """A plan as it was tried; None where it cannot be."""
        said = self.tried.get(str(plan))
        if said is None:
            schedule = self.schedule(plan, opened or self.opened, by_hand=origin != "found")
            if schedule is None:
                return None
            said = Tried(plan, schedule, origin)
        if candidate is not None and not said.variables:
            said = replace(
                said, over=candidate.over, value=candidate.value, bound=candidate.bound,
                variables=candidate.variables, build=candidate.build, solve=candidate.solve,
            )  # fmt: skip
        self.tried[str(plan)] = said
        return said

    def schedule(self, plan: Plan, opened: Opened, by_hand: bool = True) -> Schedule | None:
        """What ``plan`` takes; None where it cannot be.

        Args:
            by_hand: alike blocks may come out different in any way. Those of a found plan may at the ends alone, since
                globs are to say it.
        """
        try:
            return opened.program(self.mesh, plan, self.options).schedule(self.hardware)
        except NotPeriodic:
            more = opened.more
            return self.schedule(plan, more, by_hand) if more.repeats or (by_hand and more is not opened) else None
        except ShardcError:
            return None


def storages(over: Sequence[str], name: str, compute: Layout) -> list[Layout]:
    """Where an ``fsdp`` entry over ``over`` may store a parameter that is computed with at ``compute``."""
    if not over:
        return [compute]
    plan = ParamPlan(compute, compute, compute.shape, 3, "", "")
    made = Fsdp(tuple(over)).store(plan, Placed((name,), compute.shape, 0, compute), None).storage
    return [compute] if made.shape != compute.shape or made == compute else [compute, made]


def exposed(schedule: Schedule, weights: Weights, params: Collection[str]) -> Weights:
    """What gathers of ``params`` and reductions of their gradients count: the share that a schedule leaves exposed."""

    def share(kinds: Sequence[str], before: float) -> float:
        found = [c for c in schedule.collectives if c.kind in kinds and set(c.cause.tensors) <= set(params)]
        total = sum(c.seconds for c in found)
        return max(0.02, min(1.0, sum(c.exposed for c in found) / total)) if total else before

    gather, reduce = share(["all_gather"], weights.gather), share(["reduce_scatter", "all_reduce"], weights.reduce)
    return replace(weights, gather=gather, reduce=reduce)
