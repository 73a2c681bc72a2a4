"""``python -m shardc``: the command line."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from typing import NoReturn

import torch

import shardc
from shardc.cli import calibrate, graphs, plan, predictions, real_steps, rules, sweep
from shardc.errors import ShardcError, ShardcWarning, VerifyError

MODULES = (calibrate, graphs, plan, predictions, real_steps, rules, sweep)
COMMANDS = sorted((command for module in MODULES for command in module.COMMANDS), key=lambda command: command.name)


class Parser(argparse.ArgumentParser):
    """Argument parser whose errors are one line, like all errors of the command line."""

    def error(self, message: str) -> NoReturn:
        command = self.prog.removeprefix("shardc").strip()
        self.exit(2, f"shardc: error: {f'{command}: ' if command else ''}{message}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command of the command line. Returns its exit code; 2, with one line on stderr, if the input is
    wrong.
    """
    options = _parser().parse_args(arguments)
    # Torch logs the traceback of a failure under fake tensors; it is raised too, and printed in one line.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    python_format, warnings.formatwarning = warnings.formatwarning, format_warning
    try:
        code: int | None = options.run(options)
        sys.stdout.flush()
    except VerifyError:
        raise  # a bug of shardc: show the traceback
    except ShardcError as error:
        print(f"shardc: error: {one_line(error)}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit complains
        return 0
    except OSError as error:
        if not _named(options, error):
            raise
        print(f"shardc: error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    finally:
        warnings.formatwarning = python_format
    return code or 0


def _parser() -> Parser:
    """Return the parser of the command line, with a parser for each command."""
    parser = Parser("shardc", description="A sharding compiler for PyTorch.")
    parser.add_argument(
        "--version", action="version", version=f"shardc {shardc.__version__}, torch {torch.__version__}"
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        mine = commands.add_parser(command.name, help=command.help)
        for argument in command.arguments:
            mine.add_argument(*argument.names, **argument.options)
        mine.set_defaults(run=command.run)
    return parser


def format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Formats a warning of shardc as one line, like its errors. Other warnings look as Python formats them."""
    if issubclass(category, ShardcWarning):
        return f"shardc: warning: {'; '.join(map(str.strip, str(message).splitlines())).replace('fix: ', '')}\n"
    return f"{filename}:{lineno}: {category.__name__}: {message}\n"


def _named(options: argparse.Namespace, error: OSError) -> bool:
    """Return whether an argument of the command names the file that ``error`` is about, or a file in that folder."""
    texts = [value for value in vars(options).values() if isinstance(value, str)]
    return bool(error.filename) and any(value.startswith(str(error.filename)) for value in texts)


def one_line(error: ShardcError) -> str:
    """Formats an error as one line: what is wrong, where, and the fix."""
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
