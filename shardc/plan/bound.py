"""A plan against one captured model: everything that passes ask of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from shardc.ir.deferred import NOTHING, Deferred
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.plan.entries import Policies
from shardc.plan.forms import Form
from shardc.plan.ports import ActivationPin, InputPlan, batch_axes
from shardc.plan.resolve import ParamPlan
from shardc.plan.spec import to_layout
from shardc.plan.uneven import grown_layout
from shardc.plan.value import Plan


@dataclass(frozen=True)
class BoundPlan:
    """What a plan says of one model at one input signature, on one mesh.

    Args:
        plan, mesh: the plan, and the mesh that it is for.
        params: of each parameter, by name.
        inputs: of each tensor input, in order.
        pins: of each tagged activation, by the tag's name.
        regions: the modules whose activations backward computes again.
        outputs: of tensor outputs, by flat position: what it says and the entry.
        precision: the dtypes to compute and to reduce in, by module.
        stored: dtype of each parameter.
        deferred: parameters whose gradients are left unreduced.
    """

    plan: Plan
    mesh: Mesh
    params: Mapping[str, ParamPlan]
    inputs: tuple[InputPlan, ...]
    pins: Mapping[str, ActivationPin]
    regions: tuple[str, ...]
    outputs: Mapping[int, tuple[Form, str]]
    precision: Policies
    stored: Mapping[str, torch.dtype]
    deferred: Deferred = NOTHING

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes that split the batch."""
        return batch_axes(self.plan, self.mesh)

    @property
    def reduce(self) -> str:
        """What gradients are of the ranks' losses, where no loss is in the graph: "mean" or "sum"."""
        return str(self.plan.setting("reduce"))

    @property
    def grad_scale(self) -> float:
        """A factor on parameters' gradients."""
        return float(self.plan.setting("grad_scale"))

    @property
    def own_losses(self) -> bool:
        """Whether each rank's outputs are of a loss of its own; those that are DTensors are of one global loss."""
        return not self.plan.setting("dtensor_outputs")

    @property
    def storages(self) -> dict[str, Layout]:
        """Storage layout of each parameter, and so of its gradient."""
        return {name: p.storage for name, p in self.params.items()}

    @property
    def computes(self) -> dict[str, Layout]:
        """Compute layout of each parameter, at padded sizes where it is split so."""
        return {name: p.split or p.compute for name, p in self.params.items()}

    @property
    def padded_inputs(self) -> dict[int, tuple[Layout, str]]:
        """By position, of each input that does not divide: the layout at padded sizes, and the plan entry."""
        return {at: (x.padded, x.cause) for at, x in enumerate(self.inputs) if x.padded is not None}

    @property
    def padded_params(self) -> dict[str, Layout]:
        """Of each parameter that does not divide and is split for compute: that layout, at padded sizes."""
        return {name: p.split for name, p in self.params.items() if p.split is not None}

    @property
    def on_host(self) -> dict[str, str]:
        """Parameter -> the plan entry that keeps it on the host."""
        return {name: p.host for name, p in self.params.items() if p.host}

    @property
    def reduced(self) -> dict[str, torch.dtype]:
        """The dtype in which each parameter's gradient is reduced."""
        of = {name: self.precision.of_param(name) for name in self.stored}
        return {name: of[name].reduce or of[name].param or dtype for name, dtype in self.stored.items()}

    @property
    def gradients(self) -> dict[str, torch.dtype]:
        """The dtype in which each parameter's gradient is kept."""
        return {name: self.precision.of_param(name).grads or dtype for name, dtype in self.stored.items()}

    def pinned(self, tag: str, base: Layout) -> tuple[Layout, str]:
        """(layout, plan entry) of a tagged activation that comes in ``base``."""
        pin, base = self.pins[tag], base.without_partial()
        what = f"{pin.where} of module {pin.module!r}"
        return to_layout(pin.spec, self.mesh, base.shape, base, what=what, entry=pin.entry, uneven="drop"), pin.entry

    def grown(self, tag: str, shape: Sequence[int], held: Sequence[int]) -> Layout | None:
        """The layout at padded sizes of a tagged activation; None where all divides.

        Args:
            shape, held: of the activation, and the shape that it has been padded to.
        """
        pin = self.pins[tag]
        what = f"{pin.where} of {pin.module!r}"
        return grown_layout(pin.spec, self.mesh, shape, what=what, entry=pin.entry, held=held)

    def output(self, index: int, name: str, natural: Layout) -> tuple[Layout, str]:
        """(layout, plan entry) of an output that comes in ``natural``."""
        if (said := self.outputs.get(index)) is None:
            return natural, ""
        return to_layout(said[0], self.mesh, natural.shape, natural, what=f"output {name!r}", entry=said[1]), said[1]
