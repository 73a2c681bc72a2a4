"""`bisect` finds the first pass, and the first node, whose result differs from that of one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn

from shardc._compat import PyTree, pytree
from shardc.capture import loss_arity
from shardc.debug.evaluate import MOVES, Failed, Key, Values, key_of, on_layouts, on_ranks, refuse
from shardc.errors import InputError, VerifyError
from shardc.ir import graph as ir
from shardc.ir.mesh import Mesh
from shardc.passes import Localize, Objective, Pass, Propagate
from shardc.passes.check import Verify
from shardc.plan.ports import batch_axes
from shardc.program import Program
from shardc.report.schedule_text import aligned
from shardc.verify import window

TOLERANCE = 1e-9
FLOOR = 1e-6  # errors are relative to a tensor's largest element, but at least to this


@dataclass(frozen=True)
class Checked:
    """The comparison of one stage with a run on one device: the largest error, and the output or gradient that has it.

    Args:
        stage: name of the stage, that of its pass.
        error: the largest relative error of its outputs and gradients.
        result: the output or gradient that has this error; "" for none.
    """

    stage: str
    error: float
    result: str


@dataclass(frozen=True)
class Verdict:
    """The result of `bisect`: the first wrong stage and node, if any, and the errors of the stages up to it.

    Args:
        checked: the stages in order, up to the first wrong one.
        stage: the first wrong stage, or None.
        node: the first node whose value differs from that of the previous stage; "" if no node can be named.
        reason: the error of the node, or of the result.
        program: a few lines of the stage's text around the node.
    """

    checked: tuple[Checked, ...]
    stage: str | None = None
    node: str = ""
    reason: str = ""
    program: str = ""

    def text(self) -> str:
        """Returns the report as text: the verdict, then one line per checked stage."""
        rows = [(c.stage, f"{c.error:.1e}", c.result or "-") for c in self.checked]
        shown = aligned(rows, ("stage", "error", "worst result"), left=("stage", "worst result"))
        if self.stage is None:
            return f"every stage computes what one device does\n\n{shown}\n"
        named = f", at %{self.node}" if self.node else ""
        lines = [f"{self.stage} is the first that does not{named}: {self.reason}"]
        return "\n".join([*lines, *(f"  | {line}" for line in self.program.splitlines()), "", shown, ""])


def bisect(
    program: Program,
    model: nn.Module,
    *args: PyTree,
    loss: Callable[..., Any] | None = None,
    stages: Sequence[str] | None = None,
    tolerance: float = TOLERANCE,
) -> Verdict:
    """Run the graph of each stage on real numbers, and compare outputs and gradients with those of one device. Return
    the first wrong stage and node, if any, as a `Verdict`.

    Args:
        program: compiled from ``model`` on an abstract mesh; with ``Options(verify=False)`` if the compiler's verifier
            raises. Each stage is verified here before it runs.
        model: a model with real values, best in float64.
        args: arguments of one call at global shapes, targets of the loss last.
        loss: as in `shardc.compile`.
        stages: the stages to check; by default all.
        tolerance: largest relative error of a correct stage.

    Raises:
        InputError: the model has no values, draws random numbers or has manual regions.
    """
    feed, wanted = _one_device(model, args, loss, program)
    seen = _Stages(program, feed, wanted, tolerance)
    cut = [stage for stage in program.stages if program.microbatches > 1 and program.is_half(stage)]
    for stage in stages if stages is not None else [name for name in program.stages if name not in cut]:
        if stage in cut:
            raise InputError(
                f"stage {stage} of a plan with microbatches is cut in time, and cannot be compared with one device",
                fix="leave microbatches out of the plan, or check the stages before the cut, up to decompose",
            )
        verdict = seen.check(stage)
        if verdict is not None:
            return verdict
    return Verdict(tuple(seen.checked))


def _one_device(
    model: nn.Module, args: Sequence[PyTree], loss: Callable[..., Any] | None, program: Program
) -> tuple[dict[Key, Tensor], dict[Key, Tensor]]:
    """Run the model on one device. Return two dicts by key: what a graph is fed (parameters, inputs, tangents), and
    the outputs and gradients that it should compute.
    """
    model = copy.deepcopy(model)
    params = dict(model.named_parameters())
    missing = next((name for name, x in [*params.items(), *model.named_buffers()] if x.is_meta), None)
    if missing is not None:
        raise InputError(f"{missing!r} has no values", fix="use a model with real values on the CPU")
    feed: dict[Key, Tensor] = {("param", name): p.detach().clone() for name, p in params.items()}
    feed |= {("buffer", name): b.clone() for name, b in model.named_buffers()}
    leaves = [x for x in pytree.tree_leaves((tuple(args), {})) if isinstance(x, Tensor)]
    feed |= {("input", name): x for (name, _), x in zip(program.inputs, leaves, strict=True)}
    count = len(args) - (0 if loss is None else loss_arity(loss))
    output = model(*args[:count])
    out = output if loss is None else loss(output, *args[count:])
    tensors = [(at, x) for at, x in enumerate(pytree.tree_leaves(out)) if isinstance(x, Tensor)]
    generator = torch.Generator().manual_seed(0)
    roots = [(at, x) for at, x in tensors if x.requires_grad]
    tangents = {
        at: torch.randn(x.shape, generator=generator, dtype=x.dtype) if x.ndim else torch.ones_like(x)
        for at, x in roots
    }
    trained = {name: p for name, p in params.items() if p.requires_grad}
    grads: Sequence[Tensor | None] = ()
    if roots and trained:
        grads = torch.autograd.grad([x for _, x in roots], [*trained.values()], [*tangents.values()], allow_unused=True)
    wanted: dict[Key, Tensor] = {("output", at): x.detach() for at, x in tensors}
    wanted |= {("buffer", name): b.detach() for name, b in model.named_buffers()}
    wanted |= {("grad", name): g for name, g in zip(trained, grads, strict=False) if g is not None}
    return feed | {("tangent", at): t for at, t in tangents.items()}, wanted


class _Stages:
    """Checks stages in order. Compares outputs and gradients of each with one device, and values of nodes with those
    of the previous stage.

    Args:
        program: the compiled program.
        feed: inputs and tangents, by key.
        wanted: outputs and gradients of one device, by key.
        tolerance: largest relative error of a correct stage.
    """

    def __init__(
        self, program: Program, feed: Mapping[Key, Tensor], wanted: Mapping[Key, Tensor], tolerance: float
    ) -> None:
        # Before the cut in time, the axis of microbatches is a mesh axis as others are.
        self.program, self.mesh, self.tolerance = program, program.bound.mesh, tolerance
        self.feed, self.wanted = dict(feed), wanted
        if program.folded is not None:
            raise InputError("a folded program has no graph of all blocks to run", fix="lower it without fold")
        if program.plan.precision.entries:
            entry = str(program.plan.precision.entries[0])
            fix = "leave precision(...) out of the plan"
            raise InputError("the plan computes in lower precision than one device", plan_entry=entry, fix=fix)
        refuse(program.graph("capture"))
        placed = program.graph("collectives")
        self.input_layouts = {key_of(ir.role(n)): ir.layout(n) for n in ir.placeholders(placed) if ir.is_tensor(n)}
        self.layouts = {ir.info(n).name: ir.layout(n) for n in placed.nodes if n.op != "output" and ir.is_tensor(n)}
        self.checked: list[Checked] = []
        self.before: dict[str, Tensor | str] = {}
        self.verifier = Verify(self.mesh)
        self.last: fx.GraphModule | None = None
        self.forward: Values | None = None

    def check(self, stage: str) -> Verdict | None:
        """Run the graph of ``stage`` and compare its results. Return a `Verdict` if they are wrong, else None."""
        gm = self.program.module(stage)
        try:
            if not self.program.is_half(stage):
                self.verifier.before(stage, self.last or gm)
                self.last = gm
                self.verifier.after(stage, gm)
            values = self._values(stage, gm)
        except VerifyError as error:
            self.checked.append(Checked(stage, float("inf"), "refused by the verifier"))
            return self._wrong(error.node, error.reason, error.program or "")
        except Failed as failure:
            self.checked.append(Checked(stage, float("inf"), "does not run"))
            around = window(gm, self.mesh, failure.node)
            return self._wrong(ir.info(failure.node).name, f"running it fails: {failure}", around)
        computed = {key_of(role) for role, x in ir.outputs(gm.graph) if isinstance(x, fx.Node)}
        errors = {
            key: _error(values.results.get(key, "is not there"), x)
            for key, x in self.wanted.items()
            if key in computed or self._is_due(stage, key)
        }
        worst = max(errors, key=lambda key: errors[key], default=None)
        largest = errors[worst] if worst is not None else 0.0
        self.checked.append(Checked(stage, largest, "" if worst is None else " ".join(map(str, worst))))
        if largest <= self.tolerance:
            self.before |= values.by_name
            return None
        assert worst is not None
        actual = values.results.get(worst, "it is not there")
        reason = f"{self.checked[-1].result} is off by {largest:.1e}{f', {actual}' if isinstance(actual, str) else ''}"
        node, off = self._first_wrong(gm, values)
        if node is None:
            return self._wrong("", reason, "")
        reason = f"it is off by {off:.1e}; {reason}"
        return self._wrong(ir.info(node).name, reason, window(gm, self.mesh, node))

    def _wrong(self, node: str, reason: str, program: str) -> Verdict:
        """Return the `Verdict` that the stage checked last is wrong. The arguments are as for `Verdict`."""
        return Verdict(tuple(self.checked), self.checked[-1].stage, node, reason, program)

    def _is_due(self, stage: str, key: Key) -> bool:
        """Return whether the graph of ``stage`` computes the result ``key``. A backward graph computes gradients, a
        forward graph the others.

        A buffer that forward does not change is no result.
        """
        if key[0] == "buffer" and torch.equal(self.feed[key], self.wanted[key]):
            return False
        return (
            not self.program.is_half(stage)
            or key[0] in ("output", "grad")
            and stage.endswith(".backward") == (key[0] == "grad")
        )

    def _values(self, stage: str, gm: fx.GraphModule) -> Values:
        """Run the graph ``gm`` of a stage; return the values of its nodes and outputs as global tensors."""
        feed = self.feed if self._is_before(Objective, stage) else self.feed | dict(self._tangents())
        if self._is_before(Localize, stage):
            return on_layouts(gm, Mesh() if self._is_before(Propagate, stage) else self.mesh, feed)
        backward = stage.endswith(".backward")
        assert not backward or self.forward is not None
        saved = self.forward.saved if backward and self.forward is not None else None
        values = on_ranks(gm, self.mesh, feed, self.input_layouts, self.layouts, saved)
        if not backward:
            self.forward = values
        return values

    def _is_before(self, later: type[Pass], stage: str) -> bool:
        """Return whether ``stage`` is the graph before the pass ``later`` runs."""
        stages = self.program.stages
        return later.name in stages[stages.index(stage) + 1 :]

    def _tangents(self) -> Iterator[tuple[Key, Tensor]]:
        """Yields (("tangent", index), tangent) for each output that has a gradient. The tangents are scaled so that
        gradients equal those of one device, although the objective is the mean of the ranks' losses.
        """
        plan = self.program.plan
        reduce, scale = plan.setting("reduce"), plan.setting("grad_scale")
        # A DTensor output's gradient is of one global loss already.
        axes = batch_axes(plan, self.mesh) if reduce == "mean" and not plan.setting("dtensor_outputs") else ()
        for role in self.program.outputs:
            if role.kind == "output" and ("tangent", role.index) in self.feed and role.layout is not None:
                over = prod(self.mesh.size(axis) for axis in axes if axis in role.layout.bound)
                yield ("tangent", role.index), self.feed["tangent", role.index] * over / scale

    def _first_wrong(self, gm: fx.GraphModule, values: Values) -> tuple[fx.Node | None, float]:
        """Find the first node of a stage whose value differs from the previous stage's. Return (node, relative
        error), or (None, 0.0) if there is none.
        """
        expected = dict(self.before)
        for node in gm.graph.nodes:
            if node.op != "call_function":
                continue
            name = ir.info(node).name
            if node.target in MOVES and name not in expected:
                expected[name] = expected.get(ir.info(node.all_input_nodes[0]).name, "unknown")
            right, actual = expected.get(name), values.by_name.get(name)
            if not isinstance(right, Tensor) or actual is None or not right.is_floating_point():
                continue
            if isinstance(actual, str) or actual.shape == right.shape:
                off = _error(actual, right)
                if off > self.tolerance:
                    return node, off
        return None, 0.0


def _error(actual: Tensor | str, right: Tensor) -> float:
    """Return the largest absolute error of ``actual``, divided by the largest element of ``right``. It is inf if
    ``actual`` is the text of an error or has another shape.
    """
    if isinstance(actual, str):
        return float("inf")
    for dim, size in enumerate(right.shape):  # without its pad
        actual = actual.narrow(dim, 0, min(size, actual.shape[dim]))
    if actual.shape != right.shape:
        return float("inf")
    if not right.numel():
        return 0.0
    actual, right = actual.double(), right.double()
    same = (actual == right) | (actual.isnan() & right.isnan())
    off = torch.where(same, torch.zeros_like(right), (actual - right).abs()).max()
    finite = torch.where(right.isfinite(), right.abs(), torch.zeros_like(right)).max().clamp_min(FLOOR)
    ratio = (off / finite).item()
    return ratio if ratio == ratio else float("inf")
