"""Entries for the arguments of `Plan`: layouts of parameters, inputs, outputs, activations; prefetches; settings."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, ClassVar, Literal

from shardc.errors import PlanError
from shardc.ir.module_paths import is_in
from shardc.plan.entries.entry import Call, CheckedEntry, Entry
from shardc.plan.layout_spec import Form, PerRank, freeze, per_rank, quote, show, spec_axes
from shardc.plan.match import flatten, matching, must_match, near_names, shorten, split_target
from shardc.plan.placed import Placed
from shardc.validate import Bytes, Range, checked, did_you_mean


class Raw(Entry):
    """Base of entries that are written as arguments of ``Plan(...)``, such as ``Plan(params={...})``."""

    @property
    def group(self) -> tuple[tuple[str, ...], int]:
        order = ("params", "inputs", "outputs", "activations", "prefetch", *Setting.DEFAULTS)
        return ("Plan",), order.index(next(iter(self.call[1])))


class Spec(Raw):
    """Base of entries that give a tensor a spec. ``key`` is (argument of `Plan`, name or path of the tensor), such as
    ``("inputs", "0")``.
    """

    spec: Form

    @property
    @abstractmethod
    def key(self) -> tuple[str, str]:
        """Return (argument of `Plan`, name or path of the tensor that the spec is for)."""

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
    """Gives the parameters that ``glob`` matches the layout ``spec``."""

    glob: str
    spec: Form

    @property
    def key(self) -> tuple[str, str]:
        return ("params", self.glob)

    def place(self, params: Mapping[str, Placed], names: Mapping[str, str]) -> dict[str, Placed]:
        matches = {names[name] for name in must_match(self.glob, names, "parameter", str(self))}
        return {name: params[name].by_spec(self.spec, str(self)) for name in params if name in matches}


@dataclass(frozen=True)
class Port(Spec):
    """Gives the inputs or outputs at ``path`` the layout ``spec``.

    Args:
        kind: "inputs" or "outputs".
        path: "" for all, or names and positions from the argument down, joined by dots: "tokens", "0", "batch.mask".
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
        specs = {at: self.spec for at, name in enumerate(names) if self._is_about(name, arguments)}
        if not specs:
            fix = did_you_mean(near_names(self.path, list(names))[:1], f"the {kind} are {shorten(list(names))}")
            raise self.error(f"there is no {kind.removesuffix('s')} {self.path!r}", fix=fix)
        return specs

    def _is_about(self, name: str, arguments: list[str]) -> bool:
        """Return whether the entry is about the tensor ``name``: the entry's ``path`` is its name, the start of its
        name, or a glob.

        The argument at the start of the path may also be given by its position in ``arguments``.
        """
        path, (argument, dot, rest) = self.path, name.partition(".")
        spelled = (name, f"{arguments.index(argument)}{dot}{rest}")
        return not path or any(is_in(s, path) or fnmatchcase(s, path) for s in spelled)

    def __str__(self) -> str:
        at = f"[{self.path if self.path.isdigit() else quote(self.path)}]" if self.path else ""
        return f"{self.kind}{at} = {show(self.spec)}"


@dataclass(frozen=True)
class Activation(Spec):
    """Gives a tensor at a module boundary the layout ``spec``.

    Args:
        target: a module glob and one of its tensors, in the form that `shardc.plan.match.split_target` parses.
    """

    target: str
    spec: Form

    @property
    def key(self) -> tuple[str, str]:
        return ("activations", self.target)

    def pins(self, modules: Sequence[str]) -> dict[tuple[str, str, int | str], Form]:
        target = split_target(self.target)
        matches = matching(target.glob, modules)
        whole = matching(self.target, modules) if target.where and not target.explicit else []
        if matches and whole:
            raise self.error(
                f"{self.target!r} is the {target.where} of {matches[0]!r} and also the module {whole[0]!r}",
                fix=f"write '{target.glob}:{target.where}' for the {target.where}, or '{self.target}:output' for that "
                "module's output",
            )
        if whole:
            return {(module, "output", 0): self.spec for module in whole}
        matches = must_match(target.glob, modules, "module", str(self))
        return {(module, target.where or "output", target.index): self.spec for module in matches}


@dataclass(frozen=True)
class Prefetch(Raw, CheckedEntry):
    """Starts the gathers of the parameters of ``modules`` before ``module`` computes, in forward and in backward."""

    module: str
    modules: tuple[str, ...]

    @property
    def key(self) -> tuple[str, str]:
        return ("prefetch", self.module)

    def pins(self, modules: Sequence[str]) -> dict[tuple[str, str, int | str], Form]:
        """Raise PlanError if a module named by the entry does not exist. Return no pins, since a prefetch gives no
        layout.
        """
        for name in (self.module, *self.modules):
            if name not in modules:
                fix = did_you_mean(near_names(name, list(modules)), f"there are {shorten(list(modules))}")
                raise self.error(f"there is no module {name!r}", fix=fix)
        return {}

    @property
    def call(self) -> Call:
        return "Plan", {"prefetch": {self.module: list(self.modules)}}

    @property
    def row(self) -> tuple[str, str, str]:
        return "prefetch", self.module, f"parameters of {', '.join(self.modules)}"

    def __str__(self) -> str:
        return f"prefetch[{quote(self.module)}] = [{', '.join(map(quote, self.modules))}]"


@dataclass(frozen=True)
class Setting(Raw):
    """Sets a plain value of the plan, such as ``reduce`` or ``grad_scale``."""

    name: str
    value: str | float | bool

    KINDS: ClassVar[dict[str, Any]] = {
        "reduce": Literal["mean", "sum"], "grad_scale": Annotated[float, Range(-1e300, 1e300)], "dtensor_outputs": bool,
        "accumulate": bool, "overlap": bool, "bucket_size": Annotated[int | str, Bytes(-1)],
    }  # fmt: skip
    DEFAULTS: ClassVar[dict[str, Any]] = {
        "reduce": "mean", "grad_scale": 1.0, "dtensor_outputs": False, "accumulate": False, "overlap": True,
        "bucket_size": None, "microbatches": 1, "reduce_in": "step", "pp": None, "chunked_loss": 1,
    }  # fmt: skip

    def __post_init__(self) -> None:
        value = checked(self.value, self.KINDS[self.name], self.name, PlanError, plan_entry=str(self))
        object.__setattr__(self, "value", value)

    @property
    def key(self) -> tuple[str, str]:
        return ("setting", self.name)

    @property
    def settings(self) -> dict[str, object]:
        return {self.name: self.value}

    @property
    def call(self) -> Call:
        return "Plan", self.settings

    @property
    def row(self) -> tuple[str, str, str]:
        return "setting", self.name, str(self.value)

    def __str__(self) -> str:
        return f"{self.name}={quote(self.value) if isinstance(self.value, str) else repr(self.value)}"


def port_entries(kind: str, value: object) -> list[Port]:
    """Return a plan entry for each spec in ``value``, the argument ``inputs`` or ``outputs`` (``kind``) of ``Plan``."""
    out = []
    for path, spec in flatten(value, kind):
        form = per_rank() if spec is per_rank else spec
        if not (kind == "inputs" and isinstance(form, PerRank)):
            form = freeze(form, f"{kind}={value!r}")
        out.append(Port(kind, path, form))
    return out


def activation_entries(target: str, value: object) -> list[Activation]:
    """Return the plan entries of ``Plan(activations={target: value})``. The value is a spec, a list of specs by
    position, or a dict by keyword.
    """
    entry = f"activations[{quote(target)}] = {value!r}"
    base = target if split_target(target).where else f"{target}:output"
    out = []
    for path, spec in flatten(value, entry):
        if "." in path:
            raise PlanError("an activation's specs are nested", plan_entry=entry, fix="give one list or one dict")
        out.append(Activation(f"{base}[{path}]" if path else target, freeze(spec, entry)))
    return out
