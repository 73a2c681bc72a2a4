"""Finds the origin of a collective: the tensor that it moves, the module and source line, and the plan entry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from operator import getitem

from torch import fx

from shardc.cost.step_sequence import MOVE, START, WAIT, Sequence, of_halves
from shardc.ir import comm_volume
from shardc.ir import graph as ir
from shardc.ir.comm import about, axes_of, move_kind
from shardc.ir.executable import Executable
from shardc.ir.op_traits import CAST

REDUCTIONS = ("all_reduce", "reduce_scatter")
_MAX_OPS = 64  # ops to search upstream of a collective for the parameter whose split caused it


@dataclass(frozen=True)
class Cause:
    """The origin of a collective: the tensors that it moves, the code that needs it, and the plan entry that causes it.

    Args:
        tensors: the parameters that are gathered or whose gradients are reduced; otherwise the value that moves.
        module, source: module and source line of the code that needs it.
        entry: the plan entry that causes it; "" if none was found.
        reason: the cause in the node's record, such as ``needed by layers.0.add``.
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
        """Return the tensors that the collective moves as text: the first one's name, and the number of others (``a and
        2 more``).
        """
        return self.tensors[0] if len(self.tensors) == 1 else f"{self.tensors[0]} and {len(self.tensors) - 1} more"


class Explainer:
    """Finds the causes of the collectives of one step: tensors, source lines and plan entries. Ops are identified by
    their positions in the step.

    Args:
        step: the ops of the step.
        compute: parameter -> the plan entries that decide its compute layout.
        entries: all plan entries; where no other entry is found, those that mention the collective's axes are used.
    """

    def __init__(self, step: Sequence, compute: Mapping[str, str], entries: Iterable[str]) -> None:
        self.step, self.compute, self.entries = step, compute, tuple(entries)
        self.users: list[list[int]] = [[] for _ in step.ops]
        self.origins = [ir.info(op.node).origin for op in step.ops]
        self.passes_on = [
            bool(origin.reason) or op.kind in (MOVE, WAIT) or op.node.target is CAST
            for origin, op in zip(self.origins, step.ops, strict=True)
        ]
        self.gradients: dict[int, list[str]] = {}  # position -> the parameters whose gradients leave the step there
        for role, at in step.outputs:
            if role.kind == "grad":
                self.gradients.setdefault(at, []).append(role.name)
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
        """Return why the op at step position ``at`` communicates: tensors, source line and plan entry (`Cause`)."""
        cause, node = self._cause(at), self.step.ops[at].node
        if cause.entry or move_kind(node) is not None:
            return cause
        return replace(cause, entry=" | ".join(about(axes_of(node), self.entries)))

    def _cause(self, at: int) -> Cause:
        """Return the `Cause` of the collective at position ``at``. Its plan entry is that of a parameter that the
        collective depends on, or "": entries that only mention the collective's axes are left to `cause`.
        """
        op, origin = self.step.ops[at], self.origins[at]
        if move_kind(op.node) is not None:
            return _recorded(op.node, self._host_param(at))
        params = self._gathered(at) if op.gathered else self._needed(at)
        if params:
            module = origin.module or params[0].rpartition(".")[0]
            source, entry = origin.source or self._first_use(at), ir.info(self.params[params[0]]).origin.cause
            return replace(_recorded(op.node, *params), module=module, source=source, entry=entry)
        explaining, axes = self._explaining_op(at, origin.consumer), axes_of(op.node)
        upstream = (self._compute_entry(node) for node in islice(self._reached(explaining, self._sources), _MAX_OPS))
        module = self.origins[explaining].module
        beside = (self.compute.get(name, "") for name in (self.params_of.get(module, ()) if module else ()))
        # Upstream, another reader of the value may come before the one that reads the parameter.
        entries = chain(upstream, beside) if explaining == at else chain(beside, upstream)
        cause = _recorded(op.node, ir.info(self.step.ops[op.reads[0]].node).name)
        return replace(cause, entry=next(about(axes, entries), cause.entry))

    def _host_param(self, at: int) -> str:
        """Return the parameter that the host copy at ``at`` moves, or whose gradient it moves."""
        names = (role.name for role, out in self.step.outputs if self.step.ops[out].reads == (at,))
        return next(names, ir.info(self.step.ops[self.step.ops[at].reads[0]].node).name)

    def _gathered(self, at: int) -> list[str]:
        """Return the parameters that the op at ``at`` gathers, found by going back through gathers and views."""
        name = ir.info(self.step.ops[at].node).name
        return [name] if name in self.params else [p for read in self.step.ops[at].reads for p in self._gathered(read)]

    def _sources(self, at: int) -> tuple[int, ...]:
        """Return the positions of the ops whose values the op at ``at`` uses. For one result of a bucketed collective,
        that is the op of the one tensor that it comes from, not of the whole bucket.
        """
        op = self.step.ops[at]
        if op.node.target is getitem and self.step.ops[op.reads[0]].kind == START:
            return (self.step.ops[op.reads[0]].reads[op.node.args[1]],)
        return op.reads

    def _needed(self, at: int) -> list[str]:
        """Return the parameters, by name, whose gradients need the result of the collective at position ``at``."""
        reached = self._reached(at, lambda node: (user for user in self.users[node] if self.passes_on[user]))
        names = (name for node in reached for name in (self.origins[node].consumer, *self.gradients.get(node, ())))
        return list(dict.fromkeys(name for name in names if name in self.params))

    def _reached(self, at: int, neighbours: Callable[[int], Iterable[int]]) -> Iterator[int]:
        """Yield ``at`` and all positions that can be reached from it by ``neighbours``, the nearest first."""
        work, seen = [at], {at}
        for node in work:  # grows
            yield node
            fresh = [x for x in neighbours(node) if x not in seen]
            seen.update(fresh)
            work += fresh

    def _first_use(self, at: int) -> str:
        """Return the source line of the first op that computes with the result of the collective at position ``at``; ""
        if no op does.
        """
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

    def _explaining_op(self, at: int, consumer: str) -> int:
        """Return the position of the op whose module and operands lead to the parameter, and so to the plan entry, that
        explains the collective at ``at``: itself if it reduces, else the op named ``consumer``, which needs its result.
        """
        if comm_volume.collective_kind(self.step.ops[at].node) in REDUCTIONS:
            return at
        return self.position.get(consumer, at)

    def _compute_entry(self, at: int) -> str:
        """Return, as text, the plan entries that decide the compute layout of the parameter at position ``at``; "" if
        no parameter is there.
        """
        node = self.step.ops[at].node
        return self.compute.get(ir.info(node).name, "") if node.op == "placeholder" else ""


def cause_of(program: Executable, node: fx.Node, entries: Iterable[str]) -> Cause:
    """Return the cause of collective ``node`` of a compiled forward or backward graph.

    Args:
        program: the compiled program.
        node: the collective.
        entries: all plan entries; if the cause has none, those that mention the collective's axes are used.
    """
    halves = program.step()
    if all(node.graph is not half.graph for half in halves):
        halves = program.step(training=False)
    step = of_halves(halves, program.levels)
    at = next((at for at, op in enumerate(step.ops) if op.node is node), None)
    # None: the node is in a separate reduction graph.
    if at is not None:
        return Explainer(step, program.causes, entries).cause(at)
    cause = _recorded(node, ir.info(node).name)
    return replace(cause, entry=cause.entry or " | ".join(about(axes_of(node), entries)))


def _recorded(node: fx.Node, *tensors: str) -> Cause:
    """Return the `Cause` of a collective that moves ``tensors``, as recorded in the origin of ``node``."""
    origin = ir.info(node).origin
    return Cause(tensors, origin.module, origin.source, origin.cause, origin.reason, origin.consumer)
