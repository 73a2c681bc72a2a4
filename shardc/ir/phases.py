"""`Phases`: a joint graph that is cut in time, into graphs that run for each microbatch and graphs that run once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import fx

from shardc.ir import graph as ir
from shardc.ir.graph import Role


@dataclass(frozen=True)
class Loop:
    """A loop over the microbatches (graph ``body``), and the graph that runs once after the loop (``once``).

    Args:
        body: graph that runs for each microbatch and computes terms of sums; None if nothing depends on the
            microbatches.
        once: graph that takes the sums of these terms.
    """

    body: fx.GraphModule | None
    once: fx.GraphModule

    def takes(self, roles: Iterable[Role]) -> bool:
        """Return whether ``body`` or ``once`` has a placeholder with one of these ``roles``."""
        graphs = [gm.graph for gm in (self.body, self.once) if gm is not None]
        return not set(roles).isdisjoint(ir.role(node) for graph in graphs for node in ir.placeholders(graph))


@dataclass(frozen=True)
class Phases:
    """The graphs into which a joint graph is cut in time: loops over the microbatches before the forward, the body that
    runs for each microbatch, and the closing graph that runs once after it.

    Args:
        openings: loops that run before ``body``: they compute sums over all microbatches that its forward needs.
        body: joint graph of one microbatch. Its results are terms (role "term" in forward, "grad" in backward), and
            the outputs and gradients that belong to one microbatch.
        closing: graph that takes the sums of the body's terms, and gives the step's other outputs and gradients.
        reduce: name of each term -> reduce op that joins the terms of two microbatches, or `GATHER`.
        joint: the joint graph that is cut.
        gathers: graph of the gathered parameters that all microbatches share, which the first forward computes; None if
            there are none, or if ``openings`` compute them.
        backward: whether ``openings`` depend on gradients of outputs.
    """

    openings: tuple[Loop, ...]
    body: fx.GraphModule
    closing: fx.GraphModule
    reduce: Mapping[str, str]
    joint: fx.GraphModule
    gathers: fx.GraphModule | None = None
    backward: bool = False


@dataclass(frozen=True)
class StagedLoop:
    """A loop before the forward whose layers are cut into pipeline stages. Each microbatch passes through the stages in
    order, as in an inference.

    Args:
        bodies: graph of each stage, for one microbatch. Values that it sends to later stages have the role "transfer".
        up: for each stage but the last, the values that are sent to the next one.
    """

    bodies: tuple[fx.GraphModule, ...]
    up: tuple[tuple[fx.Node, ...], ...]


@dataclass(frozen=True)
class Staged:
    """A step in microbatches (`Phases`), cut into the graphs of each pipeline stage.

    Args:
        parts: the step before the cut. A gradient to which several stages contribute has a separate term for each.
        openings: each of the loops of ``parts``, cut into stages; None for one that all ranks run.
        bodies: joint graph of each stage, for one microbatch. Values that it sends to later stages have the role
            "transfer", and those to earlier ones "grad".
        closings: graph of each stage that takes sums of terms, and gives outputs and gradients of its parameters.
        gathers: for each stage, the graph of the gathered parameters that all microbatches share; None if there are
            none.
        up: for each stage but the last, the values that are sent to the next one with the forward.
        down: for each stage but the last, the values that the next one sends to it with the backward.
        terms: name of each term -> its stage.
    """

    parts: Phases
    openings: tuple[StagedLoop | None, ...]
    bodies: tuple[fx.GraphModule, ...]
    closings: tuple[fx.GraphModule, ...]
    gathers: tuple[fx.GraphModule | None, ...]
    up: tuple[tuple[fx.Node, ...], ...]
    down: tuple[tuple[fx.Node, ...], ...]
    terms: Mapping[str, int]
