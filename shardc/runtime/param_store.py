"""The parameters and buffers of a compiled module: where they are, whether they are still those that were compiled."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from shardc.ir.clone import clone_tree, unsharded
from shardc.ir.mesh import Mesh
from shardc.runtime import parameter_checks, submodule_calls
from shardc.runtime.module_snapshot import ModuleSnapshot
from shardc.runtime.replicas import Sources, compare_values
from shardc.runtime.sharding_spec import ShardingSpec
from shardc.runtime.sync import Sync


@dataclass
class ParamStore:
    """The parameters and buffers of a compiled module, which ``owner`` holds.

    Args:
        owner: the module itself.
        sync: which gradients are reduced.
        sources: fingerprints of what stored shards were cut of; see `shardc.runtime.replicas`.

    Attributes:
        view: the module as its own class has it, which knows nothing of this.
        fresh: whether values came since the ranks compared them.
    """

    spec: ShardingSpec
    owner: Any
    sync: Sync
    sources: Sources = field(default_factory=dict)
    fresh: bool = True
    _snapshot: ModuleSnapshot | None = None
    _checked: parameter_checks.Seen | None = None

    def __post_init__(self) -> None:
        self.view: Any = unsharded(self.owner)
        self.sync.parameters = lambda: self.look().parameters
        if self.spec.device_mesh is not None:
            parameter_checks.load_hooks(self.owner, self.spec.storages, self.spec.rank, self.spec.homes)
            submodule_calls.guard(self.owner)

    @property
    def snapshot(self) -> ModuleSnapshot:
        """Snapshot of the module at the last `look`."""
        assert self._snapshot is not None
        return self._snapshot

    def look(self) -> ModuleSnapshot:
        """Returns the module's current snapshot, which is the last one if nothing came or went."""
        if self._snapshot is None or not self._snapshot.holds():
            self._snapshot, self._checked = ModuleSnapshot(self.owner), None
        return self._snapshot

    def present(self) -> nn.Module:
        """The user's module as it is now, with ``meta`` parameters at global shapes, for capture."""
        named = self.spec.template.named_parameters(remove_duplicate=False)
        strides = {name: param.stride() for name, param in named}

        def tensor(name: str, x: Tensor) -> Tensor:
            empty = torch.empty_strided(x.shape, strides.get(name, x.stride()), dtype=x.dtype, device="meta")
            return nn.Parameter(empty, requires_grad=x.requires_grad) if isinstance(x, nn.Parameter) else empty

        template = clone_tree(self.view, tensor)
        vars(template).pop("shardc")
        submodule_calls.unguard(template)
        return template

    @cached_property
    def contracts(self) -> dict[str, parameter_checks.ParamContract]:
        """Contract of each parameter, by name."""
        assert self.spec.param_mesh is not None
        return parameter_checks.contracts(self.spec.template, self.spec.storages, Mesh.of(self.spec.param_mesh))

    def check(self, runs: bool = False) -> None:
        """Checks that the parameters are still the ones that were compiled for, with values where the module runs."""
        mesh, params = self.spec.param_mesh, self.snapshot.parameters
        if mesh is None or self._checked is not None and self._checked.still(params, runs):
            return
        parameter_checks.check(params, self.contracts, mesh, self.spec.homes, runs)
        self._checked = parameter_checks.Seen(params, runs)

    def compare_values(self, name: str) -> None:
        """Before the first use of values: ranks compare those that several of them hold; ``name``: of the module."""
        if self.fresh and self.spec.groups is not None:
            tensors = [*self.snapshot.parameters.items(), *self.snapshot.buffers.items()]
            first = {id(x): (name, x) for name, x in reversed(tensors)}  # the first name of what is tied
            compare_values(name, dict(reversed(first.values())), self.spec.storages, self.sources, self.spec.groups)
            self.fresh = False
