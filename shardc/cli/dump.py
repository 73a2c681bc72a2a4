"""``dump``: prints the annotated graph of a model after any stage, without devices or processes."""

from __future__ import annotations

import argparse

import shardc
from shardc.cli import target
from shardc.errors import InputError

DEFAULT_STAGE = "collectives"


HELP = "print the graph after a stage of the compiler"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    target.add_arguments(parser)
    parser.add_argument("--stage", help=f"the stage to print (default: {DEFAULT_STAGE})")
    target.add_passes(parser, "print the stage after the last of these, or write only these")
    parser.add_argument("--origins", action="store_true", help="end each line with its module, source and cause")
    parser.add_argument("--out", metavar="DIR", help="write the text of every stage to DIR")


def run(options: argparse.Namespace) -> None:
    """Print the requested stage; with ``--out``, write all stages and print the paths."""
    loaded, mesh, plan, loss = target.resolve(options)
    program = shardc.compile(loaded.model, mesh, plan, loss=loss).shardc.lower(*loaded.args)
    if options.stage is not None and options.stage not in program.stages:
        raise InputError(f"--stage {options.stage}: no such stage", fix=f"use one of {', '.join(program.stages)}")
    stages = target.stages_of(options.passes, program.stages)
    if options.out is not None:
        for path in program.write_stages(options.out, stages):
            print(path)
    if options.stage is not None or options.out is None:
        shown = options.stage or (DEFAULT_STAGE if options.passes is None else stages[-1])
        print(program.text(shown, origins=options.origins), end="")
