"""The redistribution planner: the cheapest sequence of steps from one layout to another.

Each step changes where some axis parts stand (see `shardc.analysis.places`) and is one collective or
one local slice. The planner searches by uniform cost with a lower bound (A*, Hart, Nilsson and Raphael,
1968): the bound is the time to receive what a rank, on average, does not hold yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from itertools import combinations, product
from math import prod

from shardc.analysis.cost import CostModel
from shardc.analysis.places import WHOLE, Places, common_places, join_axes
from shardc.ir.layout import REDUCE_OPS, Layout

State = tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """One change of layout: a collective over ``axes`` (in mesh order) or a local op.

    Args:
        kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute_ranks", "shard" or "to_partial".
        axes: the mesh axes or parts of axes that it acts on.
        op: the reduce op, for "reduce_scatter", "all_reduce" and "to_partial".
        src: the layout before.
        dst: the layout after.
    """

    kind: str
    axes: tuple[str, ...]
    op: str | None
    src: Layout
    dst: Layout

    @property
    def ranks(self) -> int:
        """Ranks in each group."""
        return prod(self.src.mesh.size(axis) for axis in self.axes)

    def wire_elements(self) -> int:
        """Elements that a rank receives."""
        return _wire_elements(self.kind, self.ranks, self.src.local_numel)

    def wire_bytes(self, itemsize: int) -> int:
        """Bytes that a rank receives."""
        return self.wire_elements() * itemsize

    def seconds(self, itemsize: int, cost: CostModel) -> float:
        """Predicted seconds, the local copies included."""
        return _seconds(self.kind, self.ranks, self.src.local_numel, self.dst.local_numel, itemsize, cost)


@lru_cache(maxsize=65536)
def steps(src: Layout, dst: Layout, itemsize: int, cost: CostModel) -> tuple[Step, ...]:
    """The cheapest steps from ``src`` to ``dst`` for elements of ``itemsize`` bytes; () where they are equal.

    Raises:
        LayoutError: different meshes or global shapes.
    """
    if src == dst:
        return ()
    places = common_places(src, dst)
    if src.numel == 0:
        return (Step("shard", (), None, src, dst),)
    path = _Search(places, itemsize, cost).path()
    out, before = [], src
    for move, after in path:
        layout = dst if after == places.target else places.layout(after)
        axes = join_axes(places.mesh, [places.parts[k] for k in move.parts])
        out.append(Step(move.kind, axes, move.op, before, layout))
        before = layout
    return tuple(out)


def seconds(src: Layout, dst: Layout, itemsize: int, cost: CostModel) -> float:
    """Predicted seconds of the cheapest steps."""
    return sum(step.seconds(itemsize, cost) for step in steps(src, dst, itemsize, cost))


def wire_bytes(src: Layout, dst: Layout, itemsize: int, cost: CostModel) -> int:
    """Bytes that a rank receives in the cheapest steps."""
    return sum(step.wire_bytes(itemsize) for step in steps(src, dst, itemsize, cost))


def _wire_elements(kind: str, ranks: int, held: int) -> int:
    if kind == "all_gather":
        return (ranks - 1) * held
    if kind in ("reduce_scatter", "all_to_all"):
        return held - held // ranks
    if kind == "all_reduce":
        return -(-2 * (ranks - 1) * held // ranks)
    return held if kind == "permute_ranks" else 0


def _seconds(kind: str, ranks: int, held: int, after: int, itemsize: int, cost: CostModel) -> float:
    """Wire time, then the time to write the result and to read what it is made of."""
    copied = cost.compute_seconds(0, (min(held, after) + after) * itemsize)
    wire = _wire_elements(kind, ranks, held)
    return copied + (cost.seconds(kind, ranks, wire * itemsize) if kind not in ("shard", "to_partial") else 0.0)


@dataclass(frozen=True)
class _Move:
    kind: str
    parts: tuple[int, ...]
    op: str | None = None


class _Search:
    """A* from the source to the target of ``places``; a state is a location for each part."""

    def __init__(self, places: Places, itemsize: int, cost: CostModel) -> None:
        self.places, self.itemsize, self.cost = places, itemsize, cost
        self.numel = prod(places.shape)
        self.wanted = self._held(places.target)

    def path(self) -> list[tuple[_Move, State]]:
        start, goal = self.places.source, self.places.target
        best: dict[State, float] = {start: 0.0}
        came: dict[State, tuple[State, _Move]] = {}
        queue: list[tuple[float, int, State]] = [(0.0, 0, start)]
        done: set[State] = set()
        pushed = 0
        while queue:
            _, _, state = heappop(queue)
            if state == goal:
                return self._trace(came, goal)
            if state in done:
                continue
            done.add(state)
            held, spent = self._held(state), best[state]
            for move, after in self._moves(state):
                if after in done:
                    continue
                ranks = prod(self.places.sizes[k] for k in move.parts)
                total = spent + _seconds(move.kind, ranks, held, self._held(after), self.itemsize, self.cost)
                if total < best.get(after, float("inf")):
                    best[after], came[after] = total, (state, move)
                    pushed += 1
                    heappush(queue, (total + self._bound(after), pushed, after))
        raise AssertionError(f"no way from {self.places.layout(start)} to {self.places.layout(goal)}")

    def _trace(self, came: dict[State, tuple[State, _Move]], state: State) -> list[tuple[_Move, State]]:
        out = []
        while state in came:
            before, move = came[state]
            out.append((move, state))
            state = before
        return out[::-1]

    def _held(self, state: State) -> int:
        """Elements that a rank holds in ``state``."""
        return self.numel // prod(size for size, at in zip(self.places.sizes, state, strict=True) if at > WHOLE)

    def _bound(self, state: State) -> float:
        """A lower bound of the seconds from ``state`` to the target."""
        strangers, terms, kept = 1, 1, 1
        for size, at, goal in zip(self.places.sizes, state, self.places.target, strict=True):
            if at == goal:
                kept *= size if at < WHOLE else 1
            elif at != WHOLE:
                strangers *= size
                terms *= size if at < WHOLE else 1
        if strangers == 1:
            return 0.0
        # What is not held must be received.
        missing = self.wanted - self.wanted // strangers
        if terms > 1:
            # Each value is the end of a tree of ``terms`` ranks, and then goes to all who hold it.
            values, ranks = self.numel * kept, self.places.mesh.ranks
            missing = (values * (terms - 2) + ranks * self.wanted) // ranks
        return self.cost.least_seconds(missing * self.itemsize)

    # --- moves

    def _moves(self, state: State) -> Iterator[tuple[_Move, State]]:
        blocked = 0
        for at in state:
            if at > WHOLE:
                blocked |= self.places.clashes[at]
        binds = self._free_binds(state, blocked)
        if binds:
            # A slice costs no wire and makes all that follows smaller.
            yield self._set(state, "shard", binds)
            return
        goal = self.places.target
        wrong = [k for k, at in enumerate(state) if at != goal[k]]
        bound = [k for k in wrong if state[k] > WHOLE]
        pending = [k for k in wrong if state[k] < WHOLE]
        if not bound and not pending:
            yield from self._to_partial(state, wrong)
            # What is whole and wrong now, and neither bound nor made partial, waits for a rival part.
            return
        yield from self._gathers(state, bound)
        yield from self._all_to_alls(state, bound, blocked)
        yield from self._permutes(state, bound)
        yield from self._reductions(state, pending, blocked)
        yield from self._parked_slices(state, blocked, bool(pending))

    def _set(self, state: State, kind: str, changes: dict[int, int], op: str | None = None) -> tuple[_Move, State]:
        after = tuple(changes.get(k, at) for k, at in enumerate(state))
        return _Move(kind, tuple(changes), op), after

    def _free_binds(self, state: State, blocked: int) -> dict[int, int]:
        goal = self.places.target
        return {
            k: goal[k]
            for k, at in enumerate(state)
            if at == WHOLE and goal[k] > WHOLE and not blocked >> goal[k] & 1 and self._rivals_whole(state, k)
        }

    def _rivals_whole(self, state: State, part: int) -> bool:
        return all(state[rival] == WHOLE for rival in self.places.rivals[part])

    def _to_partial(self, state: State, wrong: list[int]) -> Iterator[tuple[_Move, State]]:
        goal = self.places.target
        for op, members in self._by_op(goal, [k for k in wrong if goal[k] < WHOLE]).items():
            yield self._set(state, "to_partial", {k: goal[k] for k in members}, op)

    def _by_op(self, codes: State, parts: list[int]) -> dict[str, list[int]]:
        out: dict[str, list[int]] = {}
        for k in parts:
            out.setdefault(REDUCE_OPS[-1 - codes[k]], []).append(k)
        return out

    def _gathers(self, state: State, bound: list[int]) -> Iterator[tuple[_Move, State]]:
        for members in _subsets(bound):
            yield self._set(state, "all_gather", dict.fromkeys(members, WHOLE))

    def _free_targets(self, state: State, part: int, blocked: int) -> list[int]:
        """Where ``part`` could be bound now: its target, else the places where it may wait."""
        goal = self.places.target[part]
        if goal > WHOLE and not blocked >> goal & 1 and self._rivals_whole(state, part):
            return [goal]
        return self._free_parks(part, blocked)

    def _free_parks(self, part: int, blocked: int) -> list[int]:
        """Where ``part`` may wait now: one place that is in nobody's way does for all of them."""
        free = [at for at in self.places.parks[part] if not blocked >> at & 1]
        return [at for at in free if self.places.neutral >> at & 1][:1] or free

    def _bindings(self, state: State, parts: list[int], blocked: int) -> Iterator[dict[int, int]]:
        """Every way to bind some of ``parts`` at free places."""
        free = {k: targets for k in parts if (targets := self._free_targets(state, k, blocked))}
        for members in _subsets(list(free)):
            for targets in product(*(free[k] for k in members)):
                if not any(self.places.clashes[a] >> b & 1 for a, b in combinations(targets, 2)):
                    yield dict(zip(members, targets, strict=True))

    def _all_to_alls(self, state: State, bound: list[int], blocked: int) -> Iterator[tuple[_Move, State]]:
        movable = [k for k in bound if self.places.target[k] > WHOLE]
        for changes in self._bindings(state, movable, blocked):
            yield self._set(state, "all_to_all", changes)

    def _reductions(self, state: State, pending: list[int], blocked: int) -> Iterator[tuple[_Move, State]]:
        for op, members in self._by_op(state, pending).items():
            for changes in self._bindings(state, members, blocked):
                yield self._set(state, "reduce_scatter", changes, op)
            for some in _subsets(members):
                yield self._set(state, "all_reduce", dict.fromkeys(some, WHOLE), op)

    def _permutes(self, state: State, bound: list[int]) -> Iterator[tuple[_Move, State]]:
        """Cycles: each part takes the place that it wants from the next, the last one takes the first's."""
        goal, sizes = self.places.target, self.places.sizes
        holder = {at: k for k, at in enumerate(state) if at > WHOLE}
        for first in range(len(state)):
            if goal[first] <= WHOLE or state[first] < WHOLE or state[first] == goal[first]:
                continue
            cycle, last = [first], holder.get(goal[first])
            while last is not None and last not in cycle and goal[last] > WHOLE and goal[last] in holder:
                cycle.append(last)
                last = holder[goal[last]]
            if last is None:
                continue
            if last not in cycle:
                cycle.append(last)
            elif last != first:
                continue
            changes = {k: goal[k] for k in cycle[:-1]}
            changes[cycle[-1]] = state[first]
            if len(cycle) > 1 and all(sizes[k] == sizes[first] for k in cycle):
                if all(all(r in changes or state[r] == WHOLE for r in self.places.rivals[k]) for k in cycle):
                    yield self._set(state, "permute_ranks", changes)

    def _parked_slices(self, state: State, blocked: int, pending: bool) -> Iterator[tuple[_Move, State]]:
        """A part that is whole splits the value for a while, so that what follows moves less.

        That pays for a part that waits for its target; another must be gathered again, which pays only
        where it takes its share of a reduction.
        """
        for k, at in enumerate(state):
            if at == WHOLE and (pending or self.places.target[k] > WHOLE) and self._rivals_whole(state, k):
                for park in self._free_parks(k, blocked):
                    yield self._set(state, "shard", {k: park})


def _subsets(items: list[int]) -> Iterator[tuple[int, ...]]:
    for count in range(len(items), 0, -1):
        yield from combinations(items, count)
