"""Why a collective is there: the tensor it moves, the module and source line it serves, the plan entry behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from shardc.analysis.sequence import MOVE, WAIT, Sequence
from shardc.ir import graph as ir
from shardc.ir.tally import GROUP_PREFIX, arguments_of

NEEDED_BY = "needed by "
_FAR = 64  # ops that are looked at between a collective and the parameter whose split made it


@dataclass(frozen=True)
class Cause:
    """Where a collective comes from.

    Args:
        tensor: the parameter that is gathered, or whose gradient is reduced; else the value that moves.
        module, source: of the code that it serves.
        entry: the plan entry that asked for it, "" where none is found.
        reason: what the compiler says of the node itself, such as ``needed by layers.0.add``.
    """

    tensor: str
    module: str
    source: str
    entry: str
    reason: str


@dataclass(frozen=True)
class Explainer:
    """Finds the causes of the collectives of one step.

    Args:
        step: the step.
        compute: by parameter the plan entries that say how it is computed with.
    """

    step: Sequence
    compute: Mapping[str, str]

    def cause(self, at: int) -> Cause:
        """Of the collective at position ``at``."""
        op = self.step.ops[at]
        record = ir.info(op.node)
        origin = record.origin
        reason = origin.cause
        param = self._param(at) if op.gathered else self._named(reason.removeprefix(NEEDED_BY))
        if param is None:
            first = self.step.ops[op.reads[0]].node if op.reads else op.node
            return Cause(ir.info(first).name, origin.module, origin.source, self._entry(at, _axes(op.node)), reason)
        name = ir.info(param).name
        source = origin.source or self._first_use(at)
        module = origin.module or name.rpartition(".")[0]
        return Cause(name, module, source, ir.info(param).origin.cause, reason)

    def _param(self, at: int) -> fx.Node | None:
        """The parameter that a chain of gathers and moves starts from."""
        seen: list[int] = [at]
        while seen:
            op = self.step.ops[seen.pop()]
            role = ir.info(op.node).role
            if role is not None and role.kind == "param":
                return op.node
            seen.extend(reversed(op.reads))
        return None

    def _named(self, name: str) -> fx.Node | None:
        """The parameter of that name."""
        for op in self.step.ops:
            if op.node.op == "placeholder" and (record := ir.info(op.node)).name == name:
                return op.node if record.role is not None and record.role.kind == "param" else None
        return None

    def _first_use(self, at: int) -> str:
        """The source line of the first op that computes with the value."""
        reach = {at}
        for later in range(at + 1, len(self.step.ops)):
            op = self.step.ops[later]
            if reach.intersection(op.reads):
                if op.kind not in (MOVE, WAIT) or ir.info(op.node).origin.source:
                    return ir.info(op.node).origin.source
                reach.add(later)
        return ""

    def _entry(self, at: int, axes: set[str]) -> str:
        """The entry of the nearest parameter, upstream, that the plan computes with split over one of ``axes``."""
        work, seen = [at], {at}
        for _ in range(_FAR):
            if not work:
                return ""
            op = self.step.ops[work.pop(0)]
            said = self.compute.get(ir.info(op.node).name, "") if op.node.op == "placeholder" else ""
            if any(f'"{axis}"' in said or f"@{axis}" in said for axis in axes):
                return said
            work.extend(read for read in op.reads if read not in seen)
            seen.update(op.reads)
        return ""


def _axes(node: fx.Node) -> set[str]:
    group = str(arguments_of(node)["group_name"])
    return {axis.partition(":")[0] for axis in group.removeprefix(GROUP_PREFIX).split(",")}
