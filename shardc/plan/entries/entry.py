"""`Entry`, the interface of plan entries. Code that resolves, prints or saves plans calls only its methods, whatever
the kind of entry. A plan prints and is saved as the constructor calls, such as ``fsdp("dp")``, that create its entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from shardc.errors import PlanError
from shardc.ir.mesh import Mesh
from shardc.plan.layout_spec import Form, quote, show, show_sizes
from shardc.plan.placed import ParamPlan, Placed, SavePolicy
from shardc.validate import check_fields

Call = tuple[str, dict[str, Any]]
SPECS = ("params", "inputs", "outputs", "activations")  # arguments that take specs
BY_GLOB = ("overrides", "levels", "thresholds", "reshard_after_forward")  # arguments that map globs to numbers


@dataclass(frozen=True)
class Entry:
    """One statement of a plan, as a frozen dataclass. Each kind of entry overrides the methods for what it decides.

    Attributes:
        constructor: name of the function that creates the entry; "" for that of its class.
        identity: names of the fields that say what the entry is about; None if all of them do.
    """

    constructor: ClassVar[str] = ""
    identity: ClassVar[tuple[str, ...] | None] = None

    @property
    def key(self) -> tuple[object, ...]:
        """Return a key for what the entry is about. Of two entries with equal keys, the later one is used."""
        return (self,) if self.identity is None else (self.constructor, *(getattr(self, x) for x in self.identity))

    def on(self, mesh: Mesh) -> Entry:
        """Return the entry with its axes filled in from ``mesh``, if it was written without axes (``fsdp()``).

        Raises:
            PlanError: it leaves its axis open, and ``mesh`` has several axes.
        """
        return self

    # --- decisions

    @property
    def axes(self) -> tuple[str, ...]:
        """Return the mesh axes that the entry names."""
        return ()

    @property
    def batch(self) -> tuple[str, ...]:
        """Return the axes over which the entry splits dim 0 of the inputs."""
        return ()

    @property
    def sequence(self) -> tuple[int, str, bool] | None:
        """Return (dim, axis, whether each rank gets a stripe instead of a chunk) of the input dim, besides dim 0, that
        the entry splits over a batch axis. None if it splits no such dim.
        """
        return None

    @property
    def storage(self) -> tuple[tuple[str, ...], int]:
        """Return (axes over which the entry splits parameters in storage only, its ZeRO level 1, 2 or 3); ((), 0) if it
        splits none.
        """
        return (), 0

    def level_of(self, param: Placed) -> int:
        """Return the ZeRO level (1, 2 or 3) at which the entry stores the parameter; 0 if the entry is no ``fsdp``
        entry.
        """
        return self.storage[1]

    def regather_axes(self, param: Placed) -> tuple[str, ...]:
        """Return the axes over which a ZeRO-3 parameter stays split between forward and backward. () if it is split as
        in storage.
        """
        return ()

    @property
    def settings(self) -> Mapping[str, object]:
        """Return name -> value of the plan's settings that the entry gives."""
        return {}

    def check(self, mesh: Mesh, batch: Mapping[str, Entry]) -> None:
        """Raise PlanError if the entry cannot be used on ``mesh``. The mesh has all axes that the entry names.

        Args:
            batch: axis -> the entry that splits the batch over it.
        """

    def place(self, params: Mapping[str, Placed], names: Mapping[str, str]) -> Mapping[str, Placed]:
        """Return the parameters that the entry applies to, with their new layouts: name -> `Placed`.

        Args:
            params: every parameter, as placed by the entries before this one.
            names: every name of every parameter -> its first name, the key in ``params``.

        Raises:
            PlanError: a glob matches nothing, or a parameter cannot have the layout.
        """
        return {}

    def store(self, stored: ParamPlan, param: Placed, view: Mesh | None) -> ParamPlan:
        """Return ``stored``, the layouts of a parameter, with its storage also split as this entry says; unchanged if
        the entry splits no storage.

        It is called for parameters that no spec splits over axes of `storage`.

        Args:
            stored: the parameter's layouts so far.
            param: the parameter with its compute layout.
            view: the mesh of the parameters' DTensors; None while it is not known.
        """
        return stored

    def ports(self, kind: str, names: Sequence[str]) -> Mapping[int, Form]:
        """Return the specs that the entry gives to the inputs or outputs (``kind``) called ``names``: position in
        ``names`` -> spec.
        """
        return {}

    def pins(self, modules: Sequence[str]) -> Mapping[tuple[str, str, int | str], Form]:
        """Return the specs that the entry gives to activations: (module, "input" or "output", position or keyword) ->
        spec.
        """
        return {}

    def saves(self, modules: Sequence[str]) -> Sequence[SavePolicy]:
        """Return the policies by which the entry saves activations for backward, one for each module that it names."""
        return ()

    # --- text

    @property
    def call(self) -> Call:
        """Return the call that creates the entry: (name of the constructor, its arguments that are not defaults)."""
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        arguments = {name: value for name, (value, default) in values.items() if value != default}
        return self.constructor or type(self).__name__, arguments

    @property
    def group(self) -> tuple[tuple[str, ...], int] | None:
        """Return (key of the constructor call, position of the entry in its arguments) if one call creates several
        entries, as ``Plan(...)`` does. None if the entry has a call of its own.
        """
        return None

    @property
    def row(self) -> tuple[str, str, str]:
        """Return the cells (kind, subject, effect) of the entry in a table of the plan."""
        name, arguments = self.call
        return name, "", call_text("", arguments)[1:-1]

    def __str__(self) -> str:
        return call_text(*to_call([self]))

    def error(self, what: str, fix: str) -> PlanError:
        """Return the error that says ``what`` is wrong with the entry."""
        return PlanError(what, plan_entry=str(self), fix=fix)


class CheckedEntry(Entry):
    """An entry whose fields are checked against their annotations."""

    def __post_init__(self) -> None:
        check_fields(self, PlanError, "", plan_entry=str(self))


@dataclass(frozen=True)
class BatchEntry(CheckedEntry):
    """An entry that splits the batch over ``axis``, and also tensors of some modules: `Cp` (attention) and `Ep`
    (experts).
    """

    axis: str

    @property
    def axes(self) -> tuple[str, ...]:
        return (self.axis,)

    @property
    def batch(self) -> tuple[str, ...]:
        return (self.axis,)


def distinct(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """Return ``entries`` without those that a later entry with the same key replaces."""
    by_key: dict[tuple[object, ...], Entry] = {}
    for entry in entries:
        by_key.pop(entry.key, None)
        by_key[entry.key] = entry
    return tuple(by_key.values())


def runs(entries: Iterable[Entry]) -> list[list[Entry]]:
    """Split ``entries`` into runs of consecutive entries that one constructor call creates; return the runs."""
    out: list[list[Entry]] = []
    for entry in entries:
        group, before = entry.group, out[-1][-1].group if out else None
        if group and before and group[0] == before[0] and group[1] >= before[1]:
            out[-1].append(entry)
        else:
            out.append([entry])
    return out


def in_order(entries: Iterable[Entry]) -> list[Entry]:
    """Return ``entries`` sorted by their constructor calls: first entries with a constructor of their own (``fsdp``),
    then arguments of ``Plan``.

    Entries of one call are sorted by their positions in its arguments.
    """

    def order(entry: Entry) -> tuple[bool, int]:
        """Return the sort key of an entry within a plan's text: arguments of ``Plan(...)`` go last."""
        group, place = entry.group or ((), 0)
        return group == ("Plan",), place

    return sorted(entries, key=order)


def to_call(run: Sequence[Entry]) -> Call:
    """Return the call that creates all entries of ``run`` (consecutive entries of one call), as (constructor,
    arguments).

    Lists, tuples and dicts that several entries give for one argument are joined. A tuple of one item becomes the item.
    Inputs and outputs are dicts by dotted path.
    """
    arguments: dict[str, Any] = {}
    for entry in run:
        for key, value in entry.call[1].items():
            before = arguments.get(key)
            if isinstance(before, list | tuple):
                value = before + value
            arguments[key] = {**before, **value} if isinstance(before, dict) else value
    unpacked = {key: value[0] for key, value in arguments.items() if isinstance(value, tuple) and len(value) == 1}
    return run[0].call[0], arguments | unpacked


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """Return the call of constructor ``name`` as Python source that evaluates to the plan.

    The arguments ``axis``, ``names`` and ``count`` are positional.
    """
    texts = {key: _argument_text(key, value) for key, value in arguments.items()}
    return f"{name}({', '.join(x if key in ('axis', 'names', 'count') else f'{key}={x}' for key, x in texts.items())})"


def _argument_text(key: str, value: Any) -> str:
    """Return the value of a constructor's argument ``key`` as Python source."""
    if key in BY_GLOB and isinstance(value, dict):
        return show_sizes(value)
    if key == "prefetch":
        return "{" + ", ".join(f"{quote(at)}: {_argument_text('', names)}" for at, names in value.items()) + "}"
    if isinstance(value, dict) and key in SPECS:
        return _specs_text(key, value)
    if isinstance(value, list | tuple) and not all(isinstance(item, str) for item in value):
        return repr(value)
    if isinstance(value, list):
        return f"[{', '.join(map(quote, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(quote, value))})"
    return quote(value) if isinstance(value, str) else repr(value)


def _specs_text(key: str, specs: dict[str, Form]) -> str:
    """Return the plan specs of argument ``key`` as Python source. ``specs`` maps a parameter glob or the path of an
    input or output to its spec.
    """
    if key in ("inputs", "outputs"):
        if list(specs) == [""]:
            return show(specs[""])
        if list(specs) == [str(index) for index in range(len(specs))]:
            return f"[{', '.join(map(show, specs.values()))}]"
    return "{" + ", ".join(f"{quote(at)}: {show(spec)}" for at, spec in specs.items()) + "}"
