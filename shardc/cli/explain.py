"""``explain``: why one tensor lies as it does, who decided, and what each of its uses costs."""

from __future__ import annotations

import argparse

import shardc
from shardc.cli import target
from shardc.cost import hardware
from shardc.debug.explain import explain

HELP = "why a tensor lies as it does, and its costs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    target.add_arguments(parser)
    parser.add_argument("--tensor", required=True, metavar="NAME", help="a parameter, or a value as dumps name it")
    target.add_hardware(parser)
    target.add_fold(parser)


def run(options: argparse.Namespace) -> None:
    """Prints layouts and who decided them, the strategies that there were, uses and collectives."""
    described = hardware.find(options.hardware)
    found, mesh, plan, loss = target.resolve(options)
    program = shardc.compile(
        found.model, mesh, plan, loss=loss, options=shardc.Options(fold=options.fold)
    ).shardc.lower(*found.args)
    print(explain(program, options.tensor, described).text(), end="")
