"""``bisect``: runs the graph of each stage on real numbers, and names the first stage and node that is wrong."""

from __future__ import annotations

import argparse

from torch import Tensor, nn

import shardc
from shardc.cli import target
from shardc.debug.bisect_passes import TOLERANCE, bisect
from shardc.errors import InputError

HELP = "find the pass that changed a result"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    target.add_arguments(parser)
    target.add_passes(parser, "look at these stages only")
    parser.add_argument(
        "--tolerance", type=float, default=TOLERANCE, help=f"largest relative error, in float64 (default: {TOLERANCE})"
    )


def run(options: argparse.Namespace) -> int:
    """Print each stage's error and the verdict; return 1 if a stage is wrong.

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
    module = shardc.compile(model, mesh, plan, loss=loss, backend="eager", options=shardc.Options(verify=False))
    program = module.shardc.lower(*args)
    stages = target.stages_of(options.passes, program.stages)
    verdict = bisect(program, model, *args, loss=loss, stages=stages, tolerance=options.tolerance)
    print(verdict.text(), end="")
    return int(verdict.stage is not None)
