"""Writes a solution of the layout problem as a plan. `Writer` writes its entries, and `Pinner` adds its pins of
activations.

Entries have globs if repeated blocks agree. Pins at module boundaries make the greedy layout pass arrive at the layouts
that the solver found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import TypeVar

from torch import fx, nn

from shardc.ir import graph as ir
from shardc.ir import ops
from shardc.ir.layout import Layout, SubDim
from shardc.ir.mesh import Mesh
from shardc.ir.repeat import Repeat, Repeats
from shardc.passes.layout.greedy import Greedy
from shardc.passes.op_calls import operands_of
from shardc.passes.options import Options
from shardc.plan.constructors import ddp, fsdp, hsdp, tp
from shardc.plan.match import by_part, matching
from shardc.plan.value import Plan
from shardc.search.captured_model import CapturedModel, PlannedGraph

MOST = 60  # number of pins after which no more are added


@dataclass(frozen=True)
class Pinner:
    """Adds pins, entries that fix the layouts of activations, to the plans of one model on one mesh.

    Args:
        captured_model: the captured model.
        writer: writes globs for repeated blocks.
        mesh: the mesh.
        options: the options to compile with.
        plans: (plan as text, layouts that were wanted) -> the plan with pins.
    """

    captured_model: CapturedModel
    writer: Writer
    mesh: Mesh
    options: Options
    plans: dict[tuple[str, frozenset[tuple[str, Border]]], Plan] = field(default_factory=dict)

    def pinned(self, plan: Plan, wanted: Mapping[str, Border]) -> Plan:
        """Return ``plan`` with pins of activations added, so that each module boundary gets the layouts ``wanted`` (tag
        name -> `Border`).

        Pins are added until the forward alone gets these layouts, then until the whole step does: the backward may need
        the forward's values in other layouts. Pins of the children of one module are added together. Results
        are cached, since solutions under other weights of communication are often equal.
        """
        key = str(plan), frozenset(wanted.items())
        if key not in self.plans:
            self.plans[key] = self._pinned(plan, wanted)
        return self.plans[key]

    def _pinned(self, plan: Plan, wanted: Mapping[str, Border]) -> Plan:
        """Return ``plan`` with pins of activations, as `pinned` does, but always computed anew."""
        pins: dict[str, str] = {}
        layouts = {name: border.pin for name, border in wanted.items()}
        for model in (self.captured_model.forward, self.captured_model):
            while len(pins) < MOST:
                trial = plan | Plan(activations=pins) if pins else plan
                now = borders(model.graph(self.mesh, trial, self.options, Greedy()))
                missing = [
                    name for name, border in wanted.items()
                    if not (name in now and border.agrees(now[name])) and self._entry_name(name) not in pins
                ]  # fmt: skip
                if not missing:
                    break
                for name in missing:
                    if _parent(name) == _parent(missing[0]):
                        pins |= self._pins(name, layouts)
        return plan | Plan(activations=pins) if pins else plan

    def _entry_name(self, name: str) -> str:
        """Return the text by which a plan entry names the module boundary that tag ``name`` marks: a module name, or a
        glob for all repeated blocks, followed by ``.input`` if the boundary is the module's input.
        """
        module, where, _ = name.rsplit(".", 2)
        return self.writer.by_glob(dict.fromkeys(self.writer.block_names(module), ""))[-1][0] + (
            ".input" if where == "input" else ""
        )

    def _pins(self, name: str, wanted: Mapping[str, Layout]) -> dict[str, str]:
        """Return the pins of a module's input or output in all repeated blocks: module name or glob -> layout
        as text.
        """
        module, where, index = name.rsplit(".", 2)
        blocks = [m for m in self.writer.block_names(module) if f"{m}.{where}.{index}" in wanted]
        specs = {m: spec(wanted[f"{m}.{where}.{index}"]) for m in blocks}
        end = ".input" if where == "input" else ""
        return {f"{glob}{end}": str(text) for glob, text in self.writer.by_glob(specs)}


def _parent(name: str) -> str:
    """Return the name of the parent of a module, given ``name``, a tag at the module's boundary: ``layers`` for the tag
    ``layers.0.output.0``.
    """
    return name.rsplit(".", 2)[0].rpartition(".")[0]


@dataclass(frozen=True)
class Border:
    """The layouts of a value at a module boundary.

    Args:
        computed: the layout in which it is computed.
        need: the layout that its uses in forward need, if they agree, else ``computed``.
        gradient: the layout that the uses of its gradient need, if they agree, else the layout in which the gradient is
            computed; None if there is no gradient.
    """

    computed: Layout
    need: Layout
    gradient: Layout | None

    @property
    def pin(self) -> Layout:
        """The layout to pin for the value. The gradient of the value then gets this layout, too."""
        return self.computed if self.gradient == self.computed and not self.computed.partial else self.need

    @property
    def holds_gradient(self) -> bool:
        """Return whether the uses of the gradient need the pinned layout too, so that the pin fixes both."""
        return self.gradient == self.pin

    def agrees(self, now: Border) -> bool:
        """Return whether ``now``, the present layouts at the boundary, already are those that this border's pin would
        give value and gradient.
        """
        return self.pin in (now.computed, now.need) and (
            not self.holds_gradient or now.gradient in (None, self.gradient)
        )


def borders(planned: PlannedGraph) -> dict[str, Border]:
    """Return the layouts of the activation at each module boundary: tag name -> `Border`, in program order."""
    order = {node: at for at, node in enumerate(planned.graph.nodes)}
    names = sorted(planned.borders, key=lambda name: (order[planned.borders[name]], name))
    gradients = {name: _needed_layout(node, "backward") for name, node in planned.gradients.items()}
    nodes = ((name, planned.borders[name]) for name in names)
    return {name: Border(ir.layout(x), _needed_layout(x, "forward"), gradients.get(name)) for name, x in nodes}


def _needed_layout(node: fx.Node, phase: str) -> Layout:
    """Return the layout in which the users of ``node`` in ``phase`` need its value. If they need different layouts,
    return the layout of ``node`` itself, or if that is partial, the first needed one that is not.
    """
    needs: dict[Layout, None] = {}
    for user in node.users:
        if user.op != "call_function" or ir.info(user).origin.phase != phase:
            continue
        if user.target is ops.reshard:
            needs[ir.layout(user)] = None
        elif (operand_layouts := ir.info(user).needs) is not None:
            needs |= dict.fromkeys(w for x, w in zip(operands_of(user), operand_layouts, strict=True) if x is node)
    own_layout = ir.layout(node)
    if len(needs) == 1 or own_layout.partial:
        return next((x for x in needs if not x.partial), own_layout)
    return own_layout


@dataclass(frozen=True)
class Candidate:
    """A solution of the layout problem: its plan without pins (`Plan(activations=...)`), the layouts at module
    boundaries, and its cost.

    Args:
        plan: the plan without pins.
        borders: tag name -> the layout at that module boundary.
        over: the axes over which storage only is split.
        value: cost in seconds, with memory at ``byte`` seconds per byte.
        bound: the proven lower bound of that cost.
        variables: number of variables of the problem.
        build, solve: seconds that building and solving the problem took.
        bytes: bytes of memory that the cost includes.
        byte: price of a byte in seconds.
    """

    plan: Plan
    borders: Mapping[str, Border]
    over: tuple[str, ...]
    value: float
    bound: float
    variables: int
    build: float
    solve: float
    bytes: float
    byte: float

    def at(self, byte: float) -> float:
        """Return the cost of this solution in seconds if each byte of memory costs ``byte`` seconds."""
        return self.value + (byte - self.byte) * self.bytes


Stored = tuple[Layout, Layout]
T = TypeVar("T")


@dataclass(frozen=True)
class Writer:
    """Writes a solution of the layout problem as entries of a plan, for one model on one mesh.

    Args:
        model: the complete model.
        mesh: the mesh.
        repeats: the runs of repeated blocks of the complete model, and the number of blocks captured of each.
        globs: (run, rest of a name in its blocks) -> its glob, filled by `by_glob`.
    """

    model: nn.Module
    mesh: Mesh
    repeats: Repeats
    globs: dict[tuple[Repeat, str], str] = field(default_factory=dict, repr=False)

    def plan(
        self,
        stored: Mapping[str, Stored],
        over: tuple[str, ...],
        batch: tuple[str, ...],
        inputs: Sequence[tuple[str, tuple[int, ...]]],
    ) -> Plan:
        """Return the plan that gives parameters the layouts ``stored``: storage only is split over the axes ``over``
        (by ``fsdp``), and the batch over the axes ``batch``.

        Args:
            stored: name in the captured model -> (compute layout, storage layout).
            over: the axes over which storage only is split.
            batch: the axes that split the batch.
            inputs: (name, shape) of each input.
        """
        plan = Plan()
        whole = {name: 1 for name, (c, s) in stored.items() if c == s and over and s.numel > 1}
        rest = tuple(axis for axis in batch if axis not in over)
        if over and any(c != s for c, s in stored.values()):
            small, threshold = self._threshold(whole, [name for name, (c, s) in stored.items() if c != s])
            overrides = {} if small else dict(self.by_glob(whole))
            if rest:
                plan |= hsdp(over, rest, threshold=threshold) if not overrides else ddp(rest)
            if not rest or overrides:
                plan |= fsdp(over, threshold=threshold, overrides=overrides or None)
        else:
            plan |= ddp(batch) if batch else Plan()
        has = [axis for entry in plan.entries for axis in entry.batch]
        if set(has) != set(batch):
            plan |= Plan(inputs={name: rows(shape, batch, self.mesh) for name, shape in inputs if shape})
        return plan | self._compute_entries({name: c for name, (c, _) in stored.items() if c.axes}, batch)

    def _threshold(self, whole: Iterable[str], split: Iterable[str]) -> tuple[bool, int]:
        """Return (whether each parameter in ``whole`` is smaller than each in ``split``, the threshold in bytes of an
        ``fsdp`` entry that tells them apart). The threshold is 0 if ``whole`` is empty or sizes do not tell.

        Args:
            whole, split: names of the parameters that are replicated, and of those that are split.
        """
        nbytes = {name: p.numel() * p.element_size() for name, p in self.model.named_parameters()}
        least = min((nbytes[self.repeats.whole(name)] for name in split), default=0)
        largest = max((nbytes[self.repeats.whole(name)] for name in whole), default=-1)
        return (True, least if largest >= 0 else 0) if largest < least else (False, 0)

    def _compute_entries(self, computes: Mapping[str, Layout], batch: Sequence[str]) -> Plan:
        """Return the entries for the compute layouts ``computes``: tensor parallel styles if they match and their axis
        is not in ``batch``, else ``params`` entries.

        Args:
            computes: parameter -> its compute layout.
            batch: the axes that split the batch; styles are not used for these.
        """
        styles: dict[tuple[str, str], list[str]] = {}
        raw: dict[str, str] = {}
        by_glob = self.by_glob(computes)
        layouts = dict(by_glob)
        for glob, layout in by_glob:
            style_axis = self._style(glob, layout, layouts)
            if style_axis is not None and style_axis[1] not in batch:
                styles.setdefault(style_axis, []).append(glob.rpartition(".")[0])
            else:
                raw[glob] = spec(layout)
        plan = Plan()
        for axis in self.mesh.axes:
            by_style = {style: globs for (style, over), globs in styles.items() if over == axis and style != "bias"}
            if by_style:
                plan |= tp(axis, **by_style)
        return plan | Plan(params=raw) if raw else plan

    def _style(self, glob: str, layout: Layout, layouts: Mapping[str, Layout]) -> tuple[str, str] | None:
        """Return (style, axis) of the ``tp`` entry that gives the parameters of ``glob`` the layout ``layout``; None if
        no style does.

        Styles are "colwise", "rowwise", "vocab", and "bias" for the bias of a weight with a style.

        Args:
            glob: glob of the parameter.
            layouts: glob -> compute layout of its parameters, also of others.
        """
        module_glob, _, kind = glob.rpartition(".")
        if len(layout.bound) != 1 or layout.bound[0] not in self.mesh.axes:
            return None
        axis, dim = layout.bound[0], layout.dim_of(layout.bound[0])
        assert dim is not None
        first = layout.dims[dim][0].axis == axis
        module = self._module(module_glob)
        if not first or not isinstance(module, nn.Linear | nn.Embedding):
            return None
        weight, bias = (layouts.get(f"{module_glob}.{name}") for name in ("weight", "bias"))
        if kind == "bias":
            has_style = weight is not None and self._style(f"{module_glob}.weight", weight, layouts)
            return ("bias", axis) if has_style else None
        if isinstance(module, nn.Embedding):
            return ("vocab", axis) if dim == 0 else None
        bias_split = bias is not None and bias.bound == (axis,)
        if dim == 0 and bias_split == (getattr(module, "bias", None) is not None):
            return "colwise", axis
        return ("rowwise", axis) if dim == 1 and bias is None else None

    def _module(self, glob: str) -> nn.Module:
        """Return the module that ``glob`` matches; of repeated blocks, that of the first block."""
        glob = glob.removeprefix("./")
        for repeat in self.repeats:
            if glob.startswith(f"{repeat.prefix}*"):
                glob = repeat.name(0, glob.removeprefix(f"{repeat.prefix}*"))
        return self.model.get_submodule(glob)

    # --- globs

    def by_glob(self, by_name: Mapping[str, T]) -> list[tuple[str, T]]:
        """Return ``by_name`` as (glob or name, value) pairs for a plan. Equal values in all repeated blocks share one
        glob.
        """
        groups: dict[tuple[Repeat, str], dict[int, T]] = {}
        out: list[tuple[str, T]] = []
        for name, value in by_name.items():
            if (place := self.repeats.place(name)) is None:
                out.append((self.repeats.whole(name), value))
            else:
                run, block, rest = place
                groups.setdefault((run, rest), {})[block] = value
        for (run, rest), by_block in groups.items():
            glob, last = self._glob(run, rest), self.repeats.keep - 1
            if len(by_block) == self.repeats.keep and len({str(x) for x in by_block.values()}) == 1:
                out.append((glob, by_block[0]))
                continue
            inner = by_block.get(1)
            if inner is not None:
                out.append((glob, inner))
            for captured, block in ((0, 0), (last, run.count - 1)):
                if captured in by_block and str(by_block[captured]) != str(inner):
                    out.append((run.name(block, rest), by_block[captured]))
        return out

    def _glob(self, run: Repeat, rest: str) -> str:
        """Return a glob that matches the name ``rest`` inside each block of ``run``, and no other module or
        parameter.
        """
        glob = f"{run.prefix}*{rest}"
        if (run, rest) not in self.globs:
            others = set(matching(glob, self._names)) - {run.name(block, rest) for block in range(run.count)}
            self.globs[run, rest] = by_part(glob) if others else glob
        return self.globs[run, rest]

    @cached_property
    def _names(self) -> list[str]:
        """The names of the model's modules and parameters."""
        return [name for name, _ in (*self.model.named_modules(), *self.model.named_parameters())]

    def block_names(self, name: str) -> list[str]:
        """Return the names that the module or tensor ``name`` has in all captured blocks of its run; ``[name]`` if it
        is in no repeated block.
        """
        if (place := self.repeats.place(name)) is None:
            return [name]
        run, _, rest = place
        return [run.name(block, rest) for block in range(self.repeats.keep)]


def spec(layout: Layout) -> str:
    """Return ``layout`` as text for a plan entry, such as ``@dp, (3 _@tp), _``. The size of each dim, or of the largest
    of its sub-dims, is left open (``_``).
    """
    dims = []
    for dim in range(layout.ndim):
        subs = layout.sub_dims(dim)
        if len(subs) == 1:
            dims.append(_sub(subs[0], open=True))
        else:
            largest = max(subs, key=lambda sub: sub.size)  # its size is left open, because it may be padded
            dims.append(f"({' '.join(_sub(sub, open=sub is largest) for sub in subs)})")
    return ", ".join(dims) + layout.partial_text()


def _sub(sub: SubDim, *, open: bool) -> str:
    """Return a sub-dim as text for a plan entry, such as ``3@tp``; with ``_`` in place of its size if ``open``."""
    size, axes = "_" if open else sub.size, sub.axes
    return f"{size}" if not axes else f"{size}@{axes[0]}" if len(axes) == 1 else f"{size}@({','.join(axes)})"


def rows(shape: Sequence[int], batch: Sequence[str], mesh: Mesh) -> tuple[object, ...]:
    """Return the spec of an input for ``Plan(inputs=...)``: dim 0 is split over the axes ``batch`` if they divide it,
    and no other dim is split.
    """
    first = tuple(batch) if shape[0] % prod(mesh.size(a) for a in batch) == 0 else ()
    return (first[0] if len(first) == 1 else first or None, *[None] * (len(shape) - 1))
