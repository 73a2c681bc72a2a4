"""Meshes: the shapes in which a number of ranks can lie, and the search over all of them from one capture."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf, prod

from shardc.cost.hardware import Hardware
from shardc.errors import PlanError, ShardcError
from shardc.ir.mesh import Mesh
from shardc.passes.options import Options
from shardc.plan.value import Plan
from shardc.search.fastest import MARGIN, Candidate, Search, Tried
from shardc.search.opened import Opened
from shardc.search.result import Found, Trial

NAMES = ("rep", "dp", "tp")  # of axes, from across the nodes to within them
Report = Callable[[Trial], None]


def meshes_of(ranks: int, node: int, axes: int = 2, said: Collection[str] = ()) -> list[Mesh]:
    """The meshes of ``ranks`` that are worth a look: all axes but the first are powers of two within a node.

    Args:
        node: ranks of a node.
        axes: at most so many; with three, the inner two fill a node.
        said: the axes of a plan, which every mesh has.

    >>> meshes_of(16, 8)
    [Mesh(dp=16), Mesh(dp=8, tp=2), Mesh(dp=4, tp=4), Mesh(dp=2, tp=8)]
    >>> meshes_of(16, 8, 3)[4:]
    [Mesh(rep=2, dp=4, tp=2), Mesh(rep=2, dp=2, tp=4)]
    """
    found = []
    for count in range(max(len(said), 1), max(axes, len(said)) + 1):
        names = _names(count, said)
        for inner in _inner(count - 1, min(node, ranks // 2) if count > 1 else 1):
            full = count < 3 or prod(inner) * 2 > min(node, ranks // 2)
            if full and ranks % prod(inner) == 0:
                found.append(Mesh(zip(names, (ranks // prod(inner), *inner), strict=True)))
    return found


def _names(count: int, said: Collection[str]) -> tuple[str, ...]:
    """Names for so many axes: those of the plan, then the usual ones, in the usual order."""
    usual = {1: ("dp",), 2: ("dp", "tp")}.get(count, NAMES)
    names = [*said, *(name for name in (*usual, *NAMES) if name not in said)]
    last = {"rep": -2, "dp": -1, "tp": 1}
    return tuple(sorted(dict.fromkeys(names[:count]), key=lambda name: last.get(name, 0)))


def _inner(count: int, room: int) -> Iterator[tuple[int, ...]]:
    """Powers of two, so many, whose product is within ``room``; the innermost smallest first."""
    if not count:
        yield ()
        return
    for power in range(1, max(room, 1).bit_length()):
        for before in _inner(count - 1, room // 2**power):
            yield (*before, 2**power)


@dataclass
class Bounded(Search):
    """A search that tells of each plan that it schedules, and schedules what a hand's plan says alone, too.

    Args:
        most: seconds of the best schedule so far. If no solution costs less, none is scheduled.
    """

    most: float = inf
    report: Report | None = None

    def _forms(self) -> Iterator[tuple[str, Plan]]:
        yield from [("given", self.hand)] if self.hand else super()._forms()

    def limit(self) -> float:
        return min(self.most, super().limit())

    def _schedule(
        self, plan: Plan, origin: str, candidate: Candidate | Tried | None = None, opened: Opened | None = None
    ) -> Tried | None:
        before = len(self.tried)
        made = super()._schedule(plan, origin, candidate, opened)
        if self.report is not None and len(self.tried) > before:
            self.report(self.trials()[-1])
        return made

    def trials(self) -> list[Trial]:
        return [Trial(self.mesh, tried, self.memory) for tried in self.tried.values()]


@dataclass(frozen=True)
class Ranged:
    """Searches several meshes.

    Args:
        hand: what is given of the plan.
        memory: bytes that a rank has.
        report: called with each plan that was scheduled.
    """

    opened: Opened
    hand: Plan
    hardware: Hardware
    memory: float
    options: Options
    report: Report | None = None

    def run(self, meshes: Sequence[Mesh]) -> Found:
        """The best of ``meshes``. Those on which a step can be fastest are searched first.

        Raises:
            PlanError: nothing fits on any; it says what the plan that needs least takes.
            ShardcError: of the first mesh, where the plan by hand fits none.
        """
        searches: dict[Mesh, Bounded] = {}
        least: dict[Mesh, float] = {}
        errors: list[ShardcError] = []
        for mesh in meshes:
            with self._noted(errors):
                search = Bounded(
                    self.opened, mesh, self.hand, self.hardware, self.memory, self.options, report=self.report
                )
                search.forms()
                searches[mesh] = search
        for mesh, search in searches.items():
            with self._noted(errors):
                least[mesh] = search.least() if len(searches) > 1 else 0.0
        for mesh in sorted(least, key=least.__getitem__):
            search = searches[mesh]
            search.most = min(each.limit() for each in searches.values())
            if least[mesh] > MARGIN * search.most:
                break
            with self._noted(errors):
                search.run()
        trials = [trial for search in searches.values() for trial in search.trials()]
        if (best := self.best(trials)) is not None:
            return Found(best.plan, best.mesh, tuple(trials), self.hand)
        if not trials:
            raise self._nothing(errors, meshes)
        raise self._too_large(trials, meshes)

    @staticmethod
    @contextmanager
    def _noted(errors: list[ShardcError]) -> Iterator[None]:
        """An error of one mesh is none of the others'."""
        try:
            yield
        except ShardcError as error:
            errors.append(error)

    @staticmethod
    def best(trials: Sequence[Trial]) -> Trial | None:
        fitting = [trial for trial in trials if trial.fits]
        return min(fitting, key=_order, default=None)

    def _nothing(self, errors: Sequence[ShardcError], meshes: Sequence[Mesh]) -> ShardcError:
        """What to say where nothing was scheduled."""
        mine = [error for error in errors if "no plan on" not in error.what]
        if mine:
            return mine[0]
        return PlanError(
            f"there is no plan on {_listed(meshes)} in which all that was given holds",
            plan_entry=str(self.hand) if self.hand else None,
            fix="leave out one of its entries",
        )

    def _too_large(self, trials: Sequence[Trial], meshes: Sequence[Mesh]) -> PlanError:
        least = min(trials, key=lambda t: t.memory)
        return PlanError(
            f"no plan on {_listed(meshes)} fits in {self.memory / 1e9:g} GB a rank: the smallest that was found takes "
            f"{least.memory / 1e9:.3g} GB: {least.plan}{'' if len(meshes) == 1 else f' on {least.mesh}'}",
            fix="use more ranks, or a smaller batch",
        )


def _order(trial: Trial) -> tuple[object, ...]:
    """The fastest first; of those that are equal, the one on a mesh of fewer axes."""
    return round(trial.seconds, 9), len(trial.mesh.axes), str(trial.mesh), str(trial.plan)


def _listed(meshes: Sequence[Mesh]) -> str:
    return str(meshes[0]) if len(meshes) == 1 else f"{len(meshes)} meshes of {meshes[0].ranks} ranks"
