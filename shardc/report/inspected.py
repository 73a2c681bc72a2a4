"""`InspectedProgram`: a program with reports for people: its schedule, cost formulas, lint findings and layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from shardc.cost.hardware import Hardware, find
from shardc.cost.step_sequence import Sequence, of_halves, of_joint, of_runs
from shardc.dynamic import SizedProgram
from shardc.errors import InputError, PlanError
from shardc.ir import graph as ir
from shardc.ir.executable import Executable, Half
from shardc.ir.mesh import Mesh
from shardc.ir.module_paths import value_name
from shardc.passes import Decompose
from shardc.passes.lower.decompose import candidates
from shardc.plan.match import near_names
from shardc.program import Program
from shardc.report.advice import Advice, advise
from shardc.report.derive import Dims, derive
from shardc.report.findings import Finding
from shardc.report.formulas import Costs
from shardc.report.lint_rules import in_pieces, lint
from shardc.report.played_stages import Parts
from shardc.report.predicted_schedule import Schedule, build, expert_room_note
from shardc.report.stage_schedule import predict
from shardc.report.tiles import Tiles
from shardc.validate import did_you_mean, typed


class InspectedProgram(Program):
    """A program with reports on it (schedule, lint, costs, ...), as `shardc.compile` returns it. What runs does not
    depend on the reports.
    """

    @typed()
    def draw(self, name: str, stage: str = "collectives") -> Tiles:
        """Return the `Tiles` of a tensor: which ranks store which part. ``print`` them, or write a picture with
        ``save("picture.png")``.

        Args:
            name: the name of a parameter, an input or an activation in the dump.
            stage: a stage whose graph has layouts.

        Raises:
            InputError: no tensor of that name after ``stage``.
            PlanError: the plan has pipeline stages.
        """
        self._check_stages("draw")
        nodes = [node for node in self.whole(stage).nodes if node.op != "output" and ir.is_tensor(node)]
        layouts = {ir.info(node).name: ir.layout(node) for node in nodes if ir.value(node).layout is not None}
        wanted = value_name(name)
        if wanted not in layouts:
            fix = did_you_mean(near_names(wanted, list(layouts)), f"names are in program.text({stage!r})")
            raise InputError(f"there is no tensor {wanted!r} with a layout after {stage!r}", fix=fix)
        return Tiles(wanted, layouts[wanted].untimed)

    @typed()
    def schedule(
        self,
        hardware: str | Hardware = "h100",
        *,
        stage: str = "schedule",
        order: str = "graph",
        optimizer_copies: float = 2.0,
        skew: float = 1.0,
    ) -> Schedule:
        """Return the predicted communication, time and memory of one training step; nothing is run.

        With pipeline stages it is a `shardc.report.stage_schedule.PipelineSchedule`.

        Args:
            hardware: a description, or its name in `shardc.cost.hardware`.
            stage: "schedule": the forward and backward that run; "localize": the joint graph before it is split,
                bucketed and scheduled, which takes a fraction of the time on a large model.
            order: "graph": collectives start and are awaited where the graph says; "earliest": as dependences allow.
            optimizer_copies: the optimizer's state as a multiple of the parameters (AdamW: 2).
            skew: rows of experts on the most loaded rank, as a multiple of an even load.

        Raises:
            MeshError: no such hardware, or the mesh is larger than its description.
            PlanError: no such stage or order.
        """
        if stage not in ("schedule", "localize"):
            raise PlanError(f"there is no schedule of stage {stage!r}", fix="use schedule or localize")
        shown: Any = self.shown
        described, mesh = self._priced(hardware), _whole_mesh(shown)
        predicted = self._predictor(described, order, optimizer_copies, skew)
        # A graph that runs several times is one object in all of its runs.
        graph = cache(partial(_unscheduled, shown)) if stage == "localize" else (lambda half: half)
        if shown.stage_ranks:
            return predict(shown, Parts(mesh, shown.bound.pp.entry.axis, described, predicted, graph, optimizer_copies))
        if stage == "localize" and shown.microbatches == 1:
            return predicted(of_joint(shown.localized.graph, shown.levels, shown.options.checkpoint_collectives))
        return predicted(of_halves(map(graph, _graphs_of_step(shown)), shown.levels))

    def first_and_last(self, hardware: Hardware) -> tuple[Schedule, list[Half]]:
        """Return (prediction, graphs) of a shortened step, which runs only the first and the last of its
        microbatches.
        """
        shown: Any = self.shown
        runs = [run for run in shown.runs(True) if run[1] in (0, shown.microbatches - 1)]
        step = of_runs(runs, shown.levels)
        return self._predictor(self._priced(hardware), "graph", 2.0, 1.0)(step), [half for half, _ in runs]

    def _predictor(
        self, described: Hardware, order: str, optimizer_copies: float, skew: float
    ) -> Callable[..., Schedule]:
        """Return a function that predicts a sequence of this program's ops on the hardware ``described``. The other
        arguments are as for `schedule`.
        """
        shown: Any = self.shown
        folded, mesh = shown.folded, _whole_mesh(shown)
        useful = sum(flops * (1 if folded is None else folded.times(name)) for name, flops in shown.joint.flops)

        def predicted(step: Sequence, begins: Mapping[int, float] = MappingProxyType({})) -> Schedule:
            """Return the prediction of ``step``; ``begins``: position of an op -> its earliest second."""
            return build(
                step, mesh, described, symbols=partial(shown.costs, described), order=order,
                causes=shown.causes, entries=tuple(map(str, shown.plan.entries)),
                useful_flops=useful / mesh.ranks, optimizer_copies=optimizer_copies, skew=skew,
                tokens=_tokens(shown.joint.captured.graph.graph),
                notes=(
                    *(() if folded is None else folded.notes), *_microbatch_note(shown),
                    *expert_room_note(op.node for op in step.ops),
                ),
                model=shown.source.model, plan=str(shown.plan), begins=begins,
            )  # fmt: skip

        return predicted

    @typed()
    def costs(self, hardware: str | Hardware = "h100", dims: Dims | None = None) -> Costs:
        """Return bytes and seconds of each axis as formulas in batch, sequence and axis sizes (`shardc.report.derive`).

        Args:
            hardware: a description, or its name in `shardc.cost.hardware`.
            dims: for each input the symbol of each dim, "batch", "sequence" or None; by default dim 0 is the batch.

        Raises:
            PlanError: the program has other collectives at other sizes, or a formula does not hold there.
        """
        self._check_stages("cost")
        return derive(self, self._priced(hardware), dims)

    def _priced(self, hardware: str | Hardware) -> Hardware:
        """Return ``hardware`` for predictions. Its float32 matrix products have the precision that was set when the
        program was compiled.
        """
        key = self.shown.source.key
        precision = torch.get_float32_matmul_precision() if key is None else key.call.surroundings.matmul_precision
        return (find(hardware) if isinstance(hardware, str) else hardware).at(precision)

    def _check_stages(self, report: str) -> None:
        """Raise PlanError if the program has pipeline stages. The error says that ``report``, a method such as "lint",
        does not support them.
        """
        if (pp := self.shown.bound.pp) is not None:
            raise PlanError(
                f"{report} does not know the stages of a pipeline",
                plan_entry=str(pp.entry),
                fix="leave pp out of the plan, with the mesh of one stage, or take program.schedule()",
            )

    @typed()
    def lint(self, hardware: str | Hardware = "h100", *, stage: str = "schedule") -> list[Finding]:
        """Return findings about needless communication and compute under the plan, the most severe first. Those about
        collectives cut into chunks are last. The arguments are as for `schedule`.

        Raises:
            PlanError: the plan has pipeline stages.
        """
        self._check_stages("lint")
        joint, shown = self.schedule(hardware, stage="localize"), self.shown
        findings = lint(shown.whole("collectives"), joint, joint if stage == "localize" else self.schedule(hardware))
        loops = candidates(shown.graph("chunk_loss"), shown.pipeline[Decompose])
        return findings + [in_pieces(one.name, one.module, one.source, one.pieces, one.reason) for one in loops]

    @typed()
    def advise(self, hardware: str | Hardware = "h100") -> list[Advice]:
        """Return changes that were tried and make the predicted step shorter by removing findings of `lint`, the best
        first.

        `Advice.line` is what to paste, `Advice.gain` the seconds that the change saves by the prediction.
        """
        self._check_stages("advise")
        described = self._priced(hardware)
        now = self.schedule(described)
        findings = lint(self.shown.whole("collectives"), self.schedule(described, stage="localize"), now)
        return advise(self.shown, findings, now, lambda program: program.schedule(described))


class InspectedSizedProgram(SizedProgram, InspectedProgram):
    """A program with dynamic sizes at the sizes of one call, as an `InspectedProgram`. Reports describe a program
    compiled for these sizes alone.
    """


def _whole_mesh(program: Program) -> Mesh:
    """Return the mesh of all ranks of the program, with its axis of pipeline stages. (``program.mesh`` is that of one
    stage.)
    """
    if (pp := program.bound.pp) is None:
        return program.mesh
    return Mesh((axis, pp.ranks if axis == pp.entry.axis else size) for axis, size in program.mesh.shape)


def _graphs_of_step(program: Executable) -> list[Half]:
    """Return the graphs of a training step in the order in which they run. A graph of microbatches is repeated for each
    of them.
    """
    # With microbatches and without a loss, the call runs forward alone, and the backward runs all again.
    runs_twice = program.microbatches > 1 and program.trains and program.loss is None
    return [half for training in ((False, True) if runs_twice else (True,)) for half, _ in program.runs(training)]


def _microbatch_note(program: Executable) -> tuple[str, ...]:
    """Return a note on the number of microbatches, as a tuple of one text; () without microbatches."""
    if program.microbatches == 1 or program.stage_ranks:
        return ()
    without_loss = "; the model returns no loss, so forward runs in the call, and again in the backward"
    note = without_loss if program.trains and program.loss is None else ""
    return (
        f"{program.microbatches} microbatches, one after the other: times, kernels and collectives are those of all, "
        f"activations those of one{note}",
    )


def _unscheduled(program: Program, half: Half) -> Half:
    """Return the graph of a step in microbatches that became ``half``, as it was before bucketing and scheduling."""
    gm = program.cut.graph(half.phase)
    assert gm is not None
    return Half(half.phase, gm, half.mesh)


def _tokens(captured: fx.Graph) -> int:
    """Return the number of tokens of the global batch: the elements of the first input if that holds integers in two
    dims or more, else 0.
    """
    first = next((ir.value(x) for x in ir.placeholders(captured, "input")), None)
    integers = first is not None and not first.dtype.is_floating_point and first.dtype is not torch.bool
    return prod(first.shape) if first is not None and integers and len(first.shape) > 1 else 0
