"""``lint``: prints communication and computation that a better plan would avoid, and what to change."""

from __future__ import annotations

import argparse

from shardc.cli import schedule
from shardc.report.export import milliseconds, plain
from shardc.report.lint_rules import SEVERITIES, merged

HELP = "find communication that a plan could avoid"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    schedule.add_prediction(parser)
    parser.add_argument("--fail-on", choices=SEVERITIES, help="exit with 1 where a finding is at least this severe")


def run(options: argparse.Namespace) -> int:
    """Print the findings, the most costly first; return 1 if one is at least as severe as ``--fail-on``."""
    program, _ = schedule.predict(options)
    findings = program.lint(options.hardware, stage=options.stage)
    rows = [
        (f.severity, f.rule, str(f.count), milliseconds(f.seconds), str(f.bytes), f.subject, f.source or "-", f.message)
        for f in merged(findings)
    ]
    head = ("severity", "rule", "count", "ms", "B/rank", "subject", "source", "what")
    print(plain(rows, head) if rows else "nothing found")
    changes = dict.fromkeys(f"{f.rule}: {f.change}" for f in findings)
    if changes:
        print("\n" + "\n".join(changes))
    limit = -1 if options.fail_on is None else SEVERITIES.index(options.fail_on)
    return int(any(SEVERITIES.index(f.severity) <= limit for f in findings))
