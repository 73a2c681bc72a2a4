"""ShardedModule: the user's module class, with parameters in storage layout, that runs compiled programs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardc.errors import InputError, MeshError
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.runtime import changes
from shardc.runtime.groups import Groups
from shardc.runtime.initialize import init_weights
from shardc.runtime.inputs import local_input, shard_input
from shardc.runtime.norm import clip_grad_norm_
from shardc.runtime.outputs import as_dtensors
from shardc.runtime.signature import Signature, fitting
from shardc.runtime.step import Compiled, Program, Runner
from shardc.runtime.storage import refill
from shardc.runtime.whole import full_state_dict, summon_full_params

Lower = Callable[..., Compiled]


@dataclass
class State:
    """What a `ShardedModule` needs besides its parameters.

    Args:
        mesh: the abstract mesh.
        device_mesh: None for a module that is only analysed or simulated.
        groups: this rank's process groups; None without a device mesh.
        template: the user's module with ``meta`` parameters at global shapes, for capture.
        storages: storage layout of each parameter.
        build: (template, args, kwargs, with_loss) at global shapes -> Program.
        global_shapes: local shapes of the inputs by name -> global shapes, by the plan.
        names: (template, args, kwargs, how many of args are the loss's) -> a name for each leaf.
        loss_args: how many arguments the loss takes after the model's own; None without a loss.
        lower: makes a local graph callable.
        device: where parameters live.
        dtensor_outputs: whether outputs come back as DTensors.
    """

    mesh: Mesh
    device_mesh: DeviceMesh | None
    groups: Groups | None
    template: nn.Module
    storages: dict[str, Layout]
    build: Callable[..., Program]
    global_shapes: Callable[[Sequence[tuple[str, tuple[int, ...]]]], list[tuple[int, ...]]]
    names: Callable[..., list[str]]
    loss_args: int | None
    lower: Lower
    device: torch.device
    dtensor_outputs: bool = False
    programs: dict[Signature, Program] = field(default_factory=dict)
    explicit: bool = False
    _runners: dict[int, Runner] = field(default_factory=dict)
    owner: Any = None

    @property
    def rank(self) -> int:
        return self.groups.rank if self.groups is not None else 0

    def with_loss(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether a call passes the loss its arguments: its last positional ones, if the model does without them.

        Raises:
            InputError: these are no arguments of the model, with or without those of the loss.
        """
        own = len(args) - (self.loss_args or 0)
        if self.loss_args is not None and own >= 0 and _refuses(self.template, args[:own], kwargs) is None:
            return True
        reason = _refuses(self.template, args, kwargs)
        if reason is None:
            return False
        takes = f"{type(self.template).__name__}.forward{inspect.signature(self.template.forward)}"
        after = f", and after these {self.loss_args} for the loss, by position" if self.loss_args else ""
        raise InputError(f"{takes}: {reason}", fix=f"pass what forward takes{after}")

    def program_for(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Program:
        """The program for global (example) inputs in the present mode, built if there is none yet."""
        key = self.signature(args, kwargs)
        if key not in self.programs:
            self.programs[key] = self.build(self.template, args, kwargs, self.with_loss(args, kwargs))
        return self.programs[key]

    def signature(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Signature:
        """The signature of a call in the present mode."""
        self._sync_template()
        return Signature.of(self.template, self.input_names(args, kwargs), args, kwargs)

    def input_names(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[str]:
        """A name for each leaf of a call's arguments."""
        extra = self.loss_args if self.with_loss(args, kwargs) else 0
        return self.names(self.template, args, kwargs, extra)

    @cached_property
    def kept(self) -> dict[str, changes.Kept]:
        """What stays of each parameter."""
        return changes.kept(self.template, self.storages)

    def adopt(self, owner: nn.Module) -> None:
        """Takes ``owner`` as the module that holds the parameters."""
        self.owner = owner
        if self.device_mesh is not None:
            changes.load_hooks(owner, self.storages, self.rank, self.device)
            changes.watch(owner)

    def check(self) -> None:
        """Checks that the parameters are still the ones that were compiled for."""
        if self.device_mesh is not None:
            changes.check(self.owner, self.kept, self.device_mesh)

    def _sync_template(self) -> None:
        """Carries train and eval mode, ``requires_grad`` and dtypes over to the template."""
        self.check()
        for mine, theirs in zip(self.owner.modules(), self.template.modules(), strict=True):
            theirs.training = mine.training
        for param, like in zip(self.owner.parameters(), self.template.parameters(), strict=True):
            like.requires_grad_(param.requires_grad)
        for held in ("parameters", "buffers"):
            for mine, like in zip(getattr(self.owner, held)(), getattr(self.template, held)(), strict=True):
                if like.dtype != mine.dtype:
                    like.data = like.data.to(mine.dtype)

    def runner(self, program: Program) -> Runner:
        """What runs ``program`` on this rank."""
        assert self.groups is not None
        if id(program) not in self._runners:
            self._runners[id(program)] = Runner(program, self.owner, self.storages, self.groups, self.lower)
        return self._runners[id(program)]


class ShardedModule(nn.Module):
    """Mixed into the user's class by `shardc.compile`; see there."""

    shardc: State

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """One step on this rank's local shards of the inputs.

        Returns:
            With a loss (and its arguments given), the global loss; else the model's outputs as local shards.

        Raises:
            MeshError: the module was compiled for an abstract mesh.
            InputError: after `lower`, inputs that no lowered program fits.
        """
        state = self.shardc
        if state.groups is None:
            raise MeshError(
                f"the module was compiled for the abstract mesh {state.mesh} and cannot run",
                fix="pass a DeviceMesh to shardc.compile, or step it with shardc.Simulation(module)",
            )
        leaves, spec = pytree.tree_flatten((args, kwargs))
        program = self._program(args, kwargs, leaves, spec)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        assert state.device_mesh is not None
        layouts = [layout for _, layout in program.inputs]
        local = [local_input(x, layout, state.device_mesh) for x, layout in zip(tensors, layouts, strict=True)]
        outputs = state.runner(program)(local)
        if not state.dtensor_outputs:
            return outputs
        roles = [role for role in program.outputs if role.kind == "output"]
        flat = program.output_spec.flatten_up_to(outputs)
        return pytree.tree_unflatten(as_dtensors(flat, roles, state.device_mesh), program.output_spec)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Compiles for example inputs at *global* shapes (any device, ``meta`` too); returns the `Program`.

        After this the module takes shards of such inputs only: another shape, dtype or constant is an error until
        it is lowered too. (A change of mode, as by ``eval()``, is compiled for at the next call.)
        """
        self.shardc.explicit = True
        return self.shardc.program_for(args, kwargs)

    def shard_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """Cuts global inputs (a tensor, or trees of them) into this rank's shards.

        Returns:
            The one shard for one argument, else a tuple; with keywords ``(args, kwargs)``.
        """
        state = self.shardc
        leaves, spec = pytree.tree_flatten((args, kwargs))
        named = zip(state.input_names(args, kwargs), leaves, strict=True)
        shapes = [(name, tuple(x.shape)) for name, x in named if isinstance(x, Tensor)]
        layouts = iter(state.build.input_layouts(shapes))  # type: ignore[attr-defined]
        cut = [shard_input(x, next(layouts), state.rank) if isinstance(x, Tensor) else x for x in leaves]
        out_args, out_kwargs = pytree.tree_unflatten(cut, spec)
        if out_kwargs:
            return out_args, out_kwargs
        return out_args[0] if len(out_args) == 1 else out_args

    def init_weights(self, fn: Callable[[nn.Module], Any] | None = None) -> None:
        """Initialises parameters and buffers shard by shard, equal to the same on one device with this seed.

        Args:
            fn: applied to every module as ``module.apply(fn)``; None calls ``reset_parameters()`` where there is one.

        Raises:
            InitError: an op that cannot run shard by shard, or a tensor that was left without values.
        """
        state = self.shardc
        if state.device_mesh is None:
            raise MeshError(f"the module was compiled for the abstract mesh {state.mesh} and holds no shards")
        state.check()
        made = init_weights(state.template, fn, state.storages, state.rank)
        for name, param in self.named_parameters():
            refill(param, made[name].to(state.device, param.dtype), state.storages[name], state.rank)
        fresh: dict[int, Tensor] = {}
        for name, buffer in self.named_buffers(remove_duplicate=False):
            value = fresh.setdefault(id(buffer), made[name].to(state.device))
            path, _, key = name.rpartition(".")
            self.get_submodule(path)._buffers[key] = value
        changes.watch(self)

    def summon_full_params(self, writeback: bool = True) -> AbstractContextManager[None]:
        """A block in which the parameters are plain whole tensors; see `shardc.runtime.whole.summon_full_params`."""
        self.shardc.check()
        return summon_full_params(self, self.shardc.storages, self.shardc.rank, writeback)

    def full_state_dict(self, device: torch.device | str | None = None) -> dict[str, Any]:
        """The unsharded model's state dict, plain whole tensors on ``device``, on every rank; all ranks call it."""
        self.shardc.check()
        return full_state_dict(self, self.shardc.storages, device)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Clips the gradients by their global norm, which it returns; see `shardc.runtime.norm.clip_grad_norm_`."""
        state = self.shardc
        if state.groups is None:
            return nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type, error_if_nonfinite)
        return clip_grad_norm_(
            self, state.storages, state.groups, state.device, max_norm, norm_type, error_if_nonfinite
        )

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As torch's, of whole tensors of the unsharded model or of DTensors on any mesh; all ranks call it.

        Parameters keep their objects (``assign`` or not), and those on ``meta`` get memory.

        Raises:
            RuntimeError: something is missing, unexpected or of another shape; nothing is loaded then.
        """
        changes.check_loads(self.shardc.template, state_dict, strict)
        return super().load_state_dict(state_dict, strict, assign)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        if self.shardc.groups is not None:
            changes.renew(self, self.shardc.storages, self.shardc.rank)
        return self

    def _program(self, args: Any, kwargs: Any, leaves: list[Any], spec: Any) -> Program:
        state = self.shardc
        call = state.signature(args, kwargs)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if state.explicit:
            shapes = [layout.shape for _, layout in fitting(call, tensors, state.programs).inputs]
        else:
            local = [
                (name, like.shape)
                for (name, like), x in zip(call.tensors, tensors, strict=True)
                if not isinstance(x, DTensor)
            ]
            found = iter(state.global_shapes(local))
            shapes = [tuple(x.shape) if isinstance(x, DTensor) else next(found) for x in tensors]
        whole = iter(shapes)
        examples = [
            torch.empty(next(whole), dtype=x.dtype, device="meta").requires_grad_(x.requires_grad)
            if isinstance(x, Tensor)
            else x
            for x in leaves
        ]
        example_args, example_kwargs = pytree.tree_unflatten(examples, spec)
        return state.program_for(example_args, example_kwargs)


def _refuses(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
    """Why ``model.forward`` does not take these arguments, or None where it does."""
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return None
