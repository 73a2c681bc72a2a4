"""A plan against a model's inputs, outputs and named activations."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

from torch import fx

from shardc._compat import pytree
from shardc.errors import LayoutError, PlanError, ShardcWarning
from shardc.ir import ops
from shardc.ir.layout import Digit, Layout
from shardc.ir.mesh import Mesh
from shardc.plan.entries import Activation, Data, Port, Precision
from shardc.plan.forms import Form, freeze
from shardc.plan.match import matching, must_match, near_names, shorten
from shardc.plan.spec import to_layout
from shardc.plan.targets import split_target
from shardc.plan.uneven import grown_layout
from shardc.plan.value import Plan


@dataclass(frozen=True)
class ActivationPin:
    """What a plan says of one tensor at a module's border.

    Args:
        module: the module's qualified name, "" for the root.
        where: "input" or "output".
        index: the tensor's position among the module's inputs or outputs, or the keyword that passes it.
        spec: for `shardc.plan.spec.to_layout`, with the layout that the value has anyway as ``base``.
        entry: the plan entry, as text.
    """

    module: str
    where: str
    index: int | str
    spec: Form
    entry: str


def batch_axes(plan: Plan, mesh: Mesh | None = None) -> tuple[str, ...]:
    """The axes over which dim 0 of the inputs is split, in the mesh's order (else replicate before shard axes)."""
    axes = [axis for entry in plan.entries if isinstance(entry, Data) for axis in entry.batch]
    return tuple(axes if mesh is None else sorted(axes, key=mesh.order))


def grad_mode(plan: Plan) -> tuple[str, float]:
    """("mean" or "sum", factor): how gradients reduce over the batch axes where no loss is in the graph."""
    return plan.setting("reduce"), float(plan.setting("grad_scale"))


def precision_of(plan: Plan, training: bool) -> Precision:
    """The precision that a model in this mode is traced in."""
    return Precision() if plan.precision.full_precision_eval and not training else plan.precision


@dataclass(frozen=True)
class InputPlan:
    """Where an input lies.

    Args:
        layout: in which it comes; a dim that its axes do not divide is whole.
        cause: the plan entry.
        padded: where such a dim is, the layout at padded sizes in which the program then computes.
    """

    layout: Layout
    cause: str
    padded: Layout | None = None


def resolve_inputs(plan: Plan, mesh: Mesh, inputs: Sequence[tuple[str, Sequence[int]]]) -> list[InputPlan]:
    """Where each input lies: as the plan says, else dim 0 split over the batch axes.

    Args:
        inputs: dotted path and global shape of each tensor, in order: ``("tokens", (8, 128))``.

    Raises:
        PlanError: an entry for an input that there is not, an unknown axis, a spec of the wrong rank.
        LayoutError: a sub-dim of a size that the plan gives does not divide.

    Warns:
        ShardcWarning: a dim that does not divide, with what is done instead.
    """
    said = _said(plan, "inputs", [name for name, _ in inputs])
    axes = batch_axes(plan, mesh)
    cause = " | ".join(str(entry) for entry in plan.entries if isinstance(entry, Data))
    out = []
    for (name, shape), port in zip(inputs, said, strict=True):
        if port is not None:
            out.append(_input(mesh, tuple(shape), port.spec, name, str(port)))
        elif shape and axes:
            out.append(_input(mesh, tuple(shape), freeze((axes, *[None] * (len(shape) - 1)), cause), name, cause))
        else:
            out.append(InputPlan(Layout.whole(mesh, shape), ""))
    return out


def _input(mesh: Mesh, shape: tuple[int, ...], spec: Form, name: str, entry: str) -> InputPlan:
    what = f"input {name!r}"
    uneven = grown_layout(spec, mesh, shape, what=what, entry=entry)
    if uneven is None:
        return InputPlan(to_layout(spec, mesh, shape, what=what, entry=entry), entry)
    odd = [dim for dim, size in enumerate(shape) if uneven.shape[dim] != size]
    axes = [axis for dim in odd for axis in uneven.dim_axes(dim)]
    ranks = prod(mesh.size(axis) for axis in axes)
    told = "; ".join(f"dim {dim} of {shape[dim]} is padded to {uneven.shape[dim]}" for dim in odd)
    what_it_costs = f"every rank takes {what} whole over {', '.join(axes)} ({ranks} ranks) and splits it itself"
    text = f"{what} of shape {shape} does not divide: {told}; {what_it_costs}"
    fix = f"pass sizes that are multiples of {ranks}, or leave {', '.join(axes)} off"
    warnings.warn(str(LayoutError(text, plan_entry=entry, fix=fix)), ShardcWarning, stacklevel=4)
    whole = uneven.unbind(axes)
    dims = [(Digit(size),) if dim in odd else whole.dims[dim] for dim, size in enumerate(shape)]
    return InputPlan(Layout(mesh, dims), entry, uneven)


def resolve_outputs(plan: Plan, names: Sequence[str]) -> list[tuple[Form, str] | None]:
    """(spec, entry) of each output, None where the plan says nothing.

    Args:
        names: dotted path of each output tensor: ``"0"``, ``"logits"``, ``"1.hidden"``.

    Raises:
        PlanError: an entry for an output that there is not.
    """
    return [None if port is None else (port.spec, str(port)) for port in _said(plan, "outputs", names)]


def output_specs(plan: Plan, spec: pytree.TreeSpec) -> dict[int, tuple[Form, str]]:
    """What the plan says of each tensor output, by flat position; ``spec`` is their structure.

    Raises:
        PlanError: as `resolve_outputs`.
    """
    flat = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    paths = pytree.tree_flatten_with_path(flat)[0]
    names = [".".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path) or "0" for path, _ in paths]
    return {at: one for at, one in enumerate(resolve_outputs(plan, names)) if one is not None}


def _said(plan: Plan, kind: str, names: Sequence[str]) -> list[Port | None]:
    """The last entry that speaks of each name."""
    arguments = list(dict.fromkeys(name.partition(".")[0] for name in names))
    out: list[Port | None] = [None] * len(names)
    for port in plan.entries:
        if not isinstance(port, Port) or port.kind != kind:
            continue
        found = [at for at, name in enumerate(names) if _speaks_of(port.path, name, arguments)]
        for at in found:
            out[at] = port
        if not found:
            near = near_names(port.path, list(names))
            raise PlanError(
                f"there is no {kind.removesuffix('s')} {port.path!r}",
                plan_entry=str(port),
                fix=f"did you mean {near[0]!r}?" if near else f"the {kind} are {shorten(list(names))}",
            )
    return out


def _speaks_of(path: str, name: str, arguments: list[str]) -> bool:
    """Whether ``path`` is ``name``, a part in front of it, a glob for it, or the same with the argument's position."""
    argument, dot, rest = name.partition(".")
    spelled = (name, f"{arguments.index(argument)}{dot}{rest}")
    return not path or any(s == path or s.startswith(f"{path}.") or fnmatchcase(s, path) for s in spelled)


def resolve_activations(plan: Plan, module_names: Iterable[str]) -> list[ActivationPin]:
    """The pins on module inputs and outputs, in the plan's order; of two on one tensor the later stays.

    Raises:
        PlanError: a glob that matches no module, or a target that reads in two ways (a module that is itself called
            ``input`` or ``output``).
    """
    names = list(module_names)
    pins: dict[tuple[str, str, int | str], ActivationPin] = {}
    for entry in plan.entries:
        if isinstance(entry, Activation):
            for module, where, index in _targets(entry, names):
                pins.pop((module, where, index), None)
                pins[module, where, index] = ActivationPin(module, where, index, entry.spec, str(entry))
    return list(pins.values())


def check_pins(pins: Sequence[ActivationPin], tags: Sequence[str], graph: fx.Graph) -> None:
    """Raises PlanError for a plan entry about activations none of which is in the program; ``tags`` name each pin's."""
    met = {node.kwargs["name"] for node in graph.nodes if node.target is ops.tag}
    heard = {pin.entry for pin, tag in zip(pins, tags, strict=True) if tag in met}
    for pin in pins:
        if pin.entry not in heard:
            raise PlanError(
                f"{pin.where} {pin.index!r} of module {pin.module!r} is no tensor of the program",
                plan_entry=pin.entry,
                fix="name a module that the model calls, and a tensor that it takes or returns there and that is used",
            )


def _targets(entry: Activation, names: list[str]) -> list[tuple[str, str, int | str]]:
    target = split_target(entry.target)
    found = matching(target.glob, names)
    whole = matching(entry.target, names) if target.where and not target.explicit else []
    if found and whole:
        raise PlanError(
            f"{entry.target!r} is the {target.where} of {found[0]!r} and also the module {whole[0]!r}",
            plan_entry=str(entry),
            fix=f"write '{target.glob}:{target.where}' for the {target.where}, or '{entry.target}:output' for that "
            "module's output",
        )
    if whole:
        return [(module, "output", 0) for module in whole]
    modules = must_match(target.glob, names, "module", str(entry))
    return [(module, target.where or "output", target.index) for module in modules]
