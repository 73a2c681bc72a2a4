"""ShardedModule: the user's module class, with parameters in storage layout, that runs compiled programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Annotated, Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardc.errors import InputError, MeshError
from shardc.ir.executable import Executable
from shardc.runtime import changes, parts
from shardc.runtime.acts import Act, call_act
from shardc.runtime.again import copied
from shardc.runtime.autograd import check_units, run_step
from shardc.runtime.habits import INSTEAD
from shardc.runtime.initialize import init_weights
from shardc.runtime.inputs import check_kinds, examples_of, local_input, local_part, shard_input
from shardc.runtime.norm import clip_grad_norm_
from shardc.runtime.outputs import as_dtensors
from shardc.runtime.replicas import compare_inputs
from shardc.runtime.signature import Signature, call_key, fitting
from shardc.runtime.state import Known, State
from shardc.runtime.storage import refill
from shardc.runtime.surroundings import Surroundings
from shardc.runtime.uneven import Rows, row_axes
from shardc.runtime.whole import first_state_dict, full_state_dict, summon_full_params
from shardc.runtime.wire.buffers import MemoryUse
from shardc.validate import Range, typed


class ShardedModule(nn.Module):
    """Mixed into the user's class by `shardc.compile`; see there."""

    shardc: State

    @torch.compiler.disable  # a function that calls the module may be compiled: the call stays as it is
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As `forward`: hooks, and a ``forward`` of the module's own, are in the program."""
        return ShardedModule.forward(self, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            raise (AttributeError(f"{error}: {INSTEAD[name]}") if name in INSTEAD else error) from None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A compiled module of its own: the same values and plan, no gradients. All ranks copy."""
        return copied(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InputError(
            f"a compiled module ({type(self).__name__}) cannot be pickled or copied flat: it holds process groups",
            fix="save module.state_dict(), with torch.distributed.checkpoint; copy.deepcopy makes a module of its own",
        )

    def share_memory(self) -> Any:
        """Refused: ranks are processes that hold different shards."""
        raise InputError("a compiled module cannot share its memory", fix="share the model before it is compiled")

    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of one step, on this rank's local shards of the inputs.

        Gradients of several backwards add up in ``.grad``. Each is the gradient of its own call's global objective. For
        the mean over k micro-batches of equal size, divide each loss by k.

        Returns:
            With a loss (and its arguments), the global loss. Otherwise the model's outputs, as local shards, or as
            DTensors under ``Plan(dtensor_outputs=True)`` (see `shardc.runtime.outputs`).

        Raises:
            MeshError: the module was compiled for an abstract mesh.
            InputError: after `lower`, inputs that fit no lowered program.
            LayoutError: a parameter is not as it was at compile; see `shardc.runtime.changes`.
        """
        if (state := vars(self).get("shardc")) is None:  # a slice of a container is of its class
            return parts.call_slice(self, type(self).__bases__[1], args, kwargs)
        if state.groups is None:
            raise MeshError(
                f"the module was compiled for the abstract mesh {state.mesh} and cannot run",
                fix="pass a DeviceMesh to shardc.compile, or step it with shardc.Simulation(module)",
            )
        with state.groups.agreement.tells():
            return self._step(state, args, kwargs)

    def _step(self, state: State, args: Any, kwargs: Any) -> Any:
        assert state.groups is not None
        state.check(runs=True)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        program, rows, compares = self._program(args, kwargs, leaves, spec)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if compares:
            compare_inputs(state.name, program.inputs, tensors, rows.axes if rows is not None else (), state.groups)
        assert state.device_mesh is not None
        layouts = [layout for _, layout in program.inputs]
        local = [
            rows.local(at, x, layout, state.groups)
            if rows is not None and rows.axes[at]
            else local_input(x, layout, state.device_mesh)
            for at, (x, layout) in enumerate(zip(tensors, layouts, strict=True))
        ]
        for x, mine, layout in zip(tensors, local, layouts, strict=True):
            if isinstance(x, DTensor) and mine.requires_grad:  # whose gradient is of the objective
                mine.register_hook(partial(torch.div, other=state.unit(program.outputs, layout)))
        runner = state.runner(program)
        check_units(runner, local, layouts)
        outputs = run_step(runner, local)
        if not state.dtensor_outputs:
            return outputs
        roles = [role for role in program.outputs if role.kind == "output"]
        flat = program.output_spec.flatten_up_to(outputs)
        return pytree.tree_unflatten(as_dtensors(flat, roles, state.device_mesh), program.output_spec)

    @typed()
    def no_sync(self, parameters: str = "*") -> AbstractContextManager[None]:
        """A block whose steps communicate no gradients: each rank sums whole gradients, whatever the plan's level.

        Args:
            parameters: a glob of names; gradients of other parameters are reduced as usual.

        The next backward outside of the block adds its own gradients and reduces the sum. ``.grad`` does not change in
        between. ``zero_grad()``, of the module or of an optimizer, drops the sum. ``step()`` of an optimizer raises
        while there is one. Forwards gather parameters as usual.
        """
        return self.shardc.sync.pause(self.shardc.sync.matching(parameters))

    @typed()
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; it also drops gradients that are held back (`no_sync`)."""
        super().zero_grad(set_to_none)
        self.shardc.sync.drop()

    @typed()
    def set_requires_grad_sync(self, sync: bool, parameters: str = "*") -> None:
        """Sets whether the next steps reduce all gradients; False holds back those that the plan accumulates whole.

        These are gradients of parameters that are whole between steps, or stored at level 1. At levels 2 and 3 every
        step reduces gradients. `no_sync` says what happens to gradients that are held back. True reduces over replicas
        too, whatever `set_requires_all_reduce` said before.

        Args:
            parameters: a glob of names; others stay as they are.
        """
        self.shardc.sync.sync(sync, self.shardc.sync.matching(parameters))

    @typed()
    def set_requires_all_reduce(self, sync: bool, parameters: str = "*") -> None:
        """Sets whether the next steps reduce gradients over the axes that replicate parameters (`shardc.hsdp`).

        With False they are reduced over the axes that split storage, and each rank sums up its shard of them. Where no
        axis splits a parameter's storage, nothing is reduced. Plans without replicas reduce as usual. `no_sync` says
        what happens to gradients that are held back. What `no_sync` or `set_requires_grad_sync` holds back stays so.

        Args:
            parameters: a glob of names; others stay as they are.
        """
        self.shardc.sync.all_reduce(sync, self.shardc.sync.matching(parameters))

    def memory(self) -> MemoryUse:
        """The memory of collectives' results on this rank, planned and observed so far; see `MemoryUse`."""
        return self.shardc.memory()

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Compiles for example inputs at *global* shapes (any device, ``meta`` too); returns the `Program`.

        After this the module takes shards of such inputs only. Another shape, dtype or constant is an error until it is
        lowered too. A change of mode, as by ``eval()``, compiles at the next call. Dims that are named in
        ``shardc.compile(dynamic=...)`` may have other sizes.
        """
        state = self.shardc
        state.check()
        check_kinds(state.input_names(args, kwargs), pytree.tree_leaves((args, kwargs)), values=False)
        program = state.program_for(args, kwargs, looks=True)
        state.explicit = True
        state.known.clear()
        if program not in state.programs.values():  # one of many sizes, for this one
            state.programs[state.signature(args, kwargs)] = program
        return program

    def shard_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """Cuts global inputs (a tensor, or trees of them) into this rank's shards.

        Returns:
            The one shard for one argument, else a tuple; with keywords ``(args, kwargs)``.

        Raises:
            InputError: an earlier input of another size had shards of the same shape.
        """
        state = self.shardc
        leaves, spec = pytree.tree_flatten((args, kwargs))
        named = zip(state.input_names(args, kwargs), leaves, strict=True)
        shapes = [(name, tuple(x.shape)) for name, x in named if isinstance(x, Tensor)]
        layouts = iter(state.build.input_layouts(shapes))
        cut = [shard_input(x, next(layouts), state.rank) if isinstance(x, Tensor) else x for x in leaves]
        for (name, shape), x in zip(shapes, (x for x in cut if isinstance(x, Tensor)), strict=True):
            state.note_cut(name, tuple(x.shape), shape)
        out_args, out_kwargs = pytree.tree_unflatten(cut, spec)
        if out_kwargs:
            return out_args, out_kwargs
        return out_args[0] if len(out_args) == 1 else out_args

    @typed()
    def init_weights(self, fn: Callable[[nn.Module], Any] | None = None) -> None:
        """Initialises parameters and buffers shard by shard; values equal those of one device with the same seed.

        Args:
            fn: applied to every module as ``module.apply(fn)``; None calls each module's ``reset_parameters()``.

        Raises:
            InitError: an op cannot run shard by shard, or a tensor was left without values.
        """
        state = self.shardc
        if state.device_mesh is None:
            raise MeshError(f"the module was compiled for the abstract mesh {state.mesh} and holds no shards")
        state.check()
        made = init_weights(state.present(), fn, state.storages, state.rank)
        for name, param in self.named_parameters():
            refill(param, state.homes[name].keep(made[name].to(param.dtype)), state.storages[name], state.rank)
        fresh: dict[int, Tensor] = {}
        for name, buffer in self.named_buffers(remove_duplicate=False):
            value = fresh.setdefault(id(buffer), made[name].to(state.device))
            path, _, key = name.rpartition(".")
            self.get_submodule(path)._buffers[key] = value
        state.fresh = True
        changes.watch(self)

    @typed()
    def summon_full_params(self, writeback: bool = True, with_grads: bool = False) -> AbstractContextManager[None]:
        """A block in which parameters are plain whole tensors; see `shardc.runtime.whole.summon_full_params`."""
        self.shardc.check()
        if with_grads:
            self.shardc.sync.refuse("summon_full_params(with_grads=True)")
        self.shardc.fresh |= writeback
        return summon_full_params(self, self.shardc.storages, self.shardc.rank, writeback, with_grads)

    @typed()
    def full_state_dict(self, device: torch.device | str | None = None, rank0_only: bool = False) -> dict[str, Any]:
        """The unsharded model's state dict, plain whole tensors; all ranks call it.

        Args:
            device: where the tensors go, by default where they are.
            rank0_only: the mesh's first rank gets it, on the CPU if ``device`` is None, and other ranks an empty dict.
                No other rank holds a whole tensor.
        """
        state = self.shardc
        state.check()
        if not rank0_only or state.groups is None:
            return full_state_dict(self, state.storages, device)
        state.groups.agreement.act(Act((("act", f"full_state_dict of {state.name} for the first rank"),)), ask=True)
        return first_state_dict(self, state.storages, state.groups, device)

    @typed()
    def clip_grad_norm_(
        self,
        max_norm: Annotated[float, Range(0)],
        norm_type: Annotated[float, Range(0, above=True)] = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Clips the gradients by their global norm, which it returns; see `shardc.runtime.norm.clip_grad_norm_`."""
        state = self.shardc
        state.sync.refuse("clip_grad_norm_()")
        if state.groups is None:
            return nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type, error_if_nonfinite)
        return clip_grad_norm_(
            self, state.storages, state.groups, state.device, max_norm, norm_type, error_if_nonfinite
        )

    @typed()
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As torch's; takes whole tensors of the unsharded model, or DTensors on any mesh. All ranks call it.

        Parameters keep their objects, with ``assign`` too, and those on ``meta`` get memory.

        Raises:
            RuntimeError: something is missing, unexpected or of another shape. Nothing is loaded then.
        """
        changes.check_loads(self.shardc.present(), state_dict, strict)
        self.shardc.fresh = True
        return super().load_state_dict(state_dict, strict, assign)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        if self.shardc.groups is not None:
            changes.renew(self, self.shardc.storages, self.shardc.rank, self.shardc.homes)
        return self

    def _program(self, args: Any, kwargs: Any, leaves: list[Any], spec: Any) -> tuple[Executable, Rows | None, bool]:
        """The program for a call on local inputs; what it takes to find it is done once for calls that are alike.

        And how many rows each rank passes, where that is not the same; and whether ranks compare inputs.
        """
        state, mode, deferred = self.shardc, self.shardc.census.mode(), self.shardc.sync.deferred()
        assert state.groups is not None
        around = Surroundings.now(state.device)
        key = call_key(leaves, spec, mode, around, deferred)
        known = None if key is None else state.known.get(key)
        if known is None:
            call = state.signature(args, kwargs)
            axes = self._row_axes(call, leaves) if state.uneven else ()
            act = call_act(state.name, call, leaves, mode, torch.is_grad_enabled(), deferred, axes)
            known = Known(act, axes)
            if key is not None and not state.build.dynamic.names:
                state.known[key] = known
        state.groups.agreement.call = known.act
        state.groups.agreement.act(known.act.fresh if state.fresh else known.act)
        compares = state.turns.due(known.act.key)
        if state.fresh:
            state.compare_values()
        if any(known.row_axes):
            tensors = [x for x in leaves if isinstance(x, Tensor)]
            names = [
                name for name, x in zip(state.input_names(args, kwargs), leaves, strict=True) if isinstance(x, Tensor)
            ]
            rows = Rows.exchanged(names, tensors, known.row_axes, state.groups, state.device)
            if not rows.even:
                return self._uneven(rows, args, kwargs, leaves, spec), rows, compares
        if known.program is None:
            with state.groups.agreement.compiles():
                found = self._found(state.signature(args, kwargs), args, kwargs, leaves, spec)
                found.step(torch.is_grad_enabled())
            known.program = found
        return known.program, None, compares

    def _row_axes(self, call: Signature, leaves: list[Any]) -> tuple[tuple[str, ...], ...]:
        """Over which axes the rows of each tensor of a call are split."""
        tensors, ranks = [x for x in leaves if isinstance(x, Tensor)], self.shardc.mesh.ranks
        shapes = [
            (name, tuple(max(n, 1) * ranks for n in x.shape))
            for (name, _), x in zip(call.tensors, tensors, strict=True)
        ]
        return row_axes(tensors, self.shardc.build.input_layouts(shapes))

    def _uneven(self, rows: Rows, args: Any, kwargs: Any, leaves: list[Any], spec: Any) -> Executable:
        """The program for a call in which ranks pass different numbers of rows: that of all rows together."""
        state = self.shardc
        assert state.groups is not None
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        shapes = rows.totals(_global(rows.names, tensors, state.global_shapes), state.groups)
        examples = examples_of(leaves, spec, shapes)
        if state.explicit and not state.lowered(*examples):
            raise InputError(
                f"the ranks' rows make inputs of shapes {[list(shape) for shape in shapes]}, which the module was not "
                "lowered for",
                fix="lower it for these sizes too, or do not lower it: a call then compiles what it needs",
            )
        with state.groups.agreement.compiles():
            program = state.program_for(*examples)
            program.step(torch.is_grad_enabled())
        if not state.dtensor_outputs and any(role.layout and role.layout.shape for role in program.outputs if
                                             role.kind == "output"):  # fmt: skip
            raise InputError(
                f"ranks pass different numbers of rows ({rows.counts}), and a rank's part of a split output would not "
                "be of its own rows",
                fix="pass loss= to shardc.compile, so that the call returns the loss of all rows, or write "
                "Plan(dtensor_outputs=True)",
            )
        return program

    def _found(self, call: Signature, args: Any, kwargs: Any, leaves: list[Any], spec: Any) -> Executable:
        state = self.shardc
        check_kinds(call.names, leaves, values=True)
        state.mark(call.names, args, kwargs)
        tensors = [x for x in leaves if isinstance(x, Tensor)]

        def by_plan() -> Any:
            names = [name for name, _ in call.tensors]
            return examples_of(leaves, spec, _global(names, tensors, state.whole_shapes))

        if not state.explicit:
            return state.program_for(*by_plan())
        try:
            shapes = [layout.shape for _, layout in fitting(call, tensors, state.programs).inputs]
        except InputError:
            if not state.build.dynamic.names:
                raise
            examples = by_plan()
            if not state.lowered_but_for_sizes(*examples):
                raise
            return state.program_for(*examples)
        return state.program_for(*examples_of(leaves, spec, shapes))


def _global(names: Sequence[str], tensors: Sequence[Tensor], whole: Callable[..., Any]) -> list[tuple[int, ...]]:
    """The global shapes of ``tensors``, which are DTensors or local; those as ``whole`` says of their local shapes."""
    # The plan speaks of all inputs, by name and by position: a DTensor stands among them with the shape of its shard.
    found = whole([(name, tuple(local_part(x).shape)) for name, x in zip(names, tensors, strict=True)])
    return [tuple(x.shape) if isinstance(x, DTensor) else shape for x, shape in zip(tensors, found, strict=True)]
