"""``rules``: every op that has a sharding rule, and how much of core ATen that covers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from fnmatch import fnmatch
from typing import Any, NamedTuple

import torch
from tabulate import tabulate

from shardc._compat import aten_overloads
from shardc.capture import decompositions
from shardc.rules import RULES, find_rule
from shardc.rules.fallback import TEXT as FROM_TORCH

# Ops that say something of a shape or a place in memory, or whose result's shape depends on the data: a traced
# program with fixed shapes has none of them.
NOT_IN_A_PROGRAM = (
    "_local_scalar_dense nonzero resize_ sym_is_contiguous sym_numel sym_size sym_storage_offset sym_stride"
).split()


class Line(NamedTuple):
    """One line of the table."""

    op: str
    text: str
    source: str


HELP = "list the sharding rules"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--op", default="*", metavar="GLOB", help="only ops whose name fits, e.g. 'aten.*scatter*'")


def run(options: argparse.Namespace) -> None:
    """Prints the table, its totals and the coverage of core ATen."""
    lines = [line for line in listed() if fnmatch(line.op, options.op)]
    print(tabulate(lines, headers=("op", "rule", "source"), tablefmt="simple"))
    own = [line for line in lines if line.source == "own"]
    print(f"\n{len(own)} own rules for {sum(len(list(overloads(line.op))) for line in own)} aten overloads")
    print(coverage())


def listed() -> Iterator[Line]:
    """Our own rules, then ops that are decomposed or that only torch's tables cover, then core ATen ops without any."""
    for op, rule in sorted(RULES.items()):
        yield Line(op, rule.text, "own")
    known = {overload: source(overload) for overload in aten_overloads() if functional(overload)}
    for overload, where in known.items():
        if where == "decomposed":
            yield Line(str(overload), "into ops with rules of their own", where)
        elif where == "torch" and not overload._opname.startswith(("_foreach", "_fused")):
            yield Line(str(overload), FROM_TORCH, where)
    for overload in core_aten():
        if source(overload) == "none":
            yield Line(str(overload), "computed whole, with a warning", "none")


def core_aten() -> list[Any]:
    """The core ATen overloads that a traced program can hold."""
    return [op for op in aten_overloads() if torch.Tag.core in op.tags and op._opname not in NOT_IN_A_PROGRAM]


def overloads(op: str) -> Iterator[Any]:
    """The functional overloads of a rule's op."""
    namespace, name, *one = op.split(".")
    packet = getattr(getattr(torch.ops, namespace), name)
    yield from filter(functional, (getattr(packet, overload) for overload in one or packet.overloads()))


def functional(overload: Any) -> bool:
    """Whether an overload makes new tensors from tensors and numbers, and from nothing else."""
    schema = overload._schema
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    tensors = all(str(r.type) in ("Tensor", "List[Tensor]") for r in schema.returns)
    return not writes and tensors and "Dimname" not in str(schema) and "Generator" not in str(schema)


def source(overload: Any) -> str:
    """``own``, ``decomposed`` (into ops with own rules, when a model is traced), ``torch`` or ``none``."""
    rule = find_rule(overload)
    if rule is not None and rule.text != FROM_TORCH:
        return "own"
    if overload in decompositions():
        return "decomposed"
    return "none" if rule is None else "torch"


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
