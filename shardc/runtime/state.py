"""The state of a compiled module: what it is sharded for, its parameters, its programs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from shardc.ir.executable import Executable
from shardc.ir.mesh import Mesh
from shardc.runtime.gradients import Sync
from shardc.runtime.parameter_checks import ParamStore
from shardc.runtime.program_cache import Build, CacheKey, ProgramCache
from shardc.runtime.replicas import Sources, Turns
from shardc.runtime.sharding_spec import ShardingSpec


class State:
    """``module.shardc`` without its methods for users.

    Attributes:
        turns: at which calls ranks compare inputs.
        around: a forward that was set on the module and calls the compiled one; see `shardc.runtime.forward_calls`.
        found: the result of the search for its plan (`shardc.search.result.Found`); None where the plan was given.
        epoch: see `shardc.runtime.rank_consistency.RankConsistency`; when it last ran.
    """

    def __init__(
        self, owner: nn.Module, spec: ShardingSpec, build: Build, sync: Sync, sources: Sources, found: Any = None
    ) -> None:
        object.__setattr__(owner, "shardc", self)
        self.spec, self.params, self.found = spec, ParamStore(spec, owner, sync, sources), found
        self.cache = ProgramCache(spec, self.params, build)
        self.turns, self.epoch = Turns(), 0
        self.around: Callable[..., Any] | None = None
        self._name: str | None = None

    @property
    def mesh(self) -> Mesh:
        """The mesh that the module is compiled for."""
        return self.spec.mesh

    @property
    def device(self) -> torch.device:
        """The device of its parameters and inputs on this rank."""
        return self.spec.device

    @property
    def programs(self) -> dict[CacheKey, Executable]:
        """The compiled programs of fixed sizes."""
        return self.cache.programs

    @property
    def name(self) -> str:
        """Name of the module in events: its class, and its number among the modules of the mesh."""
        assert self.spec.groups is not None
        if self._name is None:
            consistency = self.spec.groups.consistency
            consistency.modules += 1
            self._name = f"{type(self.spec.template).__name__} (module {consistency.modules} of the mesh)"
        return self._name

    def begin_anew(self, epoch: int) -> None:
        """Forgets what ranks do not share after an error of one of them, which others came further than."""
        self._name, self.epoch, self.params.fresh, self.turns = None, epoch, True, Turns()
        self.cache.calls.clear()
        self.cache.runners.clear()

    def check(self, runs: bool = False) -> None:
        """Checks that the parameters are still the ones that were compiled for, with values where the module runs."""
        self.cache.look()
        self.params.check(runs)

    def tells(self) -> AbstractContextManager[None]:
        """A block of what all ranks do: what is raised in it on this rank is raised on the others too."""
        return self.spec.tells()
