"""Finds why a collective exists: the tensor that it moves, the module and source line that need it, and the plan
entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from operator import getitem

from torch import fx

from shardc.cost.step_sequence import MOVE, START, WAIT, Sequence, of_halves
from shardc.ir import comm_volume
from shardc.ir import graph as ir
from shardc.ir.comm import move_kind
from shardc.ir.executable import Executable

REDUCTIONS = ("all_reduce", "reduce_scatter")
_MAX_OPS = 64  # ops to search upstream of a collective for the parameter whose split caused it


@dataclass(frozen=True)
class Cause:
    """The origin of a collective.

    Args:
        tensors: the parameters that are gathered or whose gradients are reduced; otherwise the value that moves.
        module, source: where the code that needs it is.
        entry: the plan entry that causes it; "" if none was found.
        reason: the compiler's own record of the node, such as ``needed by layers.0.add``.
        consumer: the op that needs it, as in ``reason``; "" if a plan entry asked for it.
    """

    tensors: tuple[str, ...]
    module: str
    source: str
    entry: str
    reason: str
    consumer: str = ""

    @property
    def tensor(self) -> str:
        """Return the first of the tensors and the number of others."""
        return self.tensors[0] if len(self.tensors) == 1 else f"{self.tensors[0]} and {len(self.tensors) - 1} more"


class Explainer:
    """Finds the causes of the collectives of one step.

    Args:
        step: the ops of the step.
        compute: parameter -> the plan entries that decide its compute layout.
    """

    def __init__(self, step: Sequence, compute: Mapping[str, str]) -> None:
        self.step, self.compute = step, compute
        self.users: list[list[int]] = [[] for _ in step.ops]
        self.origins = [ir.info(op.node).origin for op in step.ops]
        self.passes_on = [
            bool(origin.reason) or op.kind in (MOVE, WAIT) for origin, op in zip(self.origins, step.ops, strict=True)
        ]
        self.params: dict[str, fx.Node] = {}
        self.params_of: dict[str, list[str]] = {}  # module -> its parameters
        self.position: dict[str, int] = {}
        for at, op in enumerate(step.ops):
            for read in op.reads:
                self.users[read].append(at)
            record = ir.info(op.node)
            self.position[record.name] = at
            if record.role is not None and record.role.kind == "param":
                self.params[record.name] = op.node
                self.params_of.setdefault(record.name.rpartition(".")[0], []).append(record.name)

    def cause(self, at: int) -> Cause:
        """Return the cause of the collective at position ``at``."""
        op = self.step.ops[at]
        origin = ir.info(op.node).origin
        if move_kind(op.node) is not None:
            return Cause((self._host_param(at),), origin.module, origin.source, origin.cause, origin.cause)
        params = self._gathered(at) if op.gathered else self._needed(at)
        if not params:
            first = self.step.ops[op.reads[0]].node
            maker, axes = self._maker(at, origin.consumer), _axes(op.node)
            lookups = (self._entry, self._entry_of_module)
            if maker != at:  # upstream, another reader of the value may come before the one that reads the parameter
                lookups = lookups[::-1]
            entries = (lookup(maker, axes) for lookup in lookups)
            entry = next(filter(None, entries), "") or origin.cause
            tensors = (ir.info(first).name,)
            return Cause(tensors, origin.module, origin.source, entry, origin.reason, origin.consumer)
        module = origin.module or params[0].rpartition(".")[0]
        entry = ir.info(self.params[params[0]]).origin.cause
        source = origin.source or self._first_use(at)
        return Cause(tuple(params), module, source, entry, origin.reason, origin.consumer)

    def _host_param(self, at: int) -> str:
        """Return the offloaded parameter that a host copy moves, or whose gradient it moves."""
        names = (role.name for role, out in self.step.outputs if self.step.ops[out].reads == (at,))
        return next(names, ir.info(self.step.ops[self.step.ops[at].reads[0]].node).name)

    def _gathered(self, at: int) -> list[str]:
        """Return the parameters from which a chain of gathers and moves starts."""
        work, params = [at], []
        while work:
            op = self.step.ops[work.pop()]
            name = ir.info(op.node).name
            params += [name] if name in self.params else []
            work.extend(reversed(op.reads))
        return params

    def _sources(self, at: int) -> tuple[int, ...]:
        """Return what an op reads; an item of a bucketed collective reads only its own tensor."""
        op = self.step.ops[at]
        if op.node.target is getitem and self.step.ops[op.reads[0]].kind == START:
            return (self.step.ops[op.reads[0]].reads[op.node.args[1]],)
        return op.reads

    def _needed(self, at: int) -> list[str]:
        """Return the parameters whose gradients need the result of the collective, or an item of it."""
        work, seen = [at], {at}
        params: dict[str, None] = {}
        for node in work:
            name = self.origins[node].consumer
            if name in self.params:
                params[name] = None
            fresh = [x for x in self.users[node] if self.passes_on[x] and x not in seen]
            seen.update(fresh)
            work += fresh
        return list(params)

    def _first_use(self, at: int) -> str:
        """Return the source line of the first op that computes with the value."""
        work, seen = [at], {at}
        while work:
            node = min(work)
            work.remove(node)
            op = self.step.ops[node]
            if node != at and (source := ir.info(op.node).origin.source):
                return source
            fresh = [user for user in self.users[node] if user not in seen]
            seen.update(fresh)
            work += fresh
        return ""

    def _maker(self, at: int, consumer: str) -> int:
        """Return the op whose parameter caused a collective: a reduction, or the op that needs the value resharded."""
        if comm_volume.collective_kind(self.step.ops[at].node) in REDUCTIONS:
            return at
        return self.position.get(consumer, at)

    def _entry(self, at: int, axes: set[str]) -> str:
        """Return the plan entry of the nearest parameter upstream that is split for compute over one of ``axes``."""
        work, seen = [at], {at}
        for _ in range(_MAX_OPS):
            if not work:
                return ""
            node = work.pop(0)
            op = self.step.ops[node]
            entry = self.compute.get(ir.info(op.node).name, "") if op.node.op == "placeholder" else ""
            if _mentions(entry, axes):
                return entry
            fresh = [read for read in self._sources(node) if read not in seen]
            work += fresh
            seen.update(fresh)
        return ""

    def _entry_of_module(self, at: int, axes: set[str]) -> str:
        """Return the plan entry of a parameter of the module that op ``at`` belongs to."""
        module = ir.info(self.step.ops[at].node).origin.module
        entries = [self.compute.get(name, "") for name in (self.params_of.get(module, ()) if module else ())]
        return next((entry for entry in entries if _mentions(entry, axes)), "")


def cause_of(program: Executable, node: fx.Node, entries: Iterable[str]) -> Cause:
    """Return the cause of collective ``node`` of a compiled forward or backward graph.

    Args:
        entries: all plan entries; if the cause has none, those that mention the collective's axes are used.
    """
    halves = program.step()
    if all(node.graph is not half.graph for half in halves):
        halves = program.step(training=False)
    step = of_halves(halves, program.levels)
    at = next((at for at, op in enumerate(step.ops) if op.node is node), None)
    if at is None:  # the node is in a separate reduction graph
        origin = ir.info(node).origin
        tensors = (ir.info(node).name,)
        cause = Cause(tensors, origin.module, origin.source, origin.cause, origin.reason, origin.consumer)
    else:
        cause = Explainer(step, program.causes).cause(at)
    entry = cause.entry or " | ".join(entry for entry in entries if _mentions(entry, _axes(node)))
    return replace(cause, entry=entry)


def _mentions(entry: str, axes: set[str]) -> bool:
    return any(f'"{axis}"' in entry or f"@{axis}" in entry for axis in axes)


def _axes(node: fx.Node) -> set[str]:
    """Return the mesh axes of a collective, without their parts."""
    group = str(comm_volume.arguments_of(node)["group_name"])
    return {axis.partition(":")[0] for axis in group.removeprefix(comm_volume.GROUP_PREFIX).split(",")}
