"""`Entry`, the interface of plan entries. Code that resolves, prints or saves plans calls only its methods, whatever
the kind of entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from shardc.ir.mesh import Mesh
from shardc.plan.constructor_calls import Call, call_text, to_call
from shardc.plan.layout_spec import Form
from shardc.plan.placed import ParamPlan, Placed, SavePolicy


@dataclass(frozen=True)
class Entry:
    """One statement of a plan, as a frozen dataclass. Each kind of entry overrides the methods for what it decides."""

    @property
    def key(self) -> tuple[object, ...]:
        """Return a key for what the entry is about. Of two entries with equal keys, the later one is used."""
        return (self,)

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
        return type(self).__name__, {name: value for name, (value, default) in values.items() if value != default}

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


@dataclass(frozen=True)
class BatchEntry(Entry):
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
