"""`Search`: finds the plan of least predicted step time for one model on one mesh, within a memory limit.

The exact layout problem is solved for several splits of storage. The least of their solutions is written as a plan and
scheduled; the share of communication that its schedule leaves exposed weighs the next solution of that split.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import combinations
from math import ceil, inf, prod
from operator import itemgetter

from shardc.cost.hardware import Hardware
from shardc.custom_ops.flops import is_attention
from shardc.errors import PlanError, ShardcError
from shardc.ir import graph as ir
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.passes.layout.exact.chooser import OpenLayoutProblem, StorageChoice, Weights
from shardc.passes.options import Options
from shardc.passes.unfold import NotPeriodic
from shardc.plan.constructors import cp, ddp, fsdp
from shardc.plan.entries import Fsdp
from shardc.plan.entries.data_parallel import Data
from shardc.plan.placed import ParamPlan, Placed
from shardc.plan.value import Plan
from shardc.report.predicted_schedule import Schedule
from shardc.search.captured_model import CapturedModel, PlannedGraph
from shardc.search.memory_fit import LEAST, Fit, PriceSearch, kept_whole
from shardc.search.plan_writer import Candidate, Pinner, Writer, borders
from shardc.search.result import Report, Trial
from shardc.solver import WORK, Infeasible, solve

COPIES = 4.0  # copies of a parameter in memory: itself, its gradient and two of AdamW's
HIDDEN = 0.2  # initial weight of a second of parameter gathers and of gradient reductions: most overlap with compute
BEST = 0.05  # weight of gathers in lower bounds
ROUNDS = 3  # number of solutions of a split of storage that are scheduled
MARGIN = 1.01  # solutions up to this multiple of the best step time are considered: a schedule may hide more
TILE = 64  # rows of queries that kernels of attention compute at once, at least
GLANCE = 3e7  # table entries that the solver may visit to bound the step time of a mesh


@dataclass
class PlanProblem(OpenLayoutProblem):
    """The layout problem of a captured graph under a plan: an energy whose minimum gives the cheapest layouts.

    Args:
        planned: the planned graph.
        seconds: seconds that building the problem took.
    """

    planned: PlannedGraph = field(kw_only=True)
    seconds: float = 0.0


@dataclass
class Split:
    """A choice of the axes over which storage only is split, with its layout problem and the solutions found so far.

    Args:
        over: the axes.
        problem: states the layout problem, once.
        weights: weights of communication in it.
        rounds: number of its solutions that were scheduled.
        solutions: price of a byte in seconds -> solution, as known so far.
        candidate: the fastest of them that is expected to fit; None if there is none yet.
    """

    over: tuple[str, ...]
    problem: Callable[[], PlanProblem]
    weights: Weights
    rounds: int = 0
    solutions: dict[float, Candidate] = field(default_factory=dict)
    candidate: Candidate | None = None


@dataclass
class Search:
    """A search over plans for a captured model on one mesh.

    Args:
        captured_model: the captured model.
        mesh: the mesh.
        hand: the entries that the user gave; every plan contains them.
        hardware: the hardware of the prediction.
        memory: memory of a rank in bytes.
        options: the options to compile with.
        report: called with each plan when it is scheduled.
        best_elsewhere: seconds of the best schedule on any other mesh so far; slower solutions are not scheduled.
        gap: share of its cost by which a solution of the layout problem may miss the least one.
        price: price of a byte in seconds at which solutions on other meshes were expected to fit.
        tried: text of a plan -> the scheduled plan.
        prices: axes that split storage only -> price of a byte at which a solution was last expected to fit.
        excess: axes that split storage only -> predicted peak of the last plan that did not fit, minus the bytes of its
            solution.
        memory_factor: factor for estimates of memory, from schedules that needed more than was estimated.
        left_out: what was not scheduled -> the bound that shows why, as text.
    """

    captured_model: CapturedModel
    mesh: Mesh
    hand: Plan
    hardware: Hardware
    memory: float
    options: Options
    report: Report | None = None
    best_elsewhere: float = inf
    gap: float = 0.0
    price: float = LEAST
    tried: dict[str, Trial] = field(default_factory=dict)
    prices: dict[tuple[str, ...], float] = field(default_factory=dict)
    excess: dict[tuple[str, ...], float] = field(default_factory=dict)
    memory_factor: float = 1.0
    left_out: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.writer = Writer(self.captured_model.source.model, self.mesh, self.captured_model.repeats)
        self.pinner = Pinner(self.captured_model, self.writer, self.mesh, self.options)
        self.last_problem: PlanProblem | None = None  # the last layout problem; others take from it what they share
        self.param_plans = self.captured_model.params(self.mesh, self.hand)

    def forms(self) -> None:
        """Predict the schedules of the ready-made plans (ddp, fsdp, ...). Then predict the best one with parameters
        kept unsharded for backward.

        Plans whose matrix products alone take longer than the best plan so far are left out.
        """
        forms = [(self._product_seconds(plan), name, plan) for name, plan in self.ready_made()]
        for bound, name, plan in sorted(forms, key=itemgetter(0)):
            if bound > MARGIN * self.limit():
                self.left_out[name] = f"{name} on {self.mesh}: its products alone take {bound * 1e3:.4g} ms"
            else:
                self._schedule(plan, name)
        if (best := self.best()) is not None:
            self._schedule(kept_whole(best.plan, self.hand), best.origin)

    def _product_seconds(self, plan: Plan) -> float:
        """Return the seconds of a rank's dense ops under ``plan`` if that has data-parallel entries only; 0 for other
        plans, and if the user gave entries.
        """
        rows = max((shape[0] for _, shape in self.captured_model.source.inputs if shape), default=0)
        if not rows or self.hand or not all(isinstance(entry, Data) for entry in plan.entries):
            return 0.0
        ways = prod(self.mesh.size(axis) for axis in plan.axes)
        return self.captured_model.floor(self.hardware) * ceil(rows / ways) / rows

    def least(self) -> float:
        """Return a lower bound in seconds of the cost of every solution, found with little work (at most `GLANCE` table
        entries of the solver).

        It is inf if there is no solution, or none that costs less than `MARGIN` times the best plan so far.
        """
        return self._cost_of_any(Weights(BEST, HIDDEN, self.captured_model.weight), GLANCE)

    def _cost_of_any(self, weights: Weights, work: float = WORK) -> float:
        """Return a proven lower bound, in seconds, of the cost of all solutions that fit in memory, with storage split
        over any axes. inf if no such solution costs less than `MARGIN` times the best plan so far.

        Args:
            weights: weights of communication.
            work: table entries that the solver may visit.
        """
        ceiling = MARGIN * self.limit() + self.price * self.memory
        try:
            energy = self.problem(None, weights).energy(self.price)
            bound = solve(energy, work=work, ceiling=ceiling, gap=self.gap).bound
        except Infeasible:
            return inf
        return bound - (self.price - LEAST) * self.memory

    def run(self) -> None:
        """Run the search; `best` is then the fastest plan that fits, if there is one."""
        weights = Weights(HIDDEN, HIDDEN, self.captured_model.weight)
        if self.limit() == self.best_elsewhere < inf and self._cost_of_any(weights) > MARGIN * self.best_elsewhere:
            return
        splits = [self._split(over, weights) for over in self._storage_axes()]
        while splits := [split for split in splits if self._is_promising(split)]:
            split = min(splits, key=_value)
            before, best = len(self.tried), self.best()
            trial = self._schedule_until_fits(split)
            if trial is None or len(self.tried) == before or split.rounds + 1 == ROUNDS:
                splits.remove(split)
                continue
            if self.best() is not best:
                trial = self._schedule(kept_whole(trial.plan, self.hand), "found", trial) or trial
            new = self._split(split.over, exposed(trial.schedule, split.weights, self.captured_model.source.shapes))
            splits[splits.index(split)] = replace(new, rounds=split.rounds + 1)
        self._fit()

    def _fit(self) -> None:
        """Change the fastest and the smallest plan that were tried so that they use less memory (recompute, offload,
        ...), until they fit or are slower than the best plan so far.
        """
        tried = sorted(self.tried.values(), key=lambda t: (t.seconds, str(t.plan)))
        globs = [glob for glob, _ in self.writer.by_glob(dict.fromkeys(self.param_plans, ""))]
        for start in (tried[0], min(tried, key=lambda t: t.memory)) if tried else ():

            def cost(plan: Plan, start: Trial = start) -> Trial | None:
                return self._schedule(plan, start.origin, start)

            host = not self.hardware.is_host
            Fit(self.captured_model.source.model, globs, self.hand, self.memory, host, cost, self.limit).run(start.plan)

    def limit(self) -> float:
        """Return the seconds of the fastest plan so far that fits in memory, on this mesh or another; inf if there is
        none.
        """
        best = self.best()
        return self.best_elsewhere if best is None else min(self.best_elsewhere, best.seconds)

    def best(self) -> Trial | None:
        """Return the fastest plan that fits; None if there is none yet."""
        fitting = [t for t in self.tried.values() if t.fits]
        return min(fitting, key=lambda t: (round(t.seconds, 9), str(t.plan)), default=None)

    # --- solutions

    def _split(self, over: tuple[str, ...], weights: Weights) -> Split:
        """Return a `Split`: storage may be split over the axes ``over``, and ``weights`` scale the costs of
        communication. Its layout problem is not solved yet.
        """
        return Split(over, cache(partial(self.problem, over, weights)), weights)

    def _is_promising(self, split: Split) -> bool:
        """Solve ``split`` (a choice of the axes that split storage) if it is not solved yet. Return whether its
        solution may lead to the best plan.
        """
        if split.candidate is None:
            split.candidate = self._fastest(split)
        return split.candidate is not None and _value(split) <= MARGIN * self.limit()

    def _schedule_until_fits(self, split: Split) -> Trial | None:
        """Predict schedules of solutions of ``split``, the fastest first, until one fits in memory or no smaller one is
        left. Return the last trial; None if there is no solution, or its plan cannot be compiled.
        """
        candidate = split.candidate
        if candidate is not None and candidate.bytes > self._room(split.over):
            candidate = self._fastest(split)
        trial = None
        while candidate is not None:
            try:
                plan = self.pinner.pinned(candidate.plan, candidate.borders)
                trial = self._schedule(plan, "found", candidate)
            except ShardcError:
                return None
            if trial is None or trial.fits:
                break
            self.excess[split.over] = trial.memory - candidate.bytes
            smaller = self._fastest(split)
            candidate = smaller if smaller is not None and smaller.bytes < candidate.bytes else None
        return trial

    def _fastest(self, split: Split) -> Candidate | None:
        """Return the fastest solution of ``split`` (a choice of the axes that split storage) that is expected to fit in
        memory; while no tried plan fits, else about the smallest. None if no solution fits and may beat the best plan.

        The first price per byte is the one that sufficed before: for this split, for others, or on another mesh.
        """
        within = PriceSearch(
            lambda price, ceiling: self._best_solution(split.problem(), price, ceiling), split.solutions
        )
        first = self.prices.get(split.over, min(self.prices.values(), default=self.price))
        candidate = within.fastest(self._room(split.over), MARGIN * self.limit(), first)
        if candidate is not None:
            self.prices[split.over] = candidate.byte
        return candidate

    def _room(self, over: tuple[str, ...]) -> float:
        """Return the bytes that a solution with storage split over ``over`` may take if its plan is to fit in memory.
        Plans predicted earlier show by how much peaks exceed the bytes of solutions.
        """
        return self.memory - self.excess.get(over, min(self.excess.values(), default=0.0))

    def _storage_axes(self) -> Iterator[tuple[str, ...]]:
        """Yield sets of axes over which FSDP may split storage, the largest first and the empty set last. Axes that the
        user's entries mention are left out, and all axes if these entries split the batch.
        """
        mentioned = set(self.hand.axes)
        by_hand = any(entry.batch for entry in self.hand.entries)  # an ``fsdp`` entry would split the batch further
        free = [axis for axis in self.mesh.axes if axis not in mentioned and self.mesh.size(axis) > 1 and not by_hand]
        for count in range(len(free), -1, -1):
            yield from combinations(free, count)

    def problem(self, over: tuple[str, ...] | None, weights: Weights) -> PlanProblem:
        """Return the layout problem: the choices that the user's entries leave open for ops, parameters and batch, with
        their costs. ``over`` are the axes that may split storage further (None: any), ``weights`` scale communication.
        """
        start = time.perf_counter()
        like = self.last_problem
        options = replace(self.options, cost=self.hardware)
        planned = self.captured_model.graph(self.mesh, self.hand, options, None) if like is None else like.planned
        storages = self._storages_over_any if over is None else partial(self._storages, over)
        free = StorageChoice(over or (), storages, tuple(self._batches()), COPIES)
        problem = PlanProblem(planned.problem, planned.graph, weights, free, planned=planned, like=like)
        problem.seconds = time.perf_counter() - start
        self.last_problem = problem
        return problem

    def _best_solution(self, problem: PlanProblem, byte: float, ceiling: float) -> Candidate | None:
        """Return the best solution of the layout ``problem`` if a byte of memory costs ``byte`` seconds; None if no
        solution costs less than ``ceiling`` seconds.
        """
        start = time.perf_counter()
        try:
            solution = solve(problem.energy(byte), ceiling=ceiling, gap=self.gap)
        except Infeasible:
            return None
        solved = time.perf_counter()
        problem.apply(solution.labels)
        over = problem.free.over
        plan = self.hand | self.writer.plan(
            problem.stored(solution.labels), over, problem.batch(solution.labels), self.captured_model.source.inputs
        )
        return Candidate(
            plan, borders(problem.planned), over, solution.value, solution.bound, solution.variables, problem.seconds,
            solved - start, problem.bytes(solution.labels), byte,
        )  # fmt: skip

    def _storages(self, over: Sequence[str], name: str, compute: Layout) -> list[Layout]:
        """Return the storage layouts among which the solver may choose for a parameter. Empty if the user's entries
        fix its storage (or offload it), or fix a compute layout other than ``compute``.

        Args:
            over: the axes over which storage may be split further.
            name: the parameter of the captured model.
            compute: its compute layout.
        """
        param = self.param_plans[name]
        if param.storage_cause or param.host or (param.compute_cause and compute != param.compute):
            return []
        return storages(over, name, compute)

    def _storages_over_any(self, name: str, compute: Layout) -> list[Layout]:
        """Return the storage layouts among which the solver may choose for the parameter ``name`` with layout
        ``compute`` if FSDP may split its storage over any axes.
        """
        overs = [over for over in self._storage_axes() if not set(over) & set(compute.bound)]
        return list(dict.fromkeys(layout for over in overs for layout in self._storages(over, name, compute)))

    def _batches(self) -> Iterator[tuple[str, ...]]:
        """Yield each set of axes that may split the batch. Yield nothing if the user's entries split it already."""
        if any(entry.batch for entry in self.hand.entries):
            return
        mentioned = set(self.hand.axes)
        free = [axis for axis in self.mesh.axes if axis not in mentioned]
        for count in range(len(free) + 1):
            yield from combinations(free, count)

    # --- schedules

    def ready_made(self) -> Iterator[tuple[str, Plan]]:
        """Yield (name, plan) of each ready-made plan: ddp, fsdp, fsdp with tp or cp. If the user gave entries, yield
        only ("given", plan of these entries).
        """
        if self.hand:
            yield "given", self.hand
            return
        axes = [axis for axis in self.mesh.axes if self.mesh.size(axis) > 1]
        whole = ddp(axes) if axes else Plan()
        yield "ddp", whole
        yield "fsdp", fsdp(tuple(axes)) if axes else whole
        for axis in axes if (rows := self._attention_rows) else ():
            if rows < TILE * self.mesh.size(axis):
                reason = f"a rank's {rows / self.mesh.size(axis):g} tokens of a sequence are less than a kernel's tile"
                self.left_out[f"cp({axis})"] = f"fsdp and cp over {axis} of {self.mesh}: {reason}, {TILE}"
            else:
                yield "fsdp and cp", fsdp(tuple(axes)) | cp(axis)
        for axis in axes:
            rest = tuple(a for a in axes if a != axis)
            try:
                tensor = Plan.from_hf(self.captured_model.source.model, axis)
            except PlanError:
                break
            yield "fsdp and from_hf", (fsdp(rest) if rest else Plan()) | tensor

    @property
    def _attention_rows(self) -> int:
        """The largest number of query rows (tokens of a sequence) that an attention op of the model reads; 0 without
        attention.

        Ops of packed sequences have heads behind the rows, others before them; rows are taken to be more than heads.
        """
        nodes = self.captured_model.captured.graph.graph.nodes
        calls = [node for node in nodes if node.op == "call_function" and is_attention(node.target)]
        return max((max(ir.value(node.args[0]).shape[-3:-1]) for node in calls), default=0)

    def _schedule(
        self,
        plan: Plan,
        origin: str,
        candidate: Candidate | Trial | None = None,
    ) -> Trial | None:
        """Predict the schedule of a plan, record it and return it as `Trial`; None if the plan cannot be compiled. A
        plan that was predicted before is not predicted again.

        Args:
            plan: the plan.
            origin: "found" for a solution, else the name of the ready-made plan that it is or was derived from.
            candidate: the solution that the plan was written from, or the scheduled plan that it was derived from.
        """
        tried = self.tried.get(str(plan))
        if tried is None:
            captured_model = self.captured_model.of_plan(plan, self.mesh)
            if not captured_model.repeats:
                schedule = self.schedule(plan, captured_model, by_hand=origin != "found")
                tried = None if schedule is None else Trial(plan, self.mesh, schedule, self.memory, origin)
            else:
                tried = self._estimated(plan, origin, captured_model)
            if tried is None:
                return None
        if candidate is not None and not tried.variables:
            tried = replace(
                tried, over=candidate.over, value=candidate.value, bound=candidate.bound,
                variables=candidate.variables, build=candidate.build, solve=candidate.solve,
            )  # fmt: skip
        is_new = str(plan) not in self.tried
        self.tried[str(plan)] = tried
        if is_new and self.report is not None:
            self.report(tried)
        return tried

    def _estimated(self, plan: Plan, origin: str, captured_model: CapturedModel) -> Trial | None:
        """Return a `Trial` of ``plan`` whose cost is estimated from the captured blocks alone; None if the plan cannot
        be compiled.
        """
        try:
            few = captured_model.program(self.mesh, plan, self.options, few=True).schedule(self.hardware)
        except ShardcError:
            return None
        estimate = captured_model.estimate(few)
        estimate = replace(estimate, memory=round(estimate.memory * self.memory_factor))
        return Trial(plan, self.mesh, few, self.memory, origin, estimate=estimate)

    def confirm(self, trial: Trial) -> None:
        """Predict the schedule of ``trial`` from all blocks of the model, and record it. Its cost so far was estimated
        from a few blocks.

        If it needs more memory than estimated, other estimates are scaled by that ratio. If no plan fits any more,
        plans are made to fit again.
        """
        assert trial.estimate is not None
        captured_model = self.captured_model.of_plan(trial.plan, self.mesh)
        schedule = self.schedule(trial.plan, captured_model, by_hand=not trial.from_search)
        if schedule is None:
            del self.tried[str(trial.plan)]
            return
        confirmed = replace(trial, schedule=schedule, estimate=None)
        self.tried[str(trial.plan)] = confirmed
        if self.report is not None:
            self.report(confirmed)
        if confirmed.fits or confirmed.memory <= trial.memory:
            return
        low = confirmed.memory / trial.memory
        self.memory_factor *= low
        for key, other in self.tried.items():
            if other.estimate is not None:
                scaled = replace(other.estimate, memory=round(other.estimate.memory * low))
                self.tried[key] = replace(other, estimate=scaled)
        if self.best() is None:
            self._fit()

    def schedule(self, plan: Plan, captured_model: CapturedModel, by_hand: bool = True) -> Schedule | None:
        """Return the predicted schedule of ``plan``. None if it cannot be compiled, or if repeated blocks get different
        layouts that only a plan written ``by_hand`` may give them.

        Args:
            plan: the plan.
            captured_model: the capture to build its program from.
            by_hand: repeated blocks may get different layouts. In a found plan only the first and the last may differ,
                because its entries are globs.
        """
        try:
            return captured_model.program(self.mesh, plan, self.options).schedule(self.hardware)
        except NotPeriodic:
            more = captured_model.more
            return (
                self.schedule(plan, more, by_hand) if more.repeats or (by_hand and more is not captured_model) else None
            )
        except ShardcError:
            return None


def _value(split: Split) -> float:
    """Return the cost in seconds of the solution of ``split``, without the price of its memory; inf if there is no
    solution.
    """
    return inf if split.candidate is None else split.candidate.at(0.0)


def storages(over: Sequence[str], name: str, compute: Layout) -> list[Layout]:
    """Return the layouts in which parameter ``name`` may be stored if ``fsdp(over)`` may split its storage:
    ``compute``, its compute layout, and that split over ``over``, if this needs no padding.
    """
    if not over:
        return [compute]
    plan = ParamPlan(compute, compute, compute.shape, 3, "", "")
    stored = Fsdp(tuple(over)).store(plan, Placed((name,), compute.shape, 0, compute), None).storage
    return [compute] if stored.shape != compute.shape or stored == compute else [compute, stored]


def exposed(schedule: Schedule, weights: Weights, params: Collection[str]) -> Weights:
    """Return ``weights`` with new weights of parameter gathers and of gradient reductions: the share of their seconds
    that is exposed (not hidden by compute) in ``schedule``.

    Args:
        schedule: the schedule.
        weights: the weights to update: of gathers of parameters, and of reductions of their gradients.
        params: names of the parameters.
    """

    def share(kinds: Sequence[str], before: float) -> float:
        """Return the share of the seconds of parameters' collectives of ``kinds`` that is exposed, at least 0.02;
        ``before`` if the schedule has no such collectives.
        """
        collectives = [c for c in schedule.collectives if c.kind in kinds and set(c.cause.tensors) <= set(params)]
        total = sum(c.seconds for c in collectives)
        return max(0.02, min(1.0, sum(c.exposed for c in collectives) / total)) if total else before

    gather, reduce = share(["all_gather"], weights.gather), share(["reduce_scatter", "all_reduce"], weights.reduce)
    return replace(weights, gather=gather, reduce=reduce)
