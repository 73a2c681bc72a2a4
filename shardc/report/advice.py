"""Changes of a plan, of options or of the mesh that were tried, with what each gains by the prediction.

Each try predicts the step again. Those of bucket sizes and options start from the joint graph, so nothing is captured
or planned anew. Another order of the mesh is compiled again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from shardc import passes
from shardc.errors import ShardcError
from shardc.ir.mesh import Mesh
from shardc.report.findings import Finding
from shardc.report.lint_rules import MEDIUM, severity_of
from shardc.report.prediction import Prediction
from shardc.report.units import duration, percent, size

if TYPE_CHECKING:
    from shardc.program import Program

SIZES = (8, 32, 64, 128, 256, 450, 900)  # MiB of a bucket that are tried
BUCKETS = ("small-messages", "exposed-axis")  # rules whose findings larger or smaller buckets may answer


@dataclass(frozen=True)
class Advice:
    """A change of the plan, options or mesh that shortens the predicted step: a line of code, and what it gains.

    Args:
        rules: names of the lint rules whose findings it answers.
        line: the line of code to paste, such as ``Options(overlap=True)``.
        gain: seconds by which a step is shorter.
        exposed: seconds of communication that it hides; negative if more is exposed.
        seconds: seconds of a step with it.
        memory: peak bytes of a rank with it.
        change: bytes by which this peak is higher than without it.
    """

    rules: tuple[str, ...]
    line: str
    gain: float
    exposed: float
    seconds: float
    memory: int
    change: int

    def finding(self) -> Finding:
        """Return the tried change as a `Finding` for the HTML page. The seconds that it saves are the finding's cost,
        and its line of code is the remedy.
        """
        share = self.gain / (self.seconds + self.gain)
        rules = ", ".join(self.rules)
        return Finding(rules, severity_of(share), "tried", "", "", self.gain, self.change, str(self), self.line)

    def __str__(self) -> str:
        does = "hides" if self.exposed >= 0.9 * self.gain else "saves"
        than = f", {size(abs(self.change))} {'more' if self.change > 0 else 'less'} than now" if self.change else ""
        share = percent(self.gain / (self.seconds + self.gain))
        return (
            f"{self.line} {does} {duration(self.gain)}: a step takes {duration(self.seconds)}, {share} less; "
            f"the peak is {size(self.memory)}{than}"
        )


@dataclass(frozen=True)
class Try:
    """A change of the plan, options or mesh that `advise` tries: a line of code, and a function that compiles with it.

    Args:
        kind: the setting that it changes, such as "buckets"; of the tries of one kind, only the best is advised.
        rules: the lint rules whose findings the change may mend.
        line: the change as a line of code.
        program: compiles the program with the change.
    """

    kind: str
    rules: tuple[str, ...]
    line: str
    program: Callable[[], Any]


def advise(
    program: Program, findings: Iterable[Finding], now: Prediction, predict: Callable[[Any], Prediction]
) -> list[Advice]:
    """Return the changes of plan, options or mesh that remove ``findings`` and make the step at least half a percent
    shorter, the best first.

    A change that does not fit in the memory of the hardware is left out, unless the program does not fit either.

    Args:
        program: the program, for fixed sizes.
        now: its predicted step.
        predict: returns the predicted step of another program.
    """
    best: dict[str, Advice] = {}
    for change in _tries(program, {finding.rule for finding in findings}):
        try:
            then = predict(change.program())
        except ShardcError:  # the mesh or the plan does not allow it
            continue
        gain = now.seconds - then.seconds
        if gain < MEDIUM * now.seconds or (now.fits() and not then.fits()):
            continue
        peak = then.memory.peak.total
        rules, extra = change.rules, peak - now.memory.peak.total
        advice = Advice(rules, change.line, gain, now.exposed - then.exposed, then.seconds, peak, extra)
        if change.kind not in best or advice.gain > best[change.kind].gain:
            best[change.kind] = advice
    return sorted(best.values(), key=lambda advice: -advice.gain)


def _tries(program: Program, rules: set[str]) -> Iterator[Try]:
    """Yield the changes of plan, options or mesh that may remove findings of the lint ``rules`` (names such as
    "exposed-axis"), each as a `Try`.
    """
    options = program.options

    def changed(**changes: Any) -> Callable[[], Program]:
        return lambda: with_options(program, **changes)

    if answered := tuple(rule for rule in BUCKETS if rule in rules):
        # An explicit option goes before a plan's setting.
        where = "Options" if isinstance(options.bucket_size, int) else "Plan"
        for mebibytes in SIZES:
            line = f'{where}(bucket_size="{mebibytes} MiB")'
            yield Try("buckets", answered, line, changed(bucket_size=mebibytes << 20))
    if "exposed-axis" in rules:
        if options.budget_bytes() >= 0 and any(level == 3 for level in program.levels.values()):
            yield Try("budget", ("exposed-axis",), "Options(memory_budget=-1)", changed(memory_budget=-1))
        if not options.overlap:
            yield Try("overlap", ("exposed-axis",), "Options(overlap=True)", changed(overlap=True))
    if "collective-run-again" in rules:
        line = 'Options(checkpoint_collectives="keep")'
        yield Try("checkpoint", ("collective-run-again",), line, changed(checkpoint_collectives="keep"))
    if "axis-across-nodes" in rules and program.rebuild is not None and not _has_input_gradients(program):
        rebuild, shapes = program.rebuild, [layout.shape for _, layout in program.inputs]
        for axis in program.mesh.axes[:-1]:
            order = [*(other for other in program.mesh.axes if other != axis), axis]
            mesh = Mesh({name: program.mesh.size(name) for name in order})
            yield Try("mesh", ("axis-across-nodes",), repr(mesh), partial(rebuild, mesh, shapes))


def _has_input_gradients(program: Program) -> bool:
    """Return whether an input requires a gradient. A program compiled for another mesh would lack that gradient."""
    return program.key is None or any(getattr(leaf, "requires_grad", False) for leaf in program.key.call.leaves)


def with_options(program: Program, **changes: Any) -> Program:
    """Return ``program`` compiled with other options, ``changes``. Only the passes from the split into forward and
    backward on run again.
    """
    joint = program.joint
    options = replace(program.options, verify=False, hooks=(), dump=None, **changes)
    partition, device = joint.pipeline[passes.Partition], joint.pipeline[passes.Localize].device
    cut = partition.split, partition.recompute, partition.save
    pipeline = passes.pipeline(joint.bound, options, joint.captured.fake_mode, device, cut)
    return type(program)(replace(joint, options=options, pipeline=pipeline), program.source, program.folded)
