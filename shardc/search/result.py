"""The result of a search: plan and mesh, their cost, and all plans that were tried."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardc.errors import InputError
from shardc.ir.mesh import Mesh
from shardc.plan.value import Plan
from shardc.report.export import gigabytes, milliseconds, plain, shorten
from shardc.report.predicted_schedule import Schedule

HEAD = (
    "mesh", "plan", "step ms", "exposed ms", "GB/rank", "fits", "value ms", "gap", "build s", "solve s",
)  # fmt: skip
WIDTH = 60  # characters of a plan in a table


@dataclass(frozen=True)
class ScheduledPlan:
    """A plan with its predicted schedule, and the solution of the layout problem that it was written from.

    Args:
        origin: "found" for a solution, else the name of the ready-made plan that it is or was derived from.
        over: the axes over which storage only is split.
        value, bound: cost of its solution in seconds, and the proven lower bound; 0 if it is not a solution.
        variables: number of variables of its problem; 0 if it is not a solution.
        build, solve: seconds spent on stating and on solving the problem.
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
        """Return the predicted step time."""
        return self.schedule.seconds

    @property
    def memory(self) -> int:
        """Return the bytes of a rank at the peak."""
        return self.schedule.memory.peak.total


@dataclass(frozen=True)
class Trial:
    """A plan that was scheduled on a mesh.

    Args:
        limit: memory of a rank in bytes.
    """

    mesh: Mesh
    tried: ScheduledPlan
    limit: float

    @property
    def plan(self) -> Plan:
        return self.tried.plan

    @property
    def schedule(self) -> Schedule:
        return self.tried.schedule

    @property
    def seconds(self) -> float:
        """Return the predicted step time."""
        return self.schedule.seconds

    @property
    def memory(self) -> int:
        """Return the bytes of a rank at the peak."""
        return self.schedule.memory.peak.total

    @property
    def fits(self) -> bool:
        return self.memory <= self.limit

    @property
    def found(self) -> bool:
        """Return whether the search made this plan; otherwise it is ready-made, or the user's own."""
        return self.tried.origin == "found"

    @property
    def is_solution(self) -> bool:
        """Return whether it is a solution of the layout problem; a ready-made plan can be one, too."""
        return self.tried.variables > 0

    def __str__(self) -> str:
        schedule, too_large = self.schedule, "" if self.fits else " (does not fit)"
        return (
            f"{self.mesh}: {milliseconds(schedule.seconds)} ms a step, {milliseconds(schedule.exposed)} ms exposed, "
            f"{gigabytes(self.memory)} GB a rank{too_large}: {shorten(str(self.plan), WIDTH)}"
        )

    def row(self) -> tuple[str, ...]:
        """Return a row of the table with head `HEAD`."""
        schedule, tried = self.schedule, self.tried
        problem = (
            (milliseconds(tried.value), f"{tried.gap:.1g}", f"{tried.build:.1f}", f"{tried.solve:.1f}")
            if self.is_solution
            else ("", "", "", "")
        )
        return (
            str(self.mesh), shorten(str(self.plan), WIDTH), milliseconds(schedule.seconds),
            milliseconds(schedule.exposed), gigabytes(self.memory), "yes" if self.fits else "no", *problem,
        )  # fmt: skip


@dataclass(frozen=True)
class Found:
    """The plan with the least predicted step time that fits in memory.

    Args:
        trials: all plans that were scheduled; empty on ranks that received the plan from rank 0.
        hand: the entries that the user gave.
    """

    plan: Plan
    mesh: Mesh
    trials: tuple[Trial, ...] = ()
    hand: Plan = Plan()

    @property
    def best(self) -> Trial:
        """Return the `Trial` of the plan: its predicted cost and schedule.

        Raises:
            InputError: this rank received the plan from rank 0, without its cost.
        """
        for trial in self.trials:
            if trial.plan == self.plan and trial.mesh == self.mesh:
                return trial
        raise InputError("the plan was found by the mesh's first rank, which alone has its cost")

    @property
    def schedule(self) -> Schedule:
        return self.best.schedule

    @property
    def memory(self) -> int:
        """Return the bytes of a rank at the peak."""
        return self.best.memory

    @property
    def solution(self) -> Trial:
        """Return the trial of the plan or, if it is not a solution of the problem, the fastest trial that is one."""
        solved = [trial for trial in self.trials if trial.is_solution]
        return min(solved, key=lambda t: (t is not self.best, not t.fits, t.seconds), default=self.best)

    @property
    def value(self) -> float:
        """Return the cost of the solution in seconds: a sum without overlap."""
        return self.solution.tried.value

    @property
    def bound(self) -> float:
        """Return the proven lower bound of the cost of every solution of the problem."""
        return self.solution.tried.bound

    @property
    def gap(self) -> float:
        """Return how much cheaper a solution could be, as a share of the value."""
        return self.solution.tried.gap

    @property
    def variables(self) -> int:
        """Return the number of variables of the problem."""
        return self.solution.tried.variables

    @property
    def form(self) -> Trial | None:
        """Return the best ready-made plan (or the user's own), made to fit: the fastest, or else the smallest."""
        forms = [trial for trial in self.trials if not trial.found]
        return min(
            forms, key=lambda t: (not t.fits, t.seconds if t.fits else t.memory, str(t.mesh), str(t.plan)), default=None
        )

    def brief(self) -> Found:
        """Return a copy with the best trial, the solution and the form only: a trial holds the graphs of a program."""
        ids = {id(trial) for trial in (self.best, self.solution, self.form)}
        return replace(self, trials=tuple(trial for trial in self.trials if id(trial) in ids))

    def table(self) -> str:
        """Return a table of all plans that were tried, the fastest first; those that do not fit are last."""
        rows = sorted(self.trials, key=lambda t: (not t.fits, t.seconds, str(t.mesh), str(t.plan)))
        return plain([trial.row() for trial in rows], HEAD)

    def __str__(self) -> str:
        head = f"{self.plan}\non {self.mesh}"
        if not self.trials:
            return head
        schedule = self.schedule
        step = f"{milliseconds(schedule.seconds)} ms a step, {milliseconds(schedule.exposed)} exposed"
        return f"{head}: {step}, {gigabytes(self.memory)} GB a rank; gap {self.gap:.1g}"
