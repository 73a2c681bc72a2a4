"""``python -m shardc``: the command line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from shardc.cli import bisect, calibrate, cost, diff, dump, explain, lint, measure, rules, schedule, sweep
from shardc.errors import ShardcError, VerifyError

COMMANDS = (bisect, calibrate, cost, diff, dump, explain, lint, measure, rules, schedule, sweep)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code, or 2 where the input is wrong (one line on stderr says what)."""
    parser = argparse.ArgumentParser("shardc", description="A sharding compiler for PyTorch.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    options = parser.parse_args(arguments)
    try:
        code: int | None = options.run(options)
        sys.stdout.flush()
    except VerifyError:
        raise  # a bug of shardc: the traceback is wanted
    except ShardcError as error:
        print(f"shardc: error: {one_line(error)}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit complains
        return 0
    return code or 0


def one_line(error: ShardcError) -> str:
    """What is wrong, where, and what to do."""
    parts = [error.what]
    if error.plan_entry:
        parts.append(f"plan entry: {error.plan_entry}")
    if error.source:
        parts.append(f"at {error.source}")
    if error.fix:
        parts.append(error.fix)
    return "; ".join(" ".join(part.split()) for part in parts)


if __name__ == "__main__":
    sys.exit(main())
