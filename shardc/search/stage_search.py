"""`StageSearch`: the search for a plan with pipeline stages on one mesh.

A layout is predicted once for each size of microbatches, on the mesh of one stage and a few of the blocks. The cut and
the schedule are chosen by playing lists with these numbers, and the fastest plan of all is then predicted as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf

from shardc.capture import numbered_containers
from shardc.cost.hardware import price, route
from shardc.errors import PlanError, ShardcError
from shardc.ir.module_paths import is_in
from shardc.ir.schedules import Schedule, schedule
from shardc.plan.constructors import microbatches, pp, recompute
from shardc.plan.entries import Pp
from shardc.plan.value import Plan
from shardc.search.captured_model import Estimate
from shardc.search.memory_fit import kept_whole
from shardc.search.plan_search import Search
from shardc.search.result import Trial
from shardc.search.stage_cost import Part, Player, parts_of

AXIS = "pp"
SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zbv", 2))  # name, stages of a rank
ROUNDS = 8  # most microbatches for each stage of the pipeline
SIZES = 2  # numbers of microbatches that are tried for a layout
lists = cache(schedule)  # the lists of actions of a schedule, of which the same are tried for several layouts


@dataclass
class StageSearch(Search):
    """A search over plans with pipeline stages, for a captured model on one mesh. It has the arguments of `Search`, and
    the axis of the stages.

    Args:
        axis: the axis of the stages.
    """

    axis: str = AXIS

    def __post_init__(self) -> None:
        entry: Pp | None = self.hand.setting("pp")
        self.entry = entry
        self.ranks = self.mesh.size(self.axis)
        self.rest = Plan.of(x for x in self.hand.entries if x is not entry)
        self.inner = Search(
            self.captured_model, self.mesh.of_stage(self.axis), self.rest, self.hardware, self.memory, self.options
        )

    def forms(self) -> None:
        """Does nothing. `Search.forms` predicts the ready-made plans (ddp, fsdp); here `run` tries them as layouts of
        a stage.
        """

    def least(self) -> float:
        """Return a lower bound of the seconds of a step on this mesh: all matrix products divided by the ranks, and the
        shortest bubble.
        """
        bounds = [self._lower_bound(order) for count in self._counts(1) for order in self._orders(count)]
        return min(bounds, default=inf)

    def run(self) -> None:
        """Predict steps with each layout of a stage, in the schedules and numbers of microbatches that may be faster
        than the best plan so far. The lists of actions of a schedule are simulated with the costs of the layout.
        """
        for layout in self._layouts():
            for count in self._counts(self._batch_parts(layout))[:SIZES]:
                orders = [order for order in self._orders(count) if self._may_win(order)]
                if orders:
                    self._play(layout, count, orders)

    def _play(self, layout: Plan, count: int, orders: list[Schedule]) -> None:
        """Simulate the schedules ``orders`` of ``count`` microbatches, with stages that have the plan ``layout``. Of
        all ``orders``, record only the best trial, with its cut into stages. Record nothing if the layout cannot be
        compiled or the program has no loss.
        """
        plan = layout | microbatches(count)
        try:
            program = self.captured_model.program(self.inner.mesh, plan, self.options, few=True)
            if not program.trains or program.loss is None:
                return
            parts = parts_of(self.captured_model, program, self.hardware)
            few = program.first_and_last(self.hardware)[0]
        except ShardcError:
            return
        best: Trial | None = None
        for order in orders:
            played = Player(order, parts, self._message, self.memory / self.memory_factor).fastest()
            if played is None:
                continue
            cut = [_cut_name(parts, at) for at in played.starts[1:]]
            per_rank = order.stages // order.ranks
            by_default = 1 if order.name in ("1f1b", "gpipe") else 2
            entry = pp(
                self.axis, order.name, microbatches=count, cut=cut,
                stages_per_rank=None if per_rank == by_default else per_rank,
            )  # fmt: skip
            estimate = Estimate(played.seconds, round(played.memory * self.memory_factor))
            trial = Trial(layout | entry, self.mesh, few, self.memory, estimate=estimate)
            if best is None or trial.order < best.order:
                best = trial
        if best is not None:
            self.tried[str(best.plan)] = best
            if self.report is not None:
                self.report(best)

    # --- what is tried

    def _layouts(self) -> Iterator[Plan]:
        """Yield the plans to try as layouts of a stage: first the ready-made plans. If none of these fits in memory,
        then the same plans with all blocks recomputed.
        """
        forms = [form for _, plan in self.inner.ready_made() for form in (kept_whole(plan, self.rest), plan)]
        unique = list({str(plan): plan for plan in forms}.values())
        yield from unique
        if self.limit() == inf:
            for plan in unique:
                yield plan | recompute(
                    [f"{path}.*" for path, _ in numbered_containers(self.captured_model.source.model)]
                )

    def _counts(self, ways: int) -> list[int]:
        """Return the numbers of microbatches to try, the largest first. ``ways`` is the number of parts into which
        ranks already split the batch.
        """
        if self.entry is not None and (requested := self.hand.setting("microbatches")) > 1:
            return [requested]
        rows = min((shape[0] for _, shape in self.captured_model.source.inputs if shape), default=0)
        most = min(rows // ways, ROUNDS * self.ranks)
        return [n for n in (2**k for k in range(most.bit_length(), 0, -1)) if n <= most and rows % n == 0]

    def _orders(self, count: int) -> list[Schedule]:
        """Return the pipeline schedules to try with ``count`` microbatches."""
        named = SCHEDULES if self.entry is None else ((self.entry.schedule, self.entry.stages_per_rank),)
        out = []
        for name, per_rank in named:
            try:
                out.append(lists(name, self.ranks, count, per_rank))
            except PlanError:
                continue  # the schedule does not have these numbers
        return out

    def _batch_parts(self, layout: Plan) -> int:
        """Return the number of parts into which the plan of a stage splits the batch over ranks."""
        ways = 1
        for axis in {axis for entry in layout.entries for axis in entry.batch}:
            ways *= self.inner.mesh.size(axis)
        return ways

    # --- bounds

    def _may_win(self, order: Schedule) -> bool:
        """Return whether the pipeline schedule ``order`` may be faster than the fastest plan so far. If not, the reason
        is added to `left_out`.
        """
        bound = self._lower_bound(order)
        if bound < self.limit():
            return True
        name = f"{order.name}, {order.stages} stages, {order.microbatches} microbatches"
        self.left_out[name] = f"on {self.mesh}, {name}: no layout takes less than {bound * 1e3:.4g} ms"
        return False

    def _lower_bound(self, order: Schedule) -> float:
        """Return a lower bound of the seconds of a step in the pipeline schedule ``order``: all matrix products at the
        peak rate, divided by the ranks, plus the bubble.

        In 1F1B a stage waits for the first microbatch in front of it, and for the last behind it. With the sum c of a
        microbatch in all p stages and m microbatches, no cut is faster than c / (1 - (1 - 1/m)^p). Other schedules
        fill these times. They take at least as long as the forward of one microbatch through all stages.
        """
        count, floor = order.microbatches, self.captured_model.floor
        ideal = floor(self.hardware) / self.mesh.ranks
        if order.name not in ("1f1b", "gpipe"):
            return max(ideal, floor(self.hardware, "forward") / self.mesh.ranks * self.ranks / count)
        return ideal * order.stages / count / (1 - (1 - 1 / count) ** order.stages)

    @property
    def _message(self) -> tuple[float, float]:
        """Return (seconds before the first byte, seconds for each byte) of a message between stages."""
        where = route(self.mesh, (self.axis,), self.hardware.node)
        small, large = (price(self.hardware, "permute_ranks", where, size).seconds for size in (0, 1 << 30))
        return small + self.hardware.start_seconds(1), (large - small) / (1 << 30)


def _cut_name(parts: Sequence[Part], at: int) -> str:
    """Return the module by which a plan names a cut in front of part ``at``: the part itself, or its parent (such as
    its block) if the part before is not in that parent.
    """
    name, before = parts[at].name, parts[at - 1].name
    block = name.rpartition(".")[0]
    return name if not block or is_in(before, block) else block
