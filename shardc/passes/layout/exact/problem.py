"""The variables and costs of the exact layout problem. Together they are an energy: a sum of costs of variables and of
pairs of variables, which the solver minimizes.

The label of an op's variable is its strategy, and costs the seconds of its kernel. The label of a value's variable is
the layout in which it is produced, with further layouts that several uses share; it costs the reshards to these. Each
use costs the reshard from the nearest of these layouts to the layout that its op needs. ``docs/auto.md`` states the
problem in full.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations

import numpy as np
from torch import fx

from shardc.cost.model import Pricing
from shardc.ir.layout import Layout
from shardc.passes.layout.exact.prices import Traffic, one_axis, prices
from shardc.passes.op_calls import Work, call_of, operations, with_sending
from shardc.rules.spec import Spec, Strategy
from shardc.solver import Energy, PairCosts

Table = np.ndarray
SHARED = 600  # labels of a value beyond which only single layouts are shared


@dataclass(frozen=True)
class Use:
    """A use of a value by an op, or as a graph output.

    Args:
        variable: number of the op's variable; None for a graph output.
        needs: the layout of the value that each label of ``variable`` needs; for an output, its one layout.
        weight: weight of the reshard's seconds.
    """

    variable: int | None
    needs: tuple[Layout, ...]
    weight: float = 1.0


@dataclass
class Builder:
    """Collects the variables and costs of a layout problem for the solver.

    Args:
        cost: the cost model.

    Attributes:
        unary: for each variable, the seconds of each label.
        memory: for each variable, the bytes of each label; 0.0 if it holds none.
        pairs: (variable, variable, seconds of each pair of labels).
    """

    cost: Pricing
    unary: list[Table] = field(default_factory=list)
    memory: list[Table | float] = field(default_factory=list)
    pairs: list[tuple[int, int, Table | PairCosts]] = field(default_factory=list)

    def add_variable(self, costs: Table, memory: Table | float = 0.0) -> int:
        """Adds a variable to the problem, given the seconds (``costs``) and the bytes (``memory``) of each of its
        labels; returns its number.
        """
        self.unary.append(costs)
        self.memory.append(memory)
        return len(self.unary) - 1

    def energy(self, byte: float) -> Energy:
        """Returns the energy to minimize; a byte of memory counts as ``byte`` seconds."""
        costs = (own + byte * memory for own, memory in zip(self.unary, self.memory, strict=True))
        return Energy(tuple(costs), tuple(self.pairs))

    def bytes(self, labels: Sequence[int]) -> float:
        """Returns the bytes of memory that a solution needs, given the label of each variable."""
        return float(
            sum(memory[at] for memory, at in zip(self.memory, labels, strict=True) if isinstance(memory, np.ndarray))
        )

    def add_value(
        self, maker: int, produced: tuple[Layout, ...], uses: Sequence[Use], itemsize: int, memory: float = 0.0
    ) -> None:
        """Adds a variable for a value, with its costs and its pair costs with the op that makes it and the ops that use
        it.

        Args:
            maker: number of the variable of the op that produces the value.
            produced: for each label of ``maker``, the layout in which the op produces the value.
            uses: the uses of the value.
            itemsize: bytes per element of the value.
            memory: weight of the value's bytes on a rank; 0 if it is not saved.
        """
        layouts, costs, tables = _value_costs(produced, tuple((u.needs, u.weight) for u in uses), itemsize, self.cost)
        sizes = memory * itemsize * np.array([layout.local_numel for layout in layouts]) if memory else 0.0
        index = self.add_variable(costs, sizes)
        for use, table in zip(uses, tables, strict=True):
            # An output has no variable: its layout is fixed, and its reshard is a cost of the value alone.
            if use.variable is None:
                self.unary[index] = self.unary[index] + table.column(0)
            else:
                self.pairs.append((index, use.variable, table))
        # The label of the value has to agree with the layout in which the op's label produces it.
        self.pairs.append((maker, index, _production_costs(produced, layouts)))


@lru_cache(maxsize=1 << 10)
def _production_costs(produced: tuple[Layout, ...], layouts: tuple[Layout, ...]) -> PairCosts:
    """Returns pair costs of an op's labels and a value's labels: inf where the op's label produces the value in another
    layout (``produced``) than the value's label says (``layouts``), else 0.
    """
    index = {layout: at for at, layout in enumerate(dict.fromkeys(produced))}
    differs = np.where(np.eye(len(index), dtype=bool), 0.0, np.inf)
    return PairCosts.by_class(differs, _indices(produced, index), _indices(layouts, index))


@lru_cache(maxsize=1 << 10)
def _value_costs(
    produced: tuple[Layout, ...], uses: tuple[tuple[tuple[Layout, ...], float], ...], itemsize: int, cost: Pricing
) -> tuple[tuple[Layout, ...], Table, tuple[PairCosts, ...]]:
    """Returns, of the labels of a value, (the layout in which each produces the value, seconds of each, pair costs with
    each of ``uses``). ``produced``: for each label of the value's op, the layout in which the op produces the value.

    Each of ``uses`` is (layout that each of its labels needs, weight of its seconds).
    """
    layouts = tuple(dict.fromkeys(produced))
    # Any fixed order of all layouts.
    place = {x: at for at, x in enumerate(dict.fromkeys((*layouts, *(x for needs, _ in uses for x in needs))))}
    # In one order, so that uses with equal needs share an entry of the cache.
    wanted = tuple((tuple(sorted(set(needs), key=place.__getitem__)), w) for needs, w in uses)
    label_layouts, costs, tables = _label_costs(layouts, wanted, itemsize, cost)
    # The tables have a column for each distinct layout: that of each label of the use, which may need equal ones.
    columns = (
        _indices(needs, {x: at for at, x in enumerate(some)})
        for (needs, _), (some, _) in zip(uses, wanted, strict=True)
    )
    return label_layouts, costs, tuple(PairCosts(*table, at) for table, at in zip(tables, columns, strict=True))


@lru_cache(maxsize=1 << 10)
def _label_costs(
    layouts: tuple[Layout, ...], uses: tuple[tuple[tuple[Layout, ...], float], ...], itemsize: int, cost: Pricing
) -> tuple[tuple[Layout, ...], Table, tuple[tuple[Table, Table], ...]]:
    """Returns, of the labels of a value, (the layout in which each produces the value, seconds of each, tables of costs
    for each use). ``layouts``: the distinct layouts in which the value may be produced; ``uses``: (distinct layouts
    that the use may need, weight of its seconds) of each.

    A label is a produced layout with some needed layouts that several uses share (`_shared_reshards`). The tables of a
    use are the seconds [class of labels, needed layout] and the class of each label: labels of one class cost the use
    the same.
    """
    wanted = tuple(dict.fromkeys(x for needs, _ in uses for x in needs))
    table = prices(layouts, wanted, itemsize, cost)
    column = {layout: at for at, layout in enumerate(wanted)}
    weight = max((w for _, w in uses), default=1.0)  # that of a shared reshard
    # For each label: the row of its produced layout in ``table``, the columns of the layouts that it shares.
    rows, shared = _shared_reshards(
        one_axis(layouts, wanted) & np.isfinite(table), [needs for needs, _ in uses], column
    )
    full = table[rows]  # [label, needed layout]: seconds of the reshard from the label's produced layout
    costs = np.zeros(len(rows))
    # A shared reshard is paid once, by the label, and costs the uses that read it nothing.
    for at, columns in enumerate(shared):
        costs[at] = weight * full[at, columns].sum()
        full[at, columns] = 0.0
    tables = {}  # equal uses share one
    for needs, w in dict.fromkeys(uses):
        some = {column[x] for x in needs}
        seen: dict[tuple[int, ...], int] = {}  # key of a class -> its number
        # Labels with one produced layout and the same shared layouts, of those that this use may need, form a class.
        keys = ((r, *(s for s in columns if s in some)) for r, columns in zip(rows, shared, strict=True))
        classes = np.array([seen.setdefault(key, len(seen)) for key in keys])
        _, first = np.unique(classes, return_index=True)  # one label of each class
        tables[needs, w] = w * full[np.ix_(first, _indices(needs, column))], classes
    return tuple(layouts[row] for row in rows), costs, tuple(tables[use] for use in uses)


def _indices(layouts: Sequence[Layout], index: Mapping[Layout, int]) -> Table:
    """Returns ``index[x]`` of each layout x in ``layouts``, as an int array."""
    return np.array([index[layout] for layout in layouts])


def _shared_reshards(
    moves: Table, uses: Sequence[Sequence[Layout]], column: Mapping[Layout, int]
) -> tuple[list[int], list[list[int]]]:
    """Enumerates the labels of a value. Returns, for all labels, (rows of ``moves``: the layout in which the value is
    produced, lists of columns: needed layouts that several uses share).

    Only reshards that two uses may need are shared, at most half as many as there are uses, and at most two.

    Args:
        moves: [produced layouts, needed layouts]: whether a reshard from one to the other is worth sharing.
        uses: the layouts that each use may need.
        column: needed layout -> its column in ``moves``.
    """
    count = np.zeros(len(column), dtype=int)  # for each needed layout, the uses that may need it
    for needs in uses:
        count[sorted({column[x] for x in needs})] += 1
    worth = moves & (count > 1)
    most_shared = min(len(uses) // 2, 2)
    rows: list[int] = []
    shared: list[list[int]] = []
    for row in range(len(worth)):
        columns = np.nonzero(worth[row])[0].tolist()
        # Pairs of shared layouts only as long as they do not make too many labels.
        most_in_row = most_shared if len(worth) * len(columns) ** 2 < 2 * SHARED else min(most_shared, 1)
        for size in range(most_in_row + 1):  # 0: the label that shares nothing
            for some in combinations(columns, size):
                rows.append(row)
                shared.append(list(some))
    return rows, shared


def kernel_seconds(
    node: fx.Node, spec: Spec | None, strategies: Sequence[Strategy], traffic: Traffic, cost: Pricing
) -> Table:
    """Returns the predicted seconds of an op's kernel on a rank under each of ``strategies``: a roofline of operations
    and memory traffic, and for a dense op the communication inside it that compute does not hide. They are 0 without a
    rule.
    """
    if spec is None:
        return np.zeros(len(strategies))
    work = Work.of(call_of(node))
    dtypes = work.dtypes  # of the operands, then of the results
    out = []
    for strategy in strategies:
        # Bytes between memory and the chip; fused operands stay in registers and count nothing.
        moved = sum(strategy.operands[at].local_numel * dtypes[at].itemsize for at in traffic.reads)
        if traffic.writes:
            results = zip(strategy.results, dtypes[len(strategy.operands) :], strict=True)
            moved += sum(x.local_numel * dtype.itemsize for x, dtype in results)
        if traffic.dense:
            computed = cost.compute_seconds(operations(spec, strategy), moved, dtypes[0], work.attention)
            out.append(with_sending(spec, strategy.operands, work, cost, computed))
        else:
            # Part of a fused kernel: without the fixed seconds of a kernel, which remain for 0 bytes.
            out.append(cost.copy_seconds(moved) - cost.copy_seconds(0))
    return np.array(out)
