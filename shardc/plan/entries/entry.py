"""What an entry can say. Resolving, text and files ask the entries of a plan and know no kind of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from shardc.ir.mesh import Mesh
from shardc.plan.calls import Call, call_text, to_call
from shardc.plan.forms import Form
from shardc.plan.placed import ParamPlan, Placed


@dataclass(frozen=True)
class Entry:
    """One statement of a plan. A kind of entry is a frozen dataclass that overrides what it has something to say on."""

    @property
    def key(self) -> tuple[Any, ...]:
        """Of two entries with the same key the later one holds."""
        return (self,)

    def on(self, mesh: Mesh) -> Entry:
        """The entry with the axes that it leaves open filled in from ``mesh``.

        Raises:
            PlanError: it leaves its axis open, and ``mesh`` has several.
        """
        return self

    # --- what it decides

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that it names."""
        return ()

    @property
    def batch(self) -> tuple[str, ...]:
        """The axes over which it splits dim 0 of the inputs."""
        return ()

    @property
    def sequence(self) -> tuple[int, str, bool] | None:
        """(dim, axis, striped) where it splits another dim of the inputs over one of its axes of ``batch``."""
        return None

    @property
    def storage(self) -> tuple[tuple[str, ...], int]:
        """The axes over which it splits parameters in storage only, and at which level of ``fsdp``; 0 for none."""
        return (), 0

    def level_of(self, param: Placed) -> int:
        """The level at which it stores a parameter; 0 where it stores none."""
        return self.storage[1]

    def kept(self, param: Placed) -> tuple[str, ...]:
        """The axes, and parts of axes, that split a parameter of level 3 from forward to backward; none for all."""
        return ()

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings of the plan that it gives, by name."""
        return {}

    def check(self, mesh: Mesh, batch: Mapping[str, Entry]) -> None:
        """Raises PlanError for what can be told from the mesh alone; ``batch`` says which entry splits it by axis.

        `axes` are on the mesh.
        """

    def place(self, params: Mapping[str, Placed], names: Mapping[str, str]) -> Mapping[str, Placed]:
        """The parameters that it is about, as it places them.

        Args:
            params: every parameter, as the entries before this one place it.
            names: every name of every parameter -> the first, by which ``params`` has it.

        Raises:
            PlanError: a glob that matches nothing, or a layout that a parameter cannot have.
        """
        return {}

    def store(self, stored: ParamPlan, param: Placed, view: Mesh | None) -> ParamPlan:
        """``stored`` with the storage that it gives the parameter, which no spec has split over axes of `storage`.

        Args:
            view: the mesh that parameters are DTensors on, once it is known.
        """
        return stored

    def ports(self, kind: str, names: Sequence[str]) -> Mapping[int, Form]:
        """By position in ``names`` the specs that it gives "inputs" or "outputs" (``kind``)."""
        return {}

    def pins(self, modules: Sequence[str]) -> Mapping[tuple[str, str, int | str], Form]:
        """The specs that it gives activations: module, "input" or "output", and position or keyword there -> spec."""
        return {}

    def regions(self, modules: Sequence[str]) -> Sequence[str]:
        """The modules whose activations backward computes again."""
        return ()

    # --- how it reads

    @property
    def call(self) -> Call:
        """The constructor that makes it, by name, and the arguments that are not at their defaults."""
        said = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        return type(self).__name__, {name: value for name, (value, default) in said.items() if value != default}

    @property
    def group(self) -> tuple[tuple[str, ...], int] | None:
        """What entries that one call makes have in common, and where this one stands in it; None where it is alone."""
        return None

    @property
    def row(self) -> tuple[str, str, str]:
        """(what, of, where) for a table."""
        name, arguments = self.call
        return name, "", call_text("", arguments)[1:-1]

    def __str__(self) -> str:
        return call_text(*to_call([self]))


def distinct(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """``entries`` without those that a later one of the same key replaces."""
    said: dict[Any, Entry] = {}
    for entry in entries:
        said.pop(entry.key, None)
        said[entry.key] = entry
    return tuple(said.values())
