"""`State`: what one compiled module holds, namely its sharding, parameters and programs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from shardc._compat import PyTree, pytree
from shardc.ir.executable import Executable
from shardc.ir.mesh import Mesh
from shardc.runtime.gradients import Sync
from shardc.runtime.inputs import CacheKey, check_kinds, shard_input, targets_last
from shardc.runtime.parameter_checks import ParamStore
from shardc.runtime.program_cache import Build, ProgramCache
from shardc.runtime.replicas import Sources, Turns
from shardc.runtime.sharding_spec import ShardingSpec
from shardc.runtime.uneven import refuse_own


class State:
    """What one compiled module holds: its sharding, parameters and programs. Base class of ``module.shardc``, which
    adds the methods for users.

    Attributes:
        spec: mesh and layouts of the module.
        params: its parameters and buffers.
        cache: its programs.
        turns: schedule of the calls at which ranks compare inputs.
        admits: called with the program of each call before it runs; raises where it may not.
        around: forward that a user set on the module and that calls the compiled one (`forward_calls.Forward`).
        search_result: what a search for the plan returned (`shardc.search.result.SearchResult`); None without a search.
        epoch: epoch of the event numbers (`RankConsistency.epoch`) at the last run.
    """

    def __init__(
        self,
        owner: nn.Module,
        spec: ShardingSpec,
        build: Build,
        sync: Sync,
        sources: Sources,
        search_result: Any = None,
    ) -> None:
        object.__setattr__(owner, "shardc", self)  # past a ``__setattr__`` of the model's class
        self.spec, self.params, self.search_result = spec, ParamStore(spec, owner, sync, sources), search_result
        self.cache = ProgramCache(spec, self.params, build)
        self.turns, self.epoch = Turns(), 0
        self.admits: Callable[[Executable], None] | None = None  # called with the program of a call before it runs
        self.around: Callable[..., PyTree] | None = None  # the user's wrapper of the compiled forward
        self._name: str | None = None  # of the property `name`, which numbers modules at their first run

    @property
    def mesh(self) -> Mesh:
        """The mesh that the module is compiled for."""
        return self.spec.mesh

    @property
    def device(self) -> torch.device:
        """The device of the module's parameters and inputs on this rank."""
        return self.spec.device

    @property
    def programs(self) -> dict[CacheKey, Executable]:
        """The compiled programs by key, except those for dynamic sizes."""
        return self.cache.programs

    @property
    def name(self) -> str:
        """Name of the module in comparisons between ranks: its class, and its number among the modules of the mesh."""
        assert self.spec.groups is not None
        if self._name is None:
            consistency = self.spec.groups.consistency
            consistency.modules += 1
            self._name = f"{type(self.spec.template).__name__} (module {consistency.modules} of the mesh)"
        return self._name

    def begin_anew(self, epoch: int) -> None:
        """Resets what may differ between ranks after an error that ranks raised at different points: name, checks,
        cached calls.

        Args:
            epoch: the new epoch of the event numbers.
        """
        self._name, self.epoch, self.params.fresh, self.turns = None, epoch, True, Turns()
        self.cache.calls.clear()
        self.cache.runners.clear()

    def check(self, runs: bool = False) -> None:
        """Raises LayoutError if a parameter is no longer as it was compiled (shape, layout, device, ties). If the
        module ``runs``, its parameters must have values, too.
        """
        self.cache.current_snapshot()
        self.params.check(runs)

    def map_inputs(
        self,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        fn: Callable[[list[tuple[str, Tensor]]], list[Tensor]],
    ) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
        """Replaces the tensors in the arguments of a call by the results of ``fn``. Returns (args, kwargs) in the
        same structure.

        Args:
            fn: maps (name, tensor) of all tensors, in the order of the program's inputs, to the new tensors.
        """
        # In the order of the program's inputs: targets of the loss come after the model's arguments, without keywords.
        moved = targets_last(self.params.view, args, kwargs, self.spec.targets or ())
        leaves, structure = pytree.tree_flatten(moved)
        named = zip(self.cache.input_names(*moved), leaves, strict=True)
        new = iter(fn([(name, x) for name, x in named if isinstance(x, Tensor)]))
        values = [next(new) if isinstance(x, Tensor) else x for x in leaves]
        new_args, new_kwargs = pytree.tree_unflatten(values, structure)
        # Targets that came by keyword, and were moved to the end, go back to the keywords.
        new_kwargs |= zip(self.spec.targets or (), new_args[len(args) :], strict=False)
        return new_args[: len(args)], {name: new_kwargs[name] for name in kwargs}

    def cut_global(self, named: list[tuple[str, Tensor]]) -> list[Tensor]:
        """Returns this rank's shards of global inputs, given as (name, tensor); see `Namespace.shard_inputs`."""
        check_kinds([name for name, _ in named], [x for _, x in named], values=False)
        shapes = [(name, tuple(x.shape)) for name, x in named]
        # Inputs that number each rank's own rows (`shardc.per_rank`) cannot be cut.
        refuse_own([name for name, _ in shapes], self.cache.build.numbered([name for name, _ in shapes]))
        layouts = self.cache.build.input_layouts(shapes)
        shards = [shard_input(x, layout, self.spec.rank) for (_, x), layout in zip(named, layouts, strict=True)]
        for (name, shape), x in zip(shapes, shards, strict=True):
            # A call then knows the global shape of this shard: its local shape alone may be ambiguous.
            self.cache.note_cut(name, tuple(x.shape), shape)
        return shards

    def shares_errors(self) -> AbstractContextManager[None]:
        """Returns a context manager that sends an error raised inside it to the other ranks, which raise it too."""
        return self.spec.shares_errors()
