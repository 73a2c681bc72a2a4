"""`ShardingSpec`: mesh, parameter layouts, devices and input rules that a module is compiled with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardc.ir.executable import Compiled
from shardc.ir.graph import Role
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.runtime.groups import Groups
from shardc.runtime.host import ParamLocation
from shardc.runtime.owned import OwnedLayout

Lower = Callable[..., Sequence[Compiled]]  # local graphs (`Half`) -> their code


@dataclass(frozen=True)
class ShardingSpec:
    """Settings that a module is compiled with: mesh, storage layouts, devices and so on; immutable.

    Args:
        mesh: the abstract mesh.
        device_mesh: mesh of devices; None if the module is only analysed or simulated.
        param_mesh: mesh of the parameters' DTensors: ``device_mesh``, or a view of it with some axes split into parts.
        groups: this rank's process groups; None without a device mesh.
        template: the user's module at compile, with ``meta`` parameters at global shapes; see `ParamStore.present`.
        storages: storage layout of each parameter.
        homes: device of each parameter between steps.
        device: device on which programs run.
        global_shapes: (name, local shape) of the inputs -> their global shapes, by the plan.
        input_names: (template, args, kwargs, number of args for the loss) -> a name for each pytree leaf.
        targets: names of the loss's arguments after the model's output; None without a loss.
        lower_half: lowers local graphs.
        unit: (roles of the outputs, layout of an input) -> factor of an input's gradient, for losses of each rank.
        dtensor_outputs: whether outputs are DTensors.
        uneven: whether ranks may pass different numbers of rows.
        stages: axis of the device mesh whose coordinates are a pipeline's stages; "" without. ``mesh`` is that of one
            stage.
        owners: coordinate along ``stages`` whose ranks store a parameter, of each parameter; empty without.
    """

    mesh: Mesh
    device_mesh: DeviceMesh | None
    param_mesh: DeviceMesh | None
    groups: Groups | None
    template: nn.Module
    storages: dict[str, Layout]
    homes: dict[str, ParamLocation]
    device: torch.device
    global_shapes: Callable[[Sequence[tuple[str, tuple[int, ...]]]], list[tuple[int, ...]]]
    input_names: Callable[..., list[str]]
    targets: tuple[str, ...] | None
    lower_half: Lower
    unit: Callable[[Sequence[Role], Layout], float]
    dtensor_outputs: bool
    uneven: bool
    stages: str = ""
    owners: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def stored(self) -> dict[str, Layout]:
        """Storage layout of each parameter on this rank. If another pipeline stage stores the parameter, its shard
        here has no rows.
        """
        if self.groups is None or not self.stages:
            return self.storages
        return {
            name: OwnedLayout(layout, self.stages, self.owners[name], local=self.owners[name] == self.groups.stage)
            for name, layout in self.storages.items()
        }

    @property
    def rank(self) -> int:
        """Row-major index of this process on the mesh; in a pipeline, on the mesh of its stage. It is 0 without a
        device mesh.
        """
        return self.groups.rank if self.groups is not None else 0

    def shares_errors(self) -> AbstractContextManager[None]:
        """Returns a context manager that sends an error raised inside it to the other ranks, which raise it too."""
        return nullcontext() if self.groups is None else self.groups.consistency.shares_errors()
