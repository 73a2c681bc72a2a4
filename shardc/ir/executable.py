"""A compiled step: what goes in and out of it, and the local graphs that run, by their place in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from shardc.ir import graph as ir
from shardc.ir.arena import PLAN, MemoryPlan
from shardc.ir.certificate import Certificate, certify, outputs_text
from shardc.ir.graph import Role
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.ir.reads import Reads

FORWARD, BACKWARD, INFERENCE, REDUCTION = "forward", "backward", "inference", "reduction"

# The place of a half in a step; of a backward for a loss that does not use all outputs, the outputs that it does use.
Phase = str | frozenset[int]


@dataclass(frozen=True)
class Port:
    """What a half takes.

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
        """What goes in, in order."""
        return tuple(Port(ir.role(node), node.name, node.meta["val"]) for node in ir.placeholders(self.graph))

    @cached_property
    def gives(self) -> tuple[Role, ...]:
        """What comes out, in order."""
        return tuple(role for role, _ in ir.outputs(self.graph))

    @cached_property
    def reads(self) -> Mapping[str, Role]:
        """By name of what a backward takes, the parameters, buffers and inputs that it reads as they are."""
        known = ir.output_node(self.graph).meta.get(ir.READS, {})
        return {port.name: known[port.name] for port in self.takes if port.name in known}

    @property
    def plan(self) -> MemoryPlan:
        """Where the results of its collectives lie."""
        found: MemoryPlan = ir.output_node(self.graph).meta.get(PLAN, MemoryPlan())
        return found


class Executable(ABC):
    """A compiled step, which a runtime, a simulation or a report can take.

    Attributes:
        mesh: what it was compiled for.
        inputs: (name, layout) of each tensor input.
        outputs: the role (with layout) of each output, updated buffers among them.
        output_values: what an output is where it is no tensor.
        output_spec: how a call's results are made of the outputs.
        deferred: the parameters whose gradients the backward leaves unreduced.
        identity: what call and model it is for.
        reads: what of the model it depends on besides.
        levels, causes: of each parameter, how it is gathered and which plan entries say how it is computed with.
    """

    mesh: Mesh
    inputs: tuple[tuple[str, Layout], ...]
    outputs: tuple[Role, ...]
    output_values: tuple[Any, ...]
    output_spec: Any
    deferred: frozenset[str]
    identity: Any
    reads: Reads
    levels: Mapping[str, int]
    causes: Mapping[str, str]

    @abstractmethod
    def made(self, phase: Phase) -> fx.GraphModule | None:
        """The graph of a phase; None of a forward or backward where nothing needs a gradient."""

    @abstractmethod
    def reduction(self, sums: Sequence[tuple[str, Layout, torch.dtype]]) -> Half:
        """What reduces sums of gradients that backwards left unreduced to the gradients.

        Args:
            sums: parameter, layout and dtype of each local sum.
        """

    @abstractmethod
    def cause(self, collective: fx.Node) -> Any:
        """Why a collective is there; see `shardc.report.causes.Cause`."""

    @cached_property
    def _known(self) -> dict[Phase, Half]:
        return {}

    def half(self, phase: Phase) -> Half:
        """The half of a phase, which this step has."""
        if phase not in self._known:
            made = self.made(phase)
            assert made is not None, f"there is no {phase}: nothing needs a gradient"
            self._known[phase] = Half(phase, made, self.mesh)
        return self._known[phase]

    def step(self, training: bool = True) -> tuple[Half, ...]:
        """The halves of a training step in the order in which they run, or that of an evaluation."""
        if training and self.trains:
            return self.half(FORWARD), self.half(BACKWARD)
        return (self.half(INFERENCE),)

    @property
    def trains(self) -> bool:
        """Whether something needs a gradient."""
        return self.forward is not None

    @property
    def forward(self) -> fx.GraphModule | None:
        """The graph that runs first in training, or None where nothing needs a gradient."""
        return self.made(FORWARD)

    @property
    def backward(self) -> fx.GraphModule | None:
        """The graph that computes the gradients, or None where nothing needs one."""
        return self.made(BACKWARD)

    @property
    def inference(self) -> fx.GraphModule:
        """The graph of an evaluation."""
        return self.half(INFERENCE).gm

    def certificate(self, training: bool = True) -> Certificate:
        """The order of the collectives of a training step, or of an evaluation."""
        return certificate_of(self.step(training))


def certificate_of(halves: Sequence[Half]) -> Certificate:
    """The order of the collectives of halves that run one after the other."""
    return certify(halves[0].mesh, [(half.name, half.graph) for half in halves])
