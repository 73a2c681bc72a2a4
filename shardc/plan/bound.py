"""A plan resolved for one captured model: everything that passes read from the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from shardc.ir.deferred import NOTHING, Deferred
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.plan.entries import Policies
from shardc.plan.ports import ActivationPin, InputPlan, batch_axes
from shardc.plan.resolve import ParamPlan
from shardc.plan.spec_forms import Form
from shardc.plan.spec_layout import to_layout
from shardc.plan.uneven_sizes import grown_layout
from shardc.plan.value import Plan


@dataclass(frozen=True)
class BoundPlan:
    """A plan resolved for one model at one input signature, on one mesh.

    Args:
        plan, mesh: the plan, and the mesh.
        params: parameter name -> its layouts.
        inputs: the layouts of each tensor input, in order.
        pins: tag name -> the spec of a tagged activation.
        regions: the modules whose activations backward recomputes.
        outputs: flat position of a tensor output -> (spec, plan entry).
        precision: the dtypes for compute and for reductions, by module.
        stored: parameter name -> dtype.
        deferred: parameters whose gradients stay unreduced.
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
        """Return the axes that split the batch."""
        return batch_axes(self.plan, self.mesh)

    @property
    def reduce(self) -> str:
        """Return "mean" or "sum": how the ranks' losses are combined if no loss is in the graph."""
        return str(self.plan.setting("reduce"))

    @property
    def grad_scale(self) -> float:
        """Return the factor on parameters' gradients."""
        return float(self.plan.setting("grad_scale"))

    @property
    def own_losses(self) -> bool:
        """Return whether each rank computes its own loss; False if outputs are DTensors of a global loss."""
        return not self.plan.setting("dtensor_outputs")

    @property
    def storages(self) -> dict[str, Layout]:
        """Return the storage layout of each parameter, which is also that of its gradient."""
        return {name: p.storage for name, p in self.params.items()}

    @property
    def computes(self) -> dict[str, Layout]:
        """Return the compute layout of each parameter; at padded sizes if it is split so."""
        return {name: p.split or p.compute for name, p in self.params.items()}

    @property
    def padded_inputs(self) -> dict[int, tuple[Layout, str]]:
        """Return position -> (layout at padded sizes, plan entry) of each input that does not divide."""
        return {at: (x.padded, x.cause) for at, x in enumerate(self.inputs) if x.padded is not None}

    @property
    def padded_params(self) -> dict[str, Layout]:
        """Return the compute layout at padded sizes of each parameter that does not divide and is split for compute."""
        return {name: p.split for name, p in self.params.items() if p.split is not None}

    @property
    def on_host(self) -> dict[str, str]:
        """Return parameter -> the plan entry that keeps it on the host."""
        return {name: p.host for name, p in self.params.items() if p.host}

    @property
    def reduced(self) -> dict[str, torch.dtype]:
        """Return the dtype in which each parameter's gradient is reduced."""
        of = {name: self.precision.of_param(name) for name in self.stored}
        return {name: of[name].reduce or of[name].param or dtype for name, dtype in self.stored.items()}

    @property
    def gradients(self) -> dict[str, torch.dtype]:
        """Return the dtype of each parameter's gradient after the reduction."""
        return {name: self.precision.of_param(name).grads or dtype for name, dtype in self.stored.items()}

    def pinned(self, tag: str, base: Layout) -> tuple[Layout, str]:
        """Return (layout, plan entry) of a tagged activation whose value has layout ``base``."""
        pin, base = self.pins[tag], base.without_partial()
        what = f"{pin.where} of module {pin.module!r}"
        return to_layout(pin.spec, self.mesh, base.shape, base, what=what, entry=pin.entry, uneven="drop"), pin.entry

    def grown(self, tag: str, shape: Sequence[int], padded: Sequence[int]) -> Layout | None:
        """Return the layout at padded sizes of a tagged activation; None if all its dims divide.

        Args:
            shape, padded: the shape of the activation, and the shape that it is padded to so far.
        """
        pin = self.pins[tag]
        what = f"{pin.where} of {pin.module!r}"
        return grown_layout(pin.spec, self.mesh, shape, what=what, entry=pin.entry, padded=padded)

    def output(self, index: int, name: str, natural: Layout) -> tuple[Layout, str]:
        """Return (layout, plan entry) of an output whose value has layout ``natural``."""
        if (pair := self.outputs.get(index)) is None:
            return natural, ""
        return to_layout(pair[0], self.mesh, natural.shape, natural, what=f"output {name!r}", entry=pair[1]), pair[1]
