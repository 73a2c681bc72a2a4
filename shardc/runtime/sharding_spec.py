"""What a compiled module is sharded for: the mesh, the layouts of its parameters and what the plan says of calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardc.ir.executable import Compiled
from shardc.ir.graph import Role
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.runtime.groups import Groups
from shardc.runtime.host import ParamLocation

Lower = Callable[..., Sequence[Compiled]]  # makes halves callable


@dataclass(frozen=True)
class ShardingSpec:
    """What a module is compiled for: mesh, storage layouts, devices and so on; immutable.

    Args:
        mesh: the abstract mesh.
        device_mesh: None for a module that is only analysed or simulated.
        param_mesh: what parameters are DTensors on: the same, or a view of it with some of its axes split in parts.
        groups: this rank's process groups; None without a device mesh.
        template: the user's module as it was, with ``meta`` parameters at global shapes; see `ParamStore.present`.
        storages: storage layout of each parameter.
        homes: where each parameter is kept between steps.
        device: where the program runs.
        global_shapes: local shapes of the inputs by name -> global shapes, by the plan.
        names: (template, args, kwargs, how many of args are the loss's) -> a name for each leaf.
        targets: the arguments that the loss takes after the model's output; None without a loss.
        lower_half: makes a half callable.
        unit: (roles of the outputs, layout of an input) -> what its gradient is scaled by to be this rank's.
        dtensor_outputs: whether outputs come back as DTensors.
        uneven: whether ranks may pass different numbers of rows.
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
    names: Callable[..., list[str]]
    targets: tuple[str, ...] | None
    lower_half: Lower
    unit: Callable[[Sequence[Role], Layout], float]
    dtensor_outputs: bool
    uneven: bool

    @property
    def rank(self) -> int:
        return self.groups.rank if self.groups is not None else 0

    def tells(self) -> AbstractContextManager[None]:
        """A block of what all ranks do: what is raised in it on this rank is raised on the others too."""
        return nullcontext() if self.groups is None else self.groups.consistency.tells()
