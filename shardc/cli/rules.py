"""``rules``: lists every op that has a sharding rule, and the coverage of core ATen."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from fnmatch import fnmatch
from typing import NamedTuple

import torch
from tabulate import tabulate

from shardc._compat import OpOverload, aten_overloads
from shardc.capture import decompositions
from shardc.cli.target import Argument, Command
from shardc.rules import RULES, find_rule
from shardc.rules.fallback import TEXT as FROM_TORCH

# Ops that query shapes or memory, or whose result shape depends on the data: absent from programs with fixed shapes.
NOT_IN_A_PROGRAM = (
    "_local_scalar_dense nonzero resize_ sym_is_contiguous sym_numel sym_size sym_storage_offset sym_stride"
).split()


class Line(NamedTuple):
    """A line of the table: an op, its rule in notation, and the source of the rule ("own", "decomposed", "torch" or
    "none").
    """

    op: str
    text: str
    source: str


ARGUMENTS = (Argument("--op", default="*", metavar="GLOB", help="only ops whose name fits, e.g. 'aten.*scatter*'"),)


def run(options: argparse.Namespace) -> None:
    """Print the table, its totals and the coverage of core ATen."""
    lines = [line for line in listed() if fnmatch(line.op, options.op)]
    print(tabulate(lines, headers=("op", "rule", "source"), tablefmt="simple"))
    ops = [line.op for line in lines if line.source == "own"]
    print(f"\n{len(ops)} own rules for {sum(len(list(overloads(op))) for op in ops)} aten overloads")
    print(coverage())


def listed() -> Iterator[Line]:
    """Yield the lines of the table of rules: ops with rules of their own, then ops that are decomposed or sharded by
    torch's rules, then core ATen ops without rules.
    """
    for op, rule in sorted(RULES.items()):
        yield Line(op, rule.text, "own")
    sources = {overload: source(overload) for overload in aten_overloads() if functional(overload)}
    for overload, where in sources.items():
        if where == "decomposed":
            yield Line(str(overload), "into ops with rules of their own", where)
        elif where == "torch" and not overload._opname.startswith(("_foreach", "_fused")):
            yield Line(str(overload), FROM_TORCH, where)
    for overload in core_aten():
        if source(overload) == "none":
            yield Line(str(overload), "computed whole, with a warning", "none")


def core_aten() -> list[OpOverload]:
    """Return the overloads of the core ATen opset that can occur in a traced program."""
    return [op for op in aten_overloads() if torch.Tag.core in op.tags and op._opname not in NOT_IN_A_PROGRAM]


def overloads(op: str) -> Iterator[OpOverload]:
    """Yield the functional overloads of an op that its rule covers; ``op`` is a name such as ``aten.add`` or
    ``aten.add.Tensor``.
    """
    namespace, name, *suffix = op.split(".")
    packet = getattr(getattr(torch.ops, namespace), name)
    yield from filter(functional, (getattr(packet, overload) for overload in suffix or packet.overloads()))


def functional(overload: OpOverload) -> bool:
    """Return whether ``overload`` computes new tensors from tensors and numbers only."""
    schema = overload._schema
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    tensors = all(str(r.type) in ("Tensor", "List[Tensor]") for r in schema.returns)
    return not writes and tensors and "Dimname" not in str(schema) and "Generator" not in str(schema)


def source(overload: OpOverload) -> str:
    """Return where the sharding rule of ``overload`` comes from: ``own`` (shardc's), ``decomposed`` (when traced, into
    ops with rules), ``torch`` or ``none``.
    """
    rule = find_rule(overload)
    if rule is not None and rule.text != FROM_TORCH:
        return "own"
    if overload in decompositions():
        return "decomposed"
    return "none" if rule is None else "torch"


def coverage() -> str:
    """Return a line of text: how many core ATen overloads have a rule of each source, and the names of the overloads
    without a rule.
    """
    by_source: dict[str, list[str]] = {"own": [], "decomposed": [], "torch": [], "none": []}
    for overload in core_aten():
        by_source[source(overload)].append(str(overload))
    total = sum(map(len, by_source.values()))
    covered = total - len(by_source["none"])
    parts = ", ".join(f"{len(by_source[kind])} {kind}" for kind in ("own", "decomposed", "torch"))
    missing = f"; without: {' '.join(sorted(by_source['none']))}" if by_source["none"] else ""
    return f"core ATen: {covered} of {total} overloads ({100 * covered / total:.1f}%): {parts}{missing}"


COMMANDS = (Command("rules", "list the sharding rules", ARGUMENTS, run),)
