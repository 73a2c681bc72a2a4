"""``explain``: prints why a tensor has its layout, what decided it, and what each of its uses costs."""

from __future__ import annotations

import argparse

import shardc
from shardc.cli import target
from shardc.cost import hardware
from shardc.debug.explain_layout import explain

HELP = "why a tensor has its layout, and its costs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    target.add_arguments(parser)
    parser.add_argument("--tensor", required=True, metavar="NAME", help="a parameter, or a value as dumps name it")
    target.add_hardware(parser)
    target.add_fold(parser)


def run(options: argparse.Namespace) -> None:
    """Print the layouts and what decided them, the alternative strategies, the uses and the collectives."""
    described = hardware.find(options.hardware)
    loaded, mesh, plan, loss = target.resolve(options)
    program = shardc.compile(
        loaded.model, mesh, plan, loss=loss, options=shardc.Options(fold=options.fold)
    ).shardc.lower(*loaded.args)
    print(explain(program, options.tensor, described).text(), end="")
