"""A compiled step: what goes in and out of it, and the local graphs that run, by their place in it."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter, getitem
from typing import Any

import torch
from torch import fx

from shardc.ir import graph as ir
from shardc.ir.arena import PLAN, MemoryPlan
from shardc.ir.comm import WAIT, waits_of
from shardc.ir.comm_volume import arguments_of, collective_kind, group_axes
from shardc.ir.deferred import Deferred
from shardc.ir.graph import DTYPE_NAMES, Role
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.ir.reads import Reads
from shardc.ir.returned import Returned
from shardc.ir.segments import Segment


@dataclass(frozen=True)
class Certificate:
    """The collectives that every rank starts, in order, and where each is waited for.

    One graph serves all ranks, so ranks that have this text start the same collectives on every group, in an
    order that is the same for all groups: no two ranks can wait for each other in a circle.

    Args:
        mesh: whose groups they are on.
        lines: one collective each: which half, kind, axes, dtypes and local shapes, what it stands for, and in front
            of which ops its results are waited for.
    """

    mesh: Mesh
    lines: tuple[str, ...]

    @property
    def digest(self) -> str:
        """A hash of the text."""
        return hashlib.sha256(self.text().encode()).hexdigest()

    def text(self) -> str:
        return "\n".join([f"mesh {self.mesh}", *self.lines])


def outputs_text(used: Iterable[int]) -> str:
    """Return the outputs that a backward is of.

    >>> outputs_text([2, 0])
    'outputs 0, 2'
    """
    return f"outputs {', '.join(map(str, sorted(used)))}"


def certify(mesh: Mesh, halves: Sequence[tuple[str, fx.Graph]]) -> Certificate:
    """Return the certificate of a program's local graphs, given by name in the order in which they run."""
    lines = []
    for name, graph in halves:
        next_op = _next_ops(graph)
        for node in graph.nodes:
            kind = collective_kind(node)
            if kind is None:
                continue
            axes = group_axes(str(arguments_of(node)["group_name"]), mesh) or ()
            record = ir.info(node)
            shapes = ", ".join(
                f"{DTYPE_NAMES.get(v.dtype, v.dtype)}[{','.join(map(str, v.shape))}]" for v in record.tensors
            )
            until = ", ".join(dict.fromkeys(op for _, op in sorted(next_op[wait] for wait in waits_of(node))))
            lines.append(f"{name}: {kind}({','.join(axes)}) {shapes} %{record.name}, waited for in front of {until}")
    return Certificate(mesh, tuple(lines))


def _next_ops(graph: fx.Graph) -> dict[fx.Node, tuple[int, str]]:
    """Return the first op behind each wait that is no wait, with a number by which waits are in order."""
    out: dict[fx.Node, tuple[int, str]] = {}
    next_op = "the outputs"
    for node in reversed(graph.nodes):
        if node.target is WAIT:
            out[node] = -len(out), next_op
        elif node.op == "call_function" and node.target is not getitem:
            next_op = f"%{ir.info(node).name}"
    return out


FORWARD, BACKWARD, INFERENCE, REDUCTION = "forward", "backward", "inference", "reduction"

# The place of a half in a step; of a backward for a loss that does not use all outputs, the outputs that it does use.
Phase = str | frozenset[int]


@dataclass(frozen=True)
class Port:
    """An argument of a half.

    Args:
        role: what it is.
        name: of the placeholder.
        example: a fake tensor, or a number.
    """

    role: Role
    name: str
    example: Any


@dataclass(frozen=True, eq=False)
class Half:
    """A straight local graph at one place of a step: a forward, a backward, all of an evaluation, or a reduction.

    Args:
        phase: the place.
        gm: the graph, scheduled and with its memory planned.
        mesh: whose groups its collectives are on.
    """

    phase: Phase
    gm: fx.GraphModule
    mesh: Mesh

    @property
    def name(self) -> str:
        """The phase in words."""
        return self.phase if isinstance(self.phase, str) else f"{BACKWARD} of {outputs_text(self.phase)}"

    @property
    def kind(self) -> str:
        """The phase, without the outputs that a backward is for."""
        return self.phase if isinstance(self.phase, str) else BACKWARD

    @property
    def graph(self) -> fx.Graph:
        return self.gm.graph

    @cached_property
    def takes(self) -> tuple[Port, ...]:
        """The arguments in order."""
        return tuple(Port(ir.role(node), node.name, node.meta["val"]) for node in ir.placeholders(self.graph))

    @cached_property
    def gives(self) -> tuple[Role, ...]:
        """The roles of the outputs in order."""
        return tuple(role for role, _ in ir.outputs(self.graph))

    @cached_property
    def reads(self) -> Mapping[str, Role]:
        """The role of each argument that is a parameter, buffer or input as stored, by the argument's name."""
        roles = ir.output_node(self.graph).meta.get(ir.READS, {})
        return {port.name: roles[port.name] for port in self.takes if port.name in roles}

    @property
    def plan(self) -> MemoryPlan:
        """The memory plan for the results of its collectives."""
        plan: MemoryPlan = ir.output_node(self.graph).meta.get(PLAN, MemoryPlan())
        return plan


@dataclass(frozen=True, eq=False)
class Compiled:
    """A lowered half: code for each of its segments, which run in order.

    Args:
        half: what was lowered.
        segments, codes: alike segments have the same code, which takes a list of local tensors (emptied by the call)
            and gives a list of results.
        plan: where the results of its collectives lie, at the lines of the code where there is some.
        source_code: what Inductor made, of all segments that differ; "" of no code.
    """

    half: Half
    segments: tuple[Segment, ...]
    codes: tuple[Callable[[list[Any]], Sequence[Any]], ...]
    plan: MemoryPlan
    source_code: str = ""

    def __call__(self, inputs: list[Any], enter: Callable[[Segment], None] = lambda _: None) -> Sequence[Any]:
        """Runs it on ``inputs``, which are emptied; ``enter`` is called in front of each segment."""
        if len(self.segments) == 1:
            return self.codes[0](inputs)
        values = self._constants | dict(zip(self.takes, inputs, strict=True))
        inputs.clear()
        for segment, code in zip(self.segments, self.codes, strict=True):
            enter(segment)
            operands = [values.pop(name) if name in segment.done else values[name] for name in segment.takes]
            values.update(zip(segment.gives, code(operands), strict=True))
        return [values[x] if isinstance(x, str) else x for x in self.gives]

    @cached_property
    def takes(self) -> tuple[str, ...]:
        """The names of the half's placeholders."""
        return tuple(port.name for port in self.half.takes)

    @cached_property
    def gives(self) -> tuple[Any, ...]:
        """The outputs: names of values, or constants."""
        return tuple(x.name if isinstance(x, fx.Node) else x for _, x in ir.outputs(self.half.graph))

    @cached_property
    def _constants(self) -> dict[str, Any]:
        """The tensors that the half holds, by name."""
        nodes = self.half.graph.find_nodes(op="get_attr")
        return {node.name: attrgetter(str(node.target))(self.half.gm) for node in nodes}


class Executable(ABC):
    """A compiled step, which a runtime, a simulation or a report can take.

    Attributes:
        mesh: what it was compiled for.
        inputs: (name, layout) of each tensor input.
        outputs: the role (with layout) of each output, updated buffers among them.
        output_values: what an output is where it is no tensor.
        output_spec: how a call's results are made of the outputs.
        returned: what each output of the model is to autograd on one device, by its index.
        deferred: the parameters whose gradients the backward leaves unreduced.
        identity: what call and model it is for.
        reads: what of the model it depends on besides.
        from_store: whether it is one of an earlier start, or of another rank, which has no stages to look at.
        stored: where it was found in the store or added to it; or "not stored: " and why.
        levels, causes: of each parameter, how it is gathered and which plan entries say how it is computed with.
    """

    mesh: Mesh
    inputs: tuple[tuple[str, Layout], ...]
    outputs: tuple[Role, ...]
    output_values: tuple[Any, ...]
    output_spec: Any
    returned: tuple[Returned, ...]
    deferred: Deferred
    identity: Any
    reads: Reads
    from_store = False
    stored = "not stored: only what a call of a module compiles is, for fixed sizes and with all gradients reduced"
    levels: Mapping[str, int]
    causes: Mapping[str, str]

    @abstractmethod
    def make(self, phase: Phase) -> fx.GraphModule | None:
        """Makes the graph of a phase; None of a forward or backward where nothing needs a gradient."""

    @abstractmethod
    def reduction(self, sums: Sequence[tuple[str, Layout, torch.dtype]]) -> Half:
        """Build the half that reduces the gradient sums that earlier backward passes left unreduced.

        Args:
            sums: parameter, layout and dtype of each local sum.
        """

    @abstractmethod
    def cause(self, collective: fx.Node) -> Any:
        """Return why a collective is there; see `shardc.report.causes.Cause`."""

    @cached_property
    def _half_of_phase(self) -> dict[Phase, Half | None]:
        return {}

    def find(self, phase: Phase) -> Half | None:
        """Return the half of a phase; None of a forward or backward where nothing needs a gradient."""
        if phase not in self._half_of_phase:
            gm = self.make(phase)
            self._half_of_phase[phase] = None if gm is None else Half(phase, gm, self.mesh)
        return self._half_of_phase[phase]

    def half(self, phase: Phase) -> Half:
        """Return the half of a phase, which this step has."""
        half = self.find(phase)
        assert half is not None, f"there is no {phase}: nothing needs a gradient"
        return half

    def step(self, training: bool = True) -> tuple[Half, ...]:
        """Return the halves of a training step in the order in which they run, or that of an evaluation."""
        if training and self.trains:
            return self.half(FORWARD), self.half(BACKWARD)
        return (self.half(INFERENCE),)

    @property
    def trains(self) -> bool:
        """Whether something needs a gradient."""
        return self.find(FORWARD) is not None

    @property
    def forward(self) -> fx.GraphModule | None:
        """The graph that runs first in training, or None where nothing needs a gradient."""
        half = self.find(FORWARD)
        return None if half is None else half.gm

    @property
    def backward(self) -> fx.GraphModule | None:
        """The graph that computes the gradients, or None where nothing needs one."""
        half = self.find(BACKWARD)
        return None if half is None else half.gm

    @property
    def inference(self) -> fx.GraphModule:
        """The graph of an evaluation."""
        return self.half(INFERENCE).gm

    def certificate(self, training: bool = True) -> Certificate:
        """Return the order of the collectives of a training step, or of an evaluation."""
        return certificate_of(self.step(training))


def certificate_of(halves: Sequence[Half]) -> Certificate:
    """Return the order of the collectives of halves that run one after the other."""
    return certify(halves[0].mesh, [(half.name, half.graph) for half in halves])
