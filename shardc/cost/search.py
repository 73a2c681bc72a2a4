"""The search for the cheapest moves of axis parts between places.

Uniform cost with a lower bound (A*; Hart, Nilsson and Raphael, 1968). A state says for each part where
it is: `WHOLE`, at a place, or pending a reduction. Which states are worth visiting is what the moves
below decide; ``tests/cost/test_cheapest.py`` holds them against brute force.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush, nsmallest
from itertools import combinations, product
from math import prod

from shardc.cost.places import WHOLE, Place, Places, join_axes
from shardc.ir.layout import REDUCE_OPS

State = tuple[int, ...]
Region = tuple[Place, ...]


@dataclass(frozen=True)
class Move:
    """One step between states.

    Args:
        kind: the kind of step, as in `shardc.cost.redistribute.Step`.
        parts: the parts whose location changes.
        op: the reduce op, where it reduces.
    """

    kind: str
    parts: tuple[int, ...]
    op: str | None = None


@dataclass(frozen=True)
class Prices:
    """What the search pays.

    Args:
        seconds: (kind, axes, elements held before, elements held after) -> seconds of a step.
        least: elements that a rank must yet receive -> a lower bound of the seconds that it takes.
    """

    seconds: Callable[[str, tuple[str, ...], int, int], float]
    least: Callable[[int], float]


# After so many moves the search goes the straight way from where it is best off: hundreds settle most pairs on two and
# three small axes, but layouts of many parts on large axes would take a million.
PATIENCE = 2000
_FINISHED = 8  # states from which the straight way is then tried


def cheapest(places: Places, prices: Prices) -> list[tuple[Move, State]]:
    """The cheapest moves from the source to the target of ``places``, each with the state after it.

    After `PATIENCE` moves that were looked at they are good ones, but others may be cheaper.
    """
    start, goal = places.source, places.target
    known = _Known(places)
    best: dict[State, float] = {start: 0.0}
    came: dict[State, tuple[State, Move]] = {}
    queue: list[tuple[float, int, State]] = [(0.0, 0, start)]
    done: set[State] = set()
    looked = 0
    while queue:
        if looked > PATIENCE:
            return _straight(known, prices, best, came, [state for _, _, state in nsmallest(_FINISHED, queue)])
        _, _, state = heappop(queue)
        if state == goal:
            return _trace(came, goal)
        if state in done:
            continue
        done.add(state)
        held, spent = known.held(state), best[state]
        for move, after in _Moves(known, state).all():
            looked += 1
            if after in done:
                continue
            total = spent + known.price(prices, move, held, after)
            if total < best.get(after, float("inf")):
                best[after], came[after] = total, (state, move)
                missing = known.missing(after)
                heappush(queue, (total + (prices.least(missing) if missing else 0.0), len(came), after))
    raise AssertionError(f"no way from {places.layout(start)} to {places.layout(goal)}")


def _straight(
    known: _Known, prices: Prices, best: dict[State, float], came: dict[State, tuple[State, Move]], states: list[State]
) -> list[tuple[Move, State]]:
    """The moves to one of ``states`` and straight on from there, the cheapest of all."""
    found = []
    for at, state in enumerate(states):
        ways, total, here = _trace(came, state), best[state], state
        while here != known.places.target:
            move, after = _Moves(known, here).straight()
            total += known.price(prices, move, known.held(here), after)
            ways.append((move, after))
            here = after
        found.append((total, at, ways))
    return min(found)[2]


def _trace(came: dict[State, tuple[State, Move]], state: State) -> list[tuple[Move, State]]:
    out = []
    while state in came:
        before, move = came[state]
        out.append((move, state))
        state = before
    return out[::-1]


class _Known:
    """What is known of every state of one search."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.numel = prod(places.shape)
        self._tilings: dict[tuple[Region, State], list[State]] = {}
        self._held: dict[State, int] = {}
        self._axes: dict[tuple[int, ...], tuple[str, ...]] = {}
        self._prices: dict[tuple[str, tuple[str, ...], int, int], float] = {}
        self.wanted = self.held(places.target)

    def held(self, state: State) -> int:
        """Elements that a rank holds."""
        if (known := self._held.get(state)) is None:
            shards = prod([size for size, at in zip(self.places.sizes, state, strict=True) if at > WHOLE])
            known = self._held[state] = self.numel // shards
        return known

    def price(self, prices: Prices, move: Move, held: int, after: State) -> float:
        """Seconds of ``move`` from a state of ``held`` elements."""
        key = move.kind, self.axes(move), held, self.held(after)
        if (known := self._prices.get(key)) is None:
            known = self._prices[key] = prices.seconds(*key)
        return known

    def axes(self, move: Move) -> tuple[str, ...]:
        """The axes that ``move`` acts on."""
        if (known := self._axes.get(move.parts)) is None:
            places = self.places
            known = self._axes[move.parts] = join_axes(places.mesh, [places.parts[k] for k in move.parts])
        return known

    def missing(self, state: State) -> int:
        """A lower bound of the elements that a rank must receive to get to the target, averaged over the ranks."""
        strangers, terms, kept = 1, 1, 1
        for size, at, goal in zip(self.places.sizes, state, self.places.target, strict=True):
            if at == goal:
                kept *= size if at < WHOLE else 1
            elif at != WHOLE:
                strangers *= size
                terms *= size if at < WHOLE else 1
        if terms == 1:
            return self.wanted - self.wanted // strangers
        # Each value is the end of a tree of `terms` ranks, and then goes to all who want it.
        ranks = self.places.mesh.ranks
        return (self.numel * kept * (terms - 2) + ranks * self.wanted) // ranks

    def tilings(self, region: Region, state: State) -> list[State]:
        """Every state that binds exactly the digits of ``region``; parts that are pending in ``state`` stay so."""
        key = region, tuple(min(at, WHOLE) for at in state)
        if key not in self._tilings:
            inside = [
                at
                for at, place in enumerate(self.places.places, start=1)
                if any(r.dim == place.dim and r.low <= place.low and place.high <= r.high for r in region)
            ]
            self._tilings[key] = list(self._fill(inside, prod(r.radix for r in region), key[1], 0, 0))
        return self._tilings[key]

    def _fill(self, inside: list[int], left: int, state: State, part: int, blocked: int) -> Iterator[State]:
        """``state`` with parts from ``part`` on bound at some of ``inside``, whose radices multiply to ``left``."""
        places = self.places
        if left == 1:
            yield state
            return
        if part == len(state):
            return
        yield from self._fill(inside, left, state, part + 1, blocked)
        if state[part] < WHOLE or left % places.sizes[part] or not self.rivals_whole(state, part):
            return
        for at in inside:
            if not blocked >> at & 1 and (at == places.target[part] or at in places.parks[part]):
                bound = (*state[:part], at, *state[part + 1 :])
                yield from self._fill(inside, left // places.sizes[part], bound, part + 1, blocked | places.clashes[at])

    def rivals_whole(self, state: State, part: int) -> bool:
        return all(state[rival] == WHOLE for rival in self.places.rivals[part])


class _Moves:
    """The moves out of one state."""

    def __init__(self, known: _Known, state: State) -> None:
        self.known, self.state = known, state
        self.places, self.goal = known.places, known.places.target
        wrong = [k for k, at in enumerate(state) if at != self.goal[k]]
        self.bound = [k for k in wrong if state[k] > WHOLE]
        self.pending = [k for k in wrong if state[k] < WHOLE]
        self.idle = [k for k, at in enumerate(state) if at == WHOLE and known.rivals_whole(state, k)]

    @cached_property
    def blocked(self) -> int:
        """Bit mask of the locations where nothing can be bound now."""
        mask = 0
        for at in self.state:
            if at > WHOLE:
                mask |= self.places.clashes[at]
        return mask

    @cached_property
    def crossed(self) -> bool:
        """Whether some part's place and its target cut a dim in ways that clash: then every waiting place counts."""
        return any(self.goal[k] > WHOLE and self.places.clashes[self.state[k]] >> self.goal[k] & 1 for k in self.bound)

    def all(self) -> Iterator[tuple[Move, State]]:
        binds = {k: self.goal[k] for k in self.idle if self._open(self.goal[k])}
        if binds:
            # A slice costs no wire and makes all that follows smaller.
            yield self._set("shard", binds)
        elif not self.bound and not self.pending:
            yield from self._to_partial()
        else:
            yield from self._gathers()
            yield from self._all_to_alls()
            yield from self._permutes()
            yield from self._reductions()
            yield from self._waiting_slices()

    def straight(self) -> tuple[Move, State]:
        """A move towards the target, without any regard to its price: of slices, reductions and gathers the first."""
        binds = {k: self.goal[k] for k in self.idle if self._open(self.goal[k])}
        if binds:
            return self._set("shard", binds)
        if self.pending:
            (op, members), *_ = self._by_op(self.state, self.pending).items()
            return self._set("all_reduce", dict.fromkeys(members, WHOLE), op)
        if self.bound:
            return self._set("all_gather", dict.fromkeys(self.bound, WHOLE))
        return next(self._to_partial())

    def _set(self, kind: str, changes: dict[int, int], op: str | None = None) -> tuple[Move, State]:
        return Move(kind, tuple(changes), op), tuple(changes.get(k, at) for k, at in enumerate(self.state))

    def _open(self, at: int) -> bool:
        return at > WHOLE and not self.blocked >> at & 1

    def _waits(self, part: int, every: bool) -> list[int]:
        """Where ``part`` may wait now; unless ``every``, one place that is in nobody's way does for all of them."""
        free = [at for at in self.places.parks[part] if self._open(at)]
        return free if every else [at for at in free if self.places.neutral >> at & 1][:1] or free

    def _by_op(self, codes: State, parts: list[int]) -> dict[str, list[int]]:
        out: dict[str, list[int]] = {}
        for k in parts:
            out.setdefault(REDUCE_OPS[-1 - codes[k]], []).append(k)
        return out

    def _to_partial(self) -> Iterator[tuple[Move, State]]:
        terms = [k for k, at in enumerate(self.goal) if at < WHOLE and at != self.state[k]]
        for op, members in self._by_op(self.goal, terms).items():
            yield self._set("to_partial", {k: self.goal[k] for k in members}, op)

    def _gathers(self) -> Iterator[tuple[Move, State]]:
        for members in _subsets(self.bound):
            yield self._set("all_gather", dict.fromkeys(members, WHOLE))

    def _all_to_alls(self) -> Iterator[tuple[Move, State]]:
        for changes in self._bindings(self.bound, every=False):
            yield self._set("all_to_all", changes)

    def _reductions(self) -> Iterator[tuple[Move, State]]:
        for op, members in self._by_op(self.state, self.pending).items():
            for changes in self._bindings(members, every=True):
                yield self._set("reduce_scatter", changes, op)
            for some in _subsets(members):
                yield self._set("all_reduce", dict.fromkeys(some, WHOLE), op)

    def _bindings(self, parts: list[int], every: bool) -> Iterator[dict[int, int]]:
        """Every way to bind some of ``parts``: each at its target where that is open, else where it may wait.

        Args:
            every: whether a part that waits for its target may do so anywhere.
        """
        choices = {}
        for k in parts:
            if self._open(self.goal[k]) and self.known.rivals_whole(self.state, k):
                choices[k] = [self.goal[k]]
            elif waits := self._waits(k, self.crossed or (every and self.goal[k] > WHOLE)):
                choices[k] = waits
        for members in _subsets(list(choices)):
            for chosen in product(*(choices[k] for k in members)):
                if not any(self.places.clashes[a] >> b & 1 for a, b in combinations(chosen, 2)):
                    yield dict(zip(members, chosen, strict=True))

    def _permutes(self) -> Iterator[tuple[Move, State]]:
        """Other ways to split the value into the very same shards, by which some part comes to its target."""
        if not self.bound:
            return
        for after in self.known.tilings(_region(self.places, self.state), self.state):
            changed = [k for k, at in enumerate(after) if at != self.state[k]]
            if any(after[k] == self.goal[k] > WHOLE for k in changed):
                yield Move("permute_ranks", tuple(changed)), after

    def _waiting_slices(self) -> Iterator[tuple[Move, State]]:
        """A part that is whole splits the value for a while, so that what follows moves less.

        That pays for a part that waits for its target. Another must be gathered again, which pays only
        where it takes its share of a reduction, or makes shards that can change ranks.
        """
        for k in self.idle:
            if self.pending or self.crossed or self.goal[k] > WHOLE:
                for at in self._waits(k, self.crossed or self.goal[k] > WHOLE):
                    yield self._set("shard", {k: at})


def _region(places: Places, state: State) -> Region:
    """The digits that are bound, neighbours merged: states of one region cut the value into the same shards."""
    out: list[Place] = []
    for place in sorted(places.places[at - 1] for at in state if at > WHOLE):
        if out and out[-1].dim == place.dim and out[-1].high == place.low:
            out[-1] = Place(place.dim, out[-1].low, place.high)
        else:
            out.append(place)
    return tuple(out)


def _subsets(items: list[int]) -> Iterator[tuple[int, ...]]:
    for count in range(len(items), 0, -1):
        yield from combinations(items, count)
