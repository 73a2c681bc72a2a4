"""Resolves a plan for a mesh and a model: the layouts of each parameter, and `BoundPlan`, which passes read.

The compute layout of a parameter is given by TP and raw entries; the storage layout is the compute layout split further
over the axes of the ``fsdp`` entries. Their difference causes FSDP's all-gathers and reduce-scatters.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import prod

import torch

from shardc.errors import LayoutError, PlanError
from shardc.ir.deferred import NOTHING, Deferred
from shardc.ir.layout import Digit, Layout
from shardc.ir.mesh import Mesh, split_part
from shardc.ir.placements import parts_of, view_of
from shardc.plan.entries import Policies
from shardc.plan.layout_spec import Form, check_axis, to_layout
from shardc.plan.pipeline_stages import PipelineStages
from shardc.plan.placed import ParamPlan, Placed, SavePolicy, as_dtensor, grown_layout
from shardc.plan.ports import ActivationPin, InputPlan, batch_axes
from shardc.plan.value import Plan


@dataclass(frozen=True)
class BoundPlan:
    """A plan resolved for one model at one input signature, on one mesh.

    Args:
        plan: the plan.
        mesh: the mesh.
        params: parameter name -> its layouts.
        inputs: the layouts of each tensor input, in order.
        pins: tag name -> the spec of a tagged activation.
        saves: where the activations of modules that backward reads are kept.
        outputs: flat position of a tensor output -> (spec, plan entry).
        precision: the dtypes for compute and for reductions, by module.
        scaled: module -> scaling of its float8 products, for modules that have them.
        stored: parameter name -> dtype between steps.
        deferred: parameters whose gradients stay unreduced.
        pp: the stages of the plan's pipeline; None without one.
    """

    plan: Plan
    mesh: Mesh
    params: Mapping[str, ParamPlan]
    inputs: tuple[InputPlan, ...]
    pins: Mapping[str, ActivationPin]
    saves: tuple[SavePolicy, ...]
    outputs: Mapping[int, tuple[Form, str]]
    precision: Policies
    stored: Mapping[str, torch.dtype]
    deferred: Deferred = NOTHING
    pp: PipelineStages | None = None
    scaled: Mapping[str, str] = field(default_factory=dict)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Return the axes that split the batch."""
        return batch_axes(self.plan, self.mesh)

    @property
    def loss_axes(self) -> tuple[str, ...]:
        """Return the axes over whose ranks losses are averaged or summed: those that split the batch over devices."""
        return batch_axes(self.plan, self.mesh.untimed)

    @property
    def reduce(self) -> str:
        """Return how the plan combines the ranks' losses if no loss is in the graph: "mean" or "sum"."""
        return str(self.plan.setting("reduce"))

    @property
    def grad_scale(self) -> float:
        """Return the factor by which the plan scales the gradients of parameters."""
        return float(self.plan.setting("grad_scale"))

    @property
    def own_losses(self) -> bool:
        """Return whether each rank computes its own loss; False if outputs are DTensors of a global loss."""
        return not self.plan.setting("dtensor_outputs")

    @property
    def storages(self) -> dict[str, Layout]:
        """Return parameter -> its storage layout, which is also the layout of its gradient."""
        return {name: p.storage for name, p in self.params.items()}

    @property
    def computes(self) -> dict[str, Layout]:
        """Return parameter -> its compute layout. A dim that its axes do not divide has its padded size."""
        return {name: p.split or p.compute for name, p in self.params.items()}

    @property
    def padded_inputs(self) -> dict[int, tuple[Layout, str]]:
        """Return the inputs with a dim that its axes do not divide: position -> (layout at padded sizes, plan
        entry).
        """
        return {at: (x.padded, x.cause) for at, x in enumerate(self.inputs) if x.padded is not None}

    @property
    def padded_params(self) -> dict[str, Layout]:
        """Return parameter -> its compute layout at padded sizes. Only parameters with a dim that its axes do not
        divide are in it.
        """
        return {name: p.split for name, p in self.params.items() if p.split is not None}

    @property
    def on_host(self) -> dict[str, str]:
        """Return parameter -> the plan entry that keeps it on the host."""
        return {name: p.host for name, p in self.params.items() if p.host}

    @property
    def reduced(self) -> dict[str, torch.dtype]:
        """Return the dtype in which each gradient is reduced: parameter -> dtype."""
        of = {name: self.precision.of_param(name) for name in self.stored}
        return {name: of[name].reduce or of[name].param or dtype for name, dtype in self.stored.items()}

    @property
    def gradients(self) -> dict[str, torch.dtype]:
        """Return parameter -> the dtype of its gradient after the reduction."""
        return {name: self.precision.of_param(name).grads or dtype for name, dtype in self.stored.items()}

    def pinned(self, tag: str, base: Layout) -> tuple[Layout, str]:
        """Return (layout, plan entry) of the pinned activation that the tag node ``tag`` marks. Dims that the pin
        leaves open keep their layout in ``base``.
        """
        pin, base = self.pins[tag], base.without_partial()
        what = f"{pin.where} of module {pin.module!r}"
        return to_layout(pin.spec, self.mesh, base.shape, base, what=what, entry=pin.entry, uneven="drop"), pin.entry

    def grown(self, tag: str, shape: Sequence[int], padded: Sequence[int]) -> Layout | None:
        """Return the padded layout of a pinned activation, in which its mesh axes divide every dim. None if they divide
        all dims without padding.

        Args:
            tag: its tag name.
            shape: its shape.
            padded: the shape that it is padded to so far.
        """
        pin = self.pins[tag]
        what = f"{pin.where} of {pin.module!r}"
        return grown_layout(pin.spec, self.mesh, shape, what=what, entry=pin.entry, padded=padded)

    def output(self, index: int, name: str, natural: Layout) -> tuple[Layout, str]:
        """Return (layout, plan entry) of output ``index``, called ``name``. Without an entry, the layout is
        ``natural``, in which the value is computed.
        """
        if (pair := self.outputs.get(index)) is None:
            return natural, ""
        return to_layout(pair[0], self.mesh, natural.shape, natural, what=f"output {name!r}", entry=pair[1]), pair[1]


__all__ = ["ParamPlan", "Sizes", "check_axes", "resolve_params"]

Sizes = Mapping[str, tuple[Sequence[int], int]]


def resolve_params(
    plan: Plan, mesh: Mesh, params: Sizes, aliases: Mapping[str, str] | None = None
) -> dict[str, ParamPlan]:
    """Return the layouts of each parameter under the plan: name -> `ParamPlan`.

    Args:
        plan: the plan.
        mesh: the mesh.
        params: name -> (shape, bytes per element).
        aliases: other names of tied parameters -> the name in ``params``; globs match these too.

    Raises:
        PlanError: an axis is unknown or given to data parallelism and to TP, a glob matches nothing, or a spec has the
            wrong rank. Nothing is changed before all entries are checked.
        LayoutError: an entry splits a dim in a way that a DTensor cannot represent.

    Warns:
        ShardcWarning: a dim does not divide; the text says what is done instead.
    """
    check_axes(plan, mesh)
    names = {name: name for name in params} | dict(aliases or {})
    names_of: dict[str, list[str]] = {}
    for name, first in names.items():
        names_of.setdefault(first, []).append(name)
    placed = {
        name: Placed(tuple(names_of[name]), tuple(shape), prod(shape) * itemsize, Layout.whole(mesh, shape))
        for name, (shape, itemsize) in params.items()
    }
    for entry in plan.entries:
        with _named(str(entry)):
            placed |= entry.place(placed, names)
    with warnings.catch_warnings():  # a first pass, to find the parts of axes that the DTensors' mesh needs
        warnings.simplefilter("ignore")
        first_pass = [_store(plan, param, None) for param in placed.values()]
    view = view_of(mesh, parts_of(mesh, (stored.storage for stored in first_pass)))
    out = {name: _store(plan, param, view) for name, param in placed.items()}
    for name, stored in out.items():
        if not as_dtensor(stored.storage, placed[name].shape, view):
            raise LayoutError(
                f"parameter {name!r} of shape {placed[name].shape} cannot be stored as {stored.storage}: DTensor "
                "cuts a dim that does not divide over one axis after the other",
                plan_entry=stored.storage_cause,
                fix="split that dim over one axis only, or over axes that divide it",
            )
    return out


def check_axes(plan: Plan, mesh: Mesh) -> None:
    """Raise PlanError if the plan cannot be used on ``mesh``, whatever the model.

    Raises:
        PlanError: an axis is not on ``mesh``, or is given to TP and to the batch; axes of the batch share ranks; levels
            or numbers of microbatches differ; or shard sizes do not divide.
    """
    stores = {entry: level for entry in plan.entries if (level := entry.storage[1])}
    levels = set(stores.values())
    if len(levels) > 1:
        raise PlanError(
            f"the plan has fsdp entries of levels {' and '.join(map(str, sorted(levels)))}",
            plan_entry=" | ".join(map(str, stores)),
            fix="give all of them the same level",
        )
    counts = {entry: entry.settings["microbatches"] for entry in plan.entries if "microbatches" in entry.settings}
    if len(set(counts.values())) > 1:
        raise PlanError(
            f"the plan says {' and '.join(map(str, counts.values()))} microbatches",
            plan_entry=" | ".join(map(str, counts)),
            fix="say how many there are in one of the entries",
        )
    batch = {axis: entry for entry in plan.entries for axis in entry.batch}
    for entry in plan.entries:
        for axis in entry.axes:
            check_axis(axis, mesh, str(entry))
    for entry in plan.entries:
        entry.check(mesh, batch)
    for axis, other in combinations(batch, 2):
        if mesh.overlap(axis, other):
            raise PlanError(
                f"{batch[axis]} and {batch[other]} split the batch over {axis!r} and over {other!r}, which share ranks",
                plan_entry=str(batch[other]),
                fix="give both the same axis, or parts of it that share no ranks",
            )


@contextmanager
def _named(entry: str) -> Iterator[None]:
    """Context manager in which a LayoutError becomes a PlanError that names the plan ``entry``."""
    try:
        yield
    except LayoutError as error:
        raise PlanError(error.what, plan_entry=error.plan_entry or entry, fix=error.fix) from error


def _store(plan: Plan, param: Placed, view: Mesh | None) -> ParamPlan:
    """Return the layouts of a parameter under the plan. All entries split its storage. Its compute layout lacks the
    splits of entries that split storage only, such as ``fsdp``.

    Args:
        param: the parameter with the layout of all entries.
        view: the mesh of the parameters' DTensors; None before the parts of axes that it needs are known.
    """
    shard = [axis for entry in plan.entries for axis in entry.storage[0]]
    level = max((entry.level_of(param) for entry in plan.entries), default=0)
    regather = tuple(axis for entry in plan.entries for axis in entry.regather_axes(param)) if level == 3 else ()
    cause = " | ".join(param.causes)
    layout, free = param.layout, param.layout.unbind(set(shard) - param.compute_axes)
    dims = [(Digit(size),) if dim in param.odd else free.dims[dim] for dim, size in enumerate(param.shape)]
    compute = free.replace(dims=dims)
    out = ParamPlan(layout, compute, layout.shape, level, cause, cause, None, param.host, param.pinned, regather)
    for entry in plan.entries if not set(layout.bound) & set(shard) - param.compute_axes else ():
        with _named(f"{cause} | {entry}" if cause else str(entry)):
            out = entry.store(out, param, view)
    split = out.storage.unbind(
        axis for axis in out.storage.bound if split_part(axis)[0] in set(shard) - param.compute_axes
    )
    return replace(out, split=split) if any(split.dim_axes(dim) for dim in param.odd) else out
