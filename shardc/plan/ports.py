"""Resolves a plan for a model's inputs, outputs and named activations: which layout and plan entry each has."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from torch import fx

from shardc._compat import pytree
from shardc.errors import LayoutError, PlanError, ShardcWarning
from shardc.ir import ops
from shardc.ir.layout import Digit, Layout
from shardc.ir.mesh import Mesh
from shardc.ir.text import leaf_paths
from shardc.plan.layout_spec import Form, PerRank, Uneven, freeze, to_layout
from shardc.plan.match import shorten
from shardc.plan.placed import SavePolicy, grown_layout
from shardc.plan.value import Plan


@dataclass(frozen=True)
class ActivationPin:
    """The spec that a plan gives one tensor at a module boundary.

    Args:
        module: the module's qualified name, "" for the root.
        where: "input" or "output".
        index: position of the tensor among the module's inputs or outputs, or the keyword that passes it.
        spec: argument of `shardc.plan.layout_spec.to_layout`; ``base`` is the layout that the value has without it.
        entry: the plan entry, as text.
    """

    module: str
    where: str
    index: int | str
    spec: Form
    entry: str


def batch_axes(plan: Plan, mesh: Mesh | None = None) -> tuple[str, ...]:
    """Return the axes that split dim 0 of the inputs, in mesh order. Without ``mesh``, in the order of the plan's
    entries.

    The axis of microbatches, if ``mesh`` has one, is the last.
    """
    axes = list(dict.fromkeys(axis for entry in plan.entries for axis in entry.batch))
    return tuple(axes) if mesh is None else (*sorted(axes, key=mesh.order), *filter(None, [mesh.time]))


def row_axes(plan: Plan, mesh: Mesh) -> tuple[str, ...]:
    """Return the batch axes that split the rows of inputs, in mesh order. Axes that split the sequence are left out."""
    sequence = {entry.sequence[1] for entry in plan.entries if entry.sequence is not None}
    return tuple(axis for axis in batch_axes(plan, mesh) if axis not in sequence)


@dataclass(frozen=True)
class InputPlan:
    """The layout that the plan gives an input.

    Args:
        layout: the layout in which it is passed; a dim that its axes do not divide is not split.
        cause: the plan entry.
        padded: if there is such a dim, the layout at padded sizes in which the program computes.
    """

    layout: Layout
    cause: str
    padded: Layout | None = None


def resolve_inputs(plan: Plan, mesh: Mesh, inputs: Sequence[tuple[str, Sequence[int]]]) -> list[InputPlan]:
    """Return the layout of each input: by the plan's entry for it, or else with dim 0 split over the batch axes, and
    the sequence dim over those of ``cp``.

    Args:
        plan: the plan.
        mesh: the mesh.
        inputs: dotted path and global shape of each tensor, in order: ``("tokens", (8, 128))``.

    Raises:
        PlanError: an entry names an unknown input or axis, or a spec has the wrong rank.
        LayoutError: a sub-dim whose size the plan gives does not divide.

    Warns:
        ShardcWarning: a dim does not divide; the text says what is done instead.
    """
    if mesh.time:
        return _in_time(plan, mesh, inputs, resolve_inputs(plan, mesh.untimed, inputs))
    specs = _last_specs(plan, "inputs", [name for name, _ in inputs])
    cause = " | ".join(str(entry) for entry in plan.entries if entry.batch)
    for entry in plan.entries:
        if entry.sequence is not None and not any(len(shape) > entry.sequence[0] for _, shape in inputs):
            raise PlanError(
                f"no input has a dim {entry.sequence[0]}, which would be the sequence",
                plan_entry=str(entry),
                fix="write dim= with the dim of the inputs that is the sequence",
            )
    out = []
    for (name, shape), wanted in zip(inputs, specs, strict=True):
        if wanted is not None and isinstance(wanted[0], PerRank):
            spec = _per_rank_spec(wanted[0], plan, mesh, shape, name, wanted[1])
            out.append(_input(mesh, tuple(shape), spec, name, wanted[1]))
        elif wanted is not None:
            out.append(_input(mesh, tuple(shape), wanted[0], name, wanted[1]))
        elif shape and cause:
            out.append(_input(mesh, tuple(shape), _split(plan, mesh, shape), name, cause, by_default=True))
        else:
            out.append(InputPlan(Layout.whole(mesh, shape), ""))
    return out


def _in_time(
    plan: Plan, mesh: Mesh, inputs: Sequence[tuple[str, Sequence[int]]], whole: Sequence[InputPlan]
) -> list[InputPlan]:
    """Return the layouts of the inputs for a step in microbatches: ``whole``, their layouts without microbatches, with
    each rank's rows also split over the axis of microbatches.

    The dim that the batch axes split is split again, dim 0 by default. If its local size does not divide, it is padded.

    Args:
        plan: the plan.
        mesh: the mesh, with its axis of microbatches.
        inputs: (name, shape) of each input.
        whole: the plans of the inputs without microbatches.
    """
    specs = _last_specs(plan, "inputs", [name for name, _ in inputs])
    batch = set(row_axes(plan, mesh.untimed))
    out = []
    for on_devices, wanted in zip(whole, specs, strict=True):
        layout, padded = on_devices.layout.on(mesh), on_devices.padded and on_devices.padded.on(mesh)
        target = layout if padded is None else padded
        dims = [dim for dim in range(layout.ndim) if batch.intersection(target.dim_axes(dim))]
        dims = dims or ([0] if wanted is None and layout.ndim else [])
        if not dims or layout.shape[dims[0]] == 1:
            out.append(InputPlan(layout, on_devices.cause, padded))
            continue
        timed = _split_over(target, dims[0], Digit(mesh.microbatches, mesh.time))
        is_even = padded is None and timed.shape == target.shape
        out.append(InputPlan(timed, on_devices.cause) if is_even else InputPlan(layout, on_devices.cause, timed))
    return out


def _split_over(layout: Layout, dim: int, digit: Digit) -> Layout:
    """Return ``layout`` with the first local digit of ``dim`` also split by ``digit``, which has an axis. If the axis
    does not divide that digit, the dim is padded.
    """
    digits = layout.dims[dim]
    at = next((at for at, local in enumerate(digits) if local.axis is None), len(digits))
    size = digits[at].radix if at < len(digits) else 1
    split = [*digits[:at], digit, Digit(-(-size // digit.radix)), *digits[at + 1 :]]
    return layout.replace(dims=[*layout.dims[:dim], split, *layout.dims[dim + 1 :]])


def numbered(plan: Plan, names: Sequence[str]) -> dict[int, int]:
    """Return which inputs hold row numbers of other inputs: position of a `shardc.per_rank` input -> position of the
    input with the numbered rows.

    Args:
        plan: the plan.
        names: dotted paths of the tensor inputs.

    Raises:
        PlanError: the other input does not exist.
    """
    arguments = list(dict.fromkeys(name.partition(".")[0] for name in names))
    out = {}
    for at, wanted in enumerate(_last_specs(plan, "inputs", names)):
        if wanted is None or not isinstance(wanted[0], PerRank) or (to := wanted[0].relative_to) is None:
            continue
        argument, dot, rest = to.partition(".")
        if argument.isdigit() and int(argument) < len(arguments):
            to = f"{arguments[int(argument)]}{dot}{rest}"
        if to not in names or to == names[at]:
            others = [name for name in names if name != names[at]]
            raise PlanError(
                f"input {names[at]!r} is relative to {to!r}, which is {'itself' if to == names[at] else 'no input'}",
                plan_entry=wanted[1],
                fix=f"write relative_to= with the input whose rows its values number ({shorten(others)}), or None",
            )
        out[at] = list(names).index(to)
    return out


def _per_rank_spec(form: PerRank, plan: Plan, mesh: Mesh, shape: Sequence[int], name: str, entry: str) -> Form:
    """Return the spec of a `per_rank` input: the dim along which ranks' inputs are concatenated is split over the batch
    axes.

    Args:
        form: the argument of the plan.
        shape, name, entry: the input's shape and name, and the plan entry.
    """
    if not -len(shape) <= form.dim < len(shape):
        raise PlanError(
            f"input {name!r} of shape {tuple(shape)} has no dim {form.dim}", plan_entry=entry, fix="write another dim="
        )
    batch = row_axes(plan, mesh)
    dims = ["_"] * len(shape)
    dims[form.dim] = f"@({','.join(batch)})" if batch else "_"
    return freeze(", ".join(dims))


def _split(plan: Plan, mesh: Mesh, shape: Sequence[int]) -> Form:
    """Return the spec of an input without a plan entry. Dim 0 is split over the batch axes, the sequence dim over the
    axes of ``cp``.
    """
    splits = [entry.sequence for entry in plan.entries if entry.sequence is not None]
    sequence = {axis: (dim, striped) for dim, axis, striped in splits}
    batch = row_axes(plan, mesh)
    dims = [f"@({','.join(batch)})" if batch else "_", *["_"] * (len(shape) - 1)]
    for dim in {dim for dim, _ in sequence.values() if dim < len(shape) and shape[dim] > 1}:
        axes = [axis for axis in sorted(sequence, key=mesh.order) if sequence[axis][0] == dim]
        pieces, stripes = ([axis for axis in axes if sequence[axis][1] is striped] for striped in (False, True))
        dims[dim] = f"_@({','.join(pieces)})" if pieces else "_"
        if stripes:
            dims[dim] = f"({dims[dim]} {prod(map(mesh.size, stripes))}@({','.join(stripes)}))"
    return freeze(", ".join(dims))


def _input(
    mesh: Mesh, shape: tuple[int, ...], spec: Form, name: str, entry: str, by_default: bool = False
) -> InputPlan:
    """Return the layout that ``spec`` gives the input ``name``. A dim that its axes do not divide is padded, with a
    warning; one with a single element is not split.

    Args:
        by_default: ``spec`` splits dim 0 over the batch axes, because no entry is about this input.
    """
    what = f"input {name!r}"
    uneven = grown_layout(spec, mesh, shape, what=what, entry=entry)
    if uneven is None:
        # A dim of one element is not padded, because ops may expand it: each rank takes all of it.
        drop: Uneven = "drop" if 1 in shape else "error"
        return InputPlan(to_layout(spec, mesh, shape, what=what, entry=entry, uneven=drop), entry)
    odd = [dim for dim, size in enumerate(shape) if uneven.shape[dim] != size]
    axes = [axis for dim in odd for axis in uneven.dim_axes(dim)]
    ranks = prod(mesh.size(axis) for axis in axes)
    paddings = "; ".join(f"dim {dim} of {shape[dim]} is padded to {uneven.shape[dim]}" for dim in odd)
    what_it_costs = f"every rank takes {what} whole over {', '.join(axes)} ({ranks} ranks) and splits it itself"
    text = f"{what} of shape {shape} does not divide: {paddings}; {what_it_costs}"
    fix = f"pass sizes that are multiples of {ranks}, or leave {', '.join(axes)} off"
    if by_default:
        whole_input = f"Plan(inputs={{{name!r}: '...'}})"
        fix = f"pass sizes that are multiples of {ranks}; or {whole_input}, if dim 0 is not the batch, as of a mask"
    warnings.warn(str(LayoutError(text, plan_entry=entry, fix=fix)), ShardcWarning, stacklevel=4)
    whole = uneven.unbind(axes)
    dims = [(Digit(size),) if dim in odd else whole.dims[dim] for dim, size in enumerate(shape)]
    return InputPlan(Layout(mesh, dims), entry, uneven)


def resolve_outputs(plan: Plan, names: Sequence[str]) -> list[tuple[Form, str] | None]:
    """Return (spec, entry) of each output; None if the plan has no entry for it.

    Args:
        names: dotted path of each output tensor: ``"0"``, ``"logits"``, ``"1.hidden"``.

    Raises:
        PlanError: an entry names an unknown output.
    """
    return _last_specs(plan, "outputs", names)


def output_specs(plan: Plan, spec: pytree.TreeSpec) -> dict[int, tuple[Form, str]]:
    """Return the specs that the plan gives tensor outputs: flat position -> (spec, plan entry). ``spec`` is the pytree
    structure of the outputs.

    Raises:
        PlanError: as `resolve_outputs`.
    """
    flat = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    names = [".".join(map(str, path)) or "0" for path in leaf_paths(flat)]
    return {at: pair for at, pair in enumerate(resolve_outputs(plan, names)) if pair is not None}


def _last_specs(plan: Plan, kind: str, names: Sequence[str]) -> list[tuple[Form, str] | None]:
    """Return (spec, plan entry) for each input or output of ``names``, from the last entry about it; None where there
    is no entry.

    Args:
        kind: "inputs" or "outputs".
    """
    out: list[tuple[Form, str] | None] = [None] * len(names)
    for entry in plan.entries:
        for at, spec in entry.ports(kind, names).items():
            out[at] = spec, str(entry)
    return out


def resolve_activations(plan: Plan, module_names: Iterable[str]) -> list[ActivationPin]:
    """Return the pins (fixed layouts of module inputs and outputs) in the plan's order. Of two pins of one tensor, the
    later one is returned.

    Raises:
        PlanError: a glob matches no module, or a target is ambiguous (a module is itself called ``input`` or
            ``output``).
    """
    names = list(module_names)
    pins: dict[tuple[str, str, int | str], ActivationPin] = {}
    for entry in plan.entries:
        for place, spec in entry.pins(names).items():
            pins.pop(place, None)
            pins[place] = ActivationPin(*place, spec, str(entry))
    return list(pins.values())


def resolve_saves(plan: Plan, module_names: Iterable[str]) -> list[SavePolicy]:
    """Return the policies by which the plan saves activations for backward: by entry, then in the order of modules.

    Raises:
        PlanError: a glob matches no module.
    """
    names = list(module_names)
    return [policy for entry in plan.entries for policy in entry.saves(names)]


def check_pins(pins: Sequence[ActivationPin], tags: Sequence[str], graph: fx.Graph) -> None:
    """Raise PlanError for a plan entry that pins activations if the program uses none of them. ``tags`` has the name of
    the tag node of each pin.
    """
    met = {node.kwargs["name"] for node in graph.nodes if node.target is ops.tag}
    heard = {pin.entry for pin, tag in zip(pins, tags, strict=True) if tag in met}
    for pin in pins:
        if pin.entry not in heard:
            raise PlanError(
                f"{pin.where} {pin.index!r} of module {pin.module!r} is not a tensor of the program",
                plan_entry=pin.entry,
                fix="name a module that the model calls, and a tensor that it takes or returns there and that is used",
            )
