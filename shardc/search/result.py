"""`SearchResult`, the result of a search: plan and mesh, their predicted cost, and all plans that were tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from shardc.errors import InputError
from shardc.ir.mesh import Mesh
from shardc.plan.value import Plan
from shardc.report.export import gigabytes, milliseconds, plain, shorten
from shardc.report.predicted_schedule import Schedule
from shardc.search.captured_model import Estimate

HEAD = (
    "mesh", "plan", "step ms", "exposed ms", "GB/rank", "fits", "value ms", "gap", "build s", "solve s",
)  # fmt: skip
WIDTH = 60  # characters of a plan in a table


@dataclass(frozen=True)
class Trial:
    """A plan with its predicted schedule on a mesh. If the plan was written from a solution of the layout problem,
    also the cost and bound of that solution.

    Args:
        plan: the plan.
        mesh: the mesh.
        schedule: its predicted schedule.
        limit: memory of a rank in bytes.
        origin: "found" for a solution, else the name of the ready-made plan that it is or was derived from.
        over: the axes over which storage only is split.
        value: cost of its solution in seconds; 0 if it is not a solution.
        bound: the proven lower bound of that cost.
        variables: number of variables of its layout problem; 0 if it is not a solution.
        build, solve: seconds spent on building and on solving the problem.
        estimate: the cost, if ``schedule`` is that of a few of the model's repeated blocks; None if it is of all.
    """

    plan: Plan
    mesh: Mesh
    schedule: Schedule
    limit: float
    origin: str = "found"
    over: tuple[str, ...] = ()
    value: float = 0.0
    bound: float = 0.0
    variables: int = 0
    build: float = 0.0
    solve: float = 0.0
    estimate: Estimate | None = None

    @property
    def gap(self) -> float:
        """Return (cost - bound) / cost of the solution of the layout problem; 0 if the plan is not a solution."""
        return (self.value - self.bound) / self.value if self.value else 0.0

    @property
    def seconds(self) -> float:
        """Return the predicted seconds of a step. The optimizer's update of parameters that lie on the host is
        included.

        An update on the device takes little time, and is not counted.
        """
        if self.estimate is not None:
            return self.estimate.seconds
        return self.schedule.seconds + self.schedule.host_update_seconds

    @property
    def memory(self) -> int:
        """Return the predicted bytes of a rank at the peak."""
        return self.schedule.peak if self.estimate is None else self.estimate.memory

    @property
    def fits(self) -> bool:
        """Return whether the predicted memory peak is within the limit."""
        return self.memory <= self.limit

    @property
    def order(self) -> tuple[bool, float]:
        """Return the sort key of trials: plans that fit come first, by seconds, then plans that do not, by memory."""
        return not self.fits, self.seconds if self.fits else self.memory

    @property
    def from_search(self) -> bool:
        """Return whether the plan is from a solution; otherwise it is ready-made, or the user's own."""
        return self.origin == "found"

    @property
    def is_solution(self) -> bool:
        """Return whether the plan is a solution of the layout problem. It may also be a ready-made plan."""
        return self.variables > 0

    def __str__(self) -> str:
        step, exposed, memory = self.cells
        return (
            f"{self.mesh}: {step} ms a step{f', {exposed} ms exposed' if exposed else ''}, "
            f"{memory} GB a rank{'' if self.fits else ' (does not fit)'}: {shorten(str(self.plan), WIDTH)}"
        )

    @property
    def cells(self) -> tuple[str, str, str]:
        """Return step time in ms, exposed time in ms and memory in GB as text. Of an `estimate`, the first and the last
        are marked ``~``, the second is empty.
        """
        about, exposed = ("", milliseconds(self.schedule.exposed)) if self.estimate is None else ("~", "")
        return f"{about}{milliseconds(self.seconds)}", exposed, f"{about}{gigabytes(self.memory)}"

    def row(self) -> tuple[str, ...]:
        """Return the cells of the trial's row in a table with head `HEAD`."""
        step, exposed, memory = self.cells
        problem = (
            (milliseconds(self.value), f"{self.gap:.1g}", f"{self.build:.1f}", f"{self.solve:.1f}")
            if self.is_solution
            else ("", "", "", "")
        )
        return (
            str(self.mesh), shorten(str(self.plan), WIDTH), step, exposed, memory, "yes" if self.fits else "no",
            *problem,
        )  # fmt: skip


Report = Callable[[Trial], None]


@dataclass(frozen=True)
class SearchResult:
    """The plan with the least predicted step time that fits in memory.

    Args:
        plan: the plan.
        mesh: its mesh.
        trials: all plans that were scheduled; empty on ranks that received the plan from rank 0.
        hand: the entries that the user gave.
        left_out: what was not predicted, with the bound that shows that it is no faster, as text.
    """

    plan: Plan
    mesh: Mesh
    trials: tuple[Trial, ...] = ()
    hand: Plan = Plan()
    left_out: tuple[str, ...] = ()

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
        """Return the predicted schedule of the plan."""
        return self.best.schedule

    @property
    def memory(self) -> int:
        """Return the predicted bytes of a rank at the peak."""
        return self.best.memory

    @property
    def solution(self) -> Trial:
        """Return the trial of the best plan, if that is a solution of the layout problem. Else return the best trial
        that is one: the fastest of those that fit in memory, if any fit. Without such trials, return `best`.
        """
        solved = [trial for trial in self.trials if trial.is_solution]
        return min(solved, key=lambda t: (t is not self.best, not t.fits, t.seconds), default=self.best)

    @property
    def value(self) -> float:
        """Return the cost of the solution of the layout problem in seconds: communication and compute added up, without
        overlap.
        """
        return self.solution.value

    @property
    def bound(self) -> float:
        """Return the proven lower bound of the cost of every solution of the layout problem, in seconds."""
        return self.solution.bound

    @property
    def gap(self) -> float:
        """Return the gap between `value` and `bound`, relative to the value: the most that a better solution could
        save.
        """
        return self.solution.gap

    @property
    def variables(self) -> int:
        """Return the number of variables of the layout problem."""
        return self.solution.variables

    @property
    def form(self) -> Trial | None:
        """Return the best trial of a ready-made plan or of the user's entries alone: the fastest that fits in memory,
        or else the smallest. None if there is none.
        """
        forms = [trial for trial in self.trials if not trial.from_search]
        return min(forms, key=lambda t: (*t.order, str(t.mesh), str(t.plan)), default=None)

    def brief(self) -> SearchResult:
        """Return a copy with three trials only: `best`, `solution` and `form`. The other trials keep graphs of
        programs alive.
        """
        ids = {id(trial) for trial in (self.best, self.solution, self.form)}
        return replace(self, trials=tuple(trial for trial in self.trials if id(trial) in ids))

    def table(self) -> str:
        """Return a table of all plans that were tried, the fastest first. Plans that do not fit in memory are last."""
        rows = sorted(self.trials, key=lambda t: (not t.fits, t.seconds, str(t.mesh), str(t.plan)))
        return plain([trial.row() for trial in rows], HEAD)

    def __str__(self) -> str:
        head = f"{self.plan}\non {self.mesh}"
        if not self.trials:
            return head
        schedule = self.schedule
        step = f"{milliseconds(schedule.seconds)} ms a step, {milliseconds(schedule.exposed)} exposed"
        return f"{head}: {step}, {gigabytes(self.memory)} GB a rank; gap {self.gap:.1g}"
