"""``cost``: bytes and seconds per mesh axis as formulas, and the batch from which another mesh is faster."""

from __future__ import annotations

import argparse

import shardc
from shardc.cli import target
from shardc.cost import hardware
from shardc.errors import MeshError
from shardc.report.formulas import unrounded

HELP = "communication as formulas in batch, sequence and axis sizes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    target.add_arguments(parser)
    target.add_hardware(parser)
    target.add_fold(parser)
    parser.add_argument("--against", metavar="MESH", help="another mesh, as dp=4,tp=16: from which batch it is faster")


def run(options: argparse.Namespace) -> None:
    """Print the formulas of each group's bytes and seconds, of the step, and the crossover with ``--against``.

    Raises:
        PlanError: the program has no formula.
    """
    described = hardware.find(options.hardware)
    loaded, mesh, plan, loss = target.resolve(options)
    other = None if options.against is None else target.mesh_of(options.against)
    if other is not None and other.axes != mesh.axes:
        raise MeshError(f"--against {options.against}: its axes are not {', '.join(mesh.axes)}")
    for candidate in filter(None, (mesh, other)):
        described.check(candidate)
    costs = (
        shardc.compile(loaded.model, mesh, plan, loss=loss, options=shardc.Options(fold=options.fold))
        .shardc.lower(*loaded.args)
        .costs(described)
    )
    values = costs.values()
    for axis in costs.axes:
        cost = costs.cost(axis)
        print(f"{axis}: {cost.count} collectives")
        print(f"  bytes a rank: {cost.smooth}")
        print(f"    = {cost.wire.subs(values)} on {mesh} at batch {costs.batch}, sequence {costs.sequence}")
        print(f"  seconds: {unrounded(cost.seconds)}")
        print(f"    = {float(cost.seconds.subs(values)):.6g} on {described.name}")
    print(f"dense operations: {costs.flops}")
    if other is not None:
        print(f"a step in which nothing hides: {costs.crossover(mesh, other)}")
