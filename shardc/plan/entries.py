"""What a plan says, one statement an entry: each prints as the user would write it and knows what it speaks of."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from shardc.errors import PlanError
from shardc.plan.forms import Form, freeze, is_one, quote, show

STYLES = ("colwise", "rowwise", "vocab")
REDUCTIONS = ("mean", "sum")


@dataclass(frozen=True)
class Ddp:
    """The batch split over ``axis``, parameters whole."""

    axis: str

    @property
    def batch(self) -> tuple[str, ...]:
        return (self.axis,)

    @property
    def axes(self) -> tuple[str, ...]:
        return (self.axis,)

    @property
    def key(self) -> tuple[Any, ...]:
        return ("data", frozenset(self.axes))

    def __str__(self) -> str:
        return f"ddp({quote(self.axis)})"


@dataclass(frozen=True)
class Fsdp:
    """The batch and the parameters' storage split over ``shard``; the batch over ``replicate`` too.

    Args:
        shard: the axes that split storage, in the order in which they are bound.
        replicate: the axes over which storage is whole (HSDP), often none.
        level: 1, 2 or 3.
        threshold: parameters of fewer bytes stay whole.
    """

    shard: tuple[str, ...]
    replicate: tuple[str, ...] = ()
    level: int = 3
    threshold: int = 0

    def __post_init__(self) -> None:
        if not self.shard:
            raise PlanError("fsdp needs an axis to split parameters over", fix='write fsdp("dp")')
        for axis in self.axes:
            if self.axes.count(axis) > 1:
                raise PlanError(f"axis {axis!r} is used twice", plan_entry=str(self), fix="name each axis once")
        if self.level not in (1, 2, 3):
            raise PlanError(f"level {self.level!r} is not 1, 2 or 3", plan_entry=str(self), fix="use level=3")
        if not isinstance(self.threshold, int) or self.threshold < 0:
            raise PlanError(f"threshold {self.threshold!r} is not a number of bytes", plan_entry=str(self))

    @property
    def batch(self) -> tuple[str, ...]:
        return self.replicate + self.shard

    @property
    def axes(self) -> tuple[str, ...]:
        return self.batch

    @property
    def key(self) -> tuple[Any, ...]:
        return ("data", frozenset(self.axes))

    def __str__(self) -> str:
        options = f"level={self.level}" + (f", threshold={self.threshold}" if self.threshold else "")
        if not self.replicate:
            return f"fsdp({show_axes(self.shard)}, {options})"
        return f"hsdp(shard={show_axes(self.shard)}, replicate={show_axes(self.replicate)}, {options})"


@dataclass(frozen=True)
class Tp:
    """The modules that ``glob`` matches are computed split over ``axis``, in one of `STYLES`."""

    axis: str
    style: str
    glob: str

    @property
    def axes(self) -> tuple[str, ...]:
        return (self.axis,)

    @property
    def key(self) -> tuple[Any, ...]:
        return ("tp", self.axis, self.glob)

    def __str__(self) -> str:
        return f"tp({quote(self.axis)}, {self.style}=[{quote(self.glob)}])"


@dataclass(frozen=True)
class Param:
    """The parameters that ``glob`` matches lie as ``spec`` says."""

    glob: str
    spec: Form

    @property
    def key(self) -> tuple[Any, ...]:
        return ("params", self.glob)

    def __str__(self) -> str:
        return f"params[{quote(self.glob)}] = {show(self.spec)}"


@dataclass(frozen=True)
class Port:
    """The inputs or outputs at ``path`` lie as ``spec`` says.

    Args:
        kind: "inputs" or "outputs".
        path: "" for all; else names or positions from the argument down, joined by dots: "tokens", "0", "batch.mask".
    """

    kind: str
    path: str
    spec: Form

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.kind, self.path)

    def __str__(self) -> str:
        at = f"[{self.path if self.path.isdigit() else quote(self.path)}]" if self.path else ""
        return f"{self.kind}{at} = {show(self.spec)}"


@dataclass(frozen=True)
class Activation:
    """A tensor at a module's border lies as ``spec`` says.

    Args:
        target: a module glob and which of its tensors, as `split_target` reads it.
    """

    target: str
    spec: Form

    @property
    def key(self) -> tuple[Any, ...]:
        return ("activations", self.target)

    def __str__(self) -> str:
        return f"activations[{quote(self.target)}] = {show(self.spec)}"


@dataclass(frozen=True)
class Setting:
    """One of the plan's plain values: ``reduce``, ``grad_scale`` or ``dtensor_outputs``."""

    name: str
    value: str | float | bool

    DEFAULTS: ClassVar[dict[str, Any]] = {"reduce": "mean", "grad_scale": 1.0, "dtensor_outputs": False}

    @property
    def key(self) -> tuple[Any, ...]:
        return ("setting", self.name)

    def __str__(self) -> str:
        return f"{self.name}={quote(self.value) if isinstance(self.value, str) else repr(self.value)}"


Entry = Ddp | Fsdp | Tp | Param | Port | Activation | Setting
Data = Ddp | Fsdp


def show_axes(axes: tuple[str, ...]) -> str:
    return quote(axes[0]) if len(axes) == 1 else f"({', '.join(map(quote, axes))})"


def axis_names(axis: Any, entry: str) -> tuple[str, ...]:
    """``axis``, a name or a sequence of them, as a tuple."""
    names = (axis,) if isinstance(axis, str) else tuple(axis) if isinstance(axis, list | tuple) else (axis,)
    for name in names:
        if not isinstance(name, str):
            raise PlanError(f"{name!r} is not the name of a mesh axis", plan_entry=entry, fix='name axes like "dp"')
    return names


@dataclass(frozen=True)
class Target:
    """Which tensor of which modules an activation entry is about.

    Args:
        glob: over module names.
        where: "input", "output", or None where the entry does not say.
        index: position among the inputs or outputs, or the keyword that passes an input.
        explicit: whether ``where`` cannot be part of a module's name.
    """

    glob: str
    where: str | None = None
    index: int | str = 0
    explicit: bool = False


def split_target(target: str) -> Target:
    """``layers.*.attn`` is the first output of those modules; ``layers.*.attn.input`` and ``layers.*.attn:input``
    the first input; ``layers.*.attn:input[1]`` the second, ``:input[mask]`` the one passed by that keyword.

    Only ``:`` or an index makes it explicit: with a dot, the module could itself be called ``input`` or ``output``.
    """
    match = re.fullmatch(r"(.*?)([.:]|^)(input|output)(?:\[(\w+)\])?", target)
    if not match:
        return Target(target)
    glob, separator, where, index = match.groups()
    position: int | str = int(index) if index and index.isdigit() else index or 0
    return Target(glob, where, position, separator == ":" or index is not None)


def port_entries(kind: str, value: Any) -> list[Port]:
    """The entries of ``Plan(inputs=...)`` or ``Plan(outputs=...)``."""
    return [Port(kind, path, freeze(spec, f"{kind}={value!r}")) for path, spec in flatten(value, kind)]


def activation_entries(target: str, value: Any) -> list[Activation]:
    """The entries of ``Plan(activations={target: value})``: a spec, a list or a dict by keyword."""
    entry = f"activations[{quote(target)}] = {value!r}"
    base = target if split_target(target).where else f"{target}:output"
    out = []
    for path, spec in flatten(value, entry):
        if "." in path:
            raise PlanError("an activation's specs are nested", plan_entry=entry, fix="give one list or one dict")
        out.append(Activation(f"{base}[{path}]" if path else target, freeze(spec, entry)))
    return out


def flatten(value: Any, entry: str, path: str = "") -> list[tuple[str, Any]]:
    """(dotted path, spec of one tensor) for each spec in a pytree of specs; None says nothing."""
    if value is None:
        return []
    if is_one(value):
        return [(path, value)]
    if isinstance(value, dict):
        items = [(str(name), item) for name, item in value.items()]
    elif isinstance(value, list | tuple):
        items = [(str(index), item) for index, item in enumerate(value)]
    else:
        raise PlanError(
            f"{value!r} is neither a spec nor a list or dict of specs",
            plan_entry=entry,
            fix='write ("dp", None), (Shard(0), Replicate()) or "@dp, _"',
        )
    return [leaf for name, item in items for leaf in flatten(item, entry, f"{path}.{name}" if path else name)]


def distinct(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """``entries`` without those that a later one of the same key replaces."""
    said: dict[Any, Entry] = {}
    for entry in entries:
        said.pop(entry.key, None)
        said[entry.key] = entry
    return tuple(said.values())
