"""The halves of a compiled program on this rank: what each takes, lowered when first needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from shardc import _compat
from shardc.ir import graph as ir
from shardc.ir.arena import MemoryPlan
from shardc.ir.graph import Role
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.ir.random import draw_key
from shardc.ir.reads import Reads
from shardc.ir.segments import Segment
from shardc.ir.tally import group_axes
from shardc.runtime.acts import program_act
from shardc.runtime.autograd import Step, watch_optimizers
from shardc.runtime.census import Census
from shardc.runtime.faults import Cause, named
from shardc.runtime.groups import Groups
from shardc.runtime.heap import keep_heap
from shardc.runtime.host import settle
from shardc.runtime.storage import padded_local
from shardc.runtime.sync import Key, Sync
from shardc.runtime.wire.buffers import Buffers
from shardc.runtime.wire.direct import prepare


class Compiled(Protocol):
    """A lowered half, and where the results of its collectives lie."""

    @property
    def plan(self) -> MemoryPlan: ...

    def __call__(self, inputs: list[Tensor], enter: Callable[[Segment], None]) -> Sequence[Any]: ...


class Program(Protocol):
    """A compiled program, as the runtime sees it."""

    mesh: Mesh
    inputs: tuple[tuple[str, Layout], ...]
    outputs: tuple[Role, ...]
    output_values: tuple[Any, ...]
    output_spec: Any
    deferred: frozenset[str]
    identity: Any
    reads: Reads

    def reduction(self, sums: Sequence[tuple[str, Layout, torch.dtype]]) -> tuple[fx.GraphModule, Any]: ...

    @property
    def forward(self) -> fx.GraphModule | None: ...

    @property
    def backward(self) -> fx.GraphModule | None: ...

    @property
    def inference(self) -> fx.GraphModule: ...

    def backward_of(self, used: frozenset[int]) -> tuple[fx.GraphModule, Any]: ...

    def certificate(self, training: bool = True) -> Any: ...

    def cause(self, collective: fx.Node) -> Cause: ...


# "forward", "backward" or "inference", or the outputs that a backward is of, where those are not all.
Which = str | frozenset[int]


class Runner:
    """Runs one program on this rank; its graphs are lowered when first needed.

    Args:
        program: what to run.
        census: what the module holds, whose parameters and buffers it takes, at each call.
        storages: storage layout of each parameter.
        groups: this rank's process groups.
        lower: makes a local graph callable.
        sync: takes the gradients that the program leaves unreduced.
        buffers: the memory that the results of collectives lie in.

    Attributes:
        own: whether what comes in as gradients of outputs is of this rank's own loss, and is scaled.
        fits_behind: whether what makes its inputs was looked at, by `shardc.runtime.autograd.check_units`.
    """

    own = fits_behind = False

    def __init__(
        self,
        program: Program,
        census: Callable[[], Census],
        storages: dict[str, Layout],
        groups: Groups,
        lower: Callable[..., Compiled],
        sync: Sync,
        buffers: Buffers,
    ) -> None:
        self.program, self.census, self.storages = program, census, storages
        self.groups, self.lower, self.sync, self.buffers = groups, lower, sync, buffers
        self._compiled: dict[Which, Compiled] = {}
        self._ports: dict[Which, Ports] = {}
        self._reads: dict[Which, list[tuple[Role, int]]] = {}
        self._parts: dict[frozenset[int], tuple[fx.GraphModule, Any]] = {}
        watch_optimizers()
        self._reductions: dict[tuple[Any, ...], tuple[Compiled, fx.GraphModule]] = {}

    def __call__(self, inputs: list[Tensor]) -> Any:
        train = torch.is_grad_enabled() and self.program.forward is not None
        if train:
            results = list(Step.apply(self, len(self.program.outputs), *self._feed("forward", inputs)))
        else:
            with torch.no_grad():
                results = list(self.run("inference", self.local("inference", self._feed("inference", inputs))))
        out = []
        for role, constant, result in zip(self.program.outputs, self.program.output_values, results, strict=False):
            if role.kind == "buffer":
                with torch.no_grad():
                    self.census().buffers[role.name].copy_(result)
            elif role.kind == "output":
                out.append(result if isinstance(result, Tensor) else constant)
        return pytree.tree_unflatten(out, self.program.output_spec)

    def run(self, which: Which, inputs: list[Tensor]) -> Sequence[Any]:
        """The results of a graph; ``inputs`` are emptied."""
        compiled = self.compiled(which)
        return self._call(compiled, inputs, self.graph(which), which if isinstance(which, str) else "backward")

    def graph(self, which: Which) -> fx.GraphModule:
        """The local graph."""
        return getattr(self.program, which) if isinstance(which, str) else self._part(which)[0]

    def _part(self, used: frozenset[int]) -> tuple[fx.GraphModule, Any]:
        if used not in self._parts:
            self._parts[used] = self.program.backward_of(used)
        return self._parts[used]

    def backward_of(self, used: frozenset[int]) -> Which:
        """The backward for a loss that uses these outputs."""
        every = {role.index for role, _, _ in self.ports("backward").takes if role.kind == "tangent"}
        return "backward" if used >= every else used

    def _call(self, compiled: Compiled, inputs: list[Tensor], gm: fx.GraphModule, which: str) -> Sequence[Any]:
        """What a lowered graph gives; where it fails in a collective, the error names that."""
        agreement = self.groups.agreement
        running: Segment | None = None

        def enter(segment: Segment) -> None:
            nonlocal running
            running, window.first = segment, segment.slot

        try:
            with agreement.runs(which), self.buffers.planned(compiled.plan) as window, _compat.no_autocast():
                made = compiled(inputs, enter)
            settle()
            return made
        except Exception as error:
            failed = named(error, gm, which, self.groups, self.program.cause, running)
            if failed is None:
                raise
            raise agreement.behind() or failed from error

    def planned(self) -> dict[str, int]:
        """By graph that has run, the most bytes of collectives' results in use at once, as planned."""
        found = {which: compiled.plan.peak for which, compiled in self._compiled.items() if isinstance(which, str)}
        if "backward" in found:
            found["backward"] = self._compiled["backward"].plan.peak_after(self._compiled["forward"].plan)
        return found

    def compiled(self, which: Which) -> Compiled:
        """The lowered graph."""
        if which not in self._compiled:
            keep_heap()
            graph, part = self.graph(which), not isinstance(which, str)
            if isinstance(which, frozenset):
                self._agree(self._part(which)[1], backward=graph)
            elif which != "backward":  # the forward's act has the backward in it
                halves = ("forward", "backward") if which == "forward" else (which,)
                certificate = self.program.certificate(training=which == "forward")
                self._agree(certificate, **{half: getattr(self.program, half) for half in halves})
            use_groups(graph, self.groups)
            prepare(graph.graph)
            with _compat.no_autocast():  # the graph has its casts
                self._compiled[which] = self.lower(
                    graph, backward=part or which == "backward", inference=which == "inference"
                )
        return self._compiled[which]

    def _agree(self, certificate: Any, **graphs: fx.GraphModule | None) -> None:
        """Makes sure that all ranks compile the same graphs."""
        there = {name: gm for name, gm in graphs.items() if gm is not None}
        self.groups.agreement.act(program_act(certificate.text(), there))

    def reduce(self, sums: dict[Key, Tensor]) -> dict[str, Tensor]:
        """Each parameter's padded gradient, of local sums that are used up."""
        key = tuple((name, layout, x.dtype) for (name, layout), x in sums.items())
        if key not in self._reductions:
            made, certificate = self.program.reduction(key)
            self._agree(certificate, reduction=made)
            use_groups(made, self.groups)
            prepare(made.graph)
            self._reductions[key] = self.lower(made, backward=True, inference=False), made
        compiled, gm = self._reductions[key]
        graph = gm.graph
        given = iter(list(sums.values()))
        feed = [
            self.groups.coordinate(tuple(role.name.split(","))) if (role := ir.role(node)).kind == "coordinate"
            else next(given)
            for node in ir.placeholders(graph)
        ]  # fmt: skip
        results = self._call(compiled, feed, gm, "reduction")
        return {role.name: x for (role, _), x in zip(ir.outputs(graph), results, strict=True)}

    def late(self, roles: Sequence[Role], grads: dict[Any, Tensor | None], held: frozenset[str]) -> dict[str, Tensor]:
        """Moves unreduced gradients to their sums; the reduced sums of those that are not ``held``."""
        if not self.program.deferred:
            return {}
        for role in roles:
            grad = grads.pop(("grad", role.name), None) if role.name in self.program.deferred else None
            if grad is not None:
                assert role.layout is not None
                self.sync.add(role.name, role.layout, grad)
        due = self.sync.take(self.program.deferred - held)
        return self.reduce(due) if due else {}

    def ports(self, which: Which) -> Ports:
        """What goes in and out of a graph."""
        if which not in self._ports:
            self._ports[which] = Ports.of(self.graph(which).graph)
        return self._ports[which]

    def reads(self, which: Which) -> list[tuple[Role, int]]:
        """The parameters, buffers and inputs that a backward reads, and where the forward takes each of them."""
        if which not in self._reads:
            at = {(role.kind, role.name): at for at, (role, _, _) in enumerate(self.ports("forward").takes)}
            read = {(role.kind, role.name): role for role in self._read(which).values()}
            own = self.overwritten.values()
            self._reads[which] = [(role, at[key]) for key, role in read.items() if role.name not in own]
        return self._reads[which]

    @cached_property
    def overwritten(self) -> dict[str, str]:
        """The buffers that the backward reads and the program changes, by the names of what is saved of them."""
        changed = {role.name for role in self.program.outputs if role.kind == "buffer"}
        read = self._read("backward")
        return {name: role.name for name, role in read.items() if role.kind == "buffer" and role.name in changed}

    def _read(self, which: Which) -> dict[str, Role]:
        known = ir.output_node(self.graph(which).graph).meta[ir.READS]
        return {name: known[name] for _, name, _ in self.ports(which).takes if name in known}

    def _feed(self, which: str, inputs: list[Tensor]) -> list[Any]:
        """What the graph takes, parameters as DTensors."""
        given = dict(zip((name for name, _ in self.program.inputs), inputs, strict=True))
        census = self.census()
        feed: list[Any] = []
        for role, _, val in self.ports(which).takes:
            if role.kind == "param":
                feed.append(census.parameters[role.name])
            elif role.kind == "buffer":
                feed.append(census.buffers[role.name])
            elif role.kind == "coordinate":
                feed.append(self.groups.coordinate(tuple(role.name.split(","))))
            elif role.kind == "key":
                feed.append(self.groups.of_first(draw_key(device=val.device)))
            else:
                feed.append(given.get(role.name, val))
        return feed

    def local(self, which: str, feed: Sequence[Any]) -> list[Any]:
        """The same with each parameter's padded local tensor."""
        takes = self.ports(which).takes
        return [
            padded_local(x, self.storages[role.name]) if role.kind == "param" else x
            for (role, _, _), x in zip(takes, feed, strict=True)
        ]


@dataclass(frozen=True)
class Ports:
    """What a local graph takes and gives.

    Args:
        takes: the role, the name and the example of each placeholder.
        gives: the role of each output.
    """

    takes: tuple[tuple[Role, str, Any], ...]
    gives: tuple[Role, ...]

    @classmethod
    def of(cls, graph: fx.Graph) -> Ports:
        takes = tuple((ir.role(node), node.name, node.meta["val"]) for node in ir.placeholders(graph))
        return cls(takes, tuple(role for role, _ in ir.outputs(graph)))


def use_groups(graph: fx.GraphModule, groups: Groups) -> None:
    """Makes the process groups that ``graph`` names and writes the registered names in."""
    named = named_groups(graph, groups.mesh)
    rename = groups.add(named.values())
    for node in graph.graph.nodes:
        if node.op == "call_function":
            node.args = tuple(rename[x] if isinstance(x, str) and x in named else x for x in node.args)
            node.kwargs = {k: rename[x] if isinstance(x, str) and x in named else x for k, x in node.kwargs.items()}
    graph.recompile()


def named_groups(graph: fx.GraphModule, mesh: Mesh) -> dict[str, tuple[str, ...]]:
    """The names of groups in ``graph``, with their axes."""
    return {
        x: axes
        for node in graph.graph.nodes
        if node.op == "call_function"
        for x in (*node.args, *node.kwargs.values())
        if isinstance(x, str) and (axes := group_axes(x, mesh)) is not None
    }
