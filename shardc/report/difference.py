"""Compares two saved schedules: which numbers grew, and whether they exceed given limits (for CI)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isclose
from pathlib import Path
from typing import Any

from shardc.errors import InputError

METRICS = ("seconds", "compute_seconds", "exposed", "wire", "flops", "mfu", "memory")
_LIMIT = re.compile(r"\s*([\w.()/, ]+?)\s*([<>])\s*([+-]?\d+(?:\.\d+)?)\s*(%?)\s*")


@dataclass(frozen=True)
class Change:
    """One number in both schedules, by its metric: ``seconds``, ``wire``, ``wire.dp``, ..."""

    metric: str
    before: float
    after: float

    @property
    def relative(self) -> float:
        """Return the change as a share of the value before."""
        if self.before == self.after:
            return 0.0
        return (self.after - self.before) / self.before if self.before else float("inf")


@dataclass(frozen=True)
class Limit:
    """A condition that fails a comparison: ``exposed>+5%`` (grows by more), ``mfu<0.4`` (new value is below).

    A number with a sign or a percent sign is compared with the change, any other number with the new value.
    """

    metric: str
    above: bool
    number: float
    relative: bool
    change: bool

    @staticmethod
    def parse(text: str) -> Limit:
        """Parse a condition.

        >>> Limit.parse("exposed>+5%")
        Limit(metric='exposed', above=True, number=0.05, relative=True, change=True)

        Raises:
            InputError: ``text`` is no such condition.
        """
        match = _LIMIT.fullmatch(text)
        if match is None:
            raise InputError(f"--fail-if {text!r} is not a condition", fix="write it as 'exposed>+5%' or 'mfu<0.4'")
        metric, sign, number, percent = match.groups()
        value = float(number) / (100 if percent else 1)
        return Limit(metric, sign == ">", value, bool(percent), bool(percent) or number[0] in "+-")

    def broken(self, change: Change) -> bool:
        """Return whether ``change`` exceeds the limit."""
        value = change.after
        if self.change:
            value = change.relative if self.relative else change.after - change.before
        return value > self.number if self.above else value < self.number


def load(path: str) -> dict[str, Any]:
    """Read a schedule that ``Schedule.to_json`` wrote.

    Raises:
        InputError: the file does not exist, or is not a schedule.
    """
    try:
        record = json.loads(Path(path).read_text())
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    if not isinstance(record, dict) or not {"seconds", "totals", "memory"} <= record.keys():
        raise InputError(
            f"{path} is not a saved schedule", fix="write one with python -m shardc schedule ... --json FILE"
        )
    return record


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a saved schedule by metric: step totals, then ``wire`` and ``exposed`` by axis and kind."""
    out = {name: record["memory"]["peak"] if name == "memory" else record[name] for name in METRICS}
    out |= {f"memory.{owner}": size for owner, size in record["memory"]["by_owner"].items()}
    for by in ("axis", "kind"):
        for key, total in record["totals"][by].items():
            out |= {f"{name}.{key}": total[name] for name in ("count", "wire", "exposed")}
    return out


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Return every number of both schedules; a number that one of them lacks counts as 0."""
    old, new = numbers(before), numbers(after)
    changes = [Change(name, old.get(name, 0), new.get(name, 0)) for name in dict.fromkeys((*old, *new))]
    # Sums of the same seconds in another order differ in their last bits: treat them as equal.
    return [replace(c, after=c.before) if isclose(c.before, c.after, rel_tol=1e-9) else c for c in changes]


def broken(changes: list[Change], limits: list[Limit]) -> list[tuple[Limit, Change]]:
    """Return the limits that the changes exceed, with the change.

    Raises:
        InputError: a limit names an unknown metric.
    """
    by_name = {change.metric: change for change in changes}
    for limit in limits:
        if limit.metric not in by_name:
            raise InputError(f"--fail-if: there is no metric {limit.metric!r}", fix=f"use one of {', '.join(by_name)}")
    return [(limit, by_name[limit.metric]) for limit in limits if limit.broken(by_name[limit.metric])]
