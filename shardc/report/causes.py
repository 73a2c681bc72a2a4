"""Why a collective is there: the tensor it moves, the module and source line it serves, the plan entry behind it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from operator import getitem

from torch import fx

from shardc.cost.sequence import MOVE, START, WAIT, Sequence, of_halves
from shardc.ir import graph as ir
from shardc.ir import tally
from shardc.ir.executable import Executable
from shardc.ir.host import move_kind

NEEDED_BY = "needed by "
REDUCTIONS = ("all_reduce", "reduce_scatter")
_FAR = 64  # ops that are looked at between a collective and the parameter whose split made it


@dataclass(frozen=True)
class Cause:
    """Where a collective comes from.

    Args:
        tensors: the parameters that are gathered, or whose gradients are reduced; else the value that moves.
        module, source: of the code that it serves.
        entry: the plan entry that asked for it, "" where none is found.
        reason: what the compiler says of the node itself, such as ``needed by layers.0.add``.
    """

    tensors: tuple[str, ...]
    module: str
    source: str
    entry: str
    reason: str

    @property
    def tensor(self) -> str:
        """The first of the tensors, and how many more there are."""
        return self.tensors[0] if len(self.tensors) == 1 else f"{self.tensors[0]} and {len(self.tensors) - 1} more"


class Explainer:
    """Finds the causes of the collectives of one step.

    Args:
        step: the step.
        compute: by parameter the plan entries that say how it is computed with.
    """

    def __init__(self, step: Sequence, compute: Mapping[str, str]) -> None:
        self.step, self.compute = step, compute
        self.users: list[list[int]] = [[] for _ in step.ops]
        self.reasons = [ir.info(op.node).origin.cause for op in step.ops]
        self.passes_on = [
            bool(reason) or op.kind in (MOVE, WAIT) for reason, op in zip(self.reasons, step.ops, strict=True)
        ]
        self.params: dict[str, fx.Node] = {}
        self.held: dict[str, list[str]] = {}  # the parameters of each module
        self.named: dict[str, int] = {}
        for at, op in enumerate(step.ops):
            for read in op.reads:
                self.users[read].append(at)
            record = ir.info(op.node)
            self.named[record.name] = at
            if record.role is not None and record.role.kind == "param":
                self.params[record.name] = op.node
                self.held.setdefault(record.name.rpartition(".")[0], []).append(record.name)

    def cause(self, at: int) -> Cause:
        """Of the collective at position ``at``."""
        op = self.step.ops[at]
        origin = ir.info(op.node).origin
        if move_kind(op.node) is not None:
            return Cause((self._kept(at),), origin.module, origin.source, origin.cause, origin.cause)
        params = self._gathered(at) if op.gathered else self._needed(at)
        if not params:
            first = self.step.ops[op.reads[0]].node
            maker, axes = self._maker(at, origin.cause), _axes(op.node)
            ways = (self._entry, self._entry_of_module)
            if maker != at:  # another reader of the value may stand in front of the one that reads the parameter
                ways = ways[::-1]
            entry = next((found for way in ways if (found := way(maker, axes))), "") or _said(origin.cause)
            return Cause((ir.info(first).name,), origin.module, origin.source, entry, origin.cause)
        module = origin.module or params[0].rpartition(".")[0]
        entry = ir.info(self.params[params[0]]).origin.cause
        return Cause(tuple(params), module, origin.source or self._first_use(at), entry, origin.cause)

    def _kept(self, at: int) -> str:
        """The parameter on the host that a move is of, or that the gradient is of which it moves."""
        found = (role.name for role, out in self.step.outputs if self.step.ops[out].reads == (at,))
        return next(found, ir.info(self.step.ops[self.step.ops[at].reads[0]].node).name)

    def _gathered(self, at: int) -> list[str]:
        """The parameters that a chain of gathers and moves starts from."""
        work, found = [at], []
        while work:
            op = self.step.ops[work.pop()]
            name = ir.info(op.node).name
            found += [name] if name in self.params else []
            work.extend(reversed(op.reads))
        return found

    def _sources(self, at: int) -> tuple[int, ...]:
        """What an op is made of; of a part of several tensors that are gathered or reduced as one, its own."""
        op = self.step.ops[at]
        if op.node.target is getitem and self.step.ops[op.reads[0]].kind == START:
            return (self.step.ops[op.reads[0]].reads[op.node.args[1]],)
        return op.reads

    def _needed(self, at: int) -> list[str]:
        """The parameters for whose gradients the collective, or a part of its result, is needed."""
        work, seen = [at], {at}
        found: dict[str, None] = {}
        for here in work:
            name = self.reasons[here].removeprefix(NEEDED_BY)
            if name in self.params:
                found[name] = None
            fresh = [x for x in self.users[here] if self.passes_on[x] and x not in seen]
            seen.update(fresh)
            work += fresh
        return list(found)

    def _first_use(self, at: int) -> str:
        """The source line of the first op that computes with the value."""
        work, seen = [at], {at}
        while work:
            here = min(work)
            work.remove(here)
            op = self.step.ops[here]
            if here != at and (source := ir.info(op.node).origin.source):
                return source
            fresh = [user for user in self.users[here] if user not in seen]
            seen.update(fresh)
            work += fresh
        return ""

    def _maker(self, at: int, reason: str) -> int:
        """The op whose parameter is behind a collective: a reduction's term, or what needs a value whole or moved."""
        if tally.collective_kind(self.step.ops[at].node) in REDUCTIONS:
            return at
        return self.named.get(reason.removeprefix(NEEDED_BY), at)

    def _entry(self, at: int, axes: set[str]) -> str:
        """The entry of the nearest parameter, upstream, that the plan computes with split over one of ``axes``."""
        work, seen = [at], {at}
        for _ in range(_FAR):
            if not work:
                return ""
            here = work.pop(0)
            op = self.step.ops[here]
            said = self.compute.get(ir.info(op.node).name, "") if op.node.op == "placeholder" else ""
            if _speaks_of(said, axes):
                return said
            fresh = [read for read in self._sources(here) if read not in seen]
            work += fresh
            seen.update(fresh)
        return ""

    def _entry_of_module(self, at: int, axes: set[str]) -> str:
        """The entry of a parameter of the module whose code op ``at`` is."""
        module = ir.info(self.step.ops[at].node).origin.module
        said = [self.compute.get(name, "") for name in (self.held.get(module, ()) if module else ())]
        return next((entry for entry in said if _speaks_of(entry, axes)), "")


def cause_of(program: Executable, node: fx.Node, entries: Iterable[str]) -> Cause:
    """Why the collective ``node`` of one of the halves that run is there.

    Args:
        entries: what the plan says, for one of which no entry is found: those that speak of its axes are taken.
    """
    halves = program.step()
    if all(node.graph is not half.graph for half in halves):
        halves = program.step(training=False)
    step = of_halves(halves, program.levels)
    at = next((at for at, op in enumerate(step.ops) if op.node is node), None)
    if at is None:  # of a reduction of its own
        origin = ir.info(node).origin
        found = Cause((ir.info(node).name,), origin.module, origin.source, _said(origin.cause), origin.cause)
    else:
        found = Explainer(step, program.causes).cause(at)
    said = found.entry or " | ".join(entry for entry in entries if _speaks_of(entry, _axes(node)))
    return replace(found, entry=said)


def _speaks_of(entry: str, axes: set[str]) -> bool:
    return any(f'"{axis}"' in entry or f"@{axis}" in entry for axis in axes)


def _said(reason: str) -> str:
    """A reason that is a plan entry itself."""
    return "" if reason.startswith(NEEDED_BY) else reason


def _axes(node: fx.Node) -> set[str]:
    """The mesh axes of a collective, without their parts."""
    group = str(tally.arguments_of(node)["group_name"])
    return {axis.partition(":")[0] for axis in group.removeprefix(tally.GROUP_PREFIX).split(",")}
