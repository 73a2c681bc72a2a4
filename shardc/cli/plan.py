"""``plan``: finds the fastest plan that fits in memory, for one mesh or for all meshes of a number of ranks."""

from __future__ import annotations

import argparse
import shlex
import sys

from tqdm import tqdm

import shardc
from shardc.cli import target
from shardc.cli.target import Argument, Command, options_of
from shardc.errors import InputError
from shardc.ir.mesh import Mesh
from shardc.report.export import gigabytes, milliseconds, write
from shardc.report.schedule_text import aligned
from shardc.report.stage_schedule import PipelineSchedule
from shardc.report.stage_timeline import answer
from shardc.report.units import duration, size
from shardc.search.request import Auto
from shardc.search.result import SearchResult, Trial

ARGUMENTS = (
    *target.MODEL,
    Argument("--ranks", type=target.count_of, metavar="N", help="search the meshes of so many ranks"),
    Argument("--mesh", help="axes and sizes, as dp=2,tp=4: search this mesh alone"),
    Argument("--axes", type=int, choices=(1, 2, 3), default=2, help="of a mesh at most (default: 2)"),
    Argument("--memory", help="of a rank, as 80GB (default: the hardware's)"),
    Argument("--plan", help="""entries that the plan must have, as 'tp("tp", colwise=["*.up"])'"""),
    target.HARDWARE,
    Argument("--json", metavar="FILE", help="write the plan, for --plan of other commands and shardc.Plan.load"),
)


def run(options: argparse.Namespace) -> None:
    """Print the plan that was found, its cost beside that of the best ready-made plan, and how to compile it.

    Raises:
        InputError, MeshError, PlanError: an argument is wrong, or no plan fits in memory.
    """
    if (options.ranks is None) == (options.mesh is None):
        raise InputError("a plan is found for a mesh or for a number of ranks", fix="pass one of --mesh and --ranks")
    mesh = None if options.mesh is None else target.mesh_of(options.mesh)
    described = Auto(options.memory, options.hardware, options.ranks).described(None)
    described.check(mesh or Mesh(ranks=options.ranks))  # before the model is captured, which may take a while
    model, loss = target.load_with_loss(options.target, options.loss)
    base_plan = shardc.Plan() if options.plan is None else target.plan_of(options.plan, model, "--plan")
    with tqdm(desc="plans", unit="", leave=False, disable=None) as bar:

        def show(trial: Trial) -> None:
            """Advance the progress bar, and print the tried plan with its cost to stderr."""
            bar.update()
            bar.write(str(trial), file=sys.stderr)

        result = shardc.find_plan(
            model.model, mesh or options.ranks, *model.args, loss=loss, memory=options.memory, plan=base_plan,
            hardware=described, axes=options.axes,
            options=options_of(model, options.option, p2p_collectives=described.sends or None), report=show,
        )  # fmt: skip
    print(text(result, options))
    if options.json is not None:
        write(options.json, result.plan.to_json())


def text(result: SearchResult, options: argparse.Namespace) -> str:
    """Return the text about a search's result: the plan, its cost, and the command that compiles it."""
    schedule = result.schedule
    step, exposed = duration(schedule.seconds), duration(schedule.exposed)
    lines = [
        f"found: {step} a step, {exposed} of it exposed, {size(result.memory)} a rank, on mesh {result.mesh}",
        f"{len(result.trials)} plans scheduled, meshes: {len({t.mesh for t in result.trials})}; "
        f"{schedule.hardware.name}, {result.best.limit / 1e9:g} GB a rank",
        "",
        result.plan.describe() if result.plan else "no entries: every rank holds and computes everything",
        "",
    ]
    solved = result.solution
    if result.variables:
        lines.append(
            f"problem: {result.variables} variables, stated in {solved.build:.1f} s and solved in {solved.solve:.1f} s;"
            f" value {milliseconds(result.value)} ms, bound {milliseconds(result.bound)} ms, gap {result.gap:.1g}"
        )
    if isinstance(schedule, PipelineSchedule):
        peaks = ", ".join(gigabytes(rank.peak) for rank in schedule.ranks)
        lines += [*answer(schedule.timeline, schedule.call), f"memory    of the ranks of {schedule.axis}: {peaks} GB"]
    if result.left_out:
        lines += ["left out:", *(f"  {text}" for text in result.left_out)]
    rows = [_row("found", result.best)]
    if result.form is not None and result.form is not result.best:
        rows.append(_row("as given" if result.hand else "best form", result.form))
    head = ("", "mesh", "step ms", "exposed ms", "GB/rank", "MFU", "plan")
    lines += ["", aligned(rows, head, left=("", "mesh", "plan"), cut=("plan",)), "", *_commands(result, options)]
    return "\n".join(lines)


def _row(name: str, trial: Trial) -> tuple[str, ...]:
    """Return the row of a trial in the table of costs."""
    step, exposed, memory = trial.cells
    mfu = f"{trial.schedule.mfu:.1%}" if trial.estimate is None else ""
    fits = "" if trial.fits else " (does not fit)"
    return name, str(trial.mesh), step, exposed, f"{memory}{fits}", mfu, str(trial.plan)


def _commands(result: SearchResult, options: argparse.Namespace) -> list[str]:
    """Return lines to paste: the command that predicts the found plan, and with ``--json`` the call that
    compiles it.
    """
    mesh = ",".join(f"{name}={size}" for name, size in result.mesh.shape)
    words = ["python", "-m", "shardc", "schedule", options.target, "--mesh", mesh, "--plan", str(result.plan)]
    words += ["--hardware", options.hardware, *(["--loss", options.loss] if options.loss else [])]
    lines = [shlex.join(words)]
    if options.json is not None:
        loss = f", loss={options.loss}" if options.loss else ""
        lines.append(f"shardc.compile(model, shardc.{result.mesh!r}, shardc.Plan.load({options.json!r}){loss})")
    return lines


COMMANDS = (Command("plan", "find the fastest plan that fits in memory", ARGUMENTS, run),)
