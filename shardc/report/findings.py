"""`Finding`: a cost that a better plan would avoid, and findings of repeated layers as one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from shardc.cost.compute import layers_of
from shardc.report.prediction import grouped

SEVERITIES = ("high", "medium", "low")


@dataclass(frozen=True)
class Finding:
    """A cost that a better plan would avoid.

    Args:
        rule: name of the rule.
        severity: "high", "medium" or "low", by the cost's share of the step.
        subject: name of the tensor, op or axis.
        module, source: its module and source line; "" if there is no single one.
        seconds: predicted cost per step.
        bytes: wire bytes, or bytes of memory, per rank.
        message: the problem.
        change: the change of the plan or the mesh that avoids it.
        count: the number of collectives, ops or parameters.
    """

    rule: str
    severity: str
    subject: str
    module: str
    source: str
    seconds: float
    bytes: int
    message: str
    change: str
    count: int = 1


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Return ``findings``, with findings merged that differ only in the number of a repeated layer. The merged finding
    has their total cost.
    """

    def kind(f: Finding) -> tuple[str, ...]:
        return tuple(map(layers_of, (f.rule, f.subject, f.module, f.source, f.severity, f.message)))

    return list(map(_merge, grouped(findings, kind).values()))


def _merge(of: list[Finding]) -> Finding:
    """Return one finding that replaces ``of``, a list of equal findings about repeated layers. Costs are added up, and
    name parts that differ become ``*``.
    """
    named: dict[str, Any] = {name: _common([getattr(f, name) for f in of]) for name in ("subject", "module", "message")}
    summed: dict[str, Any] = {name: sum(getattr(f, name) for f in of) for name in ("seconds", "bytes", "count")}
    return replace(of[0], **named, **summed)


def _common(names: list[str]) -> str:
    """Return dotted names with equally many parts as one name, with ``*`` for the parts that differ:
    ``layers.*.mm``.
    """
    parts = zip(*(name.split(".") for name in names), strict=True)
    return ".".join(part[0] if len(set(part)) == 1 else "*" for part in parts)
