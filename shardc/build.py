"""`Build`: compiles the programs of one module on demand, or loads them from the store."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from shardc._compat import PyTree, pytree
from shardc.capture import Captured, Dtypes, SymbolicCapture, Tag, capture_symbolic, input_names, loss_arity
from shardc.cost.compute import wasted
from shardc.dynamic import Differs, DynamicDims, Families, Family, SizedProgram
from shardc.errors import CaptureError, PlanError, ShardcWarning
from shardc.fold import build_folded
from shardc.ir.deferred import NOTHING, Deferred
from shardc.ir.executable import Executable
from shardc.ir.guards import Guards
from shardc.ir.inner import InnerTensors
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.joint import Joint, Request, build_joint
from shardc.lower import lower
from shardc.lower.compile_lock import caches, program_folder
from shardc.lower.inductor import artifacts
from shardc.passes import in_pieces
from shardc.passes.options import Options
from shardc.passes.unfold import Folded
from shardc.plan.layout_spec import PerRank
from shardc.plan.pipeline_stages import PipelineStages
from shardc.plan.ports import numbered, resolve_activations, resolve_inputs, resolve_saves
from shardc.plan.resolve import Sizes, resolve_params
from shardc.plan.value import Plan
from shardc.precompiled import ProgramKey, Store, load
from shardc.precompiled.program_key import described
from shardc.program import Program, Rebuild, Source
from shardc.runtime.groups import Groups
from shardc.runtime.identity_guards import ModuleSnapshot
from shardc.runtime.inputs import Example, Signature, TorchGlobalState
from shardc.runtime.step import named_groups, use_groups


@dataclass(eq=False)
class Build:
    """Compiles the programs of one module, each for a model and example inputs at global shapes.

    Args:
        plan, mesh: the user's plan, and the mesh that programs are for.
        param_sizes: (parameter -> (shape, bytes per element), other name of a tied parameter -> its first name).
        device: the device of parameters and inputs.
        loss: the loss function, which a program has if its call passes targets.
        options: the options to compile with.
        groups: process groups of the mesh, to compile for; None for an abstract mesh or another backend.
        dynamic: the dims whose sizes change between calls.
        runs: whether programs run, rather than being for inspection only.
        warns: warn, once, if ranks compute the same.
        kinds: classes of programs for fixed and for dynamic sizes.
        pp: the stages of the plan's pipeline; ``mesh`` is that of one stage then.
    """

    plan: Plan
    mesh: Mesh
    param_sizes: tuple[Sizes, Mapping[str, str]]
    device: torch.device
    loss: Callable[..., PyTree] | None
    options: Options
    groups: Groups | None
    dynamic: DynamicDims
    runs: bool = False
    warns: bool = True
    kinds: tuple[type[Program], type[SizedProgram]] = (Program, SizedProgram)
    pp: PipelineStages | None = None

    def __post_init__(self) -> None:
        self.params = resolve_params(self.plan, self.mesh, *self.param_sizes)
        self.families = Families(self.kinds[1])

    def for_copy(self) -> Build:
        """Returns a builder for a copy of the module: the same plan, without programs for dynamic sizes."""
        build = copy.copy(self)
        build.dynamic, build.families = DynamicDims(self.dynamic.names), Families(self.kinds[1])
        return build

    def __call__(
        self, template: nn.Module, example: Example, deferred: Deferred = NOTHING, captured: Captured | None = None
    ) -> Program:
        """Compiles the model ``template`` for the inputs ``example`` at global shapes, and returns the program.

        Args:
            template: the model, on ``meta``.
            example: example inputs at global shapes.
            deferred: parameters whose gradients stay unreduced.
            captured: the captured model, if there is one already.
        """
        key = self._key(template, example)
        if self.pp is not None and deferred:
            raise PlanError(
                "a backward that leaves gradients unreduced (no_sync) does not run in the stages of a pipeline",
                plan_entry=str(self.pp.entry),
                fix="pass the whole batch in one call, and use more microbatches",
            )

        def make(joint: Joint, folded: Folded | None) -> Program:
            """Returns the program of a joint graph, with its guards and the functions that compile it anew."""
            guards = Guards.of(joint.captured.reads if folded is None else folded.reads, template, self.loss)
            source = Source(key, guards, self._rebuilder(template, example), self._lower_again, type(template).__name__)
            return self.kinds[0](joint, source, folded)

        mesh, modules = self._timed_mesh, [name for name, _ in template.named_modules()]
        params = self.params if mesh == self.mesh else {name: param.on(mesh) for name, param in self.params.items()}
        request = Request(
            template, mesh, self.plan, params, example.args, example.kwargs, self.device,
            self.loss if example.with_loss else None, self.options, resolve_activations(self.plan, modules),
            resolve_saves(self.plan, modules), deferred, keep_stages=not self.runs, pp=self.pp,
        )  # fmt: skip
        if captured is None and (self.runs if self.options.fold is None else self.options.fold):
            program = build_folded(request, make)
        else:
            program = make(build_joint(request, captured), None)
        self._warn_repeated(program)
        if self.options.dump:
            program.write_stages(self.options.dump)
        return program

    @property
    def _timed_mesh(self) -> Mesh:
        """The mesh, with an axis of microbatches if the plan has some."""
        return self.mesh.timed(self.plan.setting("microbatches"))

    def _warn_repeated(self, program: Program) -> None:
        """Warns, once per module, if all ranks along a mesh axis repeat the same compute, and says where."""
        if not self.warns:
            return
        counts = {} if program.folded is None else {"counts": program.folded.times}
        layouts = {name: param.compute for name, param in self.params.items()}
        warning = wasted(program.joint.work, program.bound.mesh, layouts, **counts)
        if warning is not None:
            self.warns = False
            warnings.warn(ShardcWarning(str(warning)), stacklevel=3)

    def _key(self, template: nn.Module, example: Example) -> ProgramKey:
        """Returns the `ProgramKey` of a program, which is known before its capture."""
        args, kwargs, with_loss = example
        names = input_names(template, args, kwargs, loss_arity(self.loss) if self.loss and with_loss else 0)
        around = TorchGlobalState.now(self.device)
        call = Signature.of(ModuleSnapshot(template).mode(), around, names, args, kwargs)
        model = described(template, self.loss)
        mesh = self.mesh if self.pp is None else self.pp.mesh
        return ProgramKey(call, model, self.device.type, mesh, self.plan, repr(self.options))

    def stored(self, template: nn.Module, example: Example, evaluates: bool = False) -> Executable:
        """Loads the program that an earlier start or another rank has stored; else compiles and stores it.

        ``evaluates`` stores the inference graph too.
        """
        fresh, store = partial(self, template, example), self._store(template, example)
        if isinstance(store, str):
            program = fresh()
            program.stored = f"not stored: {store}"
            return program
        if (stored_program := store.find(template, self.loss, fresh)) is not None:
            return stored_program
        with store.turn():
            if (stored_program := store.find(template, self.loss, fresh)) is not None:
                return stored_program
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                program = fresh()
            for record in caught:
                warnings.warn_explicit(record.message, record.category, record.filename, record.lineno)
            ops = {node.target for node in program.joint.stage_graphs["capture"].nodes if node.op == "call_function"}
            texts = [str(record.message) for record in caught if issubclass(record.category, ShardcWarning)]
            reached = program.guards.reads.reach(template, self.loss)
            program.stored = store.add(program, reached, ops, texts, evaluates)
        return program

    def _store(self, template: nn.Module, example: Example) -> Store | str:
        """Returns the store of the programs for the inputs ``example``, or as text why they are not stored."""
        if not (self.runs and self.options.program_cache and caches()):
            return "the store is off, by Options(program_cache=False), SHARDC_STORE=0 or Inductor's settings"
        if any(isinstance(module, InnerTensors) for module in template.modules()):
            return "the model has tensors of wrapper subclasses, whose code for ops may be where no start can look"
        return Store.of(program_folder(), self._key(template, example), self.options)

    def sized(
        self,
        template: Callable[[], nn.Module],
        example: Example,
        call: Signature,
        deferred: Deferred,
        holds: Callable[[Guards], bool],
    ) -> Program | None:
        """Returns the program for inputs with dynamic sizes: one program for many sizes, or if there is none (a warning
        says why), the program for these sizes only. None if no size is dynamic.

        Args:
            template: returns the template; called if there is no program yet.
            example: inputs at global shapes.
            call: the signature of the call.
            deferred: the gradients that are left unreduced.
            holds: returns whether guards still hold: a capture would read the same values now.
        """
        leaves = pytree.tree_leaves((tuple(example.args), dict(example.kwargs)))
        dims, sizes = self.dynamic.of(list(zip(call.names, leaves, strict=True)))
        if not sizes:
            return None
        return self.families.program(
            (call.without(dims), deferred),
            sizes,
            holds,
            family=lambda: self._family(template(), example, call.names, dims, sizes, deferred),
            alone=lambda: self(template(), example, deferred),
        )

    def _family(
        self,
        model: nn.Module,
        example: Example,
        names: Sequence[str],
        dims: Mapping[str, Mapping[int, str]],
        sizes: Mapping[str, int],
        deferred: Deferred,
    ) -> Family | None:
        """Returns the one program of ``model`` for many sizes; None, with a warning that says why, if there is none.

        Args:
            example, names: inputs at global shapes, and the name of each.
            dims: input -> dim -> name of its size.
            sizes: name -> size in ``example``.
        """
        leaves, spec = pytree.tree_flatten((tuple(example.args), dict(example.kwargs)))
        pins = resolve_activations(self.plan, [name for name, _ in model.named_modules()])
        tags = [Tag(pin.module, pin.where, pin.index) for pin in pins]
        precision = self.plan.precision.mode(model.training)
        dtypes = Dtypes.of(model, precision.of, precision.scaled)
        loss = self.loss if example.with_loss else None

        def leaves_at(wanted: Mapping[str, int]) -> list[PyTree]:
            """Returns the inputs at the sizes ``wanted``, in order: tensors on ``meta``, and constants."""

            def shape(name: str, x: Tensor) -> list[int]:
                dynamic = dims.get(name, {})
                return [wanted[dynamic[dim]] if dim in dynamic else size for dim, size in enumerate(x.shape)]

            inputs = zip(names, leaves, strict=True)
            return [_on_meta(x, shape(name, x)) if isinstance(x, Tensor) else x for name, x in inputs]

        def example_at(wanted: Mapping[str, int]) -> Example:
            args, kwargs = pytree.tree_unflatten(leaves_at(wanted), spec)
            return Example(args, kwargs, example.with_loss)

        def capture_at(hints: Mapping[str, int]) -> SymbolicCapture:
            args, kwargs, _ = example_at(hints)
            return capture_symbolic(model, args, kwargs, dims, device=self.device, loss=loss, tags=tags, dtypes=dtypes)

        def build_at(options: Options, capture: Captured, wanted: Mapping[str, int]) -> Program:
            builder = copy.copy(self)
            builder.options = options
            return builder(model, example_at(wanted), deferred, capture)

        def layouts_at(wanted: Mapping[str, int]) -> list[tuple[str, Layout]]:
            inputs = zip(names, leaves_at(wanted), strict=True)
            shapes = [(name, tuple(x.shape)) for name, x in inputs if isinstance(x, Tensor)]
            ports = resolve_inputs(self.plan, self._timed_mesh, shapes)
            return [(name, port.layout) for (name, _), port in zip(shapes, ports, strict=True)]

        # If ops run in chunks, the saved values may depend on the sizes: then once more without.
        for options in (self.options, replace(self.options, decompose=1))[: 1 + in_pieces(self.options)]:
            try:
                return Family(capture_at, partial(build_at, options), layouts_at, sizes, self._timed_mesh.ranks)
            except Differs as error:
                why = str(error)
        reason = CaptureError(
            f"there is no one program for all sizes {', '.join(sizes)}: {why}",
            fix="leave one of them out of dynamic; each of its sizes is compiled for itself then, as now",
        )
        if self.options.strict:
            raise reason
        warnings.warn(ShardcWarning(str(reason)), stacklevel=2)
        return None

    def _rebuilder(self, template: nn.Module, example: Example) -> Rebuild:
        """Returns a function that compiles the program for another mesh with the same axes, and other input shapes."""
        inputs = (tuple(example.args), example.kwargs)
        on_meta = pytree.tree_map_only(Tensor, lambda x: _on_meta(x, x.shape), inputs)

        def rebuild(mesh: Mesh, shapes: Sequence[Sequence[int]]) -> Program:
            sizes = iter(shapes)
            args, kwargs = pytree.tree_map_only(Tensor, lambda x: _on_meta(x, next(sizes)), on_meta)
            build = Build(
                self.plan, mesh, self.param_sizes, self.device, self.loss, self.options, None, DynamicDims({}),
                warns=False, kinds=self.kinds,
            )  # fmt: skip
            return build(template, Example(args, kwargs, example.with_loss))

        return rebuild

    def _lower_again(self, folder: Path) -> bytes | None:
        """Compiles the saved program in ``folder`` by Inductor, and returns Inductor's artifacts as bytes. None if the
        process groups of its collectives do not exist in this process yet.
        """
        if self.groups is None:
            return None
        saved, groups = load(folder), self.groups
        halves = saved.own_halves()
        named = {name for half in halves for name in named_groups(half.gm, self.mesh)}
        if not named <= groups.rename.keys():
            return None  # creating groups is a collective

        for half in halves:
            use_groups(half.gm, groups)
        return artifacts(lambda: lower(*halves, backend="inductor", by=self.options.compile_regions))

    @cached_property
    def has_own_inputs(self) -> bool:
        """Return whether the plan marks an input as different on each rank (`shardc.per_rank`)."""
        return any(isinstance(getattr(entry, "spec", None), PerRank) for entry in self.plan.entries)

    def numbered(self, names: Sequence[str]) -> dict[int, int]:
        """Return which inputs hold row numbers of other inputs: position of a `shardc.per_rank` input -> position of
        the input with the numbered rows.
        """
        return numbered(self.plan, names)

    def input_layouts(self, shapes: Sequence[tuple[str, tuple[int, ...]]]) -> list[Layout]:
        """Return the layouts of inputs under the plan; ``shapes`` has (name, global shape) of each."""
        return [port.layout for port in resolve_inputs(self.plan, self.mesh, shapes)]


def _on_meta(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Returns an empty tensor of ``shape`` on ``meta``, otherwise like ``x``."""
    return torch.empty(tuple(shape), dtype=x.dtype, device="meta", requires_grad=x.requires_grad)
