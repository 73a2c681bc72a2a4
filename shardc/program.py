"""A program: one model at one input signature, compiled for a mesh and a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from shardc import passes
from shardc._compat import pytree
from shardc.analysis.causes import Cause, cause_of
from shardc.analysis.certificate import Certificate, certify, outputs_text
from shardc.analysis.derive import Dims, derive
from shardc.analysis.formulas import Costs
from shardc.analysis.hardware import Hardware, find
from shardc.analysis.lint import Finding, lint
from shardc.analysis.schedule import Schedule, build, model_flops
from shardc.analysis.sequence import of_halves, of_joint
from shardc.analysis.unshard import keep_within
from shardc.capture import Captured, Dtypes, Tag, capture
from shardc.errors import PlanError
from shardc.ir import graph as ir
from shardc.ir import verify
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.ir.text import dump
from shardc.lower import min_cut, must_recompute, must_save
from shardc.passes.check import check
from shardc.passes.deferred import Sum, deferred_reduction
from shardc.passes.options import Options
from shardc.passes.seed import SeededParam as Seeded
from shardc.plan import ports
from shardc.plan.resolve import ParamPlan
from shardc.plan.spec import to_layout
from shardc.plan.uneven import grown_layout
from shardc.plan.value import Plan
from shardc.precompiled import Identity, save_program
from shardc.validate import near

if TYPE_CHECKING:
    from shardc.fold import Folded


class Program:
    """The annotated graphs of a model after every stage, and the local forward and backward at the end.

    Attributes:
        mesh, plan, options: what it was compiled for.
        stages: names of the stages whose text there is.
        forward, backward, inference: localized graphs; the first two are None where nothing needs a gradient.
        inputs: (name, layout) of each tensor input.
        outputs: the role (with layout) of each forward output.
        deferred: the parameters whose gradients the backward leaves unreduced.
        again: makes the program of another mesh and other input shapes, by input.
        conditions: what must hold of the dynamic sizes that it serves; see `shardc.dynamic`.
        levels, causes: of each parameter, how it is gathered and which plan entries say how it is computed with.
        folded: where repeated blocks are analysed on a few of them, which; then stages up to the cut show these few.
        identity: what call and model it is for; ``reads``: what its capture looked at of them besides tensors.
    """

    cached = False
    conditions: tuple[str, ...] = ()

    def __init__(
        self, mesh: Mesh, plan: Plan, options: Options, captured: Captured, inputs: Sequence[tuple[str, Layout]]
    ) -> None:
        self.mesh, self.plan, self.options = mesh, plan, options
        self.inputs = tuple(inputs)
        self.input_spec, self.constants = captured.input_spec, captured.constants
        self.output_spec, self.reads = captured.output_spec, captured.reads
        self.outputs: tuple[ir.Role, ...] = ()
        self._graphs: dict[str, fx.Graph] = {}
        self._root = captured.graph
        self.levels: Mapping[str, int] = {}
        self.causes: Mapping[str, str] = {}
        self._local: fx.GraphModule | None = None
        self._last: tuple[passes.Pass, ...] = ()
        self.deferred: frozenset[str] = frozenset()
        self.folded: Folded | None = None
        self.identity: Identity | None = None
        self.lower_again: Callable[[Path], bytes | None] | None = None
        self.reduce_sums: Callable[[Sequence[Sum]], fx.GraphModule] | None = None
        self.again: Any = None

    def reduction(self, sums: Sequence[tuple[str, Layout, torch.dtype]]) -> tuple[fx.GraphModule, Certificate]:
        """The scheduled local graph that reduces what backwards without reduction summed up to gradients.

        Args:
            sums: parameter, layout and dtype of each local sum.
        """
        assert self.reduce_sums is not None
        made = self._scheduled(self.reduce_sums([Sum(*each) for each in sums]))
        return made, certify(self.mesh, [("reduction", made.graph)])

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages in order; the last ones run when they are first asked for."""
        differentiated = any(role.kind == "grad" for role, _ in ir.outputs(self.localized.graph))
        last = passes.PARTITIONED if self.folded is None else passes.PARTITIONED[:2]
        return tuple(dict.fromkeys((*self._graphs, *(last if differentiated else last[::2]))))

    @property
    def localized(self) -> fx.GraphModule:
        """The joint graph at local shapes."""
        assert self._local is not None
        return self._local

    @property
    def forward(self) -> fx.GraphModule | None:
        return self._halves[0]

    @property
    def backward(self) -> fx.GraphModule | None:
        return self._halves[1]

    @cached_property
    def inference(self) -> fx.GraphModule:
        made = passes.inference(self.localized)
        return self._scheduled(made if self.folded is None else self.folded.halves(made, None)[0])

    @cached_property
    def _halves(self) -> tuple[fx.GraphModule | None, fx.GraphModule | None]:
        """The forward and the backward, or two None where nothing needs a gradient."""
        cut = passes.Partition(self.levels, min_cut, must_recompute, must_save, self.options.checkpoint_collectives)
        first, second = cut(self.localized)
        if self.options.verify:
            verify.verify_halves(first, second, self.mesh)
        self.keep("partition", first.graph)
        if second is not None:
            self.keep("partition.backward", second.graph)
        if self.folded is not None:
            first, second = self.folded.halves(first, second)
        if second is None:
            self._scheduled(first, "")
            return None, None
        return self._scheduled(first, ""), self._scheduled(second, ".backward")

    def backward_of(self, used: frozenset[int]) -> tuple[fx.GraphModule, Certificate]:
        """The scheduled backward for a loss that uses these outputs only (by index), and its certificate."""
        made = self._backward_of(used)
        return made, certify(self.mesh, [(f"backward of {outputs_text(used)}", made.graph)])

    def _backward_of(self, used: frozenset[int]) -> fx.GraphModule:
        cut = fx.GraphModule(self.localized, ir.copied(self.graph("partition.backward")))
        return self._scheduled(passes.Absent(used)(cut))

    def _scheduled(self, half: fx.GraphModule, suffix: str | None = None) -> fx.GraphModule:
        """``half`` bucketed and scheduled; with ``suffix`` the graphs are kept under the passes' names."""

        def keep(stage: str, gm: fx.GraphModule) -> None:
            if self.options.verify:
                verify.check(gm, self.mesh, stage, verify.SENT)
            if suffix is not None and self.folded is None:
                self.keep(stage + suffix, gm.graph)

        return passes.run(self._last, half, keep)

    def finish(
        self, local: fx.GraphModule, levels: Mapping[str, int], causes: Mapping[str, str], last: tuple[passes.Pass, ...]
    ) -> None:
        """Takes the localized joint graph; it is split, and scheduled, when a half of it is first asked for.

        Args:
            levels, causes: of each parameter, how it is gathered and which plan entries say how it is computed with.
            last: the passes to run on each half.
        """
        self._local, self.levels, self.causes, self._last = local, dict(levels), dict(causes), last
        forward = [(role, x) for role, x in ir.outputs(local.graph) if role.kind != "grad"]
        self.outputs = tuple(role for role, _ in forward)
        self.output_values = tuple(x if not isinstance(x, fx.Node) else None for _, x in forward)

    def certificate(self, training: bool = True) -> Certificate:
        """The order of the collectives of a training step (forward and backward), or of an evaluation."""
        halves = [("forward", self.forward), ("backward", self.backward)] if training else []
        graphs = [(name, half.graph) for name, half in halves if half is not None]
        return certify(self.mesh, graphs or [("inference", self.inference.graph)])

    def cause(self, collective: fx.Node) -> Cause:
        """Why a collective of one of the halves that run is there."""
        return cause_of(self, collective, map(str, self.plan.entries))

    def graph(self, stage: str) -> fx.Graph:
        """The graph as it was after ``stage``.

        Raises:
            PlanError: no such stage, or none for this program (no backward where nothing needs a gradient).
        """
        if stage in passes.PARTITIONED and stage not in self._graphs:
            _ = self._halves
        if stage not in self._graphs:
            raise PlanError(f"there is no stage {stage!r}", fix=near(stage, self.stages))
        return self._graphs[stage]

    def whole(self, stage: str) -> fx.Graph:
        """As `graph`, of all blocks of the model where a few stand for them: of stages from ``propagate`` on."""
        return self.graph(stage) if self.folded is None else self.folded.whole(stage, self.graph(stage))

    def text(self, stage: str = "collectives", *, origins: bool = False) -> str:
        """The annotated graph after ``stage``; with ``origins``, each line ends in module, source and cause."""
        return dump(self.module(stage), self.mesh, origins=origins)

    def module(self, stage: str) -> fx.GraphModule:
        """The graph as it was after ``stage``, with the constants that it holds."""
        return fx.GraphModule(self._root, self.graph(stage))

    def schedule(
        self,
        hardware: str | Hardware = "h100",
        *,
        stage: str = "schedule",
        order: str = "graph",
        optimizer_copies: float = 2.0,
    ) -> Schedule:
        """The communication, the time and the memory of one training step, predicted without running anything.

        Args:
            hardware: a description, or its name in `shardc.analysis.hardware`.
            stage: "schedule": the forward and backward that run; "localize": the joint graph before it is cut, bucketed
                and scheduled, which takes a fraction of the time on a large model.
            order: "graph": collectives start and are awaited where the graph says; "earliest": as dependences allow.
            optimizer_copies: the optimizer's state as a multiple of the parameters (AdamW: 2).

        Raises:
            MeshError: no such hardware, or the mesh is larger than its description.
            PlanError: no such stage or order.
        """
        if stage not in ("schedule", "localize"):
            raise PlanError(f"there is no schedule of stage {stage!r}", fix="use schedule or localize")
        folded = self.folded
        levels, causes = (self.levels, self.causes) if folded is None else (folded.levels, folded.causes)
        if stage == "localize":
            joint = self.localized if folded is None else folded.joint(self.localized)
            step = of_joint(joint.graph, levels, self.options.checkpoint_collectives)
        else:
            first = self.forward or self.inference
            step = of_halves(first.graph, self.backward and self.backward.graph, levels)
        # Before ``pad``: what is computed on filling is of no use.
        useful = (model_flops if folded is None else folded.model_flops)(self.graph("seed")) / self.mesh.ranks
        described = find(hardware) if isinstance(hardware, str) else hardware
        return build(
            step, self.mesh, described, symbols=partial(self.costs, described), order=order, causes=causes,
            useful_flops=useful, optimizer_copies=optimizer_copies, notes=() if folded is None else folded.notes,
        )  # fmt: skip

    def costs(self, hardware: str | Hardware = "h100", dims: Dims | None = None) -> Costs:
        """Bytes and seconds of each axis as formulas in batch, sequence and axis sizes; see `shardc.analysis.derive`.

        Raises:
            PlanError: the program has other collectives at other sizes, or a formula does not hold there.
        """
        return derive(self, find(hardware) if isinstance(hardware, str) else hardware, dims)

    def lint(self, hardware: str | Hardware = "h100", *, stage: str = "schedule") -> list[Finding]:
        """What the plan makes ranks send or compute for nothing, the costliest first; arguments as `schedule`'s."""
        joint = self.schedule(hardware, stage="localize")
        return lint(self.whole("collectives"), joint, joint if stage == "localize" else self.schedule(hardware))

    def save(self, directory: str | Path) -> list[Path]:
        """Writes the program, for `shardc.load`, and the text of every stage; returns the paths.

        Inductor's artifacts are written too where the program has run in this process.

        Raises:
            PrecompiledError: something of it has no form on disk, or it leaves its gradients unreduced (`no_sync`).
        """
        paths = save_program(self, Path(directory))
        return [*self.write_stages(directory), *paths]

    def write_stages(self, directory: str | Path, stages: Sequence[str] | None = None) -> list[Path]:
        """Writes the text of every stage (or of ``stages``) as ``NN_stage.txt``; returns the paths."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for at, stage in enumerate(self.stages):
            if stages is None or stage in stages:
                paths.append(folder / f"{at:02d}_{stage}.txt")
                paths[-1].write_text(self.text(stage))
        return paths

    def keep(self, stage: str, graph: fx.Graph) -> None:
        """Keeps a copy of ``graph`` as it is now."""
        self._graphs[stage] = ir.copied(graph)


def build_program(
    model: nn.Module,
    mesh: Mesh,
    plan: Plan,
    params: Mapping[str, ParamPlan],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    device: torch.device,
    loss: Callable[..., Any] | None,
    options: Options,
    deferred: frozenset[str] = frozenset(),
    captured: Captured | None = None,
    pins: Sequence[ports.ActivationPin] | None = None,
) -> Program:
    """Captures ``model`` at global example inputs and runs the pipeline.

    Args:
        deferred: parameters whose gradients stay unreduced, to be summed up on each rank; see `Program.reduction`.
        captured: the model, captured at these inputs before.
        pins: what the plan says of activations; by default resolved here, against the model's modules.

    Raises:
        ShardcError: whatever is wrong with the plan, the inputs or the model; nothing is changed before.
    """
    if pins is None:
        pins = ports.resolve_activations(plan, [name for name, _ in model.named_modules()])
    tags = [Tag(pin.module, pin.where, pin.index) for pin in pins]
    precision = ports.precision_of(plan, model.training)
    if captured is None:
        take = options.capture or capture
        captured = take(model, args, kwargs, device=device, loss=loss, tags=tags, dtypes=Dtypes.of(precision))
    ports.check_pins(pins, [tag.name for tag in tags], captured.graph.graph)
    leaves = [x for x in pytree.tree_leaves((tuple(args), kwargs)) if isinstance(x, Tensor)]
    shapes = [(name, tuple(x.shape)) for name, x in zip(captured.inputs, leaves, strict=True)]
    inputs = ports.resolve_inputs(plan, mesh, shapes)
    program = Program(mesh, plan, options, captured, [(n, x.layout) for (n, _), x in zip(shapes, inputs, strict=True)])
    by_tag = {tag.name: pin for tag, pin in zip(tags, pins, strict=True)}
    axes = ports.batch_axes(plan, mesh)
    reduce, grad_scale = ports.grad_mode(plan)
    # The gradient of an output that is a DTensor is of one global loss: the same on all replicas, and of no one rank.
    tangents, own = ("mean", False) if plan.setting("dtensor_outputs") else (reduce, True)
    outputs = ports.output_specs(plan, captured.output_spec)
    uneven = {at: (found.padded, found.cause) for at, found in enumerate(inputs) if found.padded is not None}
    stored = {name: p.dtype for name, p in model.named_parameters()}
    split = {name: p.split for name, p in params.items() if p.split is not None}
    seeded = {n: Seeded(p.storage, p.compute, p.storage_cause, p.compute_cause, p.split) for n, p in params.items()}
    storages = {name: p.storage for name, p in params.items()}

    def pin_layout(tag: str, base: Layout) -> tuple[Layout, str]:
        pin, base = by_tag[tag], base.without_partial()
        what = f"{pin.where} of module {pin.module!r}"
        return to_layout(pin.spec, mesh, base.shape, base, what=what, entry=pin.entry, uneven="drop"), pin.entry

    def grow(tag: str, shape: Sequence[int], held: Sequence[int]) -> Layout | None:
        pin = by_tag[tag]
        return grown_layout(pin.spec, mesh, shape, what=f"{pin.where} of {pin.module!r}", entry=pin.entry, held=held)

    def output_layout(index: int, name: str, natural: Layout) -> tuple[Layout, str]:
        if (said := outputs.get(index)) is None:
            return natural, ""
        return to_layout(said[0], mesh, natural.shape, natural, what=f"output {name!r}", entry=said[1]), said[1]

    seen: list[Any] = [None]

    def hook(stage: str, gm: fx.GraphModule) -> None:
        program.keep(stage, gm.graph)
        if options.verify:
            seen[0] = check(gm, mesh, stage, seen[0])

    spelled = passes.Collectives(options.cost), passes.Localize(mesh, captured.fake_mode, device)
    offload = partial(passes.Offload, {n: p.host for n, p in params.items() if p.host}, captured.fake_mode, device)
    grads = {name: precision.grads or dtype for name, dtype in stored.items()}

    def reduction(sums: Sequence[Sum]) -> fx.GraphModule:
        made = deferred_reduction(sums, storages, grads, captured.fake_mode, device)
        return passes.run((*spelled, offload(frozenset())), made, lambda stage, gm: None)

    hook("capture", captured.graph)
    local = passes.run(
        (
            passes.Canonicalize(),
            passes.Seed(mesh, seeded, [(found.layout, found.cause) for found in inputs], frozenset(by_tag)),
            passes.Pad(mesh, uneven, split, grow, captured.fake_mode, device),
            passes.Propagate(
                mesh, options.cost, axes, output_layout, pin_layout,
                storages, {n: p.split or p.compute for n, p in params.items()}, tangents, options.strict, deferred,
            ),
            passes.Objective(axes, reduce, grad_scale, own),
            passes.Precision(
                stored, storages, precision.reduce or precision.param, precision.keep_low_precision_grads, deferred
            ),
            passes.Reshard(),
            passes.Simplify(options.cost),
            *spelled,
            offload(deferred),
            passes.Settle(),
        ),
        captured.graph,
        hook,
    )  # fmt: skip
    program.deferred, program.reduce_sums = deferred, reduction
    again, said = {n: p.again for n, p in params.items()}, options.said(plan)
    program.finish(
        local,
        keep_within(local.graph, mesh, again, options.budget_bytes(), options.cost, said.bucket_bytes()),
        {name: p.compute_cause for name, p in params.items()},
        passes.halves(mesh, said),
    )
    if options.dump:
        program.write_stages(options.dump)
    return program
