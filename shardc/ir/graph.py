"""`Info`, shardc's record of each FX node: one typed value under one key of ``node.meta``.

The graph itself is a plain `torch.fx.Graph`. Before ``localize`` shapes are global, and from ``propagate`` on every
value has a layout. After it shapes are local, and values have no layout.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from shardc.ir.layout import Layout
from shardc.validate import torch_name

KEY = "shardc"

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "f8e4m3fn",
    torch.float8_e5m2: "f8e5m2",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}


@dataclass(frozen=True)
class Value:
    """A tensor in the graph: dtype, global shape, and the layout once it is chosen.

    After ``localize``, ``shape`` is the local one and ``layout`` is None.

    Args:
        host: whether it is in host memory, as an offloaded parameter before its copy to the device and its gradient
            after the copy back are; False before pass ``offload``.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: Layout | None = None
    host: bool = False

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Return the bytes of a tensor of this shape and dtype."""
        return prod(self.shape) * self.itemsize

    def __str__(self) -> str:
        name = DTYPE_NAMES.get(self.dtype, torch_name(self.dtype)) + ("<host>" if self.host else "")
        return f"{name}{self.layout}" if self.layout is not None else f"{name}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Origin:
    """Provenance of a node: the user's code or the plan entry that it comes from.

    Args:
        module: qualified name of the module whose code called the op ("" for the root).
        source: ``file:line`` of the user's code.
        phase: "forward" or "backward".
        cause: for inserted nodes, the plan entry or option that asked for it.
        consumer: for a reshard that no plan entry asked for, the name of the op, or of the output, that needs it.
        region: number of its ``torch.utils.checkpoint`` region, which backward recomputes; 0 for none.
        policy: "must_save" if backward reads its result where it needs it, "must_recompute" if backward runs it again
            wherever its result is used, by a policy of its region or of the plan; "" if partitioning decides.
        host: the plan entry that keeps its result in host memory between forward and backward; "" if none does.
        chunk_rows: number of rows that the model computes at a time (``linear_cross_entropy``); 0 for all.
    """

    module: str = ""
    source: str = ""
    phase: str = "forward"
    cause: str = ""
    region: int = 0
    consumer: str = ""
    policy: str = ""
    host: str = ""
    chunk_rows: int = 0

    @property
    def reason(self) -> str:
        """Return why a node is there, as text: ``cause`` (a plan entry), or ``needed by CONSUMER``, or "" if neither is
        known.
        """
        return self.cause or (f"{NEEDED_BY}{self.consumer}" if self.consumer else "")


NEEDED_BY = "needed by "


@dataclass(frozen=True)
class Role:
    """Identity of a placeholder or an output: a parameter, buffer, input, gradient or saved value, by kind and name.

    Args:
        kind: "param", "buffer", "input", "tangent", "coordinate", "key" (of random draws) for placeholders;
            "output", "buffer", "grad" (of a param or of an input) for outputs.
        name: the parameter's or buffer's qualified name, the input's dotted path, the axis, or "key".
        index: position among the placeholders, or outputs, of its kind.
        layout: for outputs from ``propagate`` on, the layout that the caller requires.
    """

    kind: str
    name: str
    index: int = 0
    layout: Layout | None = None


@dataclass(frozen=True)
class Info:
    """shardc's record of one FX node: its name, type, provenance and role. It is stored under one key of the node's
    ``meta``.

    Args:
        name: its name in text: scope and op, unique in the graph, e.g. ``layers.0.mlp.up.mm``.
        value: its tensor, a tuple of them for an op with several results, None for non-tensors.
        origin: its provenance.
        role: its role; None unless it is a placeholder.
        needs: from ``propagate`` on, the required layout of each tensor operand, in the order of `Call.operands`.
        is_kept_part: whether it is the part of a gathered parameter that each rank keeps for backward (`KeepPart`).
        regathers: name of the gathered parameter that it gathers again from the kept part; "" for other nodes.
        true_sizes: from ``pad`` on, the sizes of all operands' dims without padding; None if no operand is padded.
        piece: index among the chunks of a collective that ``decompose`` has cut; None for others.
    """

    name: str
    value: Value | tuple[Value | None, ...] | None
    origin: Origin = field(default_factory=Origin)
    role: Role | None = None
    needs: tuple[Layout, ...] | None = None
    is_kept_part: bool = False
    regathers: str = ""
    true_sizes: tuple[int, ...] | None = None
    piece: int | None = None

    @property
    def values(self) -> tuple[Value | None, ...]:
        """Return the `Value` of each result (None for a non-tensor) as a tuple, also for a single result."""
        return self.value if isinstance(self.value, tuple) else (self.value,)

    @property
    def tensors(self) -> list[Value]:
        """Return the `Value` of each result that is a tensor."""
        return [value for value in self.values if value is not None]

    def at(self, layout: Layout | tuple[Layout | None, ...] | None) -> Info:
        """Return a copy of this record in which the tensors have another ``layout``. For an op with several results, a
        tuple gives one layout per result.
        """
        if isinstance(self.value, tuple):
            layouts = layout if isinstance(layout, tuple) else (layout,) * len(self.value)
            values = tuple(v and replace(v, layout=new) for v, new in zip(self.value, layouts, strict=True))
            return replace(self, value=values)
        assert self.value is not None and not isinstance(layout, tuple)
        return replace(self, value=replace(self.value, layout=layout))


def info(node: fx.Node) -> Info:
    """Return the `Info` of ``node``."""
    record: Info = node.meta[KEY]
    return record


def set_info(node: fx.Node, record: Info) -> fx.Node:
    """Set the `Info` of ``node``; return the node."""
    node.meta[KEY] = record
    return node


def update(node: fx.Node, **fields: Any) -> fx.Node:
    """Set ``fields`` of the `Info` of ``node``; return the node."""
    return set_info(node, replace(info(node), **fields))


def value(node: fx.Node) -> Value:
    """Return the `Value` of ``node``, whose result is a single tensor."""
    tensor = node.meta[KEY].value
    assert isinstance(tensor, Value), f"{node} makes {tensor}, not one tensor"
    return tensor


def is_tensor(node: fx.Node) -> bool:
    """Return whether the result of ``node`` is a single tensor."""
    return isinstance(info(node).value, Value)


def value_of(val: object) -> Value | tuple[Value | None, ...] | None:
    """Return the `Value` of an example tensor; a tuple of these for a list or tuple; None for a non-tensor."""
    if isinstance(val, (tuple, list)):
        return tuple(Value(v.dtype, tuple(v.shape)) if isinstance(v, Tensor) else None for v in val)
    return Value(val.dtype, tuple(val.shape)) if isinstance(val, Tensor) else None


def role(node: fx.Node) -> Role:
    """Return the `Role` of the placeholder ``node``."""
    node_role = info(node).role
    assert node_role is not None, f"{node} has no role"
    return node_role


def layout(node: fx.Node) -> Layout:
    """Return the layout of the single result of ``node``."""
    result = value(node).layout
    assert result is not None, f"{node} has no layout yet"
    return result


def placeholders(graph: fx.Graph, kind: str | None = None) -> list[fx.Node]:
    """Return the graph's placeholders in order. With ``kind`` (such as "param"), return those with a role of that kind
    only.
    """
    nodes = [n for n in graph.nodes if n.op == "placeholder"]
    return nodes if kind is None else [n for n in nodes if (r := info(n).role) and r.kind == kind]


def output_node(graph: fx.Graph) -> fx.Node:
    """Return the output node, the last of the graph."""
    return next(iter(reversed(graph.nodes)))


def outputs(graph: fx.Graph) -> Iterator[tuple[Role, fx.node.Argument]]:
    """Yield (role, node) of each output of the graph, in order. An output that is a constant or None is yielded as it
    is in place of the node.
    """
    node = output_node(graph)
    yield from zip(node.meta[ROLES], node.args[0], strict=True)


def ancestors(values: Iterable[object], ends: Callable[[fx.Node], bool] = lambda node: False) -> set[fx.Node]:
    """Return the nodes among ``values`` and the nodes that they are computed from, directly or not. The walk does not
    go on behind nodes for which ``ends`` returns true.
    """
    out: set[fx.Node] = set()
    work = [x for x in values if isinstance(x, fx.Node)]
    while work:
        node = work.pop()
        if node not in out:
            out.add(node)
            work += () if ends(node) else node.all_input_nodes
    return out


def change_outputs(graph: fx.Graph, change: Callable[[Role, fx.Node], fx.Node]) -> None:
    """Replace each node that the graph returns by ``change(role, node)``; constants stay."""
    results = [change(role, node) if isinstance(node, fx.Node) else node for role, node in outputs(graph)]
    output_node(graph).args = (tuple(results),)


def dependents(graph: fx.Graph, sources: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes in ``sources``, and all nodes of ``graph`` that are computed from one of these."""
    dependent = set(sources)
    for node in graph.nodes:
        if not dependent.isdisjoint(node.all_input_nodes):
            dependent.add(node)
    return dependent


def copied(graph: fx.Graph) -> fx.Graph:
    """Return a copy of ``graph``, with copies of each node's ``meta``."""
    copy = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    output = copy.output(copy.graph_copy(graph, env))
    for node, twin in [*env.items(), (output_node(graph), output)]:
        twin.meta = dict(node.meta)
    return copy


ROLES = "shardc_roles"  # key of the output node's ``meta``: a tuple with the Role of each output
# Key of a backward's output node's ``meta``: placeholder name -> role of the parameter, buffer or input that it is, or
# was gathered, moved or cast from.
READS = "shardc_reads"


class NameScope:
    """Generator of names that are unique in one graph: ``name``, then ``name.1``, ``name.2``."""

    def __init__(self) -> None:
        self._used: dict[str, int] = {}

    @classmethod
    def of(cls, graph: fx.Graph, but: Container[fx.Node] = ()) -> NameScope:
        """Return a scope in which all names of ``graph`` are taken, except those of the nodes in ``but``."""
        scope = cls()
        for node in graph.nodes:
            if KEY in node.meta and node not in but:
                scope._used.setdefault(info(node).name, 0)
        return scope

    def fresh(self, name: str) -> str:
        """Return ``name``, with the next free number if it is taken, and reserve it."""
        if name not in self._used:
            self._used[name] = 0
            return name
        while True:
            self._used[name] += 1
            candidate = f"{name}.{self._used[name]}"
            if candidate not in self._used:
                self._used[candidate] = 0
                return candidate
