"""A rule: the function from a call's shapes to its `Spec`, and the function that emits the op on local tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, TypeAlias, TypeVar

import torch

from shardc._compat import OpOverload
from shardc.ir.graph import Value
from shardc.ir.layout import Layout
from shardc.rules.spec import Spec

T = TypeVar("T")
# A local tensor (or a list of them) as a `Builder` represents it: a node of the graph, or the tensors of all ranks.
Emitted: TypeAlias = object


@dataclass(frozen=True)
class Call:
    """An op call with `Value`s (global shapes, no layouts) in place of tensors; hashable, as a key of caches.

    Args:
        target: the op overload.
        args, kwargs: arguments as in the graph, with tuples for lists; kwargs are sorted by name.
        results: `Value` of each output; None for outputs that are not tensors.
    """

    target: OpOverload[..., object]
    args: tuple[object, ...]
    kwargs: tuple[tuple[str, object], ...]
    results: tuple[Value | None, ...]

    @cached_property
    def _bound(self) -> dict[str, Any]:
        """Return argument name -> value, defaults included."""
        out = {a.name: a.default_value for a in self.target._schema.arguments}
        # The call may leave out the last arguments, or pass them by name.
        out.update(zip((a.name for a in self.target._schema.arguments), self.args, strict=False))
        return out | dict(self.kwargs)

    def __getitem__(self, name: str) -> Any:
        """Return argument ``name`` of the op's schema, or its default."""
        return self._bound[name]

    def __contains__(self, name: str) -> bool:
        """Return whether the op has an argument ``name``."""
        return name in self._bound

    @cached_property
    def operands(self) -> tuple[Value, ...]:
        """Return the tensor arguments in schema order: tensor lists are flattened, None is left out."""
        return tuple(v for _, v in self.named_operands())

    def named_operands(self) -> Iterator[tuple[str, Value]]:
        """Yield (argument name, value) of each operand."""
        for argument in self.target._schema.arguments:
            value = self._bound[argument.name]
            for item in value if isinstance(value, tuple) else (value,):
                if isinstance(item, Value):
                    yield argument.name, item

    def position(self, name: str) -> int | None:
        """Return the position among the operands of the (first) tensor of argument ``name``; None if there is none."""
        return next((i for i, (n, _) in enumerate(self.named_operands()) if n == name), None)

    @property
    def name(self) -> str:
        """Return the name of the op overload, such as ``aten.mm.default``."""
        return str(self.target)

    @property
    def dim(self) -> int:
        """Return argument ``dim``, counted from 0, for an op on the dims of operand 0; 0 if that has none."""
        return int(self["dim"]) % max(len(self.operands[0].shape), 1)


class Builder(Protocol):
    """Interface that emits local ops: into a graph (`passes.localize`), or by a run on all ranks (`runtime.sim`)."""

    @property
    def device(self) -> torch.device:
        """Return the device of coordinates, and of other tensors that are created without an operand."""
        ...

    def call(self, target: Callable[..., object], *args: object, **kwargs: object) -> Emitted:
        """Emit one op on local tensors and return its result."""
        ...

    def coordinate(self, axes: tuple[str, ...]) -> Emitted:
        """Return this rank's index along ``axes`` (the first is the slowest): int64 [1]."""
        ...

    def key(self) -> Emitted:
        """Return the key of this step's random draws, the same on every rank: int64 [1]."""
        ...

    def shape(self, x: Any) -> tuple[int, ...]:
        """Return the local shape of ``x``."""
        ...

    def once(self, key: object, make: Callable[[], T]) -> T:
        """Return ``make()``, or its earlier result for the same ``key``."""
        ...

    def group(self, axes: tuple[str, ...]) -> tuple[int, str]:
        """Return (number of ranks, name) of the process group along ``axes``."""
        ...


@dataclass(frozen=True)
class Local:
    """What a rule's localize function gets: an op call, the layouts of its operands and results, and the builder that
    emits ops on local tensors.

    Args:
        builder: emitter of the local ops.
        call: the op at global shapes.
        spec: its factors.
        operands: layouts of the operands (flattened as in `Call.operands`).
        results: layouts of the results.
        args, kwargs: the call's arguments with local tensors in place of `Value`s.
        true_size: function of a dim, numbered through the dims of all operands, and its size; returns its size without
            padding.
    """

    builder: Builder
    call: Call
    spec: Spec
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    args: tuple[object, ...]
    kwargs: dict[str, object]
    true_size: Callable[[int, int], int] = lambda dim, size: size

    def same(self, /, **replaced: object) -> Emitted:
        """Emit the call's own op on the local tensors and return its result. ``replaced`` has new values for arguments,
        by their names in the schema.
        """
        names = (argument.name for argument in self.call.target._schema.arguments)
        args = [replaced.pop(name, x) for x, name in zip(self.args, names, strict=False)]
        # What is left in ``replaced`` was not passed by position.
        return self.builder.call(self.call.target, *args, **{**self.kwargs, **replaced})

    def operand(self, name: str) -> Any:
        """Return the local tensor of argument ``name``."""
        names = (argument.name for argument in self.call.target._schema.arguments)
        return (dict(zip(names, self.args, strict=False)) | self.kwargs)[name]

    def operand_layout(self, name: str) -> Layout:
        """Return the layout of the tensor argument ``name``."""
        position = self.call.position(name)
        assert position is not None, f"{self.call.name} has no tensor argument {name!r} here"
        return self.operands[position]


# The strides that an op accepts: any; contiguous ones and those that were traced; or only those that were traced.
ANY, CONTIGUOUS, TRACED = "any", "contiguous", "traced"

SpecOf = Callable[[Call], Spec]
Localize = Callable[[Local], Emitted]


@dataclass(frozen=True)
class Rule:
    """The sharding rule of one op, or of all its overloads.

    Args:
        op: ``"aten.mm"`` for every overload, or ``"aten.sum.dim_IntList"`` for one.
        spec: returns the factors of a call.
        text: the rule in notation, for documentation.
        localize: emits the op on local tensors; by default the same op with the same arguments.
        opaque: the op is kept as a single op at padded sizes.
        strides: the strides that it accepts: ``TRACED``, ``CONTIGUOUS`` (or as traced) or ``ANY``.
    """

    op: str
    spec: SpecOf
    text: str
    localize: Localize = Local.same
    opaque: bool = False
    strides: str = TRACED


def sized(argument: str = "size") -> Localize:
    """Return the localize function of ops that take the result's shape as ``argument``: it emits the op with the local
    shape in its place.
    """

    def localize(local: Local) -> Emitted:
        return local.same(**{argument: list(local.results[0].local_shape)})

    return localize


def rules_for(ops: str, spec: SpecOf, text: str, localize: Localize = Local.same) -> list[Rule]:
    """Return one rule for each aten op that the text ``ops`` names, separated by spaces. All rules have the same spec
    function, notation and localize function.
    """
    return [Rule(f"aten.{op}", spec, text, localize) for op in ops.split()]


def table(*rules: Rule | Sequence[Rule], **fields: Any) -> dict[str, Rule]:
    """Return ``rules`` (rules or lists of rules) as a dict: op -> rule. All of them get the ``fields``, such as
    ``strides=ANY``. Asserts that no op has two rules.
    """
    out: dict[str, Rule] = {}
    for item in rules:
        for rule in [item] if isinstance(item, Rule) else item:
            assert rule.op not in out, f"two rules for {rule.op}"
            out[rule.op] = replace(rule, **fields)
    return out
