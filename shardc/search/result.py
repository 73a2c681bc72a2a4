"""What a search found: the plan and the mesh, what they cost, and everything that was tried."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardc.errors import InputError
from shardc.ir.mesh import Mesh
from shardc.plan.value import Plan
from shardc.report.export import gigabytes, milliseconds, plain, shorten
from shardc.report.predicted_schedule import Schedule
from shardc.search.fastest import Tried

HEAD = (
    "mesh", "plan", "step ms", "exposed ms", "GB/rank", "fits", "value ms", "gap", "build s", "solve s",
)  # fmt: skip
WIDTH = 60  # of a plan in a table


@dataclass(frozen=True)
class Trial:
    """A plan that was scheduled on a mesh.

    Args:
        limit: bytes that a rank has.
    """

    mesh: Mesh
    tried: Tried
    limit: float

    @property
    def plan(self) -> Plan:
        return self.tried.plan

    @property
    def schedule(self) -> Schedule:
        return self.tried.schedule

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.schedule.seconds

    @property
    def memory(self) -> int:
        """Bytes of a rank at the peak."""
        return self.schedule.memory.peak.total

    @property
    def fits(self) -> bool:
        return self.memory <= self.limit

    @property
    def found(self) -> bool:
        """Whether the search made it; else it is a form of the library's, or what was given alone."""
        return self.tried.origin == "found"

    @property
    def is_solution(self) -> bool:
        """Whether it is a solution of the problem, as a form of the library's can be, too."""
        return self.tried.variables > 0

    def __str__(self) -> str:
        said, too_large = self.schedule, "" if self.fits else " (does not fit)"
        return (
            f"{self.mesh}: {milliseconds(said.seconds)} ms a step, {milliseconds(said.exposed)} ms exposed, "
            f"{gigabytes(self.memory)} GB a rank{too_large}: {shorten(str(self.plan), WIDTH)}"
        )

    def row(self) -> tuple[str, ...]:
        """It as a row under `HEAD`."""
        said, tried = self.schedule, self.tried
        problem = (
            (milliseconds(tried.value), f"{tried.gap:.1g}", f"{tried.build:.1f}", f"{tried.solve:.1f}")
            if self.is_solution
            else ("", "", "", "")
        )
        return (
            str(self.mesh), shorten(str(self.plan), WIDTH), milliseconds(said.seconds), milliseconds(said.exposed),
            gigabytes(self.memory), "yes" if self.fits else "no", *problem,
        )  # fmt: skip


@dataclass(frozen=True)
class Found:
    """The fastest plan that fits, by prediction.

    Args:
        trials: all that was scheduled, the best among them; none on ranks that took the plan from the first one.
        hand: what was given of the plan.
    """

    plan: Plan
    mesh: Mesh
    trials: tuple[Trial, ...] = ()
    hand: Plan = Plan()

    @property
    def best(self) -> Trial:
        """The plan as it was scheduled.

        Raises:
            InputError: this rank took the plan from the first one.
        """
        for trial in self.trials:
            if trial.plan == self.plan and trial.mesh == self.mesh:
                return trial
        raise InputError("the plan was found by the mesh's first rank, which alone knows what it costs")

    @property
    def schedule(self) -> Schedule:
        return self.best.schedule

    @property
    def memory(self) -> int:
        """Bytes of a rank at the peak."""
        return self.best.memory

    @property
    def solution(self) -> Trial:
        """The plan, or, where that is no solution of the problem, the fastest that is one."""
        solved = [trial for trial in self.trials if trial.is_solution]
        return min(solved, key=lambda t: (t is not self.best, not t.fits, t.seconds), default=self.best)

    @property
    def value(self) -> float:
        """Seconds that the solution costs, as a sum without overlap."""
        return self.solution.tried.value

    @property
    def bound(self) -> float:
        """No solution of the same problem costs less."""
        return self.solution.tried.bound

    @property
    def gap(self) -> float:
        """How much better a solution can be, as a part of the value."""
        return self.solution.tried.gap

    @property
    def variables(self) -> int:
        """Of the problem."""
        return self.solution.tried.variables

    @property
    def form(self) -> Trial | None:
        """The best of the library's forms, or what was given alone, made to fit: the fastest, else the smallest."""
        forms = [trial for trial in self.trials if not trial.found]
        return min(
            forms, key=lambda t: (not t.fits, t.seconds if t.fits else t.memory, str(t.mesh), str(t.plan)), default=None
        )

    def brief(self) -> Found:
        """It with the best trial, its solution and its form alone: every trial holds the graphs of a program."""
        kept = (self.best, self.solution, self.form)
        return replace(self, trials=tuple(trial for trial in self.trials if any(trial is each for each in kept)))

    def table(self) -> str:
        """Every plan that was tried, the fastest first; those that do not fit at the end."""
        rows = sorted(self.trials, key=lambda t: (not t.fits, t.seconds, str(t.mesh), str(t.plan)))
        return plain([trial.row() for trial in rows], HEAD)

    def __str__(self) -> str:
        head = f"{self.plan}\non {self.mesh}"
        if not self.trials:
            return head
        said = self.schedule
        step = f"{milliseconds(said.seconds)} ms a step, {milliseconds(said.exposed)} exposed"
        return f"{head}: {step}, {gigabytes(self.memory)} GB a rank; gap {self.gap:.1g}"
