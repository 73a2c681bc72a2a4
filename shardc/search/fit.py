"""Fit: what a plan that holds too much can give up for time, taken as far as it has to be, the cheapest byte first.

Parameters are gathered again in backward, activations are computed again, parameters lie on the host.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import ceil
from typing import Protocol, TypeGuard

from torch import nn

from shardc.capture import numbered_containers
from shardc.plan.constructors import offload, recompute
from shardc.plan.entries import Entry, Fsdp, Recompute
from shardc.plan.match import matching
from shardc.plan.value import Plan

TRIES = 4  # of taking a measure for some of its units


@dataclass(frozen=True)
class Measure:
    """Entries that free memory, for all units of a kind or for the first few.

    Args:
        shares: of each unit in the bytes that all free.
        added: a plan, and how many units -> the plan with entries for these.
        alike: whether what it says for some units is the same of alike blocks.
    """

    shares: Sequence[float]
    added: Callable[[Plan, int], Plan]
    alike: bool = True

    def whole(self, plan: Plan) -> Plan:
        return self.added(plan, len(self.shares))


class Cost(Protocol):
    """What a plan takes: bytes at the peak, and seconds of a step."""

    @property
    def memory(self) -> float: ...

    @property
    def seconds(self) -> float: ...


Blocks = list[tuple[str, int]]  # what the names of blocks begin with, and how many there are
# The cost of a plan in which alike blocks are treated alike, or not; None where it cannot be scheduled.
Schedule = Callable[[Plan, bool], Cost | None]


@dataclass(frozen=True)
class Fit:
    """Makes plans of one model fit.

    Args:
        globs: the parameters, those of alike blocks under one glob, in the model's order.
        hand: what a person says of the plan; it holds.
        memory: bytes that a rank has.
        host: whether what is on the host is not in that memory.
        schedule: predicts a plan, and keeps it as tried.
        limit: gives the seconds of the fastest plan so far that fits; what is not faster is not tried further.
    """

    model: nn.Module
    globs: Sequence[str]
    hand: Plan
    memory: float
    host: bool
    schedule: Schedule
    limit: Callable[[], float]

    def run(self, plan: Plan) -> None:
        """Tries ``plan`` with its parameters whole from forward to backward, and with the measures that it needs."""
        plan = kept_whole(plan, self.hand)
        now = self.schedule(plan, True)
        if now is None or now.memory <= self.memory or now.seconds >= self.limit():
            return
        again = self._again(plan)
        if again is not None and self._take(plan, now, again) is None:
            return
        priced = self._priced(plan, now, [*([again] if again else ()), *self._others()])
        for measure in priced:  # one that suffices alone
            self._take(plan, now, measure)
        for measure in priced:
            taken = self._take(plan, now, measure)
            if taken is None or taken[1].seconds >= self.limit():
                return
            plan, now = taken

    def _priced(self, plan: Plan, now: Cost, measures: Sequence[Measure]) -> list[Measure]:
        """The measures that free anything, that with the fewest seconds for a byte first."""
        found = []
        for at, measure in enumerate(measures):
            then = self.schedule(measure.whole(plan), True)
            if then is not None and then.memory < now.memory:
                found.append(((then.seconds - now.seconds) / (now.memory - then.memory), at, measure))
        return [measure for *_, measure in sorted(found, key=lambda each: each[:2])]

    def _take(self, plan: Plan, now: Cost, measure: Measure) -> tuple[Plan, Cost] | None:
        """The plan with a measure; None where that fits, in which case as little of it as fits was tried."""
        more = measure.whole(plan)
        then = self.schedule(more, True)
        if then is None or then.memory >= now.memory:
            return plan, now
        if then.memory > self.memory:
            return more, then
        held = [0.0, *accumulate(measure.shares)]
        low, high = (0, now.memory), (len(measure.shares), then.memory)  # too few units, and enough
        for _ in range(TRIES):
            if high[0] - low[0] < 2:
                break
            part = (low[1] - self.memory) / (low[1] - high[1])
            few = bisect_left(held, (held[low[0]] + part * (held[high[0]] - held[low[0]])) * (1 - 1e-9))
            few = min(max(few, low[0] + 1), high[0] - 1)
            some = self.schedule(measure.added(plan, few), measure.alike)
            if some is None:
                break
            low, high = (low, (few, some.memory)) if some.memory <= self.memory else ((few, some.memory), high)
        return None

    # --- measures

    def _again(self, plan: Plan) -> Measure | None:
        """Parameters that are gathered again in backward; those that forward uses first are needed last."""
        if not any(_is_open(entry, self.hand) and entry.level == 2 for entry in plan.entries):
            return None

        def added(plan: Plan, count: int) -> Plan:
            levels = tuple((glob, 3) for glob in self.globs[:count])
            changes = {"level": 3} if count == len(self.globs) else {"levels": levels}
            return Plan.of(replace(e, **changes) if _is_open(e, self.hand) else e for e in plan.entries)

        return Measure([self._size(glob) for glob in self.globs], added)

    def _others(self) -> Iterator[Measure]:
        """Activations that are computed again, of whole blocks and of their parts, and parameters on the host."""
        for part, blocks in _parts(self.model).items():

            def again(plan: Plan, count: int, part: str = part, blocks: Blocks = blocks) -> Plan:
                parts = [e for e in plan.entries if isinstance(e, Recompute) and e not in self.hand.entries]
                return Plan.of(e for e in plan.entries if part or e not in parts) | recompute(
                    _first(blocks, part, count)
                )

            yield Measure([1.0] * sum(size for _, size in blocks), again, alike=False)
        largest = sorted(self.globs, key=self._size, reverse=True)
        if self.host:
            yield Measure(
                [self._size(glob) for glob in largest],
                lambda plan, count: offload("*" if count == len(largest) else largest[:count]) | plan,
            )

    def _size(self, glob: str) -> float:
        """Bytes of the parameters that a glob matches."""
        params = dict(self.model.named_parameters())
        return float(sum(params[name].numel() * params[name].element_size() for name in matching(glob, params)))


def kept_whole(plan: Plan, hand: Plan) -> Plan:
    """``plan`` with parameters that stay whole from forward to backward, but for what ``hand`` says."""
    return Plan.of(replace(e, level=2) if _is_open(e, hand) and e.level == 3 else e for e in plan.entries)


def _is_open(entry: Entry, hand: Plan) -> TypeGuard[Fsdp]:
    return isinstance(entry, Fsdp) and entry not in hand.entries


def _parts(model: nn.Module) -> dict[str, Blocks]:
    """By what is behind a block's name, "" or that of a module which holds others: the blocks that have it.

    Blocks are the numbered children of the outermost containers.
    """
    found: dict[str, Blocks] = {}
    inside: list[str] = []
    for path, size in numbered_containers(model):
        prefix = f"{path}." if path else ""
        if not prefix.startswith(tuple(inside)):
            inside.append(prefix)
            children = model.get_submodule(f"{prefix}0").named_children()
            for part in ("", *(f".{name}" for name, child in children if any(child.children()))):
                found.setdefault(part, []).append((prefix, size))
    return found


def _first(blocks: Blocks, part: str, count: int) -> list[str]:
    """Globs of a part of the first ``count`` blocks."""
    found = []
    for prefix, size in blocks:
        here = min(size, count)
        count -= here
        if here == size:
            found.append(f"{prefix}*{part}")
        else:
            for ten in range(ceil(here / 10)):
                last = min(here - 10 * ten, 10) - 1
                found.append(f"{prefix}{ten or ''}{f'[0-{last}]' if last else 0}{part}")
    return found
