"""``diff``: compares two saved schedules number by number, and fails if a limit is exceeded."""

from __future__ import annotations

import argparse

from shardc.report.difference import Limit, broken, compare, load
from shardc.report.export import plain

HELP = "compare two schedules saved as JSON"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", metavar="A", help="what `schedule --json` wrote")
    parser.add_argument("after", metavar="B", help="the same, to compare with A")
    parser.add_argument(
        "--fail-if", action="append", default=[], metavar="CONDITION", help="exit with 1: 'exposed>+5%%', 'wire.dp>+0'"
    )


def run(options: argparse.Namespace) -> int:
    """Print the numbers that differ and the limits that are exceeded; return 1 if there are such limits."""
    limits = [Limit.parse(text) for text in options.fail_if]
    changes = compare(load(options.before), load(options.after))
    failed = broken(changes, limits)
    rows = [(c.metric, f"{c.before:g}", f"{c.after:g}", f"{c.relative:+.1%}") for c in changes if c.before != c.after]
    head = ("number", "before", "after", "change")
    print(plain(rows, head) if rows else "no difference")
    for limit, change in failed:
        number = f"{limit.number:+.1%}" if limit.relative else f"{limit.number:{'+' if limit.change else ''}g}"
        side = "above" if limit.above else "below"
        print(f"broken: {change.metric} is {change.after:g}, {change.relative:+.1%}; {side} {number} fails")
    return int(bool(failed))
