"""State of a compiled module besides its parameters: meshes, layouts, template and compiled programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardc.errors import InputError
from shardc.ir.clone import clone_tree, unsharded
from shardc.ir.deferred import NOTHING, Deferred
from shardc.ir.executable import Executable
from shardc.ir.graph import Role
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.ir.states import tracing
from shardc.runtime import parameter_checks, submodule_calls
from shardc.runtime.events import Act
from shardc.runtime.groups import Groups
from shardc.runtime.guard_cache import GuardCache, settled
from shardc.runtime.guards import Guards
from shardc.runtime.heap import frozen
from shardc.runtime.host import ParamLocation
from shardc.runtime.inputs import no_targets, takes_loss
from shardc.runtime.module_snapshot import ModuleSnapshot
from shardc.runtime.replicas import Sources, Turns, compare_values
from shardc.runtime.signature import Signature
from shardc.runtime.step import Lower, Runner
from shardc.runtime.sync import Sync
from shardc.runtime.torch_global_state import TorchGlobalState
from shardc.runtime.wire.buffers import Buffers


class Build(Protocol):
    """Compiles programs for example inputs at global shapes."""

    dynamic: Any
    families: Any
    loss: Any

    def __call__(
        self, template: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], with_loss: bool,
        deferred: Deferred = NOTHING,
    ) -> Executable: ...  # fmt: skip

    def stored(
        self, template: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], with_loss: bool, evaluates: bool
    ) -> Executable:
        """Compiles, or loads the program that an earlier start or another rank has stored."""

    def sized(
        self,
        template: Callable[[], nn.Module],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        with_loss: bool,
        signature: Signature,
        deferred: Deferred = NOTHING,
    ) -> Executable | None:
        """Returns a program for any sizes of the dynamic dims; None if inputs have none."""

    @property
    def has_own_inputs(self) -> bool:
        """Whether the plan marks an input as different on each rank (`shardc.per_rank`)."""

    def numbered(self, names: Sequence[str]) -> dict[int, int]:
        """Maps the position of each input that holds row numbers to that of the input whose rows it indexes."""

    def input_layouts(self, shapes: Sequence[tuple[str, tuple[int, ...]]]) -> list[Layout]: ...


@dataclass
class CallCacheEntry:
    """Event, row axes and compiled program of the calls that share a key (`call_key`).

    Args:
        act: event to compare with other ranks.
        row_axes: per tensor, the axes over which ranks may pass different numbers of rows.
        program: None before the first call.
    """

    act: Act
    row_axes: tuple[tuple[str, ...], ...]
    program: Executable | None = None


@dataclass
class State:
    """State of a `ShardedModule` besides its parameters.

    Args:
        mesh: the abstract mesh.
        device_mesh: None for a module that is only analysed or simulated.
        param_mesh: mesh of the DTensor parameters: ``device_mesh``, or a view with some axes split into parts.
        groups: this rank's process groups; None without a device mesh.
        template: the user's module at compile, with ``meta`` parameters at global shapes; see `present`.
        storages: storage layout of each parameter.
        build: compiles programs.
        global_shapes: (name, local shape) of inputs -> global shapes, by the plan.
        names: (template, args, kwargs, number of loss arguments) -> a name per pytree leaf.
        targets: names of the loss's arguments after the model's output; None without a loss.
        lower_half: turns a half (forward or backward graph) into a callable.
        device: device on which the program runs.
        sync: settings and local sums of unreduced gradients.
        homes: device of each parameter between steps.
        unit: (roles of the outputs, layout of an input) -> this rank's gradient of it divided by the objective's.
        dtensor_outputs: whether outputs are returned as DTensors.
        buffers: memory for results of collectives of all programs.
        programs: programs by signature.
        deferring: programs that leave gradients unreduced.
        variants: guards of the programs.
        explicit: whether `Namespace.lower` was called.
        read: (name, local shape) of an input -> global shape it was sharded from.
        uneven: whether ranks may pass different numbers of rows.
        turns: schedule of the calls at which ranks compare inputs.
        sources: fingerprints of the tensors that shards were cut from; see `shardc.runtime.replicas`.
        fresh: whether values have changed since ranks compared them.
        call_cache: key of a call -> its program and event.
        found: result of the plan search (`shardc.search.result.Found`); None if the plan was given.
        around: a forward set on the module, which calls the compiled one; see `shardc.runtime.rebound`.
        epoch: `shardc.runtime.rank_consistency.Agreement.epoch` at the last call.
        owner: the compiled module.
        view: the same tensors as a module of the model's own class.
    """

    mesh: Mesh
    device_mesh: DeviceMesh | None
    param_mesh: DeviceMesh | None
    groups: Groups | None
    template: nn.Module
    storages: dict[str, Layout]
    build: Build
    global_shapes: Callable[[Sequence[tuple[str, tuple[int, ...]]]], list[tuple[int, ...]]]
    names: Callable[..., list[str]]
    targets: tuple[str, ...] | None
    lower_half: Lower
    device: torch.device
    sync: Sync
    homes: dict[str, ParamLocation]
    unit: Callable[[Sequence[Role], Layout], float]
    dtensor_outputs: bool = False
    buffers: Buffers = field(default_factory=Buffers)
    programs: dict[Signature, Executable] = field(default_factory=dict)
    deferring: dict[tuple[Signature, Deferred], Executable] = field(default_factory=dict)
    variants: GuardCache = field(default_factory=GuardCache)
    explicit: bool = False
    read: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = field(default_factory=dict)
    uneven: bool = False
    turns: Turns = field(default_factory=Turns)
    sources: Sources = field(default_factory=dict)
    fresh: bool = True
    call_cache: dict[Any, CallCacheEntry] = field(default_factory=dict)
    found: Any = None
    around: Callable[..., Any] | None = None
    epoch: int = 0
    owner: Any = None
    view: Any = None
    _runners: dict[int, Runner] = field(default_factory=dict)
    _name: str | None = None
    _census: ModuleSnapshot | None = None
    _checked: parameter_checks.Seen | None = None
    _watch: Guards | None = None
    _variants_now: dict[tuple[Signature, bool], Signature] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        return self.groups.rank if self.groups is not None else 0

    def with_loss(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether a call passes the loss's arguments, as its last positional ones; InputError if neither form fits."""
        return takes_loss(self.view, args, kwargs, None if self.targets is None else len(self.targets))

    def program_for(self, args: Sequence[Any], kwargs: dict[str, Any], looks: bool = False) -> Executable:
        """Returns the program for global (example) inputs in the present mode; compiles it if there is none.

        Programs compiled with grad mode off also train, unless the model's code asks for the grad mode.

        Args:
            looks: whether the caller needs the stages of the compile, which stored programs lack.
        """
        call = self.signature(args, kwargs)
        self.mark(call.names, args, kwargs)
        evaluates = not torch.is_grad_enabled()
        if self.targets and self.view.training and not (looks or evaluates or self.with_loss(args, kwargs)):
            raise no_targets(self.view, self.targets)
        deferred = NOTHING if evaluates else self.sync.deferred()
        for grad in True, False:
            with tracing(grad):
                program: Any = self._sized(call, args, kwargs, deferred)
                if program is None and (key := self._variant(call)) is not None:
                    program = self.deferring.get((key, deferred)) if deferred else self.programs.get(key)
                if program is None or looks and program.from_store:
                    with frozen():
                        build, example = self.build, (self.present(), args, kwargs, self.with_loss(args, kwargs))
                        program = build(*example, deferred) if looks or deferred else build.stored(*example, evaluates)
                    self.add(program, deferred)
            if not (evaluates and program.reads.grad_mode):
                break
        return program

    def _variant(self, call: Signature) -> Signature | None:
        key = call, torch.is_grad_enabled()
        variant = self._variants_now.get(key) or self.variants.find(call, self.view, self.build.loss)
        return variant and self._variants_now.setdefault(key, variant)

    def add(self, program: Any, deferred: Deferred = NOTHING, signature: Signature | None = None) -> None:
        """Caches a program, for its own signature or ``signature``."""
        signature = signature or program.identity.signature
        self.variants.add(signature, program.reads)
        if deferred:
            self.deferring[signature, deferred] = program
        else:
            self.programs[signature] = program
        self._watch = Guards(self.variants.reads(), self.view, self.build.loss)

    def settle(self, program: Executable) -> None:
        """Applies the attributes that the model's first call sets, and caches ``program`` for the calls after it."""
        if program.reads.sets:
            self.add(program, program.deferred, settled(program, self.view, self.build.loss))

    def _sized(
        self, call: Signature, args: Sequence[Any], kwargs: dict[str, Any], deferred: Deferred
    ) -> Executable | None:
        """Returns the program for a call with dynamic sizes; None if it has none."""
        if not self.build.dynamic.names:
            return None
        leaves = pytree.tree_leaves((tuple(args), kwargs))
        dims, sizes = self.build.dynamic.of(list(zip(call.names, leaves, strict=True)))
        if not sizes:
            return None
        kind = call.without(dims)
        variant_key = kind, torch.is_grad_enabled()
        key = self._variants_now.get(variant_key) or self.variants.find_sized(kind, self.view, self.build.loss)
        self._variants_now[variant_key] = key
        program = self.build.sized(self.present, args, kwargs, self.with_loss(args, kwargs), key, deferred)
        if program is not None and self.variants.add_sized(key, program.reads, self.view, self.build.loss):
            self._watch = Guards(self.variants.reads(), self.view, self.build.loss)
        return program

    def mark(self, names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Registers the dims that torch's ``mark_dynamic`` marks on the tensors of a call."""
        self.build.dynamic.mark(list(zip(names, pytree.tree_leaves((tuple(args), kwargs)), strict=True)))

    def lowered_but_for_sizes(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether a program was compiled for these arguments, ignoring dynamic sizes and modes."""
        call = self.signature(args, kwargs)
        inputs = list(zip(call.names, pytree.tree_leaves((tuple(args), kwargs)), strict=True))
        dims, _ = self.build.dynamic.of(inputs)
        return any(made.without(dims).leaves == call.without(dims).leaves for made in self.programs)

    def lowered(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether a program was compiled for these arguments (global shapes)."""
        with torch.enable_grad():
            key = self._variant(self.signature(args, kwargs))
        return key is not None and key in self.programs

    def whole_shapes(self, local: Sequence[tuple[str, tuple[int, ...]]]) -> list[tuple[int, ...]]:
        """Returns the global shapes of inputs (name, local shape): those they were sharded from, else by the plan."""
        by_plan = self.global_shapes(local)
        return [self.read.setdefault(each, shape) for each, shape in zip(local, by_plan, strict=True)]

    def note_cut(self, name: str, local: tuple[int, ...], whole: tuple[int, ...]) -> None:
        """Records that inputs of global shape ``whole`` have shards of shape ``local``; InputError if others do too."""
        previous = self.read.setdefault((name, local), whole)
        if previous != whole:
            small, large = sorted((list(whole), list(previous)))
            raise InputError(
                f"input {name!r}: global inputs of {small} and of {large} both give each rank {list(local)}; "
                f"{small} does not divide and is passed whole",
                fix=f"drop or pad the batch of {small}, or compile another module for it",
            )

    def signature(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Signature:
        """Returns the signature of a call in the present mode."""
        mode = self.look().mode()
        return Signature.of(mode, TorchGlobalState.now(self.device), self.input_names(args, kwargs), args, kwargs)

    def input_names(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[str]:
        """Returns a name for each pytree leaf of a call's arguments."""
        return self.names(self.view, args, kwargs, len(self.targets or ()) * self.with_loss(args, kwargs))

    @property
    def name(self) -> str:
        """Name of the module in events: its class, and its number among the modules of the mesh."""
        assert self.groups is not None
        if self._name is None:
            self.groups.agreement.modules += 1
            self._name = f"{type(self.template).__name__} (module {self.groups.agreement.modules} of the mesh)"
        return self._name

    def begin_anew(self, epoch: int) -> None:
        """Clears the state that ranks may no longer share after one of them raised an error."""
        self._name, self.epoch, self.fresh, self.turns = None, epoch, True, Turns()
        self.call_cache.clear()
        self._runners.clear()

    @cached_property
    def contracts(self) -> dict[str, parameter_checks.ParamContract]:
        """Contract of each parameter, by name."""
        assert self.param_mesh is not None
        return parameter_checks.contracts(self.template, self.storages, Mesh.of(self.param_mesh))

    def adopt(self, owner: nn.Module) -> None:
        """Sets the module that owns the parameters, and registers its hooks."""
        self.owner, self.view = owner, unsharded(owner)
        self.sync.parameters = lambda: self.look().parameters
        self.build.families.forget = lambda program: self._runners.pop(id(program), None)
        if self.device_mesh is not None:
            parameter_checks.load_hooks(owner, self.storages, self.rank, self.homes)
            submodule_calls.guard(owner)

    def look(self) -> ModuleSnapshot:
        """Returns the module's current snapshot; clears the call cache if a guard no longer holds."""
        if self._census is None or not self._census.holds():
            self._census, self._checked, self._watch = ModuleSnapshot(self.owner), None, None
        elif self._watch is not None and not self._watch.holds():
            self._watch = None
        if self._watch is None:
            self.call_cache.clear()
            self._variants_now.clear()
            self._watch = Guards(self.variants.reads(), self.view, self.build.loss)
        return self._census

    def present(self) -> nn.Module:
        """Copies the user's module as it is now, with ``meta`` parameters at global shapes, for capture."""
        strides = {name: param.stride() for name, param in self.template.named_parameters(remove_duplicate=False)}

        def tensor(name: str, x: Tensor) -> Tensor:
            empty = torch.empty_strided(x.shape, strides.get(name, x.stride()), dtype=x.dtype, device="meta")
            return nn.Parameter(empty, requires_grad=x.requires_grad) if isinstance(x, nn.Parameter) else empty

        template = clone_tree(self.view, tensor)
        vars(template).pop("shardc")
        submodule_calls.unguard(template)
        return template

    @property
    def census(self) -> ModuleSnapshot:
        """Snapshot of the module at the last `look`."""
        assert self._census is not None
        return self._census

    def tells(self) -> AbstractContextManager[None]:
        """Returns a context manager that sends an error raised inside it to the other ranks, which raise it too."""
        return nullcontext() if self.groups is None else self.groups.agreement.tells()

    def check(self, runs: bool = False) -> None:
        """Checks that the parameters still fit what was compiled; with ``runs``, also that they have values."""
        params = self.look().parameters
        if self.param_mesh is None or self._checked is not None and self._checked.still(params, runs):
            return
        parameter_checks.check(params, self.contracts, self.param_mesh, self.homes, runs)
        self._checked = parameter_checks.Seen(params, runs)

    def compare_values(self) -> None:
        """Compares parameters and buffers between ranks, if values have changed since the last time."""
        if self.fresh and self.groups is not None:
            tensors = [*self.census.parameters.items(), *self.census.buffers.items()]
            once = {id(x): (name, x) for name, x in reversed(tensors)}  # the first of tied names
            compare_values(self.name, dict(reversed(once.values())), self.storages, self.sources, self.groups)
            self.fresh = False

    def runner(self, program: Executable) -> Runner:
        """Returns the runner of ``program`` on this rank."""
        assert self.groups is not None
        if id(program) not in self._runners:
            runner = self._runners[id(program)] = Runner(
                program,
                lambda: self.census,
                self.storages,
                self.groups,
                self.lower_half,
                self.sync,
                self.buffers,
                self.tokens,
            )
            runner.border.dtensors = self.dtensor_outputs
            runner.splits_outputs = any(
                self.unit(program.outputs, role.layout) != 1 for role in program.outputs if role.layout is not None
            )
        return self._runners[id(program)]

    @cached_property
    def tokens(self) -> dict[str, tuple[Tensor, str]]:
        """Token counts of each expert layer in the last forward."""
        return {}
