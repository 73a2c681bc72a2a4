"""Commands that predict, without devices: ``schedule``, ``lint``, ``cost``, and ``diff`` of two schedules."""

from __future__ import annotations

import argparse
from textwrap import fill

from shardc.cli import target
from shardc.cli.target import Argument, Command
from shardc.cost import hardware
from shardc.errors import MeshError
from shardc.report.beside import HEAD, answer, rows
from shardc.report.export import Limit, broken, compare, load, record, write
from shardc.report.findings import SEVERITIES, merged
from shardc.report.formulas import unrounded
from shardc.report.inspected import InspectedProgram
from shardc.report.predicted_schedule import Schedule
from shardc.report.prediction import ORDERS, grouped
from shardc.report.schedule_text import WIDTH, aligned, in_folder
from shardc.report.units import duration, size

# --- schedule


DEFAULT_ROWS = 40


# What selects a prediction: target, mesh, plan, hardware, stage and order.
PREDICTION = (
    *target.PROGRAM,
    target.HARDWARE,
    Argument(
        "--stage", default="schedule", choices=("schedule", "localize"),
        help="the compiled graphs, or the joint graph before partitioning (fast on large models)",
    ),
    target.FOLD,
    Argument("--order", default="graph", choices=ORDERS, help="as the graph is ordered, or as dependences allow"),
)  # fmt: skip


def predict(options: argparse.Namespace) -> tuple[InspectedProgram, Schedule]:
    """Compile and predict what the arguments `PREDICTION` ask for. Return (program, schedule)."""
    described = hardware.find(options.hardware)
    program = target.lowered(options, described, fold=options.fold)
    return program, program.schedule(described, stage=options.stage, order=options.order)


SCHEDULE = (
    *PREDICTION,
    Argument("--rows", type=target.count_of, default=DEFAULT_ROWS, help="rows of collectives to print; 0 for all"),
    Argument("--beside", metavar="PLAN", help="another plan to compare with, in text and on the page"),
    Argument("--beside-mesh", metavar="MESH", help="the mesh of --beside, if it is another one"),
    Argument("--trace", metavar="FILE", help="write a Chrome trace, for Perfetto"),
    Argument("--json", metavar="FILE", help="write everything as JSON"),
    Argument("--html", metavar="FILE", help="write a page: timeline, memory, tables, the annotated graph"),
    Argument("--tries", action="store_true", help="put changes that `lint` tries on the page of --html too"),
    Argument("--plot", metavar="FILE", help="write a picture (png, svg, pdf); needs shardc[plot]"),
)


def _run_schedule(options: argparse.Namespace) -> None:
    """Print the table of the predicted schedule. Write the files named by ``--trace``, ``--json``, ``--html`` and
    ``--plot``.
    """
    program, predicted = predict(options)
    tried = program.advise(options.hardware) if options.tries and options.html is not None else []
    beside = _beside(options)
    if beside is not None:
        _print_beside(predicted, beside)
    print(predicted.table(options.rows or None), end="")
    for path, text in ((options.trace, predicted.to_trace), (options.json, predicted.to_json)):
        if path is not None:
            write(path, text())
    if options.html is not None:
        has_stages = program.stage_ranks > 0  # which lint does not know
        findings = [] if has_stages else [*(advice.finding() for advice in tried), *program.lint(options.hardware)]
        write(options.html, predicted.to_html(findings, beside))
    if options.plot is not None:
        predicted.plot(options.plot)


def _beside(options: argparse.Namespace) -> Schedule | None:
    """Return the predicted schedule to compare with: that of the plan ``--beside`` on the mesh ``--beside-mesh``.

    Without one of the two arguments, ``--plan`` or ``--mesh`` holds; without both, return None.
    """
    if options.beside is None and options.beside_mesh is None:
        return None
    changed = {"plan": options.beside or options.plan, "mesh": options.beside_mesh or options.mesh}
    return predict(argparse.Namespace(**{**vars(options), **changed}))[1]


def _print_beside(above: Schedule, beside: Schedule) -> None:
    """Print step time, exposed communication and memory of two schedules, their meshes and plans, and what differs."""
    changes = compare(record(above), record(beside))
    print(answer(changes))
    for name, schedule in (("before", above), ("after", beside)):
        print(fill(f"{name:<8}  mesh {schedule.mesh}, {schedule.plan}", WIDTH, subsequent_indent=" " * 10))
    print(f"\n{aligned(rows(changes), HEAD, left=HEAD[:1])}\n")


# --- lint


LINT = (
    *PREDICTION,
    Argument("--fail-on", choices=SEVERITIES, help="exit with 1 where a finding is at least this severe"),
    Argument("--no-tries", action="store_true", help="do not try other bucket sizes, options and orders of the mesh"),
)


def _run_lint(options: argparse.Namespace) -> int:
    """Print the findings, the most severe first, what to change, and the changes that were tried; return 1 if a finding
    is at least as severe as ``--fail-on``.
    """
    program, _ = predict(options)
    findings = program.lint(options.hardware, stage=options.stage)
    table = [
        (f.severity, f.rule, str(f.count), duration(f.seconds), size(f.bytes), f.subject, in_folder(f.source))
        for f in merged(findings)
    ]
    head = ("severity", "rule", "count", "time", "a rank", "subject", "source")
    left = ("severity", "rule", "subject", "source")
    print(aligned(table, head, left=left, cut=("subject", "source")) if table else "nothing found")
    for (rule, change), group in grouped(merged(findings), lambda f: (f.rule, f.change)).items():
        print("\n" + fill(f"{rule}: {change}", WIDTH, subsequent_indent="    "))
        for f in group:
            print(fill(f"  {f.subject}: {f.message}", WIDTH, subsequent_indent="    "))
    if findings and options.stage == "schedule" and not options.no_tries:
        tried = program.advise(options.hardware)
        print("\ntried, by the prediction:")
        print("\n".join(map(str, tried)) or "no other bucket size, option or order of the mesh saves half a percent")
    limit = -1 if options.fail_on is None else SEVERITIES.index(options.fail_on)
    return int(any(SEVERITIES.index(f.severity) <= limit for f in findings))


# --- cost


COST = (
    *target.PROGRAM,
    target.HARDWARE,
    target.FOLD,
    Argument("--against", metavar="MESH", help="another mesh, as dp=4,tp=16: from which batch it is faster"),
)


def _run_cost(options: argparse.Namespace) -> None:
    """Print formulas for the bytes and seconds of each group's collectives and for the operations of the step.

    With ``--against``, also print from which batch that mesh is faster, if no communication overlaps compute.

    Raises:
        PlanError: the program has no formula.
    """
    described = hardware.find(options.hardware)
    mesh = target.mesh_of(options.mesh)
    other = None if options.against is None else target.mesh_of(options.against)
    if other is not None and other.axes != mesh.axes:
        raise MeshError(f"--against {options.against}: its axes are not {', '.join(mesh.axes)}")
    for candidate in filter(None, (mesh, other)):
        described.check(candidate)
    costs = target.lowered(options, fold=options.fold).costs(described)
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


# --- diff


DIFF = (
    Argument("before", metavar="A", help="what `schedule --json` wrote"),
    Argument("after", metavar="B", help="the same, to compare with A"),
    Argument(
        "--fail-if", action="append", default=[], metavar="CONDITION", help="exit with 1: 'exposed>+5%%', 'wire.dp>+0'"
    ),
)


def _run_diff(options: argparse.Namespace) -> int:
    """Print the numbers that differ and the limits that are exceeded; return 1 if there are such limits."""
    limits = [Limit.parse(text) for text in options.fail_if]
    changes = compare(load(options.before), load(options.after))
    failed = broken(changes, limits)
    differ = rows(changes)
    print(f"{answer(changes)}\n\n{aligned(differ, HEAD, left=HEAD[:1])}" if differ else "no difference")
    for limit, change in failed:
        number = f"{limit.number:+.1%}" if limit.relative else f"{limit.number:{'+' if limit.change else ''}g}"
        side = "above" if limit.above else "below"
        print(f"broken: {change.metric} is {change.after:g}, {change.relative:+.1%}; {side} {number} fails")
    return int(bool(failed))


COMMANDS = (
    Command("schedule", "predict a training step's communication", SCHEDULE, _run_schedule),
    Command("lint", "find communication that a plan could avoid", LINT, _run_lint),
    Command("cost", "communication as formulas in batch, sequence and axis sizes", COST, _run_cost),
    Command("diff", "compare two schedules saved as JSON", DIFF, _run_diff),
)
