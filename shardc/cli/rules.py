"""``rules``: every op that has a sharding rule, proved on the spot, and how much of core ATen that covers."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import torch
from tabulate import tabulate
from tqdm import tqdm

from shardc._compat import aten_overloads
from shardc.capture import decompositions
from shardc.errors import RuleError
from shardc.ir.mesh import Mesh
from shardc.rules import RULES, find_rule
from shardc.rules.fallback import TEXT as FROM_TORCH
from shardc.rules.proof import prove
from shardc.rules.samples import samples
from shardc.rules.samples.values import functional, overloads
from shardc.runtime.sim.lockstep import Lockstep

MESHES = (Mesh(x=2), Mesh(x=2, y=2))
# Ops that say something of a shape or a place in memory, or whose result's shape depends on the data: a traced
# program with fixed shapes has none of them.
NOT_IN_A_PROGRAM = (
    "_local_scalar_dense nonzero resize_ sym_is_contiguous sym_numel sym_size sym_storage_offset sym_stride"
).split()


@dataclass(frozen=True)
class Line:
    """One line of the table; ``tried`` is None where no sample is at hand (a kernel of another device, say)."""

    op: str
    text: str
    source: str
    tried: int | None = None
    right: int | None = None


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser("rules", help="list the sharding rules and prove them")
    parser.add_argument("--op", default="*", metavar="GLOB", help="only ops whose name fits, e.g. 'aten.*scatter*'")
    parser.add_argument("--no-proof", action="store_true", help="list the rules without running their strategies")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Prints the table, its totals and the coverage of core ATen.

    Raises:
        RuleError: a strategy that is wrong.
    """
    lines = [line for line in listed() if fnmatch(line.op, options.op)]
    wrong: list[str] = []
    if not options.no_proof:
        lines = [proved(line, wrong) for line in tqdm(lines, desc="proving", leave=False, disable=None)]
    shown = [(x.op, x.text, x.source, *("-" if n is None else n for n in (x.tried, x.right))) for x in lines]
    print(tabulate(shown, headers=("op", "rule", "source", "tried", "right"), tablefmt="simple"))
    print()
    print(totals(lines))
    print(coverage())
    if wrong:
        raise RuleError(f"{len(wrong)} strategies are wrong, the first:\n{wrong[0]}")


def listed() -> Iterator[Line]:
    """Our own rules, then what only torch's tables cover, then core ATen ops without either."""
    for op, rule in sorted(RULES.items()):
        yield Line(op, rule.text, "own")
    known = {overload: source(overload) for overload in aten_overloads() if functional(overload)}
    for overload, where in known.items():
        if where == "torch" and not overload._opname.startswith(("_foreach", "_fused")):
            yield Line(str(overload), FROM_TORCH, "torch")
    for overload in core_aten():
        if source(overload) == "none":
            yield Line(str(overload), "computed whole, with a warning", "none")


def core_aten() -> list[Any]:
    """The core ATen overloads that a traced program can hold."""
    return [op for op in aten_overloads() if torch.Tag.core in op.tags and op._opname not in NOT_IN_A_PROGRAM]


def source(overload: Any) -> str:
    """``own``, ``decomposed`` (into ops with own rules, when a model is traced), ``torch`` or ``none``."""
    rule = find_rule(overload)
    if rule is not None and rule.text != FROM_TORCH:
        return "own"
    if overload in decompositions():
        return "decomposed"
    return "none" if rule is None else "torch"


def proved(line: Line, wrong: list[str]) -> Line:
    """``line`` with how many of the op's strategies were run and right; what was wrong is added to ``wrong``."""
    if line.source != "own":
        return line
    here = [sample for sample in samples(line.op) if sample.device == "cpu" or torch.cuda.is_available()]
    if not here:
        return line
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        proofs = [prove(RULES[line.op], sample, Lockstep, MESHES) for sample in here]
    mistakes = [text for proof in proofs for text in proof.wrong]
    wrong += mistakes
    tried = sum(proof.tried for proof in proofs)
    return Line(line.op, line.text, line.source, tried, tried - len(mistakes))


def totals(lines: list[Line]) -> str:
    own = [line for line in lines if line.source == "own"]
    counted = sum(len(list(overloads(line.op))) for line in own)
    tried, right = (sum(getattr(line, name) or 0 for line in own) for name in ("tried", "right"))
    return f"{len(own)} own rules for {counted} aten overloads; {tried} strategies tried, {right} right"


def coverage() -> str:
    """How many of the core ATen overloads that a traced program can hold are covered, and by what."""
    found: dict[str, list[str]] = {"own": [], "decomposed": [], "torch": [], "none": []}
    for overload in core_aten():
        found[source(overload)].append(str(overload))
    total = sum(map(len, found.values()))
    covered = total - len(found["none"])
    parts = ", ".join(f"{len(found[kind])} {kind}" for kind in ("own", "decomposed", "torch"))
    missing = f"; without: {' '.join(sorted(found['none']))}" if found["none"] else ""
    return f"core ATen: {covered} of {total} overloads ({100 * covered / total:.1f}%): {parts}{missing}"
