"""Plans redistributions: the cheapest sequence of collectives and local ops from one layout to another.

Each step is one collective or local op, and changes the location of some axis parts (`shardc.cost.places`);
`shardc.cost.redistribute` finds the sequence.

Searches the cheapest redistribution with A*: each move changes which dims some mesh axes (or parts) split.

A* (Hart, Nilsson and Raphael, 1968): uniform cost with a lower bound. A state is a tuple with the location of each part
(`shardc.cost.places`): `WHOLE`, a place, or a partial reduction. The moves below restrict which states are visited;
``tests/cost/test_cheapest.py`` compares the results with brute force.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from heapq import heappop, heappush, nsmallest
from itertools import combinations, product
from math import prod

from shardc.cost.model import Pricing
from shardc.cost.places import WHOLE, Place, Places, common_places, join_axes
from shardc.ir import comm_volume
from shardc.ir.layout import REDUCE_OPS, Layout
from shardc.ir.mesh import Mesh

State = tuple[int, ...]
Region = tuple[Place, ...]


@dataclass(frozen=True)
class Move:
    """A step of the search: kind of collective (as in `Step`), axis parts that it moves, and its reduce op."""

    kind: str
    parts: tuple[int, ...]
    op: str | None = None


@dataclass(frozen=True)
class Prices:
    """The seconds that a redistribution search minimizes: of a step, and a lower bound of what remains.

    Args:
        seconds: (kind, axes, local elements before, local elements after) -> seconds of a step.
        least: elements that a rank still must receive -> a lower bound of the seconds for them.
    """

    seconds: Callable[[str, tuple[str, ...], int, int], float]
    least: Callable[[int], float]


# Moves after which the search gives up optimality and goes straight to the target. Most pairs of layouts on two or
# three small axes take hundreds of moves, but layouts of many parts on large axes would take a million.
PATIENCE = 2000
_FINISHED = 8  # number of the best states that are then continued straight to the target


def cheapest(places: Places, prices: Prices) -> list[tuple[Move, State]]:
    """Return the cheapest moves from the source to the target of ``places``, each with the state after it.

    If the search considers more than `PATIENCE` moves, the result is good but may not be the cheapest.
    """
    start, goal = places.source, places.target
    cache = _StateCache(places)
    best: dict[State, float] = {start: 0.0}
    came: dict[State, tuple[State, Move]] = {}
    queue: list[tuple[float, int, State]] = [(0.0, 0, start)]
    done: set[State] = set()
    looked = 0
    while queue:
        if looked > PATIENCE:
            return _straight(cache, prices, best, came, [state for _, _, state in nsmallest(_FINISHED, queue)])
        _, _, state = heappop(queue)
        if state == goal:
            return _trace(came, goal)
        if state in done:
            continue
        done.add(state)
        elements, spent = cache.local_numel(state), best[state]
        for move, after in _Moves(cache, state).all():
            looked += 1
            if after in done:
                continue
            total = spent + cache.price(prices, move, elements, after)
            if total < best.get(after, float("inf")):
                best[after], came[after] = total, (state, move)
                missing = cache.missing(after)
                heappush(queue, (total + (prices.least(missing) if missing else 0.0), len(came), after))
    raise AssertionError(f"no way from {places.layout(start)} to {places.layout(goal)}")


def _straight(
    cache: _StateCache,
    prices: Prices,
    best: dict[State, float],
    came: dict[State, tuple[State, Move]],
    states: list[State],
) -> list[tuple[Move, State]]:
    """Return the cheapest path through one of ``states`` that continues from it with `_Moves.straight`."""
    paths = []
    for at, start in enumerate(states):
        path, total, state = _trace(came, start), best[start], start
        while state != cache.places.target:
            move, after = _Moves(cache, state).straight()
            total += cache.price(prices, move, cache.local_numel(state), after)
            path.append((move, after))
            state = after
        paths.append((total, at, path))
    return min(paths)[2]


def _trace(came: dict[State, tuple[State, Move]], state: State) -> list[tuple[Move, State]]:
    out = []
    while state in came:
        before, move = came[state]
        out.append((move, state))
        state = before
    return out[::-1]


class _StateCache:
    """Cached properties of the states of one search: local sizes, prices, axes, lower bounds."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.numel = prod(places.shape)
        self._tilings: dict[tuple[Region, State], list[State]] = {}
        self._local_numel: dict[State, int] = {}
        self._axes: dict[tuple[int, ...], tuple[str, ...]] = {}
        self._prices: dict[tuple[str, tuple[str, ...], int, int], float] = {}
        self.target_numel = self.local_numel(places.target)

    def local_numel(self, state: State) -> int:
        """Return the number of elements of a rank's shard in ``state``."""
        if (numel := self._local_numel.get(state)) is None:
            shards = prod([size for size, at in zip(self.places.sizes, state, strict=True) if at > WHOLE])
            numel = self._local_numel[state] = self.numel // shards
        return numel

    def price(self, prices: Prices, move: Move, before: int, after: State) -> float:
        """Return the seconds of ``move`` from a state of ``before`` local elements."""
        key = move.kind, self.axes(move), before, self.local_numel(after)
        if (seconds := self._prices.get(key)) is None:
            seconds = self._prices[key] = prices.seconds(*key)
        return seconds

    def axes(self, move: Move) -> tuple[str, ...]:
        if (axes := self._axes.get(move.parts)) is None:
            places = self.places
            axes = self._axes[move.parts] = join_axes(places.mesh, [places.parts[k] for k in move.parts])
        return axes

    def missing(self, state: State) -> int:
        """Return a lower bound of the elements that a rank must still receive, averaged over the ranks."""
        senders, terms, partial = 1, 1, 1
        for size, at, goal in zip(self.places.sizes, state, self.places.target, strict=True):
            if at == goal:
                partial *= size if at < WHOLE else 1
            elif at != WHOLE:
                senders *= size
                terms *= size if at < WHOLE else 1
        if terms == 1:
            return self.target_numel - self.target_numel // senders
        # Each element is reduced in a tree of `terms` ranks, and then sent to all ranks that need it.
        ranks = self.places.mesh.ranks
        return (self.numel * partial * (terms - 2) + ranks * self.target_numel) // ranks

    def tilings(self, region: Region, state: State) -> list[State]:
        """Return the states that split just the stretches of dims in ``region``; partial parts of ``state`` stay so."""
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
        """Yield ``state`` with parts from ``part`` on at ``inside`` locations, whose radices multiply to ``left``."""
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
        """Return whether all axis parts that overlap ``part`` split nothing."""
        return all(state[rival] == WHOLE for rival in self.places.rivals[part])


class _Moves:
    """The moves out of one state."""

    def __init__(self, cache: _StateCache, state: State) -> None:
        self.cache, self.state = cache, state
        self.places, self.goal = cache.places, cache.places.target
        wrong = [k for k, at in enumerate(state) if at != self.goal[k]]
        self.bound = [k for k in wrong if state[k] > WHOLE]
        self.pending = [k for k in wrong if state[k] < WHOLE]
        self.idle = [k for k, at in enumerate(state) if at == WHOLE and cache.rivals_whole(state, k)]

    @cached_property
    def blocked(self) -> int:
        """The bit mask of the locations that overlap one in use, so that no axis part can go to them now."""
        mask = 0
        for at in self.state:
            if at > WHOLE:
                mask |= self.places.clashes[at]
        return mask

    @cached_property
    def crossed(self) -> bool:
        """Return whether an axis part splits what overlaps its own target; then all temporary places are considered."""
        return any(self.goal[k] > WHOLE and self.places.clashes[self.state[k]] >> self.goal[k] & 1 for k in self.bound)

    def all(self) -> Iterator[tuple[Move, State]]:
        """Yield the moves that are worth considering, each with the state after it."""
        binds = {k: self.goal[k] for k in self.idle if self._open(self.goal[k])}
        if binds:
            # Slicing needs no communication, and all later moves are smaller.
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
        """Return a move towards the target, whatever its price: the first of slices, reductions and gathers."""
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
        """Return temporary places for ``part``; unless ``every``, only one if one overlaps no part's target."""
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
        """Yield new locations for some of ``parts``: the one in the target layout if it is free, else a temporary one.

        Args:
            every: a part may wait for its target at any temporary place.
        """
        choices = {}
        for k in parts:
            if self._open(self.goal[k]) and self.cache.rivals_whole(self.state, k):
                choices[k] = [self.goal[k]]
            elif waits := self._waits(k, self.crossed or (every and self.goal[k] > WHOLE)):
                choices[k] = waits
        for members in _subsets(list(choices)):
            for chosen in product(*(choices[k] for k in members)):
                if not any(self.places.clashes[a] >> b & 1 for a, b in combinations(chosen, 2)):
                    yield dict(zip(members, chosen, strict=True))

    def _permutes(self) -> Iterator[tuple[Move, State]]:
        """Yield permutations of shards between ranks after which an axis part splits what it does in the target."""
        if not self.bound:
            return
        for after in self.cache.tilings(_region(self.places, self.state), self.state):
            changed = [k for k, at in enumerate(after) if at != self.state[k]]
            if any(after[k] == self.goal[k] > WHOLE for k in changed):
                yield Move("permute_ranks", tuple(changed)), after

    def _waiting_slices(self) -> Iterator[tuple[Move, State]]:
        """Yield temporary splits over an axis part that splits no dim now: shards, and so later moves, get smaller.

        This pays for a part whose target is blocked. Any other part must be gathered again, which pays only if it takes
        a share of a reduction, or if it makes shards that can be permuted among ranks.
        """
        for k in self.idle:
            if self.pending or self.crossed or self.goal[k] > WHOLE:
                for at in self._waits(k, self.crossed or self.goal[k] > WHOLE):
                    yield self._set("shard", {k: at})


def _region(places: Places, state: State) -> Region:
    """Return which stretches of dims are split, by any axes; states with equal regions have the same set of shards."""
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


LOCAL = ("shard", "to_partial")  # kinds of step without communication


@dataclass(frozen=True)
class Step:
    """One redistribution step: a collective over ``axes`` (in mesh order), or a local op.

    Args:
        kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute_ranks", "shard" or "to_partial".
        axes: the mesh axes, or parts of axes, that it acts on.
        op: the reduce op, for "reduce_scatter", "all_reduce" and "to_partial".
        src, dst: the layouts before and after.
    """

    kind: str
    axes: tuple[str, ...]
    op: str | None
    src: Layout
    dst: Layout

    @property
    def ranks(self) -> int:
        """Number of ranks in each process group of the step."""
        return prod(self.src.mesh.size(axis) for axis in self.axes)

    def wire_elements(self) -> int:
        return 0 if self.kind in LOCAL else comm_volume.wire_elements(self.kind, self.ranks, self.src.local_numel)

    def wire_bytes(self, itemsize: int) -> int:
        return self.wire_elements() * itemsize

    def seconds(self, itemsize: int, cost: Pricing) -> float:
        """Return the predicted seconds of the collective, or of the local copy."""
        before, after = self.src.local_numel, self.dst.local_numel
        return step_seconds(self.kind, self.src.mesh, self.axes, before, after, itemsize, cost)


@lru_cache(maxsize=65536)
def steps(src: Layout, dst: Layout, itemsize: int, cost: Pricing) -> tuple[Step, ...]:
    """Return the cheapest steps from ``src`` to ``dst``, () if equal; LayoutError if meshes or global shapes differ."""
    if src == dst:
        return ()
    places = common_places(src, dst)
    if src.numel == 0:
        return (Step("shard", (), None, src, dst),)
    prices = Prices(
        seconds=lambda kind, axes, n, after: step_seconds(kind, src.mesh, axes, n, after, itemsize, cost),
        least=lambda elements: cost.least_seconds(elements * itemsize),
    )
    out, before = [], src
    for move, after in cheapest(places, prices):
        layout = dst if after == places.target else places.layout(after)
        axes = join_axes(places.mesh, [places.parts[k] for k in move.parts])
        out.append(Step(move.kind, axes, move.op, before, layout))
        before = layout
    return tuple(out)


@lru_cache(maxsize=1 << 20)
def seconds(src: Layout, dst: Layout, itemsize: int, cost: Pricing) -> float:
    """Return the predicted seconds of the cheapest steps from ``src`` to ``dst``."""
    return sum(step.seconds(itemsize, cost) for step in steps(src, dst, itemsize, cost))


def wire_bytes(src: Layout, dst: Layout, itemsize: int, cost: Pricing) -> int:
    """Return the bytes that a rank receives in the cheapest steps from ``src`` to ``dst``."""
    return sum(step.wire_bytes(itemsize) for step in steps(src, dst, itemsize, cost))


def step_seconds(
    kind: str, mesh: Mesh, axes: tuple[str, ...], before: int, after: int, itemsize: int, cost: Pricing
) -> float:
    """Return the predicted seconds of one step; a rank has ``before`` and ``after`` local elements."""
    if kind in LOCAL:
        return cost.copy_seconds(2 * after * itemsize)
    wire = comm_volume.wire_elements(kind, prod([mesh.size(axis) for axis in axes]), before) * itemsize
    return cost.collective_seconds(kind, mesh, axes, wire)
