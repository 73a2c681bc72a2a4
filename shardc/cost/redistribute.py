"""Plans redistributions: the cheapest sequence of collectives and local ops from one layout to another.

`steps` returns the sequence. `cheapest` finds it with A* (Hart, Nilsson and Raphael, 1968): uniform-cost search with a
lower bound of the cost that remains. A state is the tuple of locations of all axis parts (`shardc.cost.places`). A move
is one collective or local op and changes some of the locations. `_Moves` restricts which states are visited;
``tests/cost/test_cheapest.py`` compares the results with brute force.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
    """One collective or local op in the search for a redistribution, which changes the locations of axis parts.

    Args:
        kind: the kind of step, as in `Step`.
        parts: indices of the axis parts whose locations change.
        op: the reduce op of a reduction, or of a change to a partial value.
    """

    kind: str
    parts: tuple[int, ...]
    op: str | None = None


@dataclass(frozen=True)
class Prices:
    """The cost functions of a redistribution search: seconds of a step, and a lower bound for what remains.

    Args:
        seconds: maps (kind, axes, local elements before, local elements after) to the seconds of a step.
        least: maps the number of elements that a rank still must receive to a lower bound of the seconds for that.
    """

    seconds: Callable[[str, tuple[str, ...], int, int], float]
    least: Callable[[int], float]


# Moves after which the search gives up optimality and goes straight to the target. Most pairs of layouts on two or
# three small axes take hundreds of moves, but layouts of many parts on large axes would take a million.
PATIENCE = 2000
_FINISHED = 8  # number of the best states that are then continued straight to the target


def cheapest(places: Places, prices: Prices) -> list[tuple[Move, State]]:
    """Return the cheapest moves (collectives and local slices) from the source layout to the target layout of
    ``places``, as (move, state after it).

    If the search considers more than `PATIENCE` moves, the result is good but may not be the cheapest.
    """
    start, goal = places.source, places.target
    cache = _StateCache(places, prices)
    best: dict[State, float] = {start: 0.0}
    came: dict[State, tuple[State, Move]] = {}
    queue: list[tuple[float, int, State]] = [(0.0, 0, start)]
    done: set[State] = set()
    looked = 0
    while queue:
        if looked > PATIENCE:
            return _straight(cache, best, came, [state for _, _, state in nsmallest(_FINISHED, queue)])
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
            total = spent + cache.price(move, elements, after)
            if total < best.get(after, float("inf")):
                best[after], came[after] = total, (state, move)
                missing = cache.missing(after)
                heappush(queue, (total + (prices.least(missing) if missing else 0.0), len(came), after))
    raise AssertionError(f"no way from {places.layout(start)} to {places.layout(goal)}")


def _straight(
    cache: _StateCache, best: dict[State, float], came: dict[State, tuple[State, Move]], states: list[State]
) -> list[tuple[Move, State]]:
    """Finish a search that ran out of patience: extend the best path to each of ``states`` to the target layout, by the
    moves of `_Moves.straight`. Return the cheapest of these paths, as a list of (move, state after it).

    Args:
        best: state -> seconds of the cheapest path to it.
        came: state -> its predecessor on that path, and the move from there.
    """
    paths = []
    for at, start in enumerate(states):
        path, total, state = _trace(came, start), best[start], start
        while state != cache.places.target:
            move, after = _Moves(cache, state).straight()
            total += cache.price(move, cache.local_numel(state), after)
            path.append((move, after))
            state = after
        paths.append((total, at, path))
    return min(paths)[2]


def _trace(came: dict[State, tuple[State, Move]], state: State) -> list[tuple[Move, State]]:
    """Return the moves from the source to ``state``, each with the state after it. ``came`` maps a state to its
    predecessor and the move from there.
    """
    out = []
    while state in came:
        before, move = came[state]
        out.append((move, state))
        state = before
    return out[::-1]


class _StateCache:
    """Cached properties of the states of one search: local sizes, prices, axes, lower bounds."""

    def __init__(self, places: Places, prices: Prices) -> None:
        self.places, self.prices = places, prices
        self.numel = prod(places.shape)
        self._tilings: dict[tuple[Region, State], list[State]] = {}
        self._local_numel: dict[State, int] = {}
        self._axes: dict[tuple[int, ...], tuple[str, ...]] = {}
        self._seconds: dict[tuple[str, tuple[str, ...], int, int], float] = {}
        self.target_numel = self.local_numel(places.target)

    def local_numel(self, state: State) -> int:
        """Return the number of elements of a rank's shard in ``state``."""
        if (numel := self._local_numel.get(state)) is None:
            shards = prod([size for size, at in zip(self.places.sizes, state, strict=True) if at > WHOLE])
            numel = self._local_numel[state] = self.numel // shards
        return numel

    def price(self, move: Move, before: int, after: State) -> float:
        """Return the seconds of ``move`` to the state ``after``, from a state of ``before`` local elements."""
        key = move.kind, self.axes(move), before, self.local_numel(after)
        if (seconds := self._seconds.get(key)) is None:
            seconds = self._seconds[key] = self.prices.seconds(*key)
        return seconds

    def axes(self, move: Move) -> tuple[str, ...]:
        """Return the mesh axes, or parts of axes, over which ``move`` communicates."""
        if (axes := self._axes.get(move.parts)) is None:
            places = self.places
            axes = self._axes[move.parts] = join_axes(places.mesh, [places.parts[k] for k in move.parts])
        return axes

    def missing(self, state: State) -> int:
        """Return a lower bound of the elements that the ranks must still receive between ``state`` and the target
        layout, as the mean per rank.
        """
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
        """Return the states in which axis parts split exactly the factors of ``region``. Axis parts that are partial in
        ``state`` stay partial.
        """
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
        """Yield the states that differ from ``state`` in that some axis parts from index ``part`` on split locations of
        the list ``inside``. The sizes of those parts multiply to ``left``; locations in the bit mask ``blocked`` are
        not used.

        Args:
            inside: locations that are allowed.
            left: product of the radices that remain to be split.
            state: locations of the parts before ``part``; the others are whole or partial.
            blocked: bit mask of the locations that overlap one in use.
        """
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
            if not blocked >> at & 1 and (at == places.target[part] or at in places.temporary[part]):
                bound = (*state[:part], at, *state[part + 1 :])
                yield from self._fill(inside, left // places.sizes[part], bound, part + 1, blocked | places.clashes[at])

    def rivals_whole(self, state: State, part: int) -> bool:
        """Return whether all other axis parts that overlap axis part ``part`` are unused in ``state``: they split
        nothing and are not partial.
        """
        return all(state[rival] == WHOLE for rival in self.places.rivals[part])


class _Moves:
    """The moves that are possible from one state of a redistribution search. Methods yield or return a move as (move,
    state after it).
    """

    def __init__(self, cache: _StateCache, state: State) -> None:
        self.cache, self.state = cache, state
        self.places, self.goal = cache.places, cache.places.target
        wrong = [k for k, at in enumerate(state) if at != self.goal[k]]
        self.bound = [k for k in wrong if state[k] > WHOLE]
        self.pending = [k for k in wrong if state[k] < WHOLE]
        self.idle = [k for k, at in enumerate(state) if at == WHOLE and cache.rivals_whole(state, k)]

    @cached_property
    def blocked(self) -> int:
        """Bit mask of the locations to which no axis part can move, because they overlap a location in use."""
        mask = 0
        for at in self.state:
            if at > WHOLE:
                mask |= self.places.clashes[at]
        return mask

    @cached_property
    def crossed(self) -> bool:
        """Return whether some axis part splits a place that overlaps the place to which it must move. Moves then try
        all temporary places too.
        """
        return any(self.goal[k] > WHOLE and self.places.clashes[self.state[k]] >> self.goal[k] & 1 for k in self.bound)

    def all(self) -> Iterator[tuple[Move, State]]:
        """Yield the moves from this state that are worth considering, as (move, state after it)."""
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
        """Return a move that brings axis parts to their targets, whatever its price, and the state after it. Slices
        come before reductions and gathers.
        """
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
        """Return a move of ``kind``, and the state after it. ``changes`` maps axis part -> its new location.

        Args:
            changes: part -> its new location.
            op: the reduce op of a reduction, or of a change to a partial value.
        """
        return Move(kind, tuple(changes), op), tuple(changes.get(k, at) for k, at in enumerate(self.state))

    def _open(self, at: int) -> bool:
        """Return whether location ``at`` is a place to which an axis part can move: it overlaps no place in use."""
        return at > WHOLE and not self.blocked >> at & 1

    def _waits(self, part: int, every: bool) -> list[int]:
        """Return the free temporary locations for axis part ``part``. Without ``every``, one location that overlaps no
        place of the target layout is enough: if there is one, it is returned alone.
        """
        free = [at for at in self.places.temporary[part] if self._open(at)]
        return free if every else [at for at in free if self.places.neutral >> at & 1][:1] or free

    def _by_op(self, codes: State, parts: list[int]) -> dict[str, list[int]]:
        """Group the pending axis parts ``parts`` by their reduce op: op -> parts. ``codes`` has the locations of all
        parts, from which the op is read.
        """
        out: dict[str, list[int]] = {}
        for k in parts:
            out.setdefault(REDUCE_OPS[-1 - codes[k]], []).append(k)
        return out

    def _to_partial(self) -> Iterator[tuple[Move, State]]:
        """Yield the local ops that make axis parts partial as in the target layout, one op for each reduce op (sum,
        max, ...).
        """
        terms = [k for k, at in enumerate(self.goal) if at < WHOLE and at != self.state[k]]
        for op, members in self._by_op(self.goal, terms).items():
            yield self._set("to_partial", {k: self.goal[k] for k in members}, op)

    def _gathers(self) -> Iterator[tuple[Move, State]]:
        """Yield the all-gathers over each subset of the axis parts that split a wrong place."""
        for members in _subsets(self.bound):
            yield self._set("all_gather", dict.fromkeys(members, WHOLE))

    def _all_to_alls(self) -> Iterator[tuple[Move, State]]:
        """Yield the all-to-alls, each of which moves some axis parts from wrong places to their targets or to temporary
        places.
        """
        for changes in self._bindings(self.bound, every=False):
            yield self._set("all_to_all", changes)

    def _reductions(self) -> Iterator[tuple[Move, State]]:
        """Yield reduce-scatters and all-reduces of the pending axis parts. Each reduces a subset of the parts that have
        the same reduce op.
        """
        for op, members in self._by_op(self.state, self.pending).items():
            for changes in self._bindings(members, every=True):
                yield self._set("reduce_scatter", changes, op)
            for some in _subsets(members):
                yield self._set("all_reduce", dict.fromkeys(some, WHOLE), op)

    def _bindings(self, parts: list[int], every: bool) -> Iterator[dict[int, int]]:
        """Yield new locations for each subset of the axis parts ``parts``, as a dict part -> location: its target if
        that is free, else a temporary place. With ``every``, all temporary places of such a part are tried, not only
        one.
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
        """Yield permutations of shards between ranks that bring at least one axis part to its target."""
        if not self.bound:
            return
        for after in self.cache.tilings(_region(self.places, self.state), self.state):
            changed = [k for k, at in enumerate(after) if at != self.state[k]]
            if any(after[k] == self.goal[k] > WHOLE for k in changed):
                yield Move("permute_ranks", tuple(changed)), after

    def _waiting_slices(self) -> Iterator[tuple[Move, State]]:
        """Yield local slices that split an unused axis part at a temporary place. They make shards, and so later moves,
        smaller.

        Such a slice pays if the part's target is blocked. Otherwise the part must be gathered again, which pays only if
        it shares the work of a reduction, or if the smaller shards can be permuted among ranks.
        """
        for k in self.idle:
            if self.pending or self.crossed or self.goal[k] > WHOLE:
                for at in self._waits(k, self.crossed or self.goal[k] > WHOLE):
                    yield self._set("shard", {k: at})


def _region(places: Places, state: State) -> Region:
    """Return the factors of dims that ``state`` splits. States with equal results have the same set of shards."""
    out: list[Place] = []
    for place in sorted(places.places[at - 1] for at in state if at > WHOLE):
        if out and out[-1].dim == place.dim and out[-1].high == place.low:
            out[-1] = Place(place.dim, out[-1].low, place.high)
        else:
            out.append(place)
    return tuple(out)


def _subsets(items: list[int]) -> Iterator[tuple[int, ...]]:
    """Yield the non-empty subsets of ``items``, the largest first."""
    for count in range(len(items), 0, -1):
        yield from combinations(items, count)


LOCAL = ("shard", "to_partial")  # kinds of step without communication
# Seconds of steps over the axis of microbatches, which must not be chosen for speed: a slice, which an op needs only
# beside a value of one microbatch; and a step that exchanges values between microbatches other than by adding them up.
IN_TIME, NEVER = 1e3, 1e6


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
        """Return the number of ranks in each process group of the step."""
        return prod(self.src.mesh.size(axis) for axis in self.axes)

    @property
    def slices_time(self) -> bool:
        """Return whether this step of a redistribution is local and over the axis of microbatches: each microbatch
        takes its slice.
        """
        return self.kind in LOCAL and _is_in_time(self.src.mesh, self.axes)

    def wire_elements(self) -> int:
        """Return the number of elements that each rank sends in this step of a redistribution; 0 for a local op."""
        return 0 if self.kind in LOCAL else comm_volume.wire_elements(self.kind, self.ranks, self.src.local_numel)

    def wire_bytes(self, itemsize: int) -> int:
        """Return the bytes that each rank sends in this redistribution step, for elements of ``itemsize`` bytes."""
        return self.wire_elements() * itemsize

    def seconds(self, itemsize: int, cost: Pricing) -> float:
        """Return the predicted seconds of this step of a redistribution: a collective, or a local copy."""
        before, after = self.src.local_numel, self.dst.local_numel
        return step_seconds(self.kind, self.src.mesh, self.axes, before, after, itemsize, cost)


@lru_cache(maxsize=65536)
def steps(src: Layout, dst: Layout, itemsize: int, cost: Pricing) -> tuple[Step, ...]:
    """Return the cheapest steps (collectives and local slices) that redistribute a tensor from layout ``src`` to
    ``dst``; () if they are equal.

    Args:
        src, dst: layouts of one tensor.
        itemsize: bytes per element.
        cost: the cost model.

    Raises:
        LayoutError: the layouts have different meshes or global shapes.
    """
    if src == dst:
        return ()
    time, pending = src.mesh.time, dict(src.partial)
    if time in pending and time not in dict(dst.partial):  # add up the microbatches first, then reduce once
        summed = src.without_partial([time])
        return (Step("all_reduce", (time,), pending[time], src, summed), *steps(summed, dst, itemsize, cost))
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
def seconds(src: Layout, dst: Layout, itemsize: int, cost: Pricing, penalty: float = 1.0) -> float:
    """Return the predicted seconds of the cheapest steps from ``src`` to ``dst``. Steps over axes of devices count
    ``penalty`` times.

    Args:
        src, dst, itemsize, cost: as for `steps`.
        penalty: factor on the seconds of steps over axes of the mesh, and not on those of slices over time.
    """
    return sum(
        step.seconds(itemsize, cost) * (1.0 if step.slices_time else penalty)
        for step in steps(src, dst, itemsize, cost)
    )


def wire_bytes(src: Layout, dst: Layout, itemsize: int, cost: Pricing) -> int:
    """Return the bytes that each rank sends in the cheapest steps from ``src`` to ``dst``."""
    return sum(step.wire_bytes(itemsize) for step in steps(src, dst, itemsize, cost))


def _is_in_time(mesh: Mesh, axes: Iterable[str]) -> bool:
    """Return whether one of ``axes`` is the axis of microbatches, or a part of it."""
    return bool(mesh.time) and any(mesh.overlap(axis, mesh.time) for axis in axes)


def step_seconds(
    kind: str, mesh: Mesh, axes: tuple[str, ...], before: int, after: int, itemsize: int, cost: Pricing
) -> float:
    """Return the predicted seconds of one step of a redistribution: a collective or a local slice.

    Args:
        kind: the kind of step, as in `Step`.
        axes: the mesh axes, or parts of axes, over which it communicates.
        before, after: elements of a rank's shard before and after the step.
        itemsize: bytes per element.
        cost: the cost model.
    """
    in_time = _is_in_time(mesh, axes)
    if kind in LOCAL:
        return cost.copy_seconds(2 * after * itemsize) + IN_TIME * in_time
    if in_time:
        if kind == "all_reduce" and axes == (mesh.time,):
            return 0.0
        return NEVER if kind == "all_gather" and axes == (mesh.time,) else 2 * NEVER
    wire = comm_volume.wire_elements(kind, prod([mesh.size(axis) for axis in axes]), before) * itemsize
    return cost.collective_seconds(kind, mesh, axes, wire)
