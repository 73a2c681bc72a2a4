"""Memory limits in a search: the price of a byte in the layout problem, and measures that make a plan fit.

`PriceSearch` finds the fastest solution of a layout problem within a limit. The solver minimizes time + price * bytes
(a Lagrange multiplier); the higher the price, the smaller and the slower its solution. The search is for the lowest
price at which the solution fits.

`Fit` reduces the memory of a plan until it fits, at the fewest seconds per byte: it gathers parameters again in
backward, recomputes activations or moves them to the host, and offloads parameters.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import ceil, inf, isinf, sqrt
from typing import TypeGuard

from torch import nn

from shardc.capture import numbered_containers
from shardc.plan.constructors import offload, recompute, save
from shardc.plan.entries import Entry, Fsdp, Save
from shardc.plan.match import matching
from shardc.plan.value import Plan
from shardc.search.plan_writer import Candidate
from shardc.search.result import Trial

LEAST = 1e-15  # seconds per byte if memory is no constraint: of equally fast solutions the smaller one is preferred
PRICES = (LEAST, 3e-13, 3e-12, 3e-11, 3e-10)  # tried in order until a solution is small enough
CLOSE = 4.0  # no price is tried between two prices that differ by less than this factor
ABOVE = 1e-9  # relative margin of a ceiling above a known solution, so that this one is returned if it is the best


@dataclass(frozen=True)
class PriceSearch:
    """A search over the solutions of one layout problem, by the price of a byte of memory.

    Args:
        solve: maps (price, ceiling) to the best solution at the price; None if none costs less than the ceiling.
        solutions: price -> the best solution at that price, filled by the search.
    """

    solve: Callable[[float, float], Candidate | None]
    solutions: dict[float, Candidate] = field(default_factory=dict)

    def fastest(self, room: float, limit: float, first: float = LEAST) -> Candidate | None:
        """Return the fastest solution of at most ``room`` bytes; if none is found, about the smallest solution. None if
        that one takes more than ``limit`` seconds, or a price that is tried proves that no solution is within both
        limits.

        Its price is at most `CLOSE` times one that is too low (above the first two of `PRICES`).

        Args:
            room: limit of bytes.
            limit: limit of seconds.
            first: the first price to try, in seconds per byte. If its solution is small enough, no lower price is
                tried.
        """
        low, high = LEAST, inf  # a price that is too low, and one that is high enough; inf while none is known
        last: Candidate | None = None  # the solution at the previous price, later the best that is small enough
        higher = iter(price for price in PRICES if price > first)
        price: float | None = first
        while price is not None:
            point = self._at(price, room, limit, last)
            if point is None:
                return None
            if point.bytes <= room:
                last, high = point, price
            else:
                low, last = price, point if isinf(high) else last
            if isinf(high):
                price = next(higher, None)
            else:
                price = sqrt(low * high) if low > LEAST and high > CLOSE * low else None
        return last if last is not None and last.at(0.0) <= limit else None

    def _at(self, price: float, room: float, limit: float, last: Candidate | None) -> Candidate | None:
        """Return the best solution at ``price`` (seconds per byte). None if there is none, or its cost at that price
        proves that no solution takes at most ``room`` bytes and at most ``limit`` seconds.

        Args:
            room, limit: as for `fastest`.
            last: the solution at another price, whose cost bounds the best one's.
        """
        worth = limit + price * room  # cost of a solution at both limits
        if price not in self.solutions:
            ceiling = worth if last is None else min(worth, (1 + ABOVE) * last.at(price))
            point = self.solve(price, ceiling)
            if point is None:
                return None
            self.solutions[price] = point
        point = self.solutions[price]
        return point if point.at(price) <= worth else None


TRIES = 4  # attempts to find the smallest number of units to which a measure must be applied
WORTH = 1e-3  # share of a step that another attempt must be able to save


@dataclass(frozen=True)
class Measure:
    """A change of a plan that frees memory, applied to all units of a kind (parameters, blocks) or to the first few.

    Args:
        shares: share of each unit in the bytes that all units free.
        apply: maps (plan, number of units) to the plan with the measure applied to these units.
    """

    shares: Sequence[float]
    apply: Callable[[Plan, int], Plan]

    def whole(self, plan: Plan) -> Plan:
        """Return ``plan`` with this change applied to all units (parameters, blocks)."""
        return self.apply(plan, len(self.shares))


Blocks = list[tuple[str, int]]  # (prefix of the blocks' names, number of blocks) of each run
Predict = Callable[[Plan], Trial | None]  # maps a plan to its predicted cost; None if it cannot be compiled


@dataclass(frozen=True)
class Fit:
    """Makes plans of one model fit in memory.

    Args:
        model: the model.
        globs: globs of the parameters in the model's order; those of repeated blocks share one.
        hand: the entries that the user gave; they are not changed.
        memory: memory of a rank in bytes.
        host: whether offloading to the host frees that memory.
        schedule: predicts the cost of a plan, and records it as tried.
        limit: returns the seconds of the fastest plan so far that fits; slower plans are not pursued.
    """

    model: nn.Module
    globs: Sequence[str]
    hand: Plan
    memory: float
    host: bool
    schedule: Predict
    limit: Callable[[], float]

    def run(self, plan: Plan) -> None:
        """Predict variants of ``plan`` that need less memory, until one fits, one is slower than the best plan so far,
        or all are tried. Each variant is recorded as a tried plan.

        First parameters stay unsharded for backward, then measures are added, the cheapest per byte first.
        """
        plan = kept_whole(plan, self.hand)
        now = self.schedule(plan)
        if now is None or now.memory <= self.memory or now.seconds >= self.limit():
            return
        regather = self._regather(plan)
        if regather is not None and self._try_measure(plan, now, regather) is None:
            return
        priced = self._by_price(plan, now, [*([regather] if regather else ()), *self._further_measures()])
        for measure in priced:  # each measure alone
            self._try_measure(plan, now, measure)
        for measure in priced:  # all measures in turn, until the plan fits
            step = self._try_measure(plan, now, measure)
            if step is None or step[1].seconds >= self.limit():
                return
            plan, now = step

    def _by_price(self, plan: Plan, now: Trial, measures: Sequence[Measure]) -> list[Measure]:
        """Return those of ``measures`` that free memory, sorted by the seconds that they cost per byte freed. ``now``
        is the cost of ``plan`` without them.
        """
        priced = []
        for at, measure in enumerate(measures):
            then = self.schedule(measure.whole(plan))
            if then is not None and then.memory < now.memory:
                priced.append(((then.seconds - now.seconds) / (now.memory - then.memory), at, measure))
        return [measure for *_, measure in sorted(priced, key=lambda row: row[:2])]

    def _try_measure(self, plan: Plan, now: Trial, measure: Measure) -> tuple[Plan, Trial] | None:
        """Predict ``plan``, whose cost is ``now``, with ``measure`` applied to all its units (parameters, blocks). If
        that frees nothing, return (``plan``, ``now``); if it is still too large, return (that plan, its cost). If it
        fits, try fewer units too, and return None.
        """
        more = measure.whole(plan)
        then = self.schedule(more)
        if then is None or then.memory >= now.memory:
            return plan, now
        if then.memory > self.memory:
            return more, then
        price = (then.seconds - now.seconds) / (now.memory - then.memory)  # of a byte that the measure frees
        cumulative = [0.0, *accumulate(measure.shares)]
        low, high = (0, now.memory), (len(measure.shares), then.memory)  # (units, bytes): too few units, and enough
        for _ in range(TRIES):
            if high[0] - low[0] < 2 or (self.memory - high[1]) * price < WORTH * now.seconds:
                break
            part = (low[1] - self.memory) / (low[1] - high[1])
            few = bisect_left(
                cumulative, (cumulative[low[0]] + part * (cumulative[high[0]] - cumulative[low[0]])) * (1 - 1e-9)
            )
            few = min(max(few, low[0] + 1), high[0] - 1)
            some = self.schedule(measure.apply(plan, few))
            if some is None:
                break
            low, high = (low, (few, some.memory)) if some.memory <= self.memory else ((few, some.memory), high)
        return None

    # --- measures

    def _regather(self, plan: Plan) -> Measure | None:
        """Return the measure (a change that frees memory) that reshards parameters after forward, beginning with those
        that forward uses first.

        None if no entry keeps parameters unsharded. The parameters that forward uses first are needed last in backward.
        """
        if not any(_is_open(entry, self.hand) and entry.level == 2 for entry in plan.entries):
            return None

        def apply(plan: Plan, count: int) -> Plan:
            levels = tuple((glob, 3) for glob in self.globs[:count])
            changes = {"level": 3} if count == len(self.globs) else {"levels": levels}
            return Plan.of(replace(e, **changes) if _is_open(e, self.hand) else e for e in plan.entries)

        return Measure([self._size(glob) for glob in self.globs], apply)

    def _further_measures(self) -> Iterator[Measure]:
        """Yield measures (changes that free memory): recompute activations of blocks or of their parts, move
        activations of blocks to the host, offload parameters.
        """
        parts_of_blocks = _recomputable_parts(self.model)
        for part, blocks in parts_of_blocks.items():

            def with_recompute(plan: Plan, count: int, part: str = part, blocks: Blocks = blocks) -> Plan:
                parts = [e for e in plan.entries if _recomputes(e) and e not in self.hand.entries]
                return Plan.of(e for e in plan.entries if part or e not in parts) | recompute(
                    _globs_of_first(blocks, part, count)
                )

            yield Measure([1.0] * sum(size for _, size in blocks), with_recompute)
        largest = sorted(self.globs, key=self._size, reverse=True)
        if self.host and (whole := parts_of_blocks.get("", [])):
            # In front: an entry that recomputes blocks then keeps on the host what goes into them.
            yield Measure(
                [1.0] * sum(size for _, size in whole),
                lambda plan, count: save(_globs_of_first(whole, "", count), on="host") | plan,
            )
        if self.host:
            yield Measure(
                [self._size(glob) for glob in largest],
                lambda plan, count: offload("*" if count == len(largest) else largest[:count]) | plan,
            )

    def _size(self, glob: str) -> float:
        """Return the bytes of the parameters that ``glob`` matches."""
        params = dict(self.model.named_parameters())
        return float(sum(params[name].numel() * params[name].element_size() for name in matching(glob, params)))


def kept_whole(plan: Plan, hand: Plan) -> Plan:
    """Return ``plan`` with parameters kept unsharded for backward (FSDP level 2 in place of 3). The user's entries,
    those of ``hand``, stay as they are.
    """
    return Plan.of(replace(e, level=2) if _is_open(e, hand) and e.level == 3 else e for e in plan.entries)


def _recomputes(entry: Entry) -> bool:
    """Return whether ``entry`` recomputes the activations of modules."""
    return isinstance(entry, Save) and entry.where == "recompute" and not entry.ops


def _is_open(entry: Entry, hand: Plan) -> TypeGuard[Fsdp]:
    """Return whether ``entry`` is an ``fsdp`` entry that is not one of the user's, ``hand``."""
    return isinstance(entry, Fsdp) and entry not in hand.entries


def _recomputable_parts(model: nn.Module) -> dict[str, Blocks]:
    """Return the parts of blocks that can be recomputed, and where they are: suffix of a part's name (``.mlp``) -> list
    of (prefix of the blocks' names, number of blocks).

    A suffix is "" (the block itself) or ``.name`` of a child that has children. Blocks are the numbered children of the
    outermost containers (ModuleList, Sequential).
    """
    parts: dict[str, Blocks] = {}
    inside: list[str] = []
    for path, size in numbered_containers(model):
        prefix = f"{path}." if path else ""
        if not prefix.startswith(tuple(inside)):
            inside.append(prefix)
            children = model.get_submodule(f"{prefix}0").named_children()
            for part in ("", *(f".{name}" for name, child in children if any(child.children()))):
                parts.setdefault(part, []).append((prefix, size))
    return parts


def _globs_of_first(blocks: Blocks, part: str, count: int) -> list[str]:
    """Return globs of the modules called ``part`` (a suffix, "" for the block itself) in the first ``count`` blocks."""
    globs = []
    for prefix, size in blocks:
        number = min(size, count)
        count -= number
        if number == size:
            globs.append(f"{prefix}*{part}")
        else:
            for ten in range(ceil(number / 10)):
                last = min(number - 10 * ten, 10) - 1
                globs.append(f"{prefix}{ten or ''}{f'[0-{last}]' if last else 0}{part}")
    return globs
