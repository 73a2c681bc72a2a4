"""Alternatives: for each parameter of a plan that was found, the next best way to lie, and what it would cost."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from shardc.ir import graph as ir
from shardc.passes.exact.chooser import Weights
from shardc.report.export import milliseconds, plain
from shardc.search.fastest import Search, Tried
from shardc.search.within import LEAST
from shardc.search.write import Stored, spec
from shardc.solver import Infeasible, solve


@dataclass(frozen=True)
class Alternative:
    """The next best way for the parameters that a glob matches, all else chosen anew.

    Args:
        chosen, other: where they lie between steps, as the solution says and as the next best one does; "" for none.
        seconds: by how much the next best solution costs more, as a sum.
    """

    glob: str
    chosen: str
    other: str
    seconds: float


def alternatives(search: Search, tried: Tried) -> list[Alternative]:
    """The next best way for each open parameter of a solution, the dearest first; each is a solution of its own."""
    problem = search.problem(tried.over, Weights(of=search.opened.weight))
    energy = problem.energy(LEAST)
    best = solve(energy)
    stored = problem.stored(best.labels)
    places = {ir.info(node).name: node for node in problem.storages}
    groups: dict[str, list[str]] = {}
    for name in stored:
        ((glob, _),) = search.writer.by_glob(dict.fromkeys(search.writer.alike(name), ""))
        groups.setdefault(glob, []).append(name)
    out = []
    for glob, names in groups.items():
        costs = list(energy.unary)
        for name in names:
            at = problem.variable[places[name]]
            same = [way == stored[name] for way in problem.storages[places[name]]]
            costs[at] = np.where(same, np.inf, costs[at])
        try:
            other = solve(replace(energy, unary=tuple(costs)))
        except Infeasible:
            out.append(Alternative(glob, _said(stored[names[0]]), "", float("inf")))
            continue
        said = _said(problem.stored(other.labels)[names[0]])
        out.append(Alternative(glob, _said(stored[names[0]]), said, other.value - best.value))
    return sorted(out, key=lambda each: (-each.seconds, each.glob))


def table(found: list[Alternative]) -> str:
    """Them as text: what each parameter's place saves over the next best."""
    rows = [
        (each.glob, each.chosen, each.other or "none", milliseconds(each.seconds) if each.other else "")
        for each in found
    ]
    return plain(rows, ("parameter", "lies", "next best", "costs ms more"))


def _said(stored: Stored) -> str:
    compute, storage = stored
    return spec(storage) if compute == storage else f"{spec(storage)}, gathered to {spec(compute)}"
