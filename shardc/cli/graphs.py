"""Commands about graphs: ``dump`` prints a graph, ``explain`` a layout, ``bisect`` finds the pass of a wrong result."""

from __future__ import annotations

import argparse

from torch import Tensor, nn

import shardc
from shardc.cli import target
from shardc.cli.target import Argument, Command, options_of
from shardc.cost import hardware
from shardc.debug.bisect_passes import TOLERANCE, bisect
from shardc.debug.explain_layout import explain
from shardc.errors import InputError

# --- dump


DEFAULT_STAGE = "collectives"


DUMP = (
    *target.PROGRAM,
    Argument("--stage", help=f"the stage to print (default: {DEFAULT_STAGE})"),
    target.passes_argument("print the stage after the last of these, or write only these"),
    Argument("--origins", action="store_true", help="end each line with its module, source and cause"),
    Argument("--out", metavar="DIR", help="write the text of every stage to DIR"),
)


def _run_dump(options: argparse.Namespace) -> None:
    """Print the requested stage; with ``--out``, write all stages and print the paths."""
    program = target.lowered(options)
    if options.stage is not None and options.stage not in program.stages:
        raise InputError(f"--stage {options.stage}: no such stage", fix=f"use one of {', '.join(program.stages)}")
    stages = target.stages_of(options.passes, program.stages)
    if options.out is not None:
        for path in program.write_stages(options.out, stages):
            print(path)
    if options.stage is not None or options.out is None:
        shown = options.stage or (DEFAULT_STAGE if options.passes is None else stages[-1])
        print(program.text(shown, origins=options.origins), end="")


# --- explain


EXPLAIN = (
    *target.PROGRAM,
    Argument("--tensor", required=True, metavar="NAME", help="a parameter, or a value as dumps name it"),
    target.HARDWARE,
    target.FOLD,
)


def _run_explain(options: argparse.Namespace) -> None:
    """Print a tensor's layouts and the reasons for them, the alternative strategies, the uses and the collectives."""
    described = hardware.find(options.hardware)
    program = target.lowered(options, fold=options.fold)
    print(explain(program, options.tensor, described).text(), end="")


# --- bisect


BISECT = (
    *target.PROGRAM,
    target.passes_argument("look at these stages only"),
    Argument(
        "--tolerance", type=float, default=TOLERANCE, help=f"largest relative error, in float64 (default: {TOLERANCE})"
    ),
)


def _run_bisect(options: argparse.Namespace) -> int:
    """Print for each stage how far its values are from those of one device, then the first wrong stage. Return 1 if a
    stage is wrong.

    Raises:
        InputError: the model has no values, or cannot be compared with one device.
    """
    loaded, mesh, plan, loss = target.resolve(options)
    if not isinstance(loaded.model, nn.Module):
        raise InputError(f"{loaded.name} returns a function, not a module", fix="return an nn.Module and its arguments")
    model = loaded.model.double()
    args = tuple(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in loaded.args)
    if any(x.is_meta for x in (*model.parameters(), *(x for x in args if isinstance(x, Tensor)))):
        raise InputError(f"{loaded.name} has no values", fix="use a target with real values on the CPU")
    # The compiler's verifier would raise at the first invalid stage; `bisect` verifies each stage itself.
    compile_options = options_of(loaded, options.option, verify=False)
    module = shardc.compile(model, mesh, plan, loss=loss, backend="eager", options=compile_options)
    program = module.shardc.lower(*args)
    stages = None if options.passes is None else target.stages_of(options.passes, program.stages)
    verdict = bisect(program, model, *args, loss=loss, stages=stages, tolerance=options.tolerance)
    print(verdict.text(), end="")
    return int(verdict.stage is not None)


COMMANDS = (
    Command("dump", "print the graph after a stage of the compiler", DUMP, _run_dump),
    Command("explain", "why a tensor has its layout, and its costs", EXPLAIN, _run_explain),
    Command("bisect", "find the pass that changed a result", BISECT, _run_bisect),
)
