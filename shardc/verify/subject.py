"""The input of a check (`Subject`) and the type of its failures (`Broken`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from shardc.ir.graph import Value, info
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh

Agrees = Callable[[fx.Node, tuple[Layout, ...] | None], str | None]
Broken = Iterator[tuple[fx.Node, str]]


def no_rules(node: fx.Node, operands: tuple[Layout, ...] | None) -> None:
    """Accept the layouts of every op: for graphs whose ops have no rules."""


@dataclass(frozen=True)
class Subject:
    """A graph to verify, with its mesh; a check takes it and yields (node, what is wrong).

    Args:
        agrees: (op, operand layouts or None for their own) -> why they do not give the results' layouts, or None.
        causes: parameter -> the plan entries that decide its compute layout, for errors.
    """

    gm: fx.GraphModule
    mesh: Mesh
    agrees: Agrees
    causes: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def nodes(self) -> list[fx.Node]:
        return list(self.gm.graph.nodes)

    @cached_property
    def place(self) -> dict[fx.Node, int]:
        """Position of each node."""
        return {node: at for at, node in enumerate(self.nodes)}

    @cached_property
    def calls(self) -> list[fx.Node]:
        return [node for node in self.nodes if node.op == "call_function"]

    @cached_property
    def stored(self) -> dict[tuple[str, str], Value]:
        """(kind, name) of a parameter, buffer, input or saved value -> its placeholder's tensor."""
        pairs = ((info(node).role, info(node).value) for node in self.nodes if node.op == "placeholder")
        return {(role.kind, role.name): value for role, value in pairs if role is not None and isinstance(value, Value)}

    def owner_value(self, kind: str, name: str) -> Value | None:
        """Return the parameter, buffer or input (its placeholder's tensor) whose gradient or update an output is."""
        return self.stored.get(("param" if kind == "grad" else kind, name))


Check = Callable[[Subject], Broken]
