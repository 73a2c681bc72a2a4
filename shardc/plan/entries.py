"""What a plan says, one statement an entry: each prints as the user would write it and knows what it speaks of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal

import torch

from shardc.errors import PlanError
from shardc.plan.forms import Form, quote, show
from shardc.validate import Bytes, Range, check_fields, checked

STYLES = ("colwise", "rowwise", "vocab")
ShardSize = Annotated[int, Range(1, also=(-1,))]


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
        shard_size: over how many ranks of the ``shard`` axes together storage is split, the minor ones; -1 for all.
        overrides: (parameter glob, shard size) pairs, of which the last that matches holds, whatever the threshold.
    """

    shard: tuple[str, ...]
    replicate: tuple[str, ...] = ()
    level: Annotated[int, Literal[1, 2, 3]] = 3
    threshold: Annotated[int, Bytes()] = 0
    shard_size: ShardSize = -1
    overrides: tuple[tuple[str, ShardSize], ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, PlanError, "", plan_entry=str(self))
        if not self.shard:
            raise PlanError("fsdp needs an axis to split parameters over", fix='write fsdp("dp")')
        for axis in self.axes:
            if self.axes.count(axis) > 1:
                raise PlanError(f"axis {axis!r} is used twice", plan_entry=str(self), fix="name each axis once")

    @property
    def options(self) -> dict[str, Any]:
        """The arguments beside the axes and the level that are not at their defaults."""
        said: dict[str, tuple[Any, Any]] = {
            "threshold": (self.threshold, 0),
            "shard_size": (self.shard_size, -1),
            "overrides": (dict(self.overrides), {}),
        }
        return {name: value for name, (value, default) in said.items() if value != default}

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
        said = (f"{name}={getattr(self, name)}" for name in ("threshold", "shard_size") if name in self.options)
        options = ", ".join((f"level={self.level}", *said))
        if self.overrides:
            options += f", overrides={show_sizes(dict(self.overrides))}"
        if not self.replicate:
            return f"fsdp({show_axes(self.shard)}, {options})"
        return f"hsdp(shard={show_axes(self.shard)}, replicate={show_axes(self.replicate)}, {options})"


@dataclass(frozen=True)
class Tp:
    """The modules that ``glob`` matches are computed split over ``axis``, in one of `STYLES`."""

    axis: str
    style: Annotated[str, Literal["colwise", "rowwise", "vocab"]]
    glob: str

    def __post_init__(self) -> None:
        check_fields(self, PlanError, "", plan_entry=str(self))

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
        target: a module glob and which of its tensors, as `shardc.plan.targets.split_target` reads it.
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
    """One of the plan's plain values: ``reduce``, ``grad_scale`` and so on."""

    name: str
    value: str | float | bool

    KINDS: ClassVar[dict[str, Any]] = {
        "reduce": Literal["mean", "sum"], "grad_scale": Annotated[float, Range(-1e300, 1e300)], "dtensor_outputs": bool,
        "accumulate": bool, "overlap": bool, "bucket_size": Annotated[int | str, Bytes(-1)],
    }  # fmt: skip
    DEFAULTS: ClassVar[dict[str, Any]] = {
        "reduce": "mean", "grad_scale": 1.0, "dtensor_outputs": False, "accumulate": False, "overlap": True,
        "bucket_size": None,
    }  # fmt: skip

    def __post_init__(self) -> None:
        made = checked(self.value, self.KINDS[self.name], self.name, PlanError, plan_entry=str(self))
        object.__setattr__(self, "value", made)

    @property
    def key(self) -> tuple[Any, ...]:
        return ("setting", self.name)

    def __str__(self) -> str:
        return f"{self.name}={quote(self.value) if isinstance(self.value, str) else repr(self.value)}"


@dataclass(frozen=True)
class Precision:
    """The dtypes in which tensors are sent and computed; None leaves them as they are.

    Args:
        param: parameters are cast to it before their gather, and the model's floating-point inputs to it too.
        reduce: gradients are reduced in it; None: in ``param``.
        output: floating-point outputs are cast to it.
        buffers: floating-point buffers are cast to it.
        keep_low_precision_grads: leave reduced gradients in ``reduce`` instead of casting them back.
        full_precision_eval: compute in the parameters' own dtype while the module is in eval mode.
    """

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    buffers: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    full_precision_eval: bool = False

    def __post_init__(self) -> None:
        check_fields(self, PlanError, "", plan_entry="precision(...)")
        for name in DTYPE_FIELDS:
            dtype = getattr(self, name)
            if dtype is not None and not dtype.is_floating_point:
                raise PlanError(
                    f"{name}={dtype!r} is not a floating-point dtype",
                    plan_entry="precision(...)",
                    fix=f"write {name}=torch.bfloat16",
                )

    @property
    def key(self) -> tuple[Any, ...]:
        return ("precision",)

    @property
    def grads(self) -> torch.dtype | None:
        """The dtype that gradients are left in, None for each parameter's own."""
        return (self.reduce or self.param) if self.keep_low_precision_grads else None

    @property
    def said(self) -> dict[str, Any]:
        """The fields that are not at their defaults."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) != field.default}

    def __str__(self) -> str:
        return f"precision({', '.join(f'{name}={value!r}' for name, value in self.said.items())})"


@dataclass(frozen=True)
class Offload:
    """The parameters that ``glob`` matches are kept on the host, or not.

    Args:
        to: "host" or "device".
        pin_memory: whether their host memory is pinned where the device is an accelerator.
    """

    glob: str
    to: Annotated[str, Literal["host", "device"]] = "host"
    pin_memory: bool = True

    def __post_init__(self) -> None:
        check_fields(self, PlanError, "", plan_entry=str(self))

    @property
    def key(self) -> tuple[Any, ...]:
        return ("offload", self.glob)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments beside the globs that are not at their defaults."""
        said = {"to": (self.to, "host"), "pin_memory": (self.pin_memory, True)}
        return {name: value for name, (value, default) in said.items() if value != default}

    def __str__(self) -> str:
        said = (f"{name}={quote(value) if isinstance(value, str) else value}" for name, value in self.options.items())
        return f"offload({', '.join((quote(self.glob), *said))})"


DTYPE_FIELDS = ("param", "reduce", "output", "buffers")
Entry = Precision | Offload | Ddp | Fsdp | Tp | Param | Port | Activation | Setting
Data = Ddp | Fsdp


def show_axes(axes: tuple[str, ...]) -> str:
    return quote(axes[0]) if len(axes) == 1 else f"({', '.join(map(quote, axes))})"


def show_sizes(overrides: dict[str, int]) -> str:
    return "{" + ", ".join(f"{quote(glob)}: {size}" for glob, size in overrides.items()) + "}"


def axis_names(axis: Any, entry: str) -> tuple[str, ...]:
    """``axis``, a name or a sequence of them, as a tuple."""
    names = (axis,) if isinstance(axis, str) else tuple(axis) if isinstance(axis, list | tuple) else (axis,)
    for name in names:
        if not isinstance(name, str) or not name:
            raise PlanError(f"{name!r} is not the name of a mesh axis", plan_entry=entry, fix='name axes like "dp"')
    return names


def distinct(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """``entries`` without those that a later one of the same key replaces."""
    said: dict[Any, Entry] = {}
    for entry in entries:
        said.pop(entry.key, None)
        said[entry.key] = entry
    return tuple(said.values())
