"""Layout problem in which the storage of parameters and the axes of the batch are chosen, too.

The labels of a parameter's variable are pairs of a compute and a storage layout. Storage is the compute layout, or is
split further over the axes of an ``fsdp`` entry. A label costs its gathers and the memory that it holds; the gradient
goes to the storage layout. The labels of one more variable are the sets of axes that split the batch of all inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
from torch import fx

from shardc.ir import graph as ir
from shardc.ir.layout import Layout
from shardc.passes.exact.chooser import LayoutProblem
from shardc.passes.exact.combine_axes import nested
from shardc.passes.exact.prices import prices
from shardc.passes.exact.problem import Use
from shardc.passes.seed import narrowed
from shardc.rules.spec import Strategy, merge

Stored = tuple[Layout, Layout]  # (compute layout, storage layout)


@dataclass(frozen=True)
class StorageChoice:
    """Storage and batch choices that the plan leaves open.

    Args:
        over: axes over which parameters may be sharded in storage and gathered for compute.
        params: (name, compute layout) -> the storage layouts to choose from; none for a parameter that the plan fixes,
            and none for a compute layout that the plan does not allow.
        batch: the sets of axes that may split the batch, each in mesh order; none if the plan fixes them.
        copies: copies of a parameter's shard in memory: itself, its gradient, its optimizer's state.
        gathers: gathers of a parameter in a step.
    """

    over: tuple[str, ...]
    params: Callable[[str, Layout], Sequence[Layout]]
    batch: tuple[tuple[str, ...], ...]
    copies: float = 0.0
    gathers: float = 2.0


@dataclass
class OpenLayoutProblem(LayoutProblem):
    """Layout problem of one graph whose plan fixes only some parameters and inputs.

    Attributes:
        storages: open parameter -> its labels.
        rows: input or tangent that follows the batch -> its layout for each set of batch axes.
        results: output that follows the batch -> its layout for each set of batch axes.
        param_of: gradient of an open parameter -> the parameter.
        batch_variable: variable of the axes that split the batch.
    """

    free: StorageChoice = field(default_factory=lambda: StorageChoice((), lambda name, compute: (), ((),)))

    # --- reading a solution

    def stored(self, labels: Sequence[int]) -> dict[str, Stored]:
        """Returns the compute and storage layout of each open parameter."""
        return {ir.info(node).name: found[labels[self.variable[node]]] for node, found in self.storages.items()}

    def batch(self, labels: Sequence[int]) -> tuple[str, ...]:
        """Returns the axes that split the batch."""
        return self.free.batch[labels[self.batch_variable]] if self.free.batch else ()

    # --- the problem

    def _start(self) -> None:
        self.storages: dict[fx.Node, list[Stored]] = {}
        self.rows: dict[fx.Node, list[Layout]] = {}
        for node in ir.placeholders(self.graph):
            role = ir.role(node)
            if role.kind == "param" and self.free.params(ir.info(node).name, ir.layout(node)):
                self.storages[node] = []
            elif role.kind == "input" and self.free.batch and ir.is_tensor(node) and not ir.layout(node).axes:
                self.rows[node] = [_rows(ir.layout(node), axes) for axes in self.free.batch]
        self.results: dict[fx.Node, list[Layout]] = {}
        if self.free.batch:
            self._tied_outputs({ir.value(node).shape[0] for node in self.rows if ir.value(node).shape})
        for node in (*self.storages, *self.rows):
            del self.outside.fixed[node]
        of = {ir.info(node).name: node for node in self.storages}
        grads = [(role.name, node) for role, node in ir.outputs(self.graph) if role.kind == "grad"]
        self.param_of = {node: of[name] for name, node in grads if name in of and isinstance(node, fx.Node)}
        for grad in self.param_of:
            del self.outside.wanted[grad]
        self.batch_variable = self.builder.variable(np.zeros(max(len(self.free.batch), 1)))

    def _tied_outputs(self, sizes: set[int]) -> None:
        """Ties outputs whose dim 0 has one of ``sizes`` (the batch), and their tangents, to the inputs' layouts."""
        by_index: dict[int, list[Layout]] = {}
        for role, node in ir.outputs(self.graph):
            if role.kind == "output" and isinstance(node, fx.Node):
                whole = Layout.whole(self.mesh, ir.value(node).shape)
                is_batch = bool(whole.shape) and whole.shape[0] in sizes
                by_index[role.index] = [_rows(whole, axes if is_batch else ()) for axes in self.free.batch]
                self.results[node] = by_index[role.index]
                self.outside.wanted.pop(node, None)
        op = "avg" if self.problem.reduce == "mean" else "sum"
        split = [{a for found in by_index.values() for a in found[at].bound} for at in range(len(self.free.batch))]
        for node in ir.placeholders(self.graph, "tangent"):
            self.rows[node] = [
                layout.with_partial([a for a in self.mesh.axes if a in split[at] and a not in layout.bound], op)
                for at, layout in enumerate(by_index[ir.role(node).index])
            ]

    def _seeds(self) -> dict[tuple[fx.Node, int], list[Layout]]:
        return super()._seeds() | {(node, 0): rows for node, rows in self.rows.items()}

    def _options(self, node: fx.Node) -> tuple[Strategy, ...]:
        if node in self.rows:
            return tuple(Strategy((), (layout,)) for layout in self.rows[node])
        if node in self.storages:
            name = ir.info(node).name
            self.storages[node] = [(c, s) for c in self._computes(node) for s in self.free.params(name, c)]
            return tuple(Strategy((), (compute,)) for compute, _ in self.storages[node])
        return super()._options(node)

    def _costs(self, node: fx.Node, options: tuple[Strategy, ...]) -> np.ndarray:
        if node not in self.storages:
            return super()._costs(node, options)
        item = ir.value(narrowed(node)).itemsize
        gathers = [prices((storage,), (compute,), item, self.cost)[0, 0] for compute, storage in self.storages[node]]
        return self.weights.of(node) * self.weights.gather * self.free.gathers * np.array(gathers)

    def _memory(self, node: fx.Node) -> np.ndarray | float:
        if node not in self.storages:
            return super()._memory(node)
        size = self.weights.of(node) * self.free.copies * ir.value(node).itemsize
        return size * np.array([storage.local_numel for _, storage in self.storages[node]])

    def _computes(self, node: fx.Node) -> list[Layout]:
        """Returns a parameter's possible compute layouts; none is split over axes that may only split storage."""
        if ir.layout(node).axes:
            return [ir.layout(node)]
        choices = []
        for closure in self.closures:
            layouts = closure.layouts.get((node, 0), {}) if closure.axis not in self.free.over else {}
            choices.append([None, *(x for x in layouts if not x.partial and not any(":" in a for a in x.bound))])
        out: dict[Layout, None] = {}
        for choice in product(*choices):
            if (compute := joined(ir.layout(node), [x for x in choice if x is not None])) is not None:
                out[compute] = None
        return list(out)

    def _extra_uses(self) -> list[tuple[fx.Node, Use]]:
        uses = []
        for grad, param in self.param_of.items():
            layouts = tuple(storage for _, storage in self.storages[param])
            uses.append((grad, Use(self.variable[param], layouts, self.weights.reduce * self.weights.of(param))))
        uses += [(node, Use(self.batch_variable, tuple(layouts))) for node, layouts in self.results.items()]
        return uses

    def _finish(self) -> None:
        for node in self.rows:
            tie = np.where(np.eye(len(self.free.batch), dtype=bool), 0.0, np.inf)
            self.builder.pairs.append((self.batch_variable, self.variable[node], tie))


def joined(whole: Layout, alone: Sequence[Layout]) -> Layout | None:
    """Combines the single-axis layouts ``alone`` of one tensor to one layout; None if they clash."""
    dims = list(whole.dims)
    for layout in alone:
        for dim, digits in enumerate(layout.dims):
            if any(d.axis is not None for d in digits):
                joint = merge(whole.mesh, dims[dim], digits) or nested(whole.mesh, dims[dim], digits)
                if joint is None:
                    return None
                dims[dim] = joint
    return whole.replace(dims=dims)


def _rows(layout: Layout, axes: Sequence[str]) -> Layout:
    """Splits dim 0 of ``layout`` over ``axes``; returns it as it is if they do not divide that."""
    split: Layout | None = layout
    for axis in axes:
        split = split.split(0, axis) if split is not None and layout.ndim else split
    return split or layout
