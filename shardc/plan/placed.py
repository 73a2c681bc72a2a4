"""A parameter's layouts while plan entries are applied: `Placed` has the layout for compute, `ParamPlan` also that of
storage.

If a dim does not divide over its axes, it is padded, as far as a DTensor can represent the result. A DTensor splits a
dim over one axis after the other, each time by ``torch.chunk``. `SavePolicy` is what entries say about activations.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm, prod

from shardc.errors import LayoutError, PlanError, ShardcWarning
from shardc.ir.layout import Digit, Layout
from shardc.ir.mesh import Mesh
from shardc.ir.placements import seen_on
from shardc.plan.layout_spec import Form, leaves_dims, to_layout


def grown_layout(
    spec: Form, mesh: Mesh, shape: Sequence[int], *, what: str, entry: str, padded: Sequence[int] | None = None
) -> Layout | None:
    """Return the padded layout of ``spec``: a dim that its mesh axes do not divide has the next size that they divide.

    Args:
        spec: the spec, in hashable form.
        mesh: the mesh.
        shape: the tensor's global shape.
        padded: the size of each dim after earlier padding; it remains a multiple of that.
        what, entry: as for `to_layout`.

    Returns:
        None if all dims divide, if one that does not has a single element, or if the spec gives sizes.
    """
    padded = tuple(shape if padded is None else padded)
    # The number of parts of each dim does not depend on its size, as long as that divides.
    try:
        easy = to_layout(spec, mesh, [size * mesh.ranks for size in shape], what=what, entry=entry)
    except (PlanError, LayoutError):
        return None
    counts = [prod(mesh.size(axis) for axis in easy.dim_axes(dim)) for dim in range(len(shape))]
    if easy.partial or all(size % count == 0 for size, count in zip(padded, counts, strict=True)):
        return None
    grown = []
    for size, now, count in zip(shape, padded, counts, strict=True):
        step = count if now == size else lcm(now, count)
        grown.append(now if now % count == 0 or size <= 1 else -(-size // step) * step)
    if any(size % count for size, count in zip(grown, counts, strict=True)):
        return None
    return to_layout(spec, mesh, grown, what=what, entry=entry)


def as_dtensor(storage: Layout, shape: Sequence[int], view: Mesh) -> bool:
    """Return whether a DTensor of ``shape`` on the mesh ``view`` would have the same elements on each rank as the
    padded layout ``storage``.

    Example where it has not: 5 elements over 2 x 2 ranks are padded to 8, of which the ranks have 2, 2, 1 and 0; a
    DTensor splits them into 3 and 2, and these into 2, 1, 1 and 1.

    Args:
        storage: the storage layout, at padded sizes.
        shape: the parameter's shape.
        view: the mesh of the DTensor, a view of the storage's mesh.
    """
    for digits, size, grown in zip(seen_on(storage, view).dims, shape, storage.shape, strict=True):
        if size == grown:
            continue
        chunks, shard = [size], grown
        for digit in digits:
            if digit.axis is not None:
                shard //= digit.radix
                chunks = [n for before in chunks for n in _chunks(before, digit.radix)]
        if chunks != [min(max(size - at * shard, 0), shard) for at in range(len(chunks))]:
            return False
    return True


def _chunks(size: int, count: int) -> list[int]:
    """Return the sizes of ``count`` chunks of ``size`` elements, as ``torch.chunk`` cuts them. Missing chunks at the
    end have size 0.
    """
    chunk = -(-size // count)
    return [min(max(size - at * chunk, 0), chunk) for at in range(count)]


@dataclass(frozen=True)
class ParamPlan:
    """The layouts of one parameter under a plan: in storage and in compute.

    Args:
        storage: layout between steps; its shape is ``padded``.
        compute: layout for its consumers, at the parameter's own shape.
        padded: the parameter's shape, with dims padded if storage could not be split otherwise.
        level: level of the ``fsdp`` entry that stores it; 0 if none does.
        storage_cause: the entry that decided storage, and the reason if it is replicated; "" if none did.
        compute_cause: the entries that decided the compute layout, joined by " | "; "" if none did.
        split: if entries split a dim for compute that they do not divide, the compute layout at ``padded`` sizes;
            ``compute`` then does not split that dim.
        host: the entry that keeps it on the host; "" if none does.
        pinned: whether its host memory is pinned.
        regather_axes: for level 3, the axes (or parts of axes) over which it stays split from forward to backward, and
            over which backward gathers it; () for all.
    """

    storage: Layout
    compute: Layout
    padded: tuple[int, ...]
    level: int
    storage_cause: str
    compute_cause: str
    split: Layout | None = None
    host: str = ""
    pinned: bool = True
    regather_axes: tuple[str, ...] = ()

    @property
    def regather_level(self) -> int:
        """Return the parameter's FSDP level. An offloaded parameter without FSDP has level 3, since backward copies it
        to the device again.
        """
        return self.level or (3 if self.host else 0)

    def on(self, mesh: Mesh) -> ParamPlan:
        """Return the same layouts on ``mesh``, which has all of their axes."""
        split = None if self.split is None else self.split.on(mesh)
        return replace(self, storage=self.storage.on(mesh), compute=self.compute.on(mesh), split=split)


@dataclass(frozen=True)
class Placed:
    """A parameter with its layout for compute, after the plan entries that were applied so far.

    Args:
        names: all of its names (tied parameters have several), its own first.
        shape: shape of the unsharded parameter.
        nbytes: bytes of the unsharded parameter.
        layout: the layout for compute, and for storage before entries split that further; sizes are the parameter's, or
            padded to sizes that its axes divide.
        causes: the entries that decided the layout.
        host, pinned: as in `ParamPlan`.
        compute_axes: axes that split it for compute, even if entries split storage over them.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    nbytes: int
    layout: Layout
    causes: tuple[str, ...] = ()
    host: str = ""
    pinned: bool = True
    compute_axes: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """Return the parameter's own name, the first of its names if it is tied."""
        return self.names[0]

    @property
    def odd(self) -> set[int]:
        """Return the dims that are padded for compute."""
        return {dim for dim, size in enumerate(self.shape) if self.layout.shape[dim] != size}

    def by_spec(self, spec: Form, entry: str) -> Placed:
        """Return the parameter with the layout that ``spec`` gives it. ``entry`` is the plan entry, for causes and
        errors.
        """
        what, base = f"parameter {self.name!r}", self.layout
        mesh, padded = base.mesh, base.shape
        larger = grown_layout(spec, mesh, self.shape, what=what, entry=entry, padded=padded)
        if larger is not None:
            dims = zip(base.dims, padded, larger.shape, strict=True)
            base = Layout(mesh, [dim if size == now else (Digit(now),) for dim, size, now in dims])
        layout = to_layout(spec, mesh, base.shape, base, what=what, entry=entry, uneven="drop")
        if layout.partial:
            raise PlanError(
                f"parameter {self.name!r} cannot be a partial reduction {layout.partial_text()}",
                plan_entry=entry,
                fix="split it, or leave it whole",
            )
        causes = (*(self.causes if leaves_dims(spec) else ()), entry)
        return replace(self, layout=layout, causes=causes)

    def keeping(self, axis: str) -> Placed:
        """Return the parameter with a note that ``axis`` splits it for compute, even if entries also split storage over
        that axis. (Else ``fsdp`` over the axis takes it out of the compute layout.)
        """
        return replace(self, compute_axes=self.compute_axes | {axis})

    def split(self, dim: int, axis: str, entry: str) -> Placed:
        """Return the parameter with ``dim`` also split over ``axis``. The dim is padded if the axis does not divide it.
        A dim of one element, or one that cannot be padded, stays whole, with a warning.
        """
        free = self.layout.unbind([axis])
        if shared := [bound for bound in free.bound if free.mesh.overlap(bound, axis)]:
            raise PlanError(
                f"parameter {self.name!r} is split over {axis!r} and over {shared[0]!r}, which share ranks",
                plan_entry=" | ".join((*self.causes, entry)),
                fix="split it over the same axis, or over parts of it that share no ranks",
            )
        split = free.split(dim, axis)
        if split is None and self.shape[dim] > 1:
            split = grown(free, dim, axis, self.shape[dim])
        if split is None:
            warn(
                f"dim {dim} of parameter {self.name!r} of shape {self.shape} does not divide over axis {axis!r} "
                f"of size {free.mesh.size(axis)}; the parameter stays whole on {axis}",
                entry,
            )
        return replace(self, layout=split or free, causes=(*self.causes, entry))


def grown(layout: Layout, dim: int, axis: str, size: int) -> Layout | None:
    """Return ``layout`` also split over ``axis`` at ``dim``. Its ``size`` elements are padded until the axes of the dim
    divide them.

    None if an axis splits the dim inside of chunks, each of which would need padding.
    """
    mesh, axes = layout.mesh, (*layout.dim_axes(dim), axis)
    if any(digit.axis is None for digit in layout.dims[dim][:-1]):
        return None
    count = prod(mesh.size(a) for a in axes)
    digits = [*(Digit(mesh.size(a), a) for a in axes), Digit(-(-size // count))]
    return layout.replace(dims=[*layout.dims[:dim], digits, *layout.dims[dim + 1 :]])


def warn(text: str, entry: str) -> None:
    """Warn, with ``text``, that a parameter cannot have the layout that the plan ``entry`` asks for."""
    warnings.warn(str(PlanError(text, plan_entry=entry)), ShardcWarning, stacklevel=3)


@dataclass(frozen=True)
class SavePolicy:
    """Where activations of a module are kept until backward reads them, as a plan entry says (`shardc.save`).

    Args:
        module: the module's qualified name, "" for the root. Modules inside it are included.
        where: the place until backward: "host" or "device" memory; or "recompute", which does not save them.
        ops: names of the ops whose results are meant; () for all. The name of an op that capture decomposes, such as
            ``aten.linear``, stands for the product in its decomposition.
        entry: the plan entry, as text.
    """

    module: str
    where: str
    ops: tuple[str, ...]
    entry: str

    def comparable(self, module: str) -> SavePolicy:
        """Return the policy for ``module`` in a form that is equal for repeated blocks that can share a graph: without
        the entry's text, unless activations go to the host, where the text is part of the graph.
        """
        return replace(self, module=module, entry=self.entry if self.where == "host" else "")

    def names(self, op: object) -> bool:
        """Return whether the policy is about results of ``op`` (a node's target): it names ``op``, or no ops at all."""
        return not self.ops or any(is_named(op, name) for name in self.ops)


# Ops that capture writes as others: their product is the one result that takes long.
_PRODUCTS = {"aten.linear": "aten.mm", "aten.addmm": "aten.mm", "aten.baddbmm": "aten.bmm"}


def is_named(op: object, name: str) -> bool:
    """Return whether ``name`` (with or without an overload) is the name of ``op``, or of an op that capture decomposes
    into ``op``.
    """
    return f"{op}.".startswith(f"{_PRODUCTS.get(name.removesuffix('.default'), name)}.")
