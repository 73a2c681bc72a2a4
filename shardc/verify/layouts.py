"""Checks of layouts: every tensor has one, it is on the mesh, and it agrees with the rules at every use."""

from __future__ import annotations

import operator

from torch import fx

from shardc.ir import ops
from shardc.ir.graph import Value, info, outputs
from shardc.ir.steps import broken_step
from shardc.verify.subject import Broken, Subject


def pins(subject: Subject) -> Broken:
    """Check that each parameter, buffer and input has a layout, and none of them a pending reduction.

    - Each parameter, buffer and input has a layout.
    - None of these has a pending reduction: a caller cannot pass a partial sum.
    """
    for node in subject.nodes:
        role = info(node).role if node.op == "placeholder" else None
        value = info(node).value if role is not None and role.kind != "tangent" else None
        if not isinstance(value, Value):
            continue
        if value.layout is None:
            yield node, "a placeholder has no layout"
        elif value.layout.partial:
            yield node, f"a placeholder has a pending reduction, {value.layout.partial_text()}"


def present(subject: Subject) -> Broken:
    """Check that every tensor of a graph has a layout."""
    for node in subject.nodes[:-1]:
        for value in info(node).tensors:
            if value.layout is None:
                yield node, f"{value} has no layout"


def shapes(subject: Subject) -> Broken:
    """Check that each layout is on the mesh of the graph and has the global shape of its value."""
    for node in subject.nodes[:-1]:
        for value in info(node).tensors:
            if value.layout is not None and value.layout.mesh != subject.mesh:
                yield node, f"its layout is on the mesh {value.layout.mesh}, not on {subject.mesh}"
            elif value.layout is not None and value.layout.shape != value.shape:
                yield node, f"its layout {value.layout} is not of its shape {list(value.shape)}"


def decisions(subject: Subject) -> Broken:
    """Check that the layouts that an op needs of its operands (`Info.needs`) give those of its results, by its rule."""
    for node in _computing(subject):
        if (reason := subject.disagreement(node, info(node).needs)) is not None:
            yield node, reason


def agreement(subject: Subject) -> Broken:
    """Check that the layouts of an op's operands give those of its results, by its rule. Else a reshard is missing."""
    for node in _computing(subject):
        if (reason := subject.disagreement(node, None)) is not None:
            yield node, reason


def _computing(subject: Subject) -> list[fx.Node]:
    """Return the ops of a graph that compute: all ops except data movement and getitems."""
    moving = (operator.getitem, *ops.MARKERS.values())
    return [node for node in subject.calls if node.target not in moving]


def moves(subject: Subject) -> Broken:
    """Check that data-movement ops (reshards, padding, tags) keep the value. Layout and size change only as the kind of
    the op allows.

    - The op takes one tensor and returns one of the same dtype.
    - ``pad`` and ``unpad`` change the size of one dim, which no axis splits; every other op keeps the global shape.
    - ``tag`` keeps the layout.
    - A collective or local move changes the layout as `shardc.ir.steps.broken_step` allows.
    """
    for node in subject.calls:
        if node.target not in ops.MARKERS.values():
            continue
        source, result = info(node.args[0]).value, info(node).value
        if not isinstance(source, Value) or not isinstance(result, Value):
            yield node, "it must take one tensor and make one"
        elif (reason := _broken_move(node, source, result)) is not None:
            yield node, reason


def _broken_move(node: fx.Node, source: Value, result: Value) -> str | None:
    """Return why the result of a data-movement op does not fit its source, as text; None if it fits."""
    if result.dtype != source.dtype:
        return f"the dtype changes from {source} to {result}"
    if node.target in (ops.pad, ops.unpad):
        return _broken_pad(node, source, result)
    if result.shape != source.shape:
        return f"the global shape changes from {list(source.shape)} to {list(result.shape)}"
    if node.target is ops.tag and source.layout != result.layout:
        return f"the layout changes from {source} to {result}"
    if node.target not in (*ops.COLLECTIVES, *ops.LOCAL_MOVES):
        return None
    assert source.layout is not None and result.layout is not None
    axes = [axis for axis in str(node.kwargs["axis"]).split(",") if axis]
    return broken_step(node.target, source.layout, result.layout, axes, str(node.kwargs.get("op", "sum")))


def _broken_pad(node: fx.Node, source: Value, result: Value) -> str | None:
    """Return why the result of a ``pad`` or ``unpad`` node does not fit its source, as text; None if it fits."""
    dim, size = node.kwargs["dim"], node.kwargs["size"]
    assert isinstance(dim, int) and isinstance(size, int)
    expected = (*source.shape[:dim], size, *source.shape[dim + 1 :])
    if result.shape != expected or (size < source.shape[dim]) == (node.target is ops.pad):
        return f"{source} does not become {result} when dim {dim} gets {size} elements"
    if source.layout is None or result.layout is None:
        return None
    if source.layout.dim_axes(dim) or result.layout.dim_axes(dim):
        return f"dim {dim} is split, from {source} to {result}, so its end is on one rank only"
    other_dims = [at for at in range(len(expected)) if at != dim]
    if [source.layout.dims[at] for at in other_dims] != [result.layout.dims[at] for at in other_dims]:
        return f"the layout of another dim changes, from {source} to {result}"
    if source.layout.partial != result.layout.partial:
        return f"the pending reductions change, from {source} to {result}"
    return None


def results(subject: Subject) -> Broken:
    """Check that outputs have the layout that the caller expects.

    - An output has the layout in its role.
    - Without one, a gradient or updated buffer has the layout of the stored tensor, and no output a pending reduction.
    """
    last = subject.nodes[-1]
    for role, node in outputs(subject.gm.graph):
        value = info(node).value if isinstance(node, fx.Node) else None
        if not isinstance(value, Value) or value.layout is None:
            continue
        owner = subject.owner_value(role.kind, role.name)
        wanted = role.layout or (owner and owner.layout)
        if value.layout.partial and role.layout is None:
            yield last, f"{role.kind} {role.name} has a pending reduction: {value}"
        elif wanted is not None and wanted != value.layout:
            yield last, f"{role.kind} {role.name} is {value}, and is wanted as {wanted}"
