"""Pins: the activations that a plan must name so that the greedy sweep finds the layouts that were found exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from shardc.ir import graph as ir
from shardc.ir import ops
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.passes.calls import operands_of
from shardc.passes.greedy import Greedy
from shardc.passes.options import Options
from shardc.plan.value import Plan
from shardc.search.opened import Laid, Opened
from shardc.search.write import Writer, spec

MOST = 60  # pins, after which a plan is taken as it is


@dataclass(frozen=True)
class Pinner:
    """Finds pins for the plans of one model on one mesh."""

    opened: Opened
    writer: Writer
    mesh: Mesh
    options: Options

    def pinned(self, plan: Plan, wanted: Mapping[str, Layout]) -> Plan:
        """``plan`` and the pins that it needs to come out with the layouts at modules' borders that are ``wanted``."""
        pins: dict[str, str] = {}
        while len(pins) < MOST:
            trial = plan | Plan(activations=pins) if pins else plan
            now = borders(self.opened.graph(self.mesh, trial, self.options, Greedy()))
            missing = next(
                (name for name in wanted if now.get(name) != wanted[name] and self._target(name) not in pins), None
            )
            if missing is None:
                return trial
            pins |= self._pins(missing, wanted)
        return plan | Plan(activations=pins)

    def _target(self, name: str) -> str:
        """The target that a plan calls the border of a tag, for all alike blocks."""
        module, where, _ = name.rsplit(".", 2)
        return self.writer.by_glob(dict.fromkeys(self.writer.alike(module), ""))[-1][0] + (
            ".input" if where == "input" else ""
        )

    def _pins(self, name: str, wanted: Mapping[str, Layout]) -> dict[str, str]:
        """The pins of a border in all alike blocks."""
        module, where, index = name.rsplit(".", 2)
        alike = [m for m in self.writer.alike(module) if f"{m}.{where}.{index}" in wanted]
        said = {m: spec(wanted[f"{m}.{where}.{index}"]) for m in alike}
        end = ".input" if where == "input" else ""
        return {f"{glob}{end}": str(text) for glob, text in self.writer.by_glob(said)}


def borders(laid: Laid) -> dict[str, Layout]:
    """The layout at each module's border, in the order of the program: what its uses need, if they agree."""
    order = {node: at for at, node in enumerate(laid.graph.nodes)}
    names = sorted(laid.borders, key=lambda name: (order[laid.borders[name]], name))
    return {name: _border(laid.borders[name]) for name in names}


def _border(node: fx.Node) -> Layout:
    needs: dict[Layout, None] = {}
    for user in node.users:
        if user.op != "call_function" or ir.info(user).origin.phase != "forward":
            continue
        if user.target is ops.reshard:
            needs[ir.layout(user)] = None
        elif (said := ir.info(user).needs) is not None:
            needs |= dict.fromkeys(w for x, w in zip(operands_of(user), said, strict=True) if x is node)
    made = ir.layout(node)
    if len(needs) == 1 or made.partial:
        return next((x for x in needs if not x.partial), made)
    return made
