"""`Family`: one program for many input sizes, fitted to programs compiled at three sets of sizes. `DynamicDims`: the
dims whose sizes may change.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import product
from pathlib import Path

from torch import Tensor, fx, nn

from shardc import _compat
from shardc.capture import Captured, SymbolicCapture
from shardc.dynamic.generalize import Differs, Fit, conditions, fitted_layouts, generalize, points
from shardc.errors import CaptureError, InputError, LayoutError, ShardcWarning
from shardc.ir.executable import CLOSING, FIRST_INFERENCE, INFERENCE, Phase, without_stage
from shardc.ir.graph import Role
from shardc.ir.guards import Guards
from shardc.ir.layout import Layout
from shardc.ir.sized import SizedGraph, numbers_at, roles_at
from shardc.passes import PlanMemory
from shardc.program import Program
from shardc.validate import near


class DynamicDims:
    """The dims of inputs whose sizes change from call to call, with a name for each size.

    Args:
        dims_by_input: input -> dim (negative counts from the end) -> name of its size; equal names are equal sizes.

    Attributes:
        names: ``dims_by_input``, extended by the dims that ``torch._dynamo.mark_dynamic`` has marked.
    """

    def __init__(self, dims_by_input: Mapping[str, Mapping[int, str]]) -> None:
        self.names: dict[str, dict[int, str]] = {name: dict(dims) for name, dims in dims_by_input.items()}

    def mark(self, inputs: Sequence[tuple[str, object]]) -> None:
        """Adds to `names`, in place, the dims of ``inputs`` (name, tensor) that the user marked as dynamic
        (``torch._dynamo.mark_dynamic``). Each gets a size name of its own, such as ``"x[0]"``, unless it has a name
        already.
        """
        for name, x in inputs:
            for dim in sorted(getattr(x, _compat.DYNAMIC_DIMS, ())):
                self.names.setdefault(name, {}).setdefault(dim, f"{name}[{dim}]")

    def of(self, inputs: Sequence[tuple[str, object]]) -> tuple[dict[str, dict[int, str]], dict[str, int]]:
        """Return two dicts for the dynamic dims of a call: input -> dim -> name of its size; and size name -> size in
        this call.

        Raises InputError if an input lacks a dim, or a name has two sizes.
        """
        dims: dict[str, dict[int, str]] = {}
        sizes: dict[str, int] = {}
        where: dict[str, str] = {}
        for name, x in inputs:
            for dim, size in self.names.get(name, {}).items():
                if not isinstance(x, Tensor) or not -x.dim() <= dim < x.dim():
                    what = f"a tensor of {x.dim()} dims" if isinstance(x, Tensor) else f"a {type(x).__name__}"
                    raise InputError(
                        f"dynamic names dim {dim} of input {name!r}, which is {what}",
                        fix="name a dim that it has, or leave it out of dynamic",
                    )
                at = dim % x.dim()
                dims.setdefault(name, {})[at] = size
                place = f"dim {at} of {name!r}"
                if sizes.setdefault(size, x.shape[at]) != x.shape[at]:
                    raise InputError(
                        f"size {size!r} is {sizes[size]} in {where[size]} and {x.shape[at]} in {place}",
                        fix="pass inputs of one size there, or give the two dims names of their own in dynamic",
                    )
                where.setdefault(size, place)
        return dims, sizes


def check_dynamic(dynamic: object, model: nn.Module) -> None:
    """Raises InputError if ``dynamic`` is not a dict input -> dim (an int) -> name of its size, or names an input that
    ``model`` does not take.
    """
    fix = 'write dynamic={"tokens": {0: "b", 1: "t"}}: input -> dim -> a name for its size'
    if not isinstance(dynamic, Mapping) or not all(isinstance(dims, Mapping) for dims in dynamic.values()):
        raise InputError(f"dynamic={dynamic!r} is not a dict of dicts", fix=fix)
    parameters = inspect.signature(model.forward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for name, dims in dynamic.items():
        head = str(name).partition(".")[0]
        if head not in parameters and not head.startswith("target"):
            hint = near(head, [*parameters, "target"], f"its inputs are {', '.join(parameters)}")
            raise InputError(f"dynamic names {name!r}, which {type(model).__name__} does not take", fix=hint)
        for dim, size in dims.items():
            if type(dim) is not int or not isinstance(size, str) or not size:
                raise InputError(f"dynamic says {dim!r}: {size!r} of {name!r}", fix=fix)


Sizes = Mapping[str, int]
# Factors of the modulus. With 16, strides and pools halve the sizes as they halve the example's.
_FINER = (1, 16)
_MAX_FAMILIES = 8  # families per signature; other sizes are compiled separately


class Family:
    """One program for many input sizes. It is fitted to programs compiled at three sets of sizes: their numbers
    become polynomials in the sizes.

    Args:
        capture: captures the model at symbolic sizes; branches are decided by the sizes (name -> size) that it is
            given.
        build: compiles a captured model for given sizes.
        layouts: returns (name, layout) of each input at given sizes.
        example: sizes near which the three programs are compiled; the fitted program may be invalid at these
            themselves.
        parts: the most parts into which the mesh may cut a size: its ranks, times the microbatches.

    Raises:
        Differs, CaptureError: there is no such program, with the reason.
    """

    def __init__(
        self,
        capture: Callable[[Sizes], SymbolicCapture],
        build: Callable[[Captured, Sizes], Program],
        layouts: Callable[[Sizes], Sequence[tuple[str, Layout]]],
        example: Sizes,
        parts: int,
    ) -> None:
        self._build, self.layouts = build, layouts
        self.example = dict(example)
        errors: list[Exception] = []
        others: list[SymbolicCapture] = []
        for hints in self._hints(parts):
            try:
                symbolic = capture(hints)
            except CaptureError as error:
                errors.append(error)
                continue
            if symbolic.broken(self.example) is not None:
                others.append(symbolic)
            elif self._try_to_fit(symbolic, parts, errors):
                return
        # The example's own sizes are a special case here, and get a separate program.
        if not any(self._try_to_fit(symbolic, parts, errors) for symbolic in others):
            raise next((e for e in errors if isinstance(e, Differs)), errors[-1])

    def _hints(self, parts: int) -> Iterator[Sizes]:
        """Yield, for each attempt at a symbolic capture, the example sizes (name -> size) that decide the model's
        branches on a size.

        The first are near the family's ``example``, congruent to it modulo ``parts``, and not related to each other by
        chance: sizes that are equal in the example first differ, then are equal. The last are the example's own.
        """
        merged: dict[int, str] = {}
        first = {name: merged.setdefault(size, name) for name, size in self.example.items()}
        for alias in [{name: name for name in first}] + [first] * (len(merged) < len(first)):
            for above in (True, False):
                with suppress(LayoutError):
                    near = points({name: self.example[name] for name in alias.values()}, parts, above)[0]
                    yield {name: near[other] for name, other in alias.items()}
        yield self.example

    def _try_to_fit(self, symbolic: SymbolicCapture, parts: int, errors: list[Exception]) -> bool:
        """Try to make this the family of ``symbolic``, the capture at symbolic sizes: compile programs at three sets of
        sizes, and fit one program for all sizes to them. Return whether it succeeded; each `Differs` is appended to
        ``errors``.
        """
        self.symbolic = symbolic
        for finer, above in product(_FINER, (True, False)):
            try:
                self._compile_and_fit(parts * finer, above)
                return True
            except Differs as error:
                errors.append(error)
        return False

    def build(self, sizes: Sizes) -> Program:
        """Compiles and returns a program that is valid at exactly ``sizes``, instead of fitting one for many sizes."""
        return self._build(self.symbolic.at(sizes), sizes)

    def _compile_and_fit(self, modulus: int, above: bool) -> None:
        """Compile programs at three sets of sizes, above the example's or below it. Fit the graphs of a step to them.

        Args:
            modulus: the sizes are congruent to the example's modulo this number.
            above: take larger sizes than the example's, else smaller ones.
        """
        near = self._choose_points(modulus, above)
        self.fit = Fit(near, modulus)
        self.programs = [self._compile_at(point, warns=at == 0) for at, point in enumerate(near)]
        self._fit_graphs()

    def _fit_graphs(self) -> None:
        """Merges the graphs of the three programs, and the layouts of their outputs, to graphs for any sizes: numbers
        become polynomials in the sizes.
        """
        programs = self.programs
        self._graphs: dict[Phase, SizedGraph | None] = {}
        self._using: dict[frozenset[int], Family] = {}
        try:
            self._outputs = fitted_layouts([program.results for program in programs], self.fit)
        except LayoutError as error:
            raise Differs(f"at the outputs: {error}") from None
        for half in programs[0].step():
            self.half(half.phase)

    def _choose_points(self, modulus: int, above: bool) -> list[dict[str, int]]:
        """Choose three sets of sizes near the example's, each a dict size name -> size. Raise Differs if a condition of
        the symbolic capture (a branch on a size) does not hold there.

        Names that the capture merged into one symbol have equal sizes; ``modulus`` and ``above`` are those of `points`.
        """
        first: dict[Hashable, str] = {}
        alias = {name: first.setdefault(symbol, name) for name, symbol in self.symbolic.symbols.items()}
        try:
            near = points({name: self.example[name] for name in first.values()}, modulus, above)
        except LayoutError as error:
            raise Differs(str(error)) from None
        for point in near:
            point.update({name: point[alias[name]] for name in alias})
            broken = self.symbolic.broken(point)
            if broken is not None:
                line = f" ({broken.source})" if broken.source else ""
                raise Differs(f"the model asks for {broken.text}{line}, which does not hold at {point}")
        return near

    def _compile_at(self, point: Sizes, warns: bool) -> Program:
        """Compiles the program for the sizes ``point``. Warnings of the compilation are given again, with the sizes,
        if ``warns``.
        """
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            program = self.build(point)
        at = ", ".join(f"{name}={size}" for name, size in point.items())
        for warning in caught if warns else ():
            warnings.warn(ShardcWarning(f"compiled for many sizes, here at {at}: {warning.message}"), stacklevel=2)
        return program

    def using(self, used: frozenset[int]) -> Family:
        """Return the family for steps in which only the outputs with indices ``used`` have gradients.

        Raises:
            Differs: no single program covers these steps at all sizes.
        """
        if used not in self._using:
            family = copy.copy(self)
            family.programs = [program.using(used) for program in self.programs]
            family._fit_graphs()
            self._using[used] = family
        return self._using[used]

    def outputs(self, sizes: Sizes) -> tuple[Role, ...]:
        """Return the role of each output at ``sizes``. The layout in the role has the axis of microbatches too."""
        return roles_at(self.programs[0].results, self._outputs, numbers_at(sizes))

    def half(self, phase: Phase) -> SizedGraph | None:
        """Returns the graph of ``phase`` (forward, backward, ...) for any sizes; None if the program has no such
        phase.

        Raises:
            Differs: the three graphs differ in more than sizes.
        """
        if phase not in self._graphs:
            halves = [program.find(phase) for program in self.programs]
            graphs = [half.gm for half in halves if half is not None]
            if graphs and len(graphs) < len(halves):
                raise Differs(f"not all of the programs have a {phase}")
            self._graphs[phase] = generalize(graphs, self.fit, self.example) if graphs else None
        return self._graphs[phase]

    def holds(self, sizes: Sizes) -> bool:
        """Return whether the program is valid at ``sizes``: they meet the conditions of the capture, and all numbers
        in the graph are integers.
        """
        return self.symbolic.broken(sizes) is None and all(number.whole_at(sizes) for number in self.fit.polynomials)

    @property
    def conditions(self) -> tuple[str, ...]:
        """The conditions that sizes must meet for this program, as text: ``"t <= 128"``, ``"b % 4 == 0"``."""
        scales = [graph.scale for graph in self._graphs.values() if graph is not None]
        merged = {name: max((scale[name] for scale in scales), default=(1, 0)) for name in self.example}
        return (*(c.text for c in self.symbolic.conditions), *conditions(merged))


class SizedProgram(Program):
    """A `Family`'s program at given sizes. It runs the family's graphs at these sizes. Graphs between passes are shown
    of another program (`alone`), compiled for these sizes only.
    """

    def __init__(self, family: Family, sizes: Sizes) -> None:
        like = family.programs[0]
        super().__init__(like.joint, like.source, like.folded, like.used)
        self.family, self.sizes = family, dict(sizes)
        self.conditions = family.conditions
        self._set_ports(family.layouts(sizes), family.outputs(sizes))

    def make(self, phase: Phase) -> fx.GraphModule | None:
        """Returns the graph of a phase at these sizes, with memory planned; None if the program has no such phase."""
        infers = without_stage(phase) in (INFERENCE, FIRST_INFERENCE, CLOSING)
        try:
            half = self.family.half(phase)
        except Differs:
            if not infers:
                raise
            return self.alone.make(phase)
        if half is None:
            return None
        if infers and not self.family.holds(self.sizes):
            return self.alone.make(phase)
        graph = half.at(self.sizes)
        sized = graph.meta
        graph = self.pipeline[PlanMemory](graph)
        graph.meta.update(sized)
        return graph

    def _for(self, used: frozenset[int]) -> Program:
        """Return the variant of this program, at the same sizes, for steps in which only the outputs with indices
        ``used`` have gradients. If the family has none, one is compiled for these sizes alone.
        """
        try:
            return type(self)(self.family.using(used), self.sizes)
        except Differs:
            return self.alone.using(used)

    @cached_property
    def alone(self) -> Program:
        """The program compiled for exactly these sizes. Dumps of a `SizedProgram` show the graphs of this one."""
        return self.family.build(self.sizes)

    @property
    def shown(self) -> Program:
        return self.alone

    @property
    def localized(self) -> fx.GraphModule:
        return self.alone.localized

    @property
    def stages(self) -> tuple[str, ...]:
        return self.alone.stages

    def graph(self, stage: str) -> fx.Graph:
        last = self.pipeline.names[-1]
        last_graphs = dict(zip((last, f"{last}.backward"), self.step(), strict=False)).get(stage)
        return last_graphs.graph if last_graphs is not None else self.alone.graph(stage)

    def save(self, directory: str | Path) -> list[Path]:
        return self.alone.save(directory)


class Families:
    """The families of one module (each a program for many sizes), and an LRU cache of their programs at the sizes of
    recent calls.

    Args:
        kind: the class of the programs.
        capacity: the largest number of cached programs.

    Attributes:
        forget: called with each evicted program.
    """

    def __init__(self, kind: type[SizedProgram] = SizedProgram, capacity: int = 64) -> None:
        self.kind, self.capacity = kind, capacity
        self.forget: Callable[[Program], object] = lambda program: None
        self._families: dict[Hashable, list[tuple[Guards, Family | None]]] = {}
        self._programs: OrderedDict[Hashable, list[Program]] = OrderedDict()

    def guards(self) -> Iterator[Guards]:
        """Yields the guards (values of the model that a capture read) of all programs."""
        yield from (guards for families in self._families.values() for guards, _ in families)
        yield from (program.guards for programs in self._programs.values() for program in programs)

    def program(
        self,
        key: Hashable,
        sizes: Sizes,
        holds: Callable[[Guards], bool],
        family: Callable[[], Family | None],
        alone: Callable[[], Program],
    ) -> Program:
        """Return the `Program` for a call at dynamic ``sizes``. It is taken from the cache, or from a family (one
        program for many sizes), or else compiled for these sizes only.

        Args:
            key: the call's signature, without its sizes.
            sizes: size name -> size of the call.
            holds: returns whether guards still hold: a capture would read the same values now.
            family: compiles a family with ``sizes`` for the example; None if there is none.
            alone: compiles the program for these sizes only.
        """
        at = key, tuple(sizes.items())
        for program in self._programs.get(at, ()):
            if holds(program.guards):
                self._programs.move_to_end(at)
                return program
        families = [family for guards, family in self._families.setdefault(key, []) if holds(guards)]
        usual = min(sizes.values()) > 1  # one element is broadcast: another program
        fitting = next((cached for cached in families if cached is not None and usual and cached.holds(sizes)), None)
        tries = fitting is None and usual and None not in families and len(families) < _MAX_FAMILIES
        compiled = family() if tries else None
        if compiled is not None and compiled.holds(sizes):
            fitting = compiled
        program = alone() if fitting is None else self.kind(fitting, sizes)
        if tries:
            guards = program.guards if compiled is None else compiled.programs[0].guards
            self._families[key].append((guards, compiled))
        self._programs.setdefault(at, []).append(program)
        while len(self._programs) > self.capacity:
            for old in self._programs.popitem(last=False)[1]:
                self.forget(old)
        return program
