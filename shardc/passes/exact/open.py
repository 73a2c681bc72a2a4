"""Open: the same problem with where parameters are stored, and over which axes the batch is split, left open too.

A parameter has a variable whose labels say how it is computed with and how it is stored. Storage is the compute layout,
split further over the axes of an ``fsdp`` entry or not; a label costs its gathers and the memory that it holds, and the
parameter's gradient goes to where it is stored. One variable says which axes split the batch; all inputs follow it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
from torch import fx

from shardc.ir import graph as ir
from shardc.ir.layout import Layout
from shardc.passes.exact.chooser import Choice
from shardc.passes.exact.crossed import nested
from shardc.passes.exact.prices import prices
from shardc.passes.exact.problem import Use
from shardc.passes.seed import narrowed
from shardc.rules.spec import Strategy, merge

Stored = tuple[Layout, Layout]  # for compute, and between steps


@dataclass(frozen=True)
class Free:
    """What is open.

    Args:
        over: the axes over which parameters may be stored split and are whole for compute.
        params: (name, layout for compute) -> the layouts in which it may be stored; none of parameters that are not
            open, and none of layouts that the plan does not let them be computed with.
        batch: the sets of axes that may split the batch, each in mesh order; none if the plan says which do.
        copies: how many copies of a parameter's storage memory holds: itself, its gradient, its optimizer's state.
        gathers: how often a parameter is gathered in a step.
    """

    over: tuple[str, ...]
    params: Callable[[str, Layout], Sequence[Layout]]
    batch: tuple[tuple[str, ...], ...]
    copies: float = 0.0
    gathers: float = 2.0


@dataclass
class OpenChoice(Choice):
    """The problem of one graph in which a plan speaks of some parameters and inputs only."""

    free: Free = field(default_factory=lambda: Free((), lambda name, compute: (), ((),)))

    # --- what a solution says

    def stored(self, labels: Sequence[int]) -> dict[str, Stored]:
        """Of each open parameter."""
        return {ir.info(node).name: found[labels[self.variable[node]]] for node, found in self.storages.items()}

    def batch(self, labels: Sequence[int]) -> tuple[str, ...]:
        """The axes that split the batch."""
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
        """Outputs whose dim 0 is the batch, of one of ``sizes``, lie as the inputs do, and so do their tangents."""
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
        """The layouts in which a parameter may be computed with: none over the axes that split storage alone."""
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
    """The layout that lies over each axis as one of ``alone`` does; None where they clash."""
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
    """``layout`` with dim 0 split over ``axes``, as far as they divide it."""
    split: Layout | None = layout
    for axis in axes:
        split = split.split(0, axis) if split is not None and layout.ndim else split
    return split or layout
