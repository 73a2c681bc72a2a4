"""The arguments of `Plan`, an entry for each: where parameters, inputs, outputs and activations lie, and settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, ClassVar, Literal

from shardc.errors import PlanError
from shardc.plan.calls import Call
from shardc.plan.entries.entry import Entry
from shardc.plan.forms import Form, PerRank, freeze, per_rank, quote, show, spec_axes
from shardc.plan.match import matching, must_match, near_names, shorten
from shardc.plan.placed import Placed
from shardc.plan.targets import flatten, split_target
from shardc.validate import Bytes, Range, checked


class Raw(Entry):
    """Said by an argument of `Plan`."""

    @property
    def group(self) -> tuple[tuple[str, ...], int]:
        order = ("params", "inputs", "outputs", "activations", "prefetch", *Setting.DEFAULTS)
        return ("Plan",), order.index(next(iter(self.call[1])))


class Spec(Raw):
    """An item of an argument of `Plan` that takes specs: ``key`` is the argument, and what the item is about."""

    spec: Form

    @property
    def axes(self) -> tuple[str, ...]:
        return spec_axes(self.spec)

    @property
    def call(self) -> Call:
        argument, about = self.key
        return "Plan", {argument: {about: self.spec}}

    @property
    def row(self) -> tuple[str, str, str]:
        argument, about = self.key
        return argument.removesuffix("s"), about or "all", show(self.spec)

    def __str__(self) -> str:
        argument, about = self.key
        return f"{argument}[{quote(about)}] = {show(self.spec)}"


@dataclass(frozen=True)
class Param(Spec):
    """The parameters that ``glob`` matches lie as ``spec`` says."""

    glob: str
    spec: Form

    @property
    def key(self) -> tuple[str, str]:
        return ("params", self.glob)

    def place(self, params: Mapping[str, Placed], names: Mapping[str, str]) -> dict[str, Placed]:
        found = {names[name] for name in must_match(self.glob, names, "parameter", str(self))}
        return {name: params[name].by_spec(self.spec, str(self)) for name in params if name in found}


@dataclass(frozen=True)
class Port(Spec):
    """The inputs or outputs at ``path`` lie as ``spec`` says.

    Args:
        kind: "inputs" or "outputs".
        path: "" for all; else names or positions from the argument down, joined by dots: "tokens", "0", "batch.mask".
    """

    kind: str
    path: str
    spec: Form

    @property
    def key(self) -> tuple[str, str]:
        return (self.kind, self.path)

    def ports(self, kind: str, names: Sequence[str]) -> dict[int, Form]:
        if kind != self.kind:
            return {}
        arguments = list(dict.fromkeys(name.partition(".")[0] for name in names))
        found = {at: self.spec for at, name in enumerate(names) if self._is_about(name, arguments)}
        if not found:
            near = near_names(self.path, list(names))
            raise PlanError(
                f"there is no {kind.removesuffix('s')} {self.path!r}",
                plan_entry=str(self),
                fix=f"did you mean {near[0]!r}?" if near else f"the {kind} are {shorten(list(names))}",
            )
        return found

    def _is_about(self, name: str, arguments: list[str]) -> bool:
        """Whether the path is ``name``, the start or a glob of it, or the same with the argument's position."""
        path, (argument, dot, rest) = self.path, name.partition(".")
        spelled = (name, f"{arguments.index(argument)}{dot}{rest}")
        return not path or any(s == path or s.startswith(f"{path}.") or fnmatchcase(s, path) for s in spelled)

    def __str__(self) -> str:
        at = f"[{self.path if self.path.isdigit() else quote(self.path)}]" if self.path else ""
        return f"{self.kind}{at} = {show(self.spec)}"


@dataclass(frozen=True)
class Activation(Spec):
    """A tensor at a module's border lies as ``spec`` says.

    Args:
        target: a module glob and which of its tensors, as `shardc.plan.targets.split_target` reads it.
    """

    target: str
    spec: Form

    @property
    def key(self) -> tuple[str, str]:
        return ("activations", self.target)

    def pins(self, modules: Sequence[str]) -> dict[tuple[str, str, int | str], Form]:
        target = split_target(self.target)
        found = matching(target.glob, modules)
        whole = matching(self.target, modules) if target.where and not target.explicit else []
        if found and whole:
            raise PlanError(
                f"{self.target!r} is the {target.where} of {found[0]!r} and also the module {whole[0]!r}",
                plan_entry=str(self),
                fix=f"write '{target.glob}:{target.where}' for the {target.where}, or '{self.target}:output' for that "
                "module's output",
            )
        if whole:
            return {(module, "output", 0): self.spec for module in whole}
        found = must_match(target.glob, modules, "module", str(self))
        return {(module, target.where or "output", target.index): self.spec for module in found}


@dataclass(frozen=True)
class Setting(Raw):
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
    def key(self) -> tuple[str, str]:
        return ("setting", self.name)

    @property
    def settings(self) -> dict[str, Any]:
        return {self.name: self.value}

    @property
    def call(self) -> Call:
        return "Plan", self.settings

    @property
    def row(self) -> tuple[str, str, str]:
        return "setting", self.name, str(self.value)

    def __str__(self) -> str:
        return f"{self.name}={quote(self.value) if isinstance(self.value, str) else repr(self.value)}"


def port_entries(kind: str, value: Any) -> list[Port]:
    """The entries of ``Plan(inputs=...)`` or ``Plan(outputs=...)``."""
    out = []
    for path, spec in flatten(value, kind):
        form = per_rank() if spec is per_rank else spec
        if not (kind == "inputs" and isinstance(form, PerRank)):
            form = freeze(form, f"{kind}={value!r}")
        out.append(Port(kind, path, form))
    return out


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
