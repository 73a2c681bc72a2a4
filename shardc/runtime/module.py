"""ShardedModule: the user's module class, with parameters in storage layout, that runs compiled programs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardc.errors import InputError, MeshError
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.runtime.groups import Groups
from shardc.runtime.initialize import init_weights
from shardc.runtime.inputs import local_input, shard_input
from shardc.runtime.signature import Signature, fitting
from shardc.runtime.step import Compiled, Program, Runner
from shardc.runtime.storage import to_parameter

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

    def _sync_template(self) -> None:
        """Carries train and eval mode and ``requires_grad`` over to the template."""
        for mine, theirs in zip(self.owner.modules(), self.template.modules(), strict=True):
            theirs.training = mine.training
        for param, like in zip(self.owner.parameters(), self.template.parameters(), strict=True):
            like.requires_grad_(param.requires_grad)

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
        return state.runner(program)(local)

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
        made = init_weights(state.template, fn, state.storages, state.rank)
        if state.device_mesh is None:
            raise MeshError(f"the module was compiled for the abstract mesh {state.mesh} and holds no shards")
        fresh: dict[int, Tensor] = {}
        for name, old in self.named_parameters(remove_duplicate=False):
            if id(old) not in fresh:
                padded = made[name].to(state.device)
                fresh[id(old)] = to_parameter(
                    padded, state.storages[name], old.shape, state.device_mesh, state.rank, old.requires_grad
                )
            _replace(self, "_parameters", name, fresh[id(old)])
        for name, _ in self.named_buffers(remove_duplicate=False):
            _replace(self, "_buffers", name, made[name].to(state.device))

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


def _replace(module: nn.Module, kind: str, name: str, tensor: Tensor) -> None:
    """Puts ``tensor`` in the place of the parameter or buffer ``name``."""
    path, _, key = name.rpartition(".")
    getattr(module.get_submodule(path), kind)[key] = tensor
