"""What layouts cost, and the least of every way to choose them, written a second time.

Strategies are those of `exact_spaces`; nothing here is from `shardc.passes.layout.exact`.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

import torch
from torch import fx

from shardc.cost.model import Pricing
from shardc.cost.redistribute import step_seconds
from shardc.ir import graph as ir
from shardc.ir.layout import Layout, strides
from shardc.ir.mesh import Mesh
from shardc.passes.layout.propagate import Problem
from shardc.passes.op_calls import operands_of
from shardc.rules.spec import Strategy, atoms
from tests.passes.exact_spaces import ops_of, spaces

aten = torch.ops.aten
MOVES = (aten.view.default, aten.permute.default)
REDUCE_WEIGHT = 0.2  # of the reduction of a parameter's gradient
Bound = tuple[int, int, int, str]  # dim, stride, radix, axis


def kernels(graph: fx.Graph, space: Mapping[fx.Node, Sequence[Strategy]], cost: Pricing) -> dict[fx.Node, list[float]]:
    """Seconds of each strategy's kernel; what stands between two products is one kernel, views are none."""
    root: dict[fx.Node, fx.Node] = {}
    stretch: dict[fx.Node, int] = {}
    count, open_ = 0, False
    for node in graph.nodes:
        root[node] = root[node.args[0]] if node.target in MOVES else node
        if node.op == "call_function" and node.target not in MOVES:
            dense = node.target is aten.mm.default
            count += dense or not open_
            open_, stretch[node] = not dense, count
    readers: dict[fx.Node, set[int]] = {}
    for node in graph.nodes:
        if node in stretch or node.op == "output":
            for x in node.all_input_nodes:
                readers.setdefault(root[x], set()).add(stretch.get(node, 0))
    seen: set[tuple[int, fx.Node]] = set()
    out: dict[fx.Node, list[float]] = {}
    for node in ops_of(graph):
        read = []
        for at, x in enumerate(operands_of(node) if node in stretch else ()):
            if stretch.get(root[x]) != stretch[node] and (stretch[node], root[x]) not in seen:
                seen.add((stretch[node], root[x]))
                read.append(at)
        writes = node in stretch and bool(readers.get(node, set()) - {stretch[node]})
        out[node] = []
        for one in space[node]:
            moved = 4 * (sum(one.operands[at].local_numel for at in read) + writes * one.results[0].local_numel)
            if node.target is aten.mm.default:
                left, right = (ir.value(x).shape for x in operands_of(node))
                ranks = prod(cut for cut in _loops(one))
                flops = 2 * left[0] * left[1] * right[1] / ranks
                out[node].append(cost.compute_seconds(flops, moved, torch.float32, False))
            else:
                out[node].append(cost.copy_seconds(moved) - cost.copy_seconds(0))
    return out


def _loops(one: Strategy) -> list[int]:
    """The sizes of the parts of axes over which the loops of a product are split."""
    mesh = one.results[0].mesh
    bound = [axis for layout in (*one.operands, *one.results) for axis in layout.bound]
    return [mesh.size(part) for part in {part for parts in atoms(mesh, bound).values() for part in parts}]


@lru_cache(maxsize=1 << 14)
def _ways(layouts: tuple[Layout, ...], have: Layout, cost: Pricing) -> dict[Layout, float]:
    """Seconds from ``have`` to each of a value's layouts: Dijkstra's shortest ways.

    A step is of one kind; slices and reductions may follow each other over layouts that are not among them.
    """
    cut = atoms(have.mesh, [axis for layout in layouts for axis in layout.axes])
    places = {layout: _places(layout, cut) for layout in layouts}
    order = {layout: at for at, layout in enumerate(layouts)}
    out: dict[Layout, float] = {}
    queue = [(0.0, order[have], have)]
    while queue:
        spent, _, here = heapq.heappop(queue)
        if here in out:
            continue
        out[here] = spent
        for then in layouts:
            if then not in out:
                steps = _steps(places[here], places[then])
                if [kind for kind, _ in steps] == ["all_to_all"] and _cut_otherwise(here, then):
                    steps = [("all_gather", steps[0][1]), ("shard", steps[0][1])]
                    more = _seconds(steps, here, cost)
                elif len(steps) <= 1 or {kind for kind, _ in steps} <= {"shard", "reduce_scatter", "all_reduce"}:
                    more = min(_seconds(order, here, cost) for order in itertools.permutations(steps))
                else:
                    continue
                heapq.heappush(queue, (spent + more, order[then], then))
    return out


def _cut_otherwise(one: Layout, other: Layout) -> bool:
    """Whether two layouts cut a dim at places of which neither divides the other: 3 x 4 and 4 x 3."""
    for mine, theirs in zip(one.dims, other.dims, strict=True):
        cuts = sorted({*strides(mine), *strides(theirs)})
        if any(larger % smaller for smaller, larger in itertools.pairwise(cuts)):
            return True
    return False


Place = tuple[int, int] | str  # dim and stride, or the pending reduction


def _places(layout: Layout, cut: Mapping[str, Sequence[str]]) -> dict[str, Place]:
    out: dict[str, Place] = {part: op for axis, op in layout.partial for part in cut[axis]}
    for dim, digits in enumerate(layout.dims):
        below = 1
        for radix, axis in reversed(digits):
            inner = below
            for part in reversed(cut[axis]) if axis is not None else ():
                out[part] = dim, inner
                inner *= layout.mesh.size(part)
            below *= radix
    return out


def _steps(before: Mapping[str, Place], after: Mapping[str, Place]) -> list[tuple[str, tuple[str, ...]]]:
    """For each kind of step, the parts that it changes."""
    kinds: dict[str, list[str]] = {}
    for part in sorted(before.keys() | after.keys()):
        old, new = before.get(part), after.get(part)
        if old == new:
            continue
        if isinstance(new, str):  # pending: nobody needs it where it is not
            kind = "never"
        elif old is None:
            kind = "shard"
        elif isinstance(old, str):
            kind = "all_reduce" if new is None else "reduce_scatter"
        else:
            kind = "all_gather" if new is None else "all_to_all"
        kinds.setdefault(kind, []).append(part)
    return [(kind, tuple(parts)) for kind, parts in kinds.items()]


def _seconds(steps: Sequence[tuple[str, tuple[str, ...]]], have: Layout, cost: Pricing) -> float:
    """Of steps in order, from ``have``."""
    total, held = 0.0, have.local_numel
    for kind, parts in steps:
        if kind == "never":
            return math.inf
        ranks = prod(map(have.mesh.size, parts))
        after = held * ranks if kind == "all_gather" else held // ranks if kind in ("shard", "reduce_scatter") else held
        total += step_seconds(kind, have.mesh, parts, held, after, 4, cost)
        held = after
    return total


def _one_axis_moves(have: Layout, want: Layout) -> bool:
    """Whether what is needed comes by collectives over one mesh axis: then all who need it share it."""
    cut = atoms(have.mesh, [*have.axes, *want.axes])
    before, after = _places(have, cut), _places(want, cut)
    changed = {part for part in before.keys() | after.keys() if before.get(part) != after.get(part)}
    axes = {part.partition(":")[0] for part in changed}
    return len(axes) == 1 and any(part.partition(":")[0] in axes for part in before)


# --- the program


@dataclass(frozen=True)
class Use:
    """One use of a value: the op, or None for the outside; by the op's strategies what is needed, as a number."""

    user: int | None
    needs: tuple[int, ...]
    weight: float


@dataclass
class Reference:
    """The objective of a program, and its least value by search.

    Args:
        wanted: layouts in which outputs are wanted.
        known: further layouts that are fixed.
    """

    graph: fx.Graph
    mesh: Mesh
    cost: Pricing
    wanted: Mapping[fx.Node, Layout]
    known: Mapping[fx.Node, Sequence[Layout]]
    explored: int = field(default=0, init=False)

    @classmethod
    def of(cls, problem: Problem, graph: fx.Graph, wanted: Mapping[fx.Node, Layout]) -> Reference:
        known = {node: [ir.layout(node)] for node in graph.nodes if node.op == "placeholder"}
        return cls(graph, problem.mesh, problem.cost, wanted, known | {node: [x] for node, x in wanted.items()})

    def __post_init__(self) -> None:
        self.ops = ops_of(self.graph)
        self.space = spaces(self.graph, self.mesh, self.known)

    def price(self) -> None:
        """Called when the space is complete."""
        self.kernels = list(kernels(self.graph, self.space, self.cost).values())
        grads = {n for role, n in ir.outputs(self.graph) if role.kind == "grad"}
        self.values = [node for node in self.graph.nodes if node.op != "output"]
        self.made: list[tuple[int, ...]] = []  # by value and strategy of its maker
        self.uses: list[list[Use]] = []
        self.layouts: list[list[Layout]] = []
        self.prices: list[list[list[tuple[float, bool]]]] = []  # and whether all who need it share it
        for node in self.values:
            made = [one.results[0] for one in self.space[node]] if node in self.space else [ir.layout(node)]
            needs = [
                (user, [one.operands[at] for one in self.space[op]], 1.0)
                for user, op in enumerate(self.ops) for at, x in enumerate(operands_of(op)) if x is node
            ]  # fmt: skip
            outside = [self.wanted[node]] if node in self.wanted else []
            number = {
                x: at for at, x in enumerate(dict.fromkeys([*made, *(x for _, n, _ in needs for x in n), *outside]))
            }
            self.layouts.append(list(number))
            self.made.append(tuple(number[x] for x in made))
            uses = [Use(user, tuple(number[x] for x in n), weight) for user, n, weight in needs]
            uses += [Use(None, (number[x],), REDUCE_WEIGHT if node in grads else 1.0) for x in outside]
            self.uses.append(uses)
            self.prices.append([])
            for have in dict.fromkeys(made):  # the first of `number`
                ways = _ways(tuple(number), have, self.cost)
                row = [(ways.get(want, math.inf), _one_axis_moves(have, want)) for want in number]
                self.prices[-1].append(row)
        place = {node: at for at, node in enumerate(self.values)}
        self.maker = [self.ops.index(node) if node in self.space else None for node in self.values]
        self.touched = [[*dict.fromkeys(place[x] for x in operands_of(op))] + [place[op]] for op in self.ops]

    def seconds(self, strategies: Mapping[fx.Node, Strategy]) -> float:
        """The objective where ops run so."""
        chosen = [self.space[op].index(strategies[op]) for op in self.ops]
        total = sum(self.kernels[at][number] for at, number in enumerate(chosen))
        return total + sum(self._value(at, chosen) for at in range(len(self.values)))

    def _value(self, at: int, chosen: Sequence[int]) -> float:
        """The reshards of a value: each needed layout once where one axis brings it, else once for each use.

        Args:
            chosen: by op, of the first ones.
        """
        maker = self.maker[at]
        if maker is not None and maker >= len(chosen):
            return 0.0
        made = self.made[at][chosen[maker] if maker is not None else 0]
        needs: dict[int, list[float]] = {}
        for use in self.uses[at]:
            if use.user is None or use.user < len(chosen):
                needs.setdefault(use.needs[0 if use.user is None else chosen[use.user]], []).append(use.weight)
        total = 0.0
        for want, weights in needs.items():
            if want != made:
                seconds, shared = self.prices[at][made][want]
                total += seconds * (max(weights) if shared else sum(weights))
        return total

    def least(self, below: float) -> float:
        """The least value of all choices if it is less than ``below``, else ``below``."""
        rest = [0.0]
        for seconds in reversed(self.kernels):
            rest.append(rest[-1] + min(seconds))
        rest.reverse()
        chosen: list[int] = []

        def descend(spent: float, best: float) -> float:
            at = len(chosen)
            if at == len(self.ops):
                return spent
            old = sum(self._value(x, chosen) for x in self.touched[at])
            reached = []
            for number, seconds in enumerate(self.kernels[at]):
                chosen.append(number)
                more = sum(self._value(x, chosen) for x in self.touched[at])
                reached.append((spent + more - old + seconds, number))
                chosen.pop()
            for total, number in sorted(reached):
                if total + rest[at + 1] >= best:
                    break
                self.explored += 1
                chosen.append(number)
                best = min(best, descend(total, best))
                chosen.pop()
            return best

        inputs = sum(self._value(at, ()) for at, maker in enumerate(self.maker) if maker is None)
        return min(below, descend(inputs, below))
