"""``lint``: what a plan makes ranks send or compute for nothing, and what to change."""

from __future__ import annotations

import argparse
from typing import Any

from tabulate import tabulate

from shardc.cli import schedule
from shardc.report.export import milliseconds
from shardc.report.lint import SEVERITIES, merged


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser("lint", help="find communication that a plan could avoid")
    schedule.add_arguments(parser)
    parser.add_argument("--fail-on", choices=SEVERITIES, help="exit with 1 where a finding is at least this severe")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the findings, the costliest first; returns 1 where ``--fail-on`` says so."""
    program, _ = schedule.predict(options)
    found = program.lint(options.hardware, stage=options.stage)
    rows = [
        (f.severity, f.rule, str(f.count), milliseconds(f.seconds), str(f.bytes), f.subject, f.source or "-", f.message)
        for f in merged(found)
    ]
    head = ("severity", "rule", "count", "ms", "B/rank", "subject", "source", "what")
    print(tabulate(rows, head, tablefmt="plain", disable_numparse=True) if rows else "nothing found")
    changes = dict.fromkeys(f"{f.rule}: {f.change}" for f in found)
    if changes:
        print("\n" + "\n".join(changes))
    limit = -1 if options.fail_on is None else SEVERITIES.index(options.fail_on)
    return int(any(SEVERITIES.index(f.severity) <= limit for f in found))
