"""Pins activations at module boundaries, so that the greedy layout pass arrives at the layouts that the solver
found.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from shardc.ir import graph as ir
from shardc.ir import ops
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.passes.greedy import Greedy
from shardc.passes.op_calls import operands_of
from shardc.passes.options import Options
from shardc.plan.value import Plan
from shardc.search.captured_model import CapturedModel, PlannedGraph
from shardc.search.plan_writer import Writer, spec

MOST = 60  # pins after which the plan is used as it is


@dataclass(frozen=True)
class Pinner:
    """Finds pins for the plans of one model on one mesh."""

    captured_model: CapturedModel
    writer: Writer
    mesh: Mesh
    options: Options

    def pinned(self, plan: Plan, wanted: Mapping[str, Layout]) -> Plan:
        """Return ``plan`` with the pins that give the layouts ``wanted`` at module boundaries."""
        pins: dict[str, str] = {}
        while len(pins) < MOST:
            trial = plan | Plan(activations=pins) if pins else plan
            now = borders(self.captured_model.graph(self.mesh, trial, self.options, Greedy()))
            missing = next(
                (name for name in wanted if now.get(name) != wanted[name] and self._target(name) not in pins), None
            )
            if missing is None:
                return trial
            pins |= self._pins(missing, wanted)
        return plan | Plan(activations=pins)

    def _target(self, name: str) -> str:
        """Return the target of a boundary's tag in plan entries, for all repeated blocks."""
        module, where, _ = name.rsplit(".", 2)
        return self.writer.by_glob(dict.fromkeys(self.writer.block_names(module), ""))[-1][0] + (
            ".input" if where == "input" else ""
        )

    def _pins(self, name: str, wanted: Mapping[str, Layout]) -> dict[str, str]:
        """Return target -> spec: the layout of a module's input or output in all repeated blocks, for a plan."""
        module, where, index = name.rsplit(".", 2)
        blocks = [m for m in self.writer.block_names(module) if f"{m}.{where}.{index}" in wanted]
        specs = {m: spec(wanted[f"{m}.{where}.{index}"]) for m in blocks}
        end = ".input" if where == "input" else ""
        return {f"{glob}{end}": str(text) for glob, text in self.writer.by_glob(specs)}


def borders(planned: PlannedGraph) -> dict[str, Layout]:
    """Return the layout at each module boundary in program order: the one that its uses need, if they agree."""
    order = {node: at for at, node in enumerate(planned.graph.nodes)}
    names = sorted(planned.borders, key=lambda name: (order[planned.borders[name]], name))
    return {name: _border(planned.borders[name]) for name in names}


def _border(node: fx.Node) -> Layout:
    needs: dict[Layout, None] = {}
    for user in node.users:
        if user.op != "call_function" or ir.info(user).origin.phase != "forward":
            continue
        if user.target is ops.reshard:
            needs[ir.layout(user)] = None
        elif (operand_layouts := ir.info(user).needs) is not None:
            needs |= dict.fromkeys(w for x, w in zip(operands_of(user), operand_layouts, strict=True) if x is node)
    own_layout = ir.layout(node)
    if len(needs) == 1 or own_layout.partial:
        return next((x for x in needs if not x.partial), own_layout)
    return own_layout
