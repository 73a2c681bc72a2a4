"""`ShardedModule`: a subclass of the user's module class that runs compiled programs on sharded parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any, NoReturn, SupportsIndex

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardc._compat import PyTree
from shardc.errors import InputError, MeshError
from shardc.ir.clone import unsharded
from shardc.ir.executable import Executable
from shardc.ir.inner import check_conversion
from shardc.runtime import forward_calls, parameter_checks
from shardc.runtime.autograd import check_units, run_step
from shardc.runtime.border import as_dtensors
from shardc.runtime.events import call_event
from shardc.runtime.forward_calls import Forward, call_around
from shardc.runtime.inputs import (
    Arguments,
    Signature,
    TorchGlobalState,
    check_kinds,
    fitting,
    local_input,
    local_part,
    targets_last,
)
from shardc.runtime.namespace import INSTEAD, OF_WRAPPERS, Namespace
from shardc.runtime.program_cache import CallCacheEntry
from shardc.runtime.replicas import compare_inputs
from shardc.runtime.state import State
from shardc.runtime.storage import padded_local, to_parameter
from shardc.runtime.uneven import Rows, global_rows, row_axes
from shardc.validate import typed

GlobalShapes = Callable[[Sequence[tuple[str, tuple[int, ...]]]], list[tuple[int, ...]]]  # of (name, local shape) pairs


def copied(module: nn.Module, memo: dict[int, object]) -> nn.Module:
    """Returns a copy of a compiled module, without gradients. Module and copy share their compiled programs. All
    ranks call it.

    Args:
        memo: memo of ``deepcopy``: id of an object -> its copy.
    """
    state: State = module.shardc  # type: ignore[assignment]
    state.check()
    state.params.sync.refuse("deepcopy")
    # `deepcopy` takes what is in `memo` for copied: these copies have padded buffers of their own.
    for name, param in module.named_parameters():
        if isinstance(param, DTensor):
            memo[id(param)] = _copied_param(param, state, name)
    memo[id(state)] = None  # the copy gets a state of its own below
    module_copy: Any = copy.deepcopy(unsharded(module), memo)
    module_copy.__class__ = type(module)  # `unsharded` has the user's class; the copy is a compiled module again
    memo[id(module)] = module_copy
    build = state.cache.build.for_copy()
    sync = state.params.sync.for_copy()
    copied_state = type(state)(module_copy, state.spec, build, sync, sources={}, search_result=state.search_result)
    copied_state.around = copy.deepcopy(state.around, memo)
    # Whether it was lowered, and the global shapes of shards, are facts about calls: they hold for the copy too.
    copied_state.cache.explicit, copied_state.cache.shapes = state.cache.explicit, dict(state.cache.shapes)
    # Under the guards that the module's cache has now: a first call may have set attributes that they compare.
    for key, program in state.cache.programs.items():
        copied_state.cache.add(program, key.guards)
    return module_copy


def _copied_param(param: DTensor, state: State, name: str) -> nn.Parameter:
    """Returns a copy of the parameter ``name``, with a new padded local buffer."""
    assert state.spec.param_mesh is not None
    storage = state.spec.stored[name]
    padded = padded_local(param.detach(), storage)
    value = torch.empty_like(padded) if padded.is_meta else state.spec.homes[name].keep(padded.clone())
    shard = to_parameter(value, storage, param.shape, state.spec.param_mesh, state.spec.rank, param.requires_grad)
    if getattr(param, "grad_dtype", None) is not None:  # the dtype that `.grad` may have
        shard.grad_dtype = param.grad_dtype
    return shard


class ShardedModule(nn.Module):
    """First base class of a compiled module; the model's class is the next. Its ``forward`` runs a program in place
    of the model's.

    The methods it adds are in ``module.shardc`` (`Namespace`), and on the module itself unless the model uses the name.
    """

    shardc: Namespace

    @torch.compiler.disable  # in a compiled function that calls the module, the call is not traced
    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Runs the compiled program, as ``module.forward`` does. The model's hooks run inside the program; so does a
        ``forward`` that the user set on the model.
        """
        state = vars(self).get("shardc")
        if state is not None and state.around is not None:
            return call_around(self, state.around, args, kwargs)
        return _forward(self, args, kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Assignments to ``module.forward`` are then noticed (see `Forward`).
        if isinstance(compiled := vars(cls).get("forward"), FunctionType):
            cls.forward = Forward(compiled)  # type: ignore[method-assign]

    def __getattr__(self, name: str) -> Any:
        """Returns a method of ``module.shardc`` for a name that the model does not use. For methods of FSDP2 and of
        wrappers the AttributeError says what to call instead.
        """
        try:
            return super().__getattr__(name)  # a parameter, buffer or submodule, or by the model's own `__getattr__`
        except AttributeError as error:
            namespace = vars(self).get("shardc")
            if namespace is not None and name in namespace.short_names() and not hasattr(type(self), name):
                return getattr(namespace, name)
            if name == "_ddp_params_and_buffers_to_ignore":  # read by DistributedDataParallel
                raise forward_calls.wrapped("DistributedDataParallel") from None
            instead = INSTEAD.get(name) or OF_WRAPPERS.get(name)
            raise (AttributeError(f"{error}: {instead}") if instead else error) from None

    @property
    def _is_fsdp_managed_module(self) -> bool:  # set first by FullyShardedDataParallel
        return False

    @_is_fsdp_managed_module.setter
    def _is_fsdp_managed_module(self, value: object) -> None:
        raise forward_calls.wrapped("FullyShardedDataParallel")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *(self.shardc.short_names() if "shardc" in vars(self) else ())})

    def __deepcopy__(self, memo: dict[int, object]) -> nn.Module:
        """Returns a copy of the compiled module with the same values and plan, without gradients. All ranks call it."""
        with self.shardc.shares_errors():
            return copied(self, memo)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise InputError(
            f"a compiled module ({type(self).__name__}) cannot be pickled or copied flat: it holds process groups",
            fix="save module.state_dict(), with torch.distributed.checkpoint; copy.deepcopy makes a module of its own",
        )

    @torch.compiler.disable
    def forward(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Runs a forward on this rank's shards of the inputs.

        Gradients of several backwards add up in ``.grad``. Each is the gradient of its own call's global objective. For
        the mean over k micro-batches of equal size, divide each loss by k.

        Returns:
            With a loss (and its arguments), the global loss. Otherwise the model's outputs, as local shards, or as
            DTensors under ``Plan(dtensor_outputs=True)`` (see `shardc.runtime.border`).

        Raises:
            MeshError: the module was compiled for an abstract mesh.
            InputError: no program fits the inputs, after `lower`.
            LayoutError: a parameter has changed since compile; see `shardc.runtime.parameter_checks`.
        """
        return _forward(self, args, kwargs)

    def zero_grad(self, *args: bool, **kwargs: bool) -> None:
        """Clears the gradients, and drops the local sums of unreduced ones (`no_sync`)."""
        super().zero_grad(*args, **kwargs)
        self.shardc.params.sync.drop()

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Loads unsharded tensors, or DTensors on any mesh. All ranks call it.

        Parameters keep their objects, with ``assign`` too, and those on ``meta`` get memory.

        Raises:
            RuntimeError: keys are missing or unexpected, or shapes differ. Nothing is loaded then.
        """
        self.shardc.params.fresh = True
        with self.shardc.shares_errors():
            return super().load_state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ShardedModule:
        """Converts parameters and buffers by ``fn``, for ``to``, ``half``, ``cuda`` and others; then gives parameters
        padded local buffers again.
        """
        with self.shardc.shares_errors():
            check_conversion(self, fn)
            super()._apply(fn, recurse)
            if self.shardc.spec.groups is not None:
                parameter_checks.renew(self, self.shardc.spec)
        return self


class BehindModel(nn.Module):
    """Last base class of a compiled module before `nn.Module`. Its methods run when the model's own ``zero_grad`` or
    ``load_state_dict`` calls ``super()``.
    """

    @typed()
    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)

    @typed()
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        # Before any value changes: all keys and shapes must fit.
        state: Any = self.shardc
        parameter_checks.check_loads(state.params.present(), state_dict, strict)
        return super().load_state_dict(state_dict, strict, assign)

    def share_memory(self) -> NoReturn:
        """Raises InputError: ranks are processes that hold different shards."""
        raise InputError("a compiled module cannot share its memory", fix="share the model before it is compiled")


def _forward(module: ShardedModule, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> PyTree:
    """Runs a call of the compiled module; see `ShardedModule.forward`."""
    # A slice of a compiled ``nn.Sequential`` is of its class, and has no state.
    if (state := vars(module).get("shardc")) is None:
        return forward_calls.call_slice(module, type(module).__bases__[1], args, kwargs)
    if state.spec.groups is None:
        raise MeshError(
            f"the module was compiled for the abstract mesh {state.spec.mesh} and cannot run",
            fix="pass a DeviceMesh to shardc.compile, or step it with shardc.Simulation(module)",
        )
    forward_calls.check_ddp(module)
    forward_calls.check_export()
    with state.spec.groups.consistency.shares_errors():
        return _step(state, args, kwargs)


def _arguments(state: State, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> Arguments:
    """Returns the arguments of a call, with the targets of the loss moved from the keywords to the end of ``args``."""
    if kwargs:
        args, kwargs = targets_last(state.params.view, args, kwargs, state.spec.targets or ())
    return Arguments.of(args, kwargs)


def _call_key(state: State, call: Arguments) -> Hashable | None:
    """Returns the key of a call in ``state.cache.calls``; None if such calls are not cached."""
    around = TorchGlobalState.now(state.spec.device)
    return call.key(state.params.snapshot.mode(), around, state.params.sync.deferred())


def _step(state: State, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> PyTree:
    """Runs the compiled program on the arguments of a call, this rank's shards, and returns the outputs."""
    groups, device_mesh = state.spec.groups, state.spec.device_mesh
    assert groups is not None and device_mesh is not None
    state.check(runs=True)
    call = _arguments(state, args, kwargs)
    program, rows, compares = _program(state, call)
    # A step that is to be recorded as a CUDA graph raises here if this program cannot be.
    if state.admits is not None:
        state.admits(program)
    tensors = call.tensors
    if compares:
        compare_inputs(state.name, program.inputs, tensors, rows.axes if rows is not None else (), groups)
    layouts = [layout for _, layout in program.inputs]
    if state.cache.build.has_own_inputs:
        # Inputs with row numbers count rows in this rank's shard; the program takes global numbers.
        numbered = state.cache.build.numbered([name for name, _ in program.inputs])
        tensors = global_rows(program.inputs, tensors, numbered, rows, groups)
    # If ranks pass different numbers of rows, these are gathered, and cut again by the program's layout.
    local = [
        rows.local(at, x, layout, groups) if rows is not None and rows.axes[at] else local_input(x, layout, device_mesh)
        for at, (x, layout) in enumerate(zip(tensors, layouts, strict=True))
    ]
    for x, shard, layout in zip(tensors, local, layouts, strict=True):
        # The gradient of a DTensor is that of the one global loss, without the factor (`unit`) of ranks' own losses.
        if isinstance(x, DTensor) and shard.requires_grad:
            shard.register_hook(partial(torch.div, other=state.spec.unit(program.outputs, layout)))
    runner = state.cache.runner(program)
    check_units(runner, local, layouts)
    outputs = run_step(runner, local)
    if not state.spec.dtensor_outputs:
        return outputs
    roles = [role for role in program.outputs if role.kind == "output"]
    flat = program.output_spec.flatten_up_to(outputs)
    return pytree.tree_unflatten(as_dtensors(flat, roles, device_mesh), program.output_spec)


def known_program(
    state: State, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> tuple[Hashable, Executable] | None:
    """Returns (key, program) of a call that can run at once, since it has run before and needs no exchange of row
    counts or checks between ranks. Returns None for any other call.

    The key is valid for the module's present snapshot only.
    """
    assert state.spec.groups is not None
    state.check(runs=True)
    key = _call_key(state, _arguments(state, args, kwargs))
    entry = None if key is None else state.cache.calls.get(key)
    if entry is None or entry.program is None or any(entry.row_axes):
        return None
    # Written values are compared, and state is reset after an error, by the usual path.
    if state.params.fresh or state.spec.groups.consistency.epoch != state.epoch:
        return None
    return key, entry.program


def _program(state: State, call: Arguments) -> tuple[Executable, Rows | None, bool]:
    """Returns (program, row counts, whether to compare inputs) for a call on local inputs. The program is compiled if
    there is none.

    Returns:
        The program; the row counts of the ranks if they differ, else None; whether ranks compare inputs at this call.
    """
    assert state.spec.groups is not None
    consistency = state.spec.groups.consistency
    # An error was raised since the last call, perhaps at different points on the ranks.
    if consistency.epoch != state.epoch:
        state.begin_anew(consistency.epoch)
    key = _call_key(state, call)
    entry = None if key is None else state.cache.calls.get(key)
    if entry is None:
        entry = _new_entry(state, call)
        # With dynamic sizes there may be a key for each size; these calls are looked up each time.
        if key is not None and not state.cache.build.dynamic.names:
            state.cache.calls[key] = entry
    consistency.call = entry.event  # the event of the call's backwards is made from it
    # `fresh`: for values that were written since the last call. All ranks must be there, as they compare these below.
    consistency.enter(entry.event.fresh if state.params.fresh else entry.event)
    compares = state.turns.due(entry.event.key)
    if state.params.fresh:  # ranks have not compared these values yet
        state.params.compare_values(state.name)
    if any(entry.row_axes):
        named = zip(state.cache.input_names(call.args, call.kwargs), call.leaves, strict=True)
        names = [name for name, x in named if isinstance(x, Tensor)]
        rows = Rows.exchanged(names, call.tensors, entry.row_axes, state.spec.groups, state.spec.device)
        if not rows.even:  # its program depends on the row counts of all ranks, so it is not stored in `entry`
            return _uneven(state, rows, call), rows, compares
    if entry.program is None:
        with consistency.compiles():
            program = _find_program(state, call)
            program.step(torch.is_grad_enabled())  # compiles the graphs of a step now, as part of this block
        state.cache.apply_assignments(program)
        entry.program = program
    return entry.program, None, compares


def _new_entry(state: State, call: Arguments) -> CallCacheEntry:
    """Returns the facts about a call that the cache does not have yet, without its program."""
    signature = state.cache.signature(call.args, call.kwargs)
    axes = _row_axes(state, signature, call.tensors) if state.spec.uneven else ()
    event = call_event(state.name, signature, call.leaves, state.params.sync.deferred(), axes)
    return CallCacheEntry(event, axes)


def _row_axes(state: State, signature: Signature, tensors: list[Tensor]) -> tuple[tuple[str, ...], ...]:
    """Returns, for each tensor of a call, the mesh axes that split its rows (dim 0). It is () for a tensor whose rows
    are not split.
    """
    ranks = state.spec.mesh.ranks
    # Of sizes that all axes divide, as the question is only which axes split dim 0.
    shapes = [
        (name, tuple(max(n, 1) * ranks for n in x.shape))
        for (name, _), x in zip(signature.tensors, tensors, strict=True)
    ]
    return row_axes(tensors, state.cache.build.input_layouts(shapes))


def _uneven(state: State, rows: Rows, call: Arguments) -> Executable:
    """Returns the program for a call in which ranks pass different numbers of rows. It is compiled for the rows of
    all ranks together.
    """
    assert state.spec.groups is not None
    shapes = rows.totals(_global(rows.names, call.tensors, state.spec.global_shapes), state.spec.groups)
    examples = call.examples(shapes)
    if state.cache.explicit and not state.cache.lowered(*examples):
        raise InputError(
            f"the ranks' rows make inputs of shapes {[list(shape) for shape in shapes]}, which the module was not "
            "lowered for",
            fix="lower it for these sizes too, or do not lower it: a call then compiles what it needs",
        )
    with state.spec.groups.consistency.compiles():
        program = state.cache.program_for(*examples)
        program.step(torch.is_grad_enabled())  # compiles the graphs of a step now, as part of this block
    state.cache.apply_assignments(program)
    # Outputs with dims (all but a loss) are cut by the program's layout, as if rows were even.
    splits_outputs = any(role.layout and role.layout.shape for role in program.outputs if role.kind == "output")
    if splits_outputs and not state.spec.dtensor_outputs:
        raise InputError(
            f"ranks pass different numbers of rows ({rows.counts}), and a rank's part of a split output would not "
            "be of its own rows",
            fix="pass loss= to shardc.compile, so that the call returns the loss of all rows, or write "
            "Plan(dtensor_outputs=True)",
        )
    return program


def _find_program(state: State, call: Arguments) -> Executable:
    """Returns the program for a call with local inputs, compiled if there is none. After `lower` was called, raises
    InputError for a call that fits no program that `lower` compiled (train or eval mode and dynamic sizes may differ).
    """
    cache, signature = state.cache, state.cache.signature(call.args, call.kwargs)
    check_kinds(signature.names, call.leaves, values=True)
    cache.mark(signature.names, call.args, call.kwargs)  # dims that `torch._dynamo.mark_dynamic` marks

    def by_plan() -> PyTree:
        """Returns the examples at the global shapes that the plan implies for these local ones."""
        names = [name for name, _ in signature.tensors]
        return call.examples(_global(names, call.tensors, cache.whole_shapes))

    if not cache.explicit:
        return cache.program_for(*by_plan())
    try:
        # The program that accepts these local shapes says the global ones.
        shapes = [layout.shape for _, layout in fitting(signature, call.tensors, cache.programs).inputs]
    except InputError:
        # A program of dynamic sizes may serve other sizes than those it was lowered for.
        if not cache.build.dynamic.names:
            raise
        examples = by_plan()
        if not cache.lowered_but_for_sizes(*examples):
            raise
        return cache.program_for(*examples)
    return cache.program_for(*call.examples(shapes))


def _global(names: Sequence[str], tensors: Sequence[Tensor], whole: GlobalShapes) -> list[tuple[int, ...]]:
    """Returns the global shape of each of ``tensors``, which are local tensors or DTensors.

    Args:
        whole: maps (name, local shape) of all inputs to their global shapes.
    """
    # The plan maps all inputs at once, by name and position, so DTensors are passed too, with their local shapes.
    shapes = whole([(name, tuple(local_part(x).shape)) for name, x in zip(names, tensors, strict=True)])
    return [tuple(x.shape) if isinstance(x, DTensor) else shape for x, shape in zip(tensors, shapes, strict=True)]
