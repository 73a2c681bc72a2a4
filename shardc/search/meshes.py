"""`SearchOverMeshes`: searches plans on all meshes of a number of ranks, from one capture."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf, prod

from shardc.cost.hardware import Hardware
from shardc.errors import PlanError, ShardcError
from shardc.ir.mesh import Mesh
from shardc.passes.options import Options
from shardc.plan.value import Plan
from shardc.search.captured_model import CapturedModel
from shardc.search.memory_fit import LEAST
from shardc.search.plan_search import MARGIN, Search
from shardc.search.result import Report, SearchResult, Trial
from shardc.search.stage_search import AXIS, StageSearch

NAMES = ("rep", "dp", "tp")  # axis names, from across nodes to within a node
UNCOLLECTED = 20_000_000  # new objects, some 3 GB, at which garbage is collected between two meshes
GAP = 1e-2  # of solutions on one of several meshes: these differ by more, and proofs take longer than answers


def meshes_of(ranks: int, node: int, axes: int = 2, required: Collection[str] = ()) -> list[Mesh]:
    """Return the meshes of ``ranks`` ranks to search. All axes but the first lie within a node, and their sizes are
    powers of two.

    Args:
        ranks: number of ranks.
        node: number of ranks in a node.
        axes: largest number of axes; with three, the inner two fill a node.
        required: the axes that the user's plan mentions; every mesh has them.

    >>> meshes_of(16, 8)
    [Mesh(dp=16), Mesh(dp=8, tp=2), Mesh(dp=4, tp=4), Mesh(dp=2, tp=8)]
    >>> meshes_of(16, 8, 3)[4:]
    [Mesh(rep=2, dp=4, tp=2), Mesh(rep=2, dp=2, tp=4)]
    """
    meshes = []
    for count in range(max(len(required), 1), max(axes, len(required)) + 1):
        names = _names(count, required)
        for inner in _inner(count - 1, min(node, ranks // 2) if count > 1 else 1):
            full = count < 3 or prod(inner) * 2 > min(node, ranks // 2)
            if full and ranks % prod(inner) == 0:
                meshes.append(Mesh(zip(names, (ranks // prod(inner), *inner), strict=True)))
    return meshes


def with_stages(
    ranks: int, node: int, blocks: int, axes: int = 2, required: Collection[str] = (), axis: str = AXIS
) -> Iterator[Mesh]:
    """Yield meshes of ``ranks`` ranks whose first axis has pipeline stages. The number of stages is a power of two.

    Args:
        ranks, node, axes, required: as for `meshes_of`, which has the meshes of one stage.
        blocks: number of blocks of the model, which is the most stages.
        axis: name of the axis of the stages; if it is in ``required``, the plan uses it for something else, and nothing
            is yielded.
    """
    if axis in required:
        return
    stages = 2
    while stages <= min(blocks, ranks) and ranks % stages == 0:
        for mesh in meshes_of(ranks // stages, node, axes, required):
            yield Mesh(((axis, stages), *mesh.shape))
        stages *= 2


def _names(count: int, required: Collection[str]) -> tuple[str, ...]:
    """Return the names of ``count`` mesh axes: first those of ``required``, then usual names such as "dp", sorted as
    they are placed on nodes.
    """
    usual = {1: ("dp",), 2: ("dp", "tp")}.get(count, NAMES)
    names = [*required, *(name for name in (*usual, *NAMES) if name not in required)]
    last = {"rep": -2, "dp": -1, "tp": 1}
    return tuple(sorted(dict.fromkeys(names[:count]), key=lambda name: last.get(name, 0)))


def _inner(count: int, room: int) -> Iterator[tuple[int, ...]]:
    """Yield tuples of ``count`` powers of two, each 2 or more, whose product is at most ``room``. The last item varies
    slowest.
    """
    if not count:
        yield ()
        return
    for power in range(1, max(room, 1).bit_length()):
        for before in _inner(count - 1, room // 2**power):
            yield (*before, 2**power)


@dataclass(frozen=True)
class SearchOverMeshes:
    """A search for the fastest plan over several meshes, from one capture of the model.

    Args:
        captured_model: the captured model.
        hand: the entries that the user gave.
        hardware: the hardware of the prediction.
        memory: memory of a rank in bytes.
        options: the options to compile with.
        report: called with each plan that is scheduled.
    """

    captured_model: CapturedModel
    hand: Plan
    hardware: Hardware
    memory: float
    options: Options
    report: Report | None = None

    def run(self, meshes: Mapping[Mesh, str]) -> SearchResult:
        """Return the best plan on any of ``meshes``; the most promising meshes are searched first.

        Args:
            meshes: mesh -> its axis of pipeline stages; "" for none.

        Raises:
            PlanError: nothing fits on any mesh; the text has the memory of the smallest plan.
            ShardcError: the error of the first mesh, if the user's entries are valid on none.
        """
        errors: list[ShardcError] = []
        searches = self._started(meshes, errors)
        left_out = self._search_each(searches, meshes, errors)
        while (best := self.best(_trials(searches))) is not None and best.estimate is not None:
            searches[best.mesh].confirm(best)
        if best is not None:
            left_out += [text for search in searches.values() for text in search.left_out.values()]
            return SearchResult(best.plan, best.mesh, tuple(_trials(searches)), self.hand, tuple(left_out))
        if trials := _trials(searches):
            raise self._too_large(trials, list(meshes))
        if errors:
            raise errors[0]
        raise PlanError(
            f"there is no plan on {_listed(list(meshes))} with all given entries",
            plan_entry=str(self.hand) if self.hand else None,
            fix="leave out one of its entries",
        )

    def _started(self, meshes: Mapping[Mesh, str], errors: list[ShardcError]) -> dict[Mesh, Search]:
        """Return mesh -> its search, which has predicted the ready-made plans. A mesh on which that fails is left out,
        and its error appended to ``errors``. ``meshes`` is as for `run`.
        """
        searches: dict[Mesh, Search] = {}
        for mesh, axis in meshes.items():
            with self._noted(errors):
                kind = partial(StageSearch, axis=axis) if axis else Search
                search = kind(
                    self.captured_model, mesh, self.hand, self.hardware, self.memory, self.options, self.report
                )
                search.best_elsewhere = _fastest(searches)
                search.forms()
                searches[mesh] = search
        return searches

    def _search_each(
        self, searches: Mapping[Mesh, Search], meshes: Mapping[Mesh, str], errors: list[ShardcError]
    ) -> list[str]:
        """Run each of ``searches``, those on meshes without pipeline stages first, then by their lower bounds. Return,
        as text, which meshes were left out, because no plan there is faster than the best. Errors are appended to
        ``errors``.
        """
        least: dict[Mesh, float] = {}
        for mesh, search in searches.items():
            search.best_elsewhere = _fastest(searches)
            with self._noted(errors):
                least[mesh] = search.least() if len(searches) > 1 else 0.0
        left_out = []
        for mesh in sorted(least, key=lambda mesh: (bool(meshes[mesh]), least[mesh])):
            search = searches[mesh]
            search.best_elsewhere = _fastest(searches)
            search.gap = GAP if len(searches) > 1 else 0.0
            search.price = min((price for other in searches.values() for price in other.prices.values()), default=LEAST)
            if least[mesh] > MARGIN * search.best_elsewhere:
                left_out.append(f"on {mesh}: no plan takes less than {MARGIN * search.best_elsewhere * 1e3:.4g} ms")
                continue
            with self._noted(errors):
                search.run()
            search.last_problem = None
            if gc.get_count()[0] > UNCOLLECTED:
                gc.collect()
        return left_out

    @staticmethod
    @contextmanager
    def _noted(errors: list[ShardcError]) -> Iterator[None]:
        """Context manager around the search on one mesh. A ShardcError in it is appended to ``errors``, so that the
        search goes on with other meshes.
        """
        try:
            yield
        except ShardcError as error:
            errors.append(error)

    @staticmethod
    def best(trials: Sequence[Trial]) -> Trial | None:
        """Return the fastest trial that fits; None if none fits."""
        fitting = [trial for trial in trials if trial.fits]
        return min(fitting, key=_order, default=None)

    def _too_large(self, trials: Sequence[Trial], meshes: Sequence[Mesh]) -> PlanError:
        """Return the PlanError for a search in which no plan fits in memory. It names the smallest plan of
        ``trials``.
        """
        least = min(trials, key=lambda t: t.memory)
        return PlanError(
            f"no plan on {_listed(meshes)} fits in {self.memory / 1e9:g} GB a rank: the smallest that was found takes "
            f"{least.memory / 1e9:.3g} GB: {least.plan}{'' if len(meshes) == 1 else f' on {least.mesh}'}",
            fix="use more ranks, or a smaller batch",
        )


def _fastest(searches: Mapping[Mesh, Search]) -> float:
    """Return the seconds of the fastest plan that fits, on any mesh so far; inf if there is none."""
    return min((search.limit() for search in searches.values()), default=inf)


def _trials(searches: Mapping[Mesh, Search]) -> list[Trial]:
    """Return the plans that were tried on all meshes."""
    return [trial for search in searches.values() for trial in search.tried.values()]


def _order(trial: Trial) -> tuple[object, ...]:
    """Return the sort key of a trial: its seconds, then the number of axes of its mesh, then mesh and plan as text."""
    return round(trial.seconds, 9), len(trial.mesh.axes), str(trial.mesh), str(trial.plan)


def _listed(meshes: Sequence[Mesh]) -> str:
    """Return ``meshes`` as text for an error: the only mesh (``dp=4``), or their number and ranks (``3 meshes of 8
    ranks``).
    """
    return str(meshes[0]) if len(meshes) == 1 else f"{len(meshes)} meshes of {meshes[0].ranks} ranks"
