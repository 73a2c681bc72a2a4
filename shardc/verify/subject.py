"""The input of a check (`Subject`), the type of its failures (`Broken`), and the report file of an error (`reporting`).

`State` detects whether a pass has changed a graph, so that an unchanged one is not verified twice.
"""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from operator import is_
from pathlib import Path

import torch
from torch import fx

from shardc.errors import VerifyError
from shardc.ir import text
from shardc.ir.arena import PLAN
from shardc.ir.graph import KEY, ROLES, Value, info
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh


class State:
    """Snapshot of a graph: nodes, operands, types and roles. The verifier compares the snapshots before and after a
    pass to see what the pass changed.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        # Dicts, not a tuple for each node: many new objects trigger Python's garbage collector.
        self.targets = {node: node.target for node in self.nodes}
        self.args, self.kwargs = {node: node.args for node in self.nodes}, {node: node.kwargs for node in self.nodes}
        self.records = {node: node.meta.get(KEY) for node in self.nodes}
        self.values = [node.meta.get("val") for node in self.nodes]  # compared as objects: tensors have no truth
        self.ends = [self.nodes[-1].meta.get(key) for key in (ROLES, PLAN)]

    def is_of(self, other: State | None) -> bool:
        """Return whether the graph has not changed since ``other``: the same nodes, in order, with the same operands
        and types.
        """
        if other is None or self.nodes != other.nodes or self.ends != other.ends or not self.computes(other):
            return False
        return all(map(is_, self.values, other.values))

    def computes(self, other: State | None) -> bool:
        """Return whether the graph has the same ops on the same operands as ``other``, in any order."""
        if other is None or self.targets != other.targets or self.args != other.args:
            return False
        return self.kwargs == other.kwargs and self.records == other.records


@contextmanager
def reporting(mesh: Mesh, programs: Mapping[str, fx.GraphModule | None]) -> Iterator[None]:
    """Context manager for checks of ``programs``. It writes a report file for a VerifyError that has no fix, and raises
    the error with a fix that names the file.

    Args:
        programs: title in the file -> graph; None for a graph that does not exist.
    """
    try:
        yield
    except VerifyError as error:
        if error.fix is not None:
            raise
        parts = [str(error), f"torch {torch.__version__}, Python {platform.python_version()}, {platform.platform()}"]
        parts += [f"--- {name}\n{_text(gm, mesh)}" for name, gm in programs.items() if gm is not None]
        content = "\n\n".join(parts)
        path = Path(tempfile.gettempdir()) / f"shardc-report-{blake2b(content.encode(), digest_size=6).hexdigest()}.txt"
        try:
            path.write_text(content)
            how = f"with {path}, which holds the program and the versions"
        except OSError as reason:
            how = f"with this text (no report could be written to {path}: {reason.strerror})"
        fix = f"this is a fault of shardc, or of a pass of your own, and not of your model or plan; report it {how}"
        raise error.with_fix(fix).with_traceback(error.__traceback__) from None


def _text(gm: fx.GraphModule, mesh: Mesh) -> str:
    """Return the dump of a graph. If the graph is too broken for a dump, return the error, and the graph as fx prints
    it.
    """
    try:
        return text.dump(gm, mesh)
    except VerifyError as error:  # a broken graph may not be printable
        return f"{error}\n{gm.graph}"


Agrees = Callable[[fx.Node, tuple[Layout, ...] | None], str | None]
Broken = Iterator[tuple[fx.Node, str]]


def no_rules(node: fx.Node, operands: tuple[Layout, ...] | None) -> None:
    """Accept the layouts of every op. Used as ``disagreement`` of a `Subject` whose graph is not checked against rules.
    Returns None (no disagreement).
    """


@dataclass(frozen=True)
class Subject:
    """A graph to verify, with its mesh. Each check of the verifier takes a `Subject` and yields (node, reason) for each
    failure.

    Args:
        gm: the graph.
        mesh: mesh of its layouts and groups.
        disagreement: function of an op and the layouts of its operands (None: their current ones) that returns why they
            do not give the layouts of its results, or None if they do.
        causes: parameter -> the plan entries that decide its compute layout, for errors.
    """

    gm: fx.GraphModule
    mesh: Mesh
    disagreement: Agrees
    causes: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def nodes(self) -> list[fx.Node]:
        """The nodes of the graph, in order."""
        return list(self.gm.graph.nodes)

    @cached_property
    def place(self) -> dict[fx.Node, int]:
        """Return the position of each node in the graph."""
        return {node: at for at, node in enumerate(self.nodes)}

    @cached_property
    def calls(self) -> list[fx.Node]:
        """The ops of the graph, in order."""
        return [node for node in self.nodes if node.op == "call_function"]

    @cached_property
    def stored(self) -> dict[tuple[str, str], Value]:
        """Return the type and layout (`Value`) of each parameter, buffer, input or saved value, by (kind, name)."""
        pairs = ((info(node).role, info(node).value) for node in self.nodes if node.op == "placeholder")
        return {(role.kind, role.name): value for role, value in pairs if role is not None and isinstance(value, Value)}

    def owner_value(self, kind: str, name: str) -> Value | None:
        """Return the `Value` (type and layout) of the stored tensor that the output (``kind``, ``name``) belongs to:
        the parameter of a gradient, or the buffer that is updated. None for other outputs.
        """
        return self.stored.get(("param" if kind == "grad" else kind, name))


Check = Callable[[Subject], Broken]
