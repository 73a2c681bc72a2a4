"""``schedule``: predicts when each collective of a training step runs and what it costs, without devices or
processes.
"""

from __future__ import annotations

import argparse
from typing import Any

import shardc
from shardc.cli import target
from shardc.cost import hardware
from shardc.report.export import write
from shardc.report.simulate import ORDERS

DEFAULT_ROWS = 40


def add_prediction(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that select what to predict: target, mesh, plan, hardware, order."""
    target.add_arguments(parser)
    target.add_hardware(parser)
    parser.add_argument(
        "--stage", default="schedule", choices=("schedule", "localize"),
        help="the compiled graphs, or the joint graph before partitioning (fast on large models)",
    )  # fmt: skip
    target.add_fold(parser)
    parser.add_argument(
        "--order", default="graph", choices=ORDERS, help="as the graph is ordered, or as dependences allow"
    )


def predict(options: argparse.Namespace) -> tuple[shardc.Program, Any]:
    """Return the program and the schedule that the arguments of `add_prediction` select."""
    described = hardware.find(options.hardware)
    loaded, mesh, plan, loss = target.resolve(options)
    described.check(mesh)  # before the model is captured, which may take a while
    compile_options = shardc.Options(fold=options.fold, direct=described.sends or None)
    program = shardc.compile(loaded.model, mesh, plan, loss=loss, options=compile_options).shardc.lower(*loaded.args)
    return program, program.schedule(described, stage=options.stage, order=options.order)


HELP = "predict a training step's communication"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_prediction(parser)
    parser.add_argument(
        "--rows", type=target.count_of, default=DEFAULT_ROWS, help="rows of collectives to print; 0 for all"
    )
    parser.add_argument("--trace", metavar="FILE", help="write a Chrome trace, for Perfetto")
    parser.add_argument("--json", metavar="FILE", help="write everything as JSON")
    parser.add_argument("--html", metavar="FILE", help="write a page: timeline, memory, tables, the annotated graph")
    parser.add_argument("--plot", metavar="FILE", help="write a picture (png, svg, pdf); needs shardc[plot]")


def run(options: argparse.Namespace) -> None:
    """Print the table; write the files of ``--trace``, ``--json``, ``--html`` and ``--plot``."""
    _, predicted = predict(options)
    print(predicted.table(options.rows or None), end="")
    files = (
        (options.trace, predicted.to_trace),
        (options.json, predicted.to_json),
        (options.html, predicted.to_html),
    )
    for path, text in files:
        if path is not None:
            write(path, text())
    if options.plot is not None:
        predicted.plot(options.plot)
