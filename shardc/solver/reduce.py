"""Exact reductions of a graph, and exact elimination of all its variables if the tables are small enough.

Reductions drop labels and merge variables; the graph keeps its least cost.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator

import numpy as np

from shardc.solver.cost_graph import Graph
from shardc.solver.energy import Clock, Infeasible, PairCosts, least_of_classes

# Table entries per vectorised operation: as many as a core's cache holds.
CHUNK = 1 << 15
# A variable with more labels is not searched for dominated ones: message passing drops as many in less time.
MANY = 1000
# Each label is compared with up to TRIED others, which are chosen by their costs for PROBES labels of the neighbours.
TRIED, PROBES = 4, 8
# Number of labels whose candidates are computed at once.
BLOCK = 256
# Stands for inf where inf - inf would give nan.
HUGE = 1e300


def reduce(graph: Graph, changed: Iterable[int] | None = None) -> None:
    """Drop labels and merge variables until no rule applies any more. At least one labelling of least cost remains.

    Args:
        graph: changed in place.
        changed: the variables that lost labels since the last reduction; None for all.

    Raises:
        Infeasible: every labelling costs inf.
    """
    todo = set(graph.unary if changed is None else changed)
    while todo:
        todo |= set(drop_unsupported(graph, todo))
        around = {j for i in todo if i in graph.unary for j in (i, *graph.near[i])}  # and their neighbours
        todo = set(drop_separable(graph, around))
        todo |= set(merge_small_degrees(graph, around | todo))
        todo |= set(drop_dominated(graph, (around | todo) & graph.unary.keys()))
        todo &= graph.unary.keys()


def drop_unsupported(graph: Graph, changed: Iterable[int]) -> list[int]:
    """Drop labels that cost inf, or that cost inf with every label of a neighbour (arc consistency), in place; return
    the variables that lost labels.

    Args:
        changed: the variables that lost labels since the last call.

    Raises:
        Infeasible: a variable loses all its labels.
    """
    alive: dict[int, np.ndarray] = {i: np.isfinite(costs) for i, costs in graph.unary.items()}
    for i, mask in alive.items():
        if not mask.any():
            raise Infeasible(f"variable {i} has no label of finite cost")
    lost = {i for i, mask in alive.items() if not mask.all()}
    queue = OrderedDict.fromkeys(i for i in sorted(lost.union(changed)) if i in alive)
    while queue:
        j, _ = queue.popitem(last=False)
        for i, table in graph.near[j].items():
            finite, share = table.finite
            if share == 1.0:
                continue
            classes = np.unique(table.rows[alive[j]])
            mask = alive[i] & finite[classes].any(axis=0)[table.columns]
            if mask.sum() == alive[i].sum():
                continue
            if not mask.any():
                raise Infeasible(f"variables {min(i, j)} and {max(i, j)} have no labels of finite cost together")
            alive[i] = mask
            queue.setdefault(i)
    return graph.keep(alive)


def drop_separable(graph: Graph, variables: Iterable[int]) -> list[int]:
    """Remove pairs whose costs are a sum ``a[x] + b[y]``, in place, adding the terms to the two variables' own costs;
    return the variables that lost a neighbour.
    """
    lost = []
    for i in sorted(variables):
        for j, table in list(graph.near[i].items()):
            if table.terms is not None:
                of_i, of_j = table.terms
                graph.unary[i] = graph.unary[i] + of_i[table.rows]
                graph.unary[j] = graph.unary[j] + of_j[table.columns]
                graph.remove_pair(i, j)
                lost += [i, j]
    return lost


def drop_dominated(graph: Graph, variables: Iterable[int]) -> list[int]:
    """Drop each label x for which a label y never costs more, whatever the neighbours' labels are (Goldstein 1994), in
    place; return the variables that lost labels.

    Of labels with equal costs the lowest one stays. Some dominated labels may be missed (see `_candidates`); variables
    with more than `MANY` labels are left out.
    """
    masks = {}
    mask_of: dict[tuple[bytes, tuple[int, ...]], np.ndarray | None] = {}
    for i in sorted(variables):
        costs, tables = graph.unary[i], list(graph.near[i].values())
        if len(costs) > MANY:
            continue
        key = (costs.tobytes(), tuple(map(id, tables)))
        if key not in mask_of:
            better, worse = _dominations(costs, tables)
            mask_of[key] = _without(len(costs), better, worse) if len(worse) else None
        if (mask := mask_of[key]) is not None:
            masks[i] = mask
    return graph.keep(masks)


def _without(labels: int, better: np.ndarray, worse: np.ndarray) -> np.ndarray:
    """Return a mask of the labels to keep. A label is dropped if another label that is kept dominates it (never costs
    more).

    Args:
        labels: number of labels.
        better, worse: pairs of labels of which the first dominates the second.
    """
    mask = np.ones(labels, dtype=bool)
    order = np.argsort(worse, kind="stable")
    better, worse = better[order], worse[order]
    ends = np.flatnonzero(np.r_[np.diff(worse) > 0, True]) + 1
    for start, end in zip(reversed([0, *ends[:-1]]), reversed(ends), strict=True):
        mask[worse[start]] = not mask[better[start:end]].any()
    return mask


def _dominations(costs: np.ndarray, tables: list[PairCosts]) -> tuple[np.ndarray, np.ndarray]:
    """Return arrays (y, x) of pairs of labels of one variable in which y dominates x: y never costs more than x,
    whatever labels the neighbours have.

    Args:
        costs: cost of each label.
        tables: pair costs with each neighbour, of which there is at least one; this variable's labels come first.
    """
    pairs = []
    for better, worse in _candidates(costs, tables):
        excess = costs[better] - costs[worse]  # of y over x; a lower bound of the worst case
        for table in tables:
            excess += _excess(table, better, worse)
        hold = excess <= 0
        pairs.append((better[hold], worse[hold], excess[hold]))
    better, worse, at_worst = map(np.concatenate, zip(*pairs, strict=True))
    for table in tables:
        if not len(better):
            break
        at_worst = at_worst - _excess(table, better, worse)
        at_worst += _worst_excess(table.costs, table.rows[better], table.rows[worse])
        hold = at_worst <= 0
        better, worse, at_worst = better[hold], worse[hold], at_worst[hold]
    return better, worse


def _excess(table: PairCosts, better: np.ndarray, worse: np.ndarray) -> np.ndarray:
    """Return, for each pair of labels y (``better``) and x (``worse``), how much more y costs than x if the neighbour
    has the label that is cheapest with x. ``table``: pair costs with the neighbour.
    """
    of_worse = table.rows[worse]
    at = table.cheapest[of_worse]
    excess: np.ndarray = table.costs[table.rows[better], at] - table.costs[of_worse, at]
    return excess


def _candidates(costs: np.ndarray, tables: list[PairCosts]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield arrays (y, x) of pairs of labels of one variable that are worth a full test of whether y dominates x (never
    costs more). A quick test with a few labels of the neighbours has passed.

    Strategies can replace each other only if they produce the same layout. So in the table with the most infinite
    entries, y must be allowed with the neighbour's label that is cheapest with x. Of many such y, those with the least
    sums are tried.

    Args:
        costs: cost of each label.
        tables: pair costs with each neighbour, of which there is at least one; this variable's labels come first.
    """
    scores = []
    for probe in range(PROBES):
        at = [probe * table.costs.shape[1] // PROBES for table in tables]
        scores.append(sum((table.costs[table.rows, y] for table, y in zip(tables, at, strict=True)), costs))
    order = np.argsort(np.minimum(scores, HUGE).sum(axis=0), kind="stable")
    scores = [score[order] for score in scores]
    strictest = min(tables, key=lambda table: table.finite[1])
    allowed, rows = strictest.finite[0].T, strictest.rows[order]
    for start in range(0, len(costs), BLOCK):
        part, before = slice(start, start + BLOCK), slice(start + BLOCK)
        mask = np.ones((len(costs[part]), len(costs[before])), dtype=bool)
        for score in scores:
            mask &= score[before] <= score[part, None]
        mask &= allowed[strictest.cheapest[rows[part]]][:, rows[before]]
        mask[np.arange(len(mask)), np.arange(start, start + len(mask))] = False
        mask &= mask.cumsum(axis=1, dtype=np.int32) <= TRIED
        worse, better = np.nonzero(mask)
        yield order[better], order[worse + start]


def _worst_excess(table: np.ndarray, better: np.ndarray, worse: np.ndarray) -> np.ndarray:
    """Return, for pairs of classes y (``better``) and x (``worse``), by how much y costs more than x in the worst case:
    ``max over z of table[y, z] - table[x, z]``, where inf - inf counts as 0.
    """
    finite = np.where(np.isinf(table), HUGE, table)
    pairs, inverse = np.unique(better * len(table) + worse, return_inverse=True)
    rows, columns = np.divmod(pairs, len(table))
    out = np.empty(len(pairs))
    step = max(1, CHUNK // table.shape[1])
    for start in range(0, len(out), step):
        part = slice(start, start + step)
        out[part] = (finite[rows[part]] - table[columns[part]]).max(axis=1)
    return out[inverse]


def merge_small_degrees(graph: Graph, variables: Iterable[int]) -> list[int]:
    """Eliminate, in place, variables with at most two neighbours (with two, only if the tables do not grow) or with one
    label; return the variables whose costs or neighbours changed.
    """
    queue = OrderedDict.fromkeys(sorted(i for i in variables if i in graph.unary))
    touched: set[int] = set()
    products: dict[tuple, tuple] = {}
    while queue:
        i, _ = queue.popitem(last=False)
        near = dict.fromkeys(graph.near[i])
        if _eliminate(graph, i, products):
            touched.update(near)
            touched.discard(i)
            queue.update(near)
    return sorted(touched)


def _eliminate(graph: Graph, i: int, products: dict[tuple, tuple]) -> bool:
    """Eliminate variable ``i`` in place if it has one label, or at most two neighbours (with two, only if the tables do
    not grow); return whether it was eliminated.

    Args:
        products: caches the results of `_through` for pairs of tables.
    """
    costs, near = graph.unary[i], graph.near[i]
    if not np.isfinite(costs.min()):
        raise Infeasible("the labels of finite cost cannot be combined")
    if not near or len(costs) == 1:
        graph.constant += float(costs.min())
        for j, table in near.items():
            graph.unary[j] = graph.unary[j] + table.row(0)
        graph.remove(i, ())
        return True
    if len(near) > 2:
        return False
    factors = tuple(((j,), (graph.labels[j],), table) for j, table in near.items())
    if len(near) == 1:
        ((j, table),) = near.items()
        least = (least_of_classes(table.rows, costs)[:, None] + table.costs).min(axis=0)
        graph.unary[j] = graph.unary[j] + least[table.columns]
    else:
        (a, to_a), (b, to_b) = near.items()
        existing = graph.near[a].get(b)
        size, room = to_a.costs.shape[1] * to_b.costs.shape[1], to_a.size + to_b.size
        if existing is not None:
            size, room = existing.sum_size(to_a.columns, to_b.columns), room + existing.size
        if size > room:
            return False
        key = (id(to_a), id(to_b), costs.tobytes())
        if key not in products:
            product, alone = _through(costs, to_a, to_b)
            products[key] = (product, product.transposed, alone, to_a, to_b)  # the ids in the key are kept alive
        product, turned, alone = products[key][:3]
        graph.add_pair(a, b, product, turned)
        if alone is not None:
            factors = (factors[alone],)
    graph.remove(i, factors)
    return True


def _through(costs: np.ndarray, to_a: PairCosts, to_b: PairCosts) -> tuple[PairCosts, int | None]:
    """Return (pair costs of the neighbours a and b after the variable between them is minimised out, the neighbour that
    alone decides the variable's label: 0 for a, 1 for b, None for neither).

    A neighbour decides alone if each of its labels leaves the variable one class of labels of finite cost.

    Args:
        costs: cost of each label of the variable.
        to_a, to_b: pair costs with the neighbours a and b; the variable's labels come first.
    """
    both, classes = np.unique(to_a.rows * len(to_b.costs) + to_b.rows, return_inverse=True)
    of_a, of_b = np.divmod(both, len(to_b.costs))
    left, right = least_of_classes(classes, costs)[:, None] + to_a.costs[of_a], to_b.costs[of_b]
    for decider, other, turned in ((left, right, False), (right, left, True)):
        finite = np.isfinite(decider)
        if (finite.sum(axis=0) == 1).all():  # each label of the neighbour leaves one choice
            only = finite.argmax(axis=0)
            product = decider[only, np.arange(len(only))][:, None] + other[only]
            return PairCosts(product.T if turned else product, to_a.columns, to_b.columns), int(turned)
    return PairCosts(min_product(left, right), to_a.columns, to_b.columns), None


def min_product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the min-plus product of two matrices, [a, b]: the least of ``left[v, a] + right[v, b]`` over v."""
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


# Limits, in units of the largest allowed table, of the entries that are added up and of those that are stored.
WORK, KEPT = 10, 2
# Entries of a table that are added up at once.
ELIMINATION_CHUNK = 1 << 20

Factor = tuple[tuple[int, ...], np.ndarray | PairCosts]
"""Variables in ascending order, and costs with one axis for each of them."""


def plan_order(graph: Graph, table: int) -> list[int] | None:
    """Return an order in which all variables can be eliminated, smallest table first; None if a table would have more
    than ``table`` entries, or all tables together too many (`WORK`, `KEPT`).
    """
    near = {i: set(graph.near[i]) for i in graph.unary}
    sizes = {i: len(costs) for i, costs in graph.unary.items()}

    def entries(i: int) -> int:
        return sizes[i] * math.prod(sizes[j] for j in near[i])

    current = {i: entries(i) for i in near}
    heap = [(count, i) for i, count in current.items()]
    heapq.heapify(heap)
    order, total, stored = [], 0, 0
    while heap:
        count, i = heapq.heappop(heap)
        if i not in near or current[i] != count:
            continue
        total += count
        stored += count // sizes[i]
        if count > table or total > WORK * table or stored > KEPT * table:
            return None
        order.append(i)
        around = near.pop(i)
        for j in around:
            near[j] |= around
            near[j] -= {i, j}
        for j in around:
            current[j] = entries(j)
            heapq.heappush(heap, (current[j], j))
    return order


def eliminate(graph: Graph, order: list[int], clock: Clock) -> bool:
    """Eliminate all variables of a graph in place, in the given ``order``; the graph's constant is then the least cost.
    Return False, with the graph unchanged, if the budget of ``clock`` does not suffice.

    Raises:
        Infeasible: every labelling costs inf.
    """
    buckets: dict[int, list[Factor]] = {i: [] for i in graph.unary}
    place = {i: p for p, i in enumerate(order)}
    for i, j, table in graph.edges():
        buckets[min(i, j, key=place.__getitem__)].append(((i, j), table))
    constant, factors_of = graph.constant, {}
    for i in order:
        if clock.over():
            return False
        factors = [_axis_first(factor, i) for factor in buckets.pop(i)]
        factors_of[i] = tuple((scope, tuple(graph.labels[j] for j in scope), costs) for scope, costs in factors)
        clock.spend(math.prod(len(graph.unary[j]) for j in {i, *(j for s, _ in factors for j in s)}))
        scope, costs = _minimise(graph.unary[i], factors, {j: len(graph.unary[j]) for s, _ in factors for j in s})
        if not np.isfinite(costs.min()):
            raise Infeasible("the labels of finite cost cannot be combined")
        if scope:
            buckets[min(scope, key=place.__getitem__)].append((scope, costs))
        else:
            constant += float(costs)
    for i in order:
        graph.remove(i, factors_of[i])
    graph.constant = constant
    return True


def _axis_first(factor: Factor, i: int) -> Factor:
    """Return (variables other than `i`, the factor's cost array with the axis of variable `i` moved to the front)."""
    scope, costs = factor
    axis = scope.index(i)
    rest = scope[:axis] + scope[axis + 1 :]
    if isinstance(costs, PairCosts):
        return rest, costs.transposed if axis else costs
    return rest, np.moveaxis(costs, axis, 0)


def _minimise(unary: np.ndarray, factors: list[Factor], sizes: dict[int, int]) -> tuple[tuple[int, ...], np.ndarray]:
    """Minimise out one variable. Return (the other variables, the least sum of costs over its labels: an array with one
    axis per other variable).

    Args:
        unary: cost of each of the variable's labels.
        factors: costs whose first axis is the variable's, and the variables of the other axes.
        sizes: other variable -> its number of labels.
    """
    scope = tuple(sorted(sizes))
    shape = tuple(sizes[j] for j in scope)
    aligned = [unary.reshape(-1, *[1] * len(scope))]
    for names, table in factors:
        costs = table.dense() if isinstance(table, PairCosts) else table
        aligned.append(costs.reshape(len(unary), *(sizes[j] if j in names else 1 for j in scope)))
    aligned.sort(key=lambda costs: costs.size)  # the small ones are added up first
    out = np.full(shape, math.inf)
    step = max(1, ELIMINATION_CHUNK // max(1, out.size))
    for start in range(0, len(unary), step):
        parts = [costs[start : start + step] for costs in aligned]
        np.minimum(out, sum(parts[1:], parts[0]).min(axis=0), out=out)
    return scope, out
