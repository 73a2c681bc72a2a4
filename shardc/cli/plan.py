"""``plan``: the fastest plan that fits in so much memory, found for one mesh or for all meshes of some ranks."""

from __future__ import annotations

import argparse
import shlex
import sys

from tqdm import tqdm

import shardc
from shardc.cli import target
from shardc.errors import InputError
from shardc.ir.mesh import Mesh
from shardc.report.export import gigabytes, milliseconds, plain, write
from shardc.search.request import Auto
from shardc.search.result import Found, Trial

HELP = "find the fastest plan that fits in memory"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    target.add_model(parser)
    parser.add_argument("--ranks", type=target.count_of, metavar="N", help="search the meshes of so many ranks")
    parser.add_argument("--mesh", help="axes and sizes, as dp=2,tp=4: search this mesh alone")
    parser.add_argument("--axes", type=int, choices=(1, 2, 3), default=2, help="of a mesh at most (default: 2)")
    parser.add_argument("--memory", help="of a rank, as 80GB (default: the hardware's)")
    parser.add_argument("--plan", help="""what is given of the plan, as 'tp("tp", colwise=["*.up"])'""")
    target.add_hardware(parser)
    parser.add_argument("--json", metavar="FILE", help="write the plan, for shardc.Plan.load")


def run(options: argparse.Namespace) -> None:
    """Prints what was found, what it costs beside the best of the library's forms, and how to compile it.

    Raises:
        InputError, MeshError, PlanError: names the argument and what is wrong with it; or nothing fits.
    """
    if (options.ranks is None) == (options.mesh is None):
        raise InputError("a plan is found for a mesh or for a number of ranks", fix="pass one of --mesh and --ranks")
    mesh = None if options.mesh is None else target.mesh_of(options.mesh)
    described = Auto(options.memory, options.hardware, options.ranks).described(None)
    described.check(mesh or Mesh(ranks=options.ranks))  # before the model is captured, which may take a while
    model = target.load(options.target)
    given = shardc.Plan() if options.plan is None else target.plan_of(options.plan, model, "--plan")
    loss = None if options.loss is None else model.named(options.loss, "loss")
    with tqdm(desc="plans", unit="", leave=False, disable=None) as bar:

        def came(trial: Trial) -> None:
            bar.update()
            bar.write(str(trial), file=sys.stderr)

        found = shardc.find_plan(
            model.model, mesh or options.ranks, *model.args, loss=loss, memory=options.memory, plan=given,
            hardware=described, axes=options.axes, options=shardc.Options(direct=described.sends or None), report=came,
        )  # fmt: skip
    print(text(found, options))
    if options.json is not None:
        write(options.json, found.plan.to_json())


def text(found: Found, options: argparse.Namespace) -> str:
    """What was found, and how to compile it."""
    said = found.schedule
    lines = [
        f"{len(found.trials)} plans scheduled, meshes: {len({t.mesh for t in found.trials})}; {said.hardware.name}, "
        f"{found.best.limit / 1e9:g} GB a rank",
        "",
        f"mesh: {found.mesh}",
        found.plan.describe() if found.plan else "no entries: every rank holds and computes everything",
        "",
    ]
    solved = found.solution.tried
    if found.variables:
        lines.append(
            f"problem: {found.variables} variables, stated in {solved.build:.1f} s and solved in {solved.solve:.1f} s; "
            f"value {milliseconds(found.value)} ms, bound {milliseconds(found.bound)} ms, gap {found.gap:.1g}"
        )
    rows = [_row("found", found.best)]
    if found.form is not None and found.form is not found.best:
        rows.append(_row("as given" if found.hand else "best form", found.form))
    head = ("", "mesh", "step ms", "exposed ms", "GB/rank", "MFU", "plan")
    lines += ["", plain(rows, head), "", *_again(found, options)]
    return "\n".join(lines)


def _row(name: str, trial: Trial) -> tuple[str, ...]:
    said = trial.schedule
    step, exposed = milliseconds(said.seconds), milliseconds(said.exposed)
    memory = f"{gigabytes(trial.memory)}{'' if trial.fits else ' (does not fit)'}"
    return name, str(trial.mesh), step, exposed, memory, f"{said.mfu:.1%}", str(trial.plan)


def _again(found: Found, options: argparse.Namespace) -> list[str]:
    """The command that compiles the plan again, and the call."""
    mesh = ",".join(f"{name}={size}" for name, size in found.mesh.shape)
    words = ["python", "-m", "shardc", "schedule", options.target, "--mesh", mesh, "--plan", str(found.plan)]
    words += ["--hardware", options.hardware, *(["--loss", options.loss] if options.loss else [])]
    lines = [shlex.join(words)]
    if options.json is not None:
        loss = f", loss={options.loss}" if options.loss else ""
        lines.append(f"shardc.compile(model, shardc.{found.mesh!r}, shardc.Plan.load({options.json!r}){loss})")
    return lines
