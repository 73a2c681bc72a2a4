"""Make a graph smaller without changing its least cost."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from shardc.solver.energy import Infeasible
from shardc.solver.graph import Graph

# Entries of tables that are worked on at once: what a core's cache holds.
CHUNK = 1 << 15
# Entries of results that are kept in case another pair shares the table.
MAX_KEPT = 1 << 22
# Stands for inf where inf - inf would give nan.
HUGE = 1e300


def reduce(graph: Graph, changed: Iterable[int] | None = None) -> None:
    """Drop labels and merge variables until no rule applies any more; at least one least labelling remains.

    Args:
        graph: is changed in place.
        changed: the variables that lost labels since the graph was last reduced; all if not given.

    Raises:
        Infeasible: every labelling costs inf.
    """
    todo = set(graph.unary if changed is None else changed)
    while todo:
        todo |= set(drop_unsupported(graph, todo))
        around = _with_neighbours(graph, todo)
        todo = set(drop_separable(graph, around))
        todo |= set(drop_dominated(graph, around))
        todo |= set(merge_small_degrees(graph, around | todo))
        todo &= graph.unary.keys()


def _with_neighbours(graph: Graph, variables: Iterable[int]) -> set[int]:
    return {j for i in variables if i in graph.unary for j in (i, *graph.near[i])}


def drop_unsupported(graph: Graph, changed: Iterable[int]) -> list[int]:
    """Drop labels that cost inf, or that have a neighbour all of whose labels cost inf with them (arc consistency)."""
    alive: dict[int, np.ndarray] = {i: np.isfinite(costs) for i, costs in graph.unary.items()}
    for i, mask in alive.items():
        if not mask.any():
            raise Infeasible(f"variable {i} has no label of finite cost")
    allowed: dict[int, np.ndarray | None] = {}
    lost = {i for i, mask in alive.items() if not mask.all()}
    queue = deque(i for i in sorted(lost.union(changed)) if i in alive)
    waiting = set(queue)
    while queue:
        j = queue.popleft()
        waiting.discard(j)
        for i, table in graph.near[j].items():
            if id(table) not in allowed:
                finite = np.isfinite(table)
                allowed[id(table)] = None if finite.all() else finite
            finite_table = allowed[id(table)]
            if finite_table is None:
                continue
            mask = alive[i] & finite_table[alive[j]].any(axis=0)
            if mask.sum() == alive[i].sum():
                continue
            if not mask.any():
                raise Infeasible(f"variables {min(i, j)} and {max(i, j)} have no labels of finite cost together")
            alive[i] = mask
            if i not in waiting:
                waiting.add(i)
                queue.append(i)
    return graph.keep(alive)


def drop_separable(graph: Graph, variables: Iterable[int]) -> list[int]:
    """Remove pairs whose cost is a sum of a cost of either variable. Return the variables that lost a neighbour."""
    split: dict[int, tuple[np.ndarray, np.ndarray] | None] = {}
    lost = []
    for i in sorted(variables):
        for j, table in list(graph.near[i].items()):
            if id(table) not in split:
                split[id(table)] = _separate(table)
            parts = split[id(table)]
            if parts is not None:
                graph.unary[i] = graph.unary[i] + parts[0]
                graph.unary[j] = graph.unary[j] + parts[1]
                graph.remove_pair(i, j)
                lost += [i, j]
    return lost


def _separate(table: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Return a(x) and b(y) with ``table[x, y] = a(x) + b(y)``, or None."""
    if len(table) == 1:
        return np.zeros(1), table[0]
    if table.shape[1] == 1:
        return table[:, 0], np.zeros(1)
    if not np.isfinite(table).all():
        return None
    rows, columns = table[:, 0], table[0] - table[0, 0]
    error = np.abs(table - rows[:, None] - columns).max()
    return (rows, columns) if error <= 1e-15 * np.abs(table).max() else None


def drop_dominated(graph: Graph, variables: Iterable[int]) -> list[int]:
    """Drop label x where a label y costs no more, whatever the neighbours' labels are (Goldstein 1994).

    Of labels that cost the same everywhere the lowest one stays.
    """
    probes: dict[int, np.ndarray] = {}
    masks, kept = {}, 0
    alike: dict[tuple[bytes, tuple[int, ...]], np.ndarray | None] = {}
    for i in sorted(variables):
        costs, tables = graph.unary[i], list(graph.near[i].values())
        key = (costs.tobytes(), tuple(map(id, tables)))
        if key in alike:
            if (mask := alike[key]) is not None:
                masks[i] = mask
            continue
        if kept > MAX_KEPT:
            probes, kept = {}, 0
        for table in tables:
            if id(table) not in probes:
                probes[id(table)] = _probe_excess(table)
                kept += len(table) ** 2
        better, worse = _dominations(costs, tables, [probes[id(table)] for table in tables])
        alike[key] = None
        if not len(worse):
            continue
        mask = np.ones(len(costs), dtype=bool)
        for x in np.unique(worse)[::-1]:
            mask[x] = not mask[better[worse == x]].any()
        masks[i] = alike[key] = mask
    return graph.keep(masks)


def _probe_excess(table: np.ndarray) -> np.ndarray:
    """Return how much more label y costs than x with the neighbour's label that is cheapest with x, for all y and x."""
    cheapest = table.argmin(axis=1)
    return table[:, cheapest] - table[np.arange(len(table)), cheapest]


def _dominations(
    costs: np.ndarray, tables: list[np.ndarray], probes: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Return labels y and x, where y never costs more than x."""
    excess = sum(probes, costs[:, None] - costs)  # of y over x; not more than it is at worst
    np.fill_diagonal(excess, np.inf)
    better, worse = np.nonzero(excess <= 0)
    at_worst = excess[better, worse]
    for table, probe in zip(tables, probes, strict=True):
        if not len(better):
            break
        at_worst = at_worst - probe[better, worse] + _worst_excess(table, better, worse)
        hold = at_worst <= 0
        better, worse, at_worst = better[hold], worse[hold], at_worst[hold]
    return better, worse


def _worst_excess(table: np.ndarray, better: np.ndarray, worse: np.ndarray) -> np.ndarray:
    """Return ``max over z of table[y, z] - table[x, z]``, where inf - inf is no excess."""
    finite = np.where(np.isinf(table), HUGE, table)
    out = np.empty(len(better))
    step = max(1, CHUNK // table.shape[1])
    for start in range(0, len(out), step):
        part = slice(start, start + step)
        out[part] = (finite[better[part]] - table[worse[part]]).max(axis=1)
    return out


def merge_small_degrees(graph: Graph, variables: Iterable[int]) -> list[int]:
    """Eliminate variables with at most two neighbours, or one label; with two, only if the tables do not grow.

    Returns:
        the variables that took over costs or lost a neighbour.
    """
    queue = deque(sorted(i for i in variables if i in graph.unary))
    waiting = set(queue)
    touched: set[int] = set()
    products: dict[tuple, tuple] = {}
    while queue:
        i = queue.popleft()
        waiting.discard(i)
        near = list(graph.near[i])
        if not _eliminate(graph, i, products):
            continue
        touched.update(near)
        touched.discard(i)
        fresh = [j for j in near if j not in waiting]
        waiting.update(fresh)
        queue.extend(fresh)
    return sorted(touched)


def _eliminate(graph: Graph, i: int, products: dict[tuple, tuple]) -> bool:
    """Eliminate a variable if that makes the graph smaller; whether it did."""
    costs, near = graph.unary[i], graph.near[i]
    if not np.isfinite(costs.min()):
        raise Infeasible("the labels of finite cost cannot be combined")
    if len(near) == 0:
        graph.constant += float(costs.min())
        graph.remove(i, ())
        return True
    if len(costs) == 1:
        graph.constant += float(costs[0])
        for j, table in near.items():
            graph.unary[j] = graph.unary[j] + table[0]
        graph.remove(i, ())
        return True
    if len(near) > 2:
        return False
    factors = tuple(((j,), (graph.labels[j],), table) for j, table in near.items())
    if len(near) == 1:
        ((j, table),) = near.items()
        graph.unary[j] = graph.unary[j] + (costs[:, None] + table).min(axis=0)
    else:
        (a, to_a), (b, to_b) = near.items()
        existing = graph.near[a][b].size if b in graph.near[a] else 0
        if to_a.shape[1] * to_b.shape[1] > to_a.size + to_b.size + existing:
            return False
        key = (id(to_a), id(to_b), costs.tobytes())
        if key not in products:
            product = min_product(costs[:, None] + to_a, to_b)
            products[key] = (product, product.T, to_a, to_b)  # the last two keep the ids in the key alive
        graph.add_pair(a, b, *products[key][:2])
    graph.remove(i, factors)
    return True


def min_product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return ``min over v of left[v, a] + right[v, b]`` for all a and b."""
    left, right = np.ascontiguousarray(left), np.ascontiguousarray(right)
    out = np.full((left.shape[1], right.shape[1]), np.inf)
    rows = max(1, min(CHUNK // right.shape[1], left.shape[1]))
    step = max(1, CHUNK // (rows * right.shape[1]))
    for top in range(0, left.shape[1], rows):
        part = out[top : top + rows]
        for start in range(0, len(left), step):
            these = slice(start, start + step)
            sums = left[these, top : top + rows, None] + right[these, None, :]
            np.minimum(part, sums[0] if len(sums) == 1 else sums.min(axis=0), out=part)
    return out
