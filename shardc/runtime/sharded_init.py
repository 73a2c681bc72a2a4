"""`Virtual` and `Lazy`: CPU tensors of global shape whose elements are not all in memory.

A `Virtual` has memory for this rank's shard, for initialisation. A `Lazy` tensor reads elements from its source when
they are copied.

Random fills of a `Virtual` have the values of a single device (`draw`). Each rank draws all chunks from the same CPU
generator and keeps its own elements, so the generator's state afterwards is that of one device too. torch's CPU fills
are sequential in the flat index, but ``normal_`` works in blocks of 16 and redraws the last 16 elements if the size is
no multiple of 16. So chunks are multiples of 16, and the last one has at least 16 elements.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import prod
from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from shardc import _compat
from shardc._compat import PyTree, is_inplace
from shardc.errors import InitError
from shardc.ir.layout import Layout
from shardc.ir.op_traits import draws
from shardc.runtime.gathered import written
from shardc.runtime.storage import cut, local_indices, padded_local, shard_tensor, take

aten = torch.ops.aten
CPU = torch.device("cpu")
Read = Callable[[tuple[Sequence[int], ...]], torch.Tensor]
# Ops that return the same elements in the same order.
_SAME = {aten.detach.default, aten.alias.default, aten.clone.default, aten.contiguous.default, aten.lift_fresh.default}


class Lazy(torch.Tensor):
    """A CPU tensor without memory of its own. An op on it returns another lazy tensor. The elements are read only by
    `value`, or when a tensor is filled from it by ``copy_``.

    Slices and casts read only the elements they need. Any other op reads its operands in full.

    Args:
        meta: a meta tensor with its shape, strides and dtype.
        read: function from indices per dim to the elements there.
    """

    meta: torch.Tensor
    read: Read

    @staticmethod
    def __new__(cls, meta: torch.Tensor, read: Read) -> Lazy:
        tensor = _compat.wrapper(cls, meta, CPU)
        tensor.meta, tensor.read = meta, read
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Lazy({list(self.shape)}, {self.dtype})"

    def value(self) -> torch.Tensor:
        """Returns this lazy tensor as a plain CPU tensor; reads all its elements."""
        return self.read(tuple(range(size) for size in self.shape))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> PyTree:  # type: ignore[override]
        """Runs an op on lazy tensors: returns lazy results, whose ``read`` runs the op when elements are needed."""
        kwargs = dict(kwargs or {})
        source = args[0]
        if func._schema.is_mutable:  # a plain tensor is filled from lazy ones, which are read now
            return func(*pytree.tree_map_only(Lazy, Lazy.value, args), **kwargs)
        if func is aten._to_copy.default:
            # It stays on the CPU: its elements go to a device when a tensor there is filled.
            kwargs.pop("device", None)
        # Shapes and dtypes of the results, without their elements.
        metas = func(*pytree.tree_map_only(Lazy, lambda x: x.meta, args), **kwargs)
        if func in _SAME:
            return cls(metas, source.read)
        if func is aten._to_copy.default:
            return cls(metas, lambda index: source.read(index).to(metas.dtype))
        if func is aten.slice.Tensor:
            # dim, start, end and step, with the op's defaults.
            arguments: list[Any] = [*args[1:], *[0, None, None, 1][len(args) - 1 :]]
            dim, *bounds = arguments
            return cls(metas, _narrowed(source, dim, positions=range(source.shape[dim])[slice(*bounds)]))
        if func is aten.index_select.default:
            return cls(metas, _narrowed(source, args[1], args[2].tolist()))

        def read(at: int, index: tuple[Sequence[int], ...]) -> torch.Tensor:
            """Runs the op on whole operands, and returns the elements at ``index`` of its result number ``at``."""
            results = func(*pytree.tree_map_only(Lazy, Lazy.value, args), **kwargs)
            return part(pytree.tree_leaves(results)[at], index)

        leaves, spec = pytree.tree_flatten(metas)
        leaf_results = [
            cls(meta, partial(read, at)) if isinstance(meta, torch.Tensor) else meta for at, meta in enumerate(leaves)
        ]
        return pytree.tree_unflatten(leaf_results, spec)


def _narrowed(source: Lazy, dim: int, positions: Sequence[int]) -> Read:
    """Returns a ``read`` function for a `Lazy` that has only the ``positions`` of ``source`` along ``dim``."""

    def read(index: tuple[Sequence[int], ...]) -> torch.Tensor:
        wanted = list(index)
        along = index[dim]  # indices into `positions`; a range stays a slice of these
        wanted[dim] = (
            positions[along.start : along.stop] if isinstance(along, range) else [positions[at] for at in along]
        )
        return source.read(tuple(wanted))

    return read


def part(value: torch.Tensor, index: tuple[Sequence[int], ...]) -> torch.Tensor:
    """Selects the elements of ``value`` at ``index``, a sequence of indices per dim."""
    for dim, positions in enumerate(index):
        if len(positions) < value.shape[dim]:
            value = value.index_select(dim, torch.tensor(list(positions), dtype=torch.int64, device=value.device))
    return value


BLOCK = 16
Fill = Callable[[torch.Tensor], object]


@dataclass(frozen=True)
class Piece:
    """This rank's elements of a parameter, a buffer or a view of one, during initialisation.

    Args:
        shape: global shape.
        indices: per dim, the global indices of the elements.
        local: tensor of the elements; None if this rank has none.
    """

    shape: tuple[int, ...]
    indices: tuple[Sequence[int], ...]
    local: torch.Tensor | None

    @property
    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        return prod(self.shape)


def draw(piece: Piece, fill: Fill, dtype: torch.dtype, limit: int) -> None:
    """Fills ``piece``, this rank's part of a tensor, with the values that ``fill`` gives the whole tensor. At most
    ``limit`` elements are drawn at once.
    """
    for start, values in drawn(piece.numel, fill, dtype, limit):
        place(piece, start, values)


def drawn(numel: int, fill: Fill, dtype: torch.dtype, limit: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Draws the values of a whole tensor of ``numel`` elements by ``fill``, chunk by chunk. Yields (flat index of the
    first, values) of each chunk.

    Chunks have at most about ``limit`` elements, and share a buffer. They are whole blocks of 16, in which
    ``normal_`` draws: the values are then those of one fill of the whole tensor.
    """
    step = max(limit // BLOCK, 1) * BLOCK
    buffer = torch.empty(min(numel, step + BLOCK), dtype=dtype)
    start = 0
    while start < numel:
        # The last chunk includes the remainder, so that it has at least one block.
        size = numel - start if numel - start < step + BLOCK else step
        fill(buffer[:size])
        yield start, buffer[:size]
        start += size


def place(piece: Piece, start: int, values: torch.Tensor) -> None:
    """Writes into ``piece`` this rank's elements among ``values``, which are consecutive elements of the whole
    tensor.

    Whole rows (indices of dim 0) are copied together. The first and the last row may be partial; these are placed as
    tensors of one dim less.

    Args:
        start: flat index of the first of ``values`` in the whole tensor.
    """
    if piece.local is None or piece.local.numel() == 0:
        return
    if not piece.shape:
        piece.local.copy_(values[0])
        return
    row = prod(piece.shape[1:])
    while values.numel():
        index, offset = divmod(start, row)  # the row of the next value, and its position there
        if offset or values.numel() < row:
            # Part of one row: recurse into its dims, if this rank has that row.
            size = min(row - offset, values.numel())
            at = bisect_left(piece.indices[0], index)
            if at < len(piece.indices[0]) and piece.indices[0][at] == index:
                place(Piece(piece.shape[1:], piece.indices[1:], piece.local[at]), offset, values[:size])
        else:
            rows = values.numel() // row
            size = rows * row
            _place_rows(piece, index, values[:size].view(rows, *piece.shape[1:]))
        start, values = start + size, values[size:]


def _place_rows(piece: Piece, first: int, block: torch.Tensor) -> None:
    """Copies this rank's elements of ``block``, rows of the whole tensor from row ``first``, into ``piece``."""
    assert piece.local is not None
    rows = piece.indices[0]
    low, high = bisect_left(rows, first), bisect_left(rows, first + block.shape[0])  # this rank's rows in the block
    block = take(block, 0, shifted(rows[low:high], first))
    for dim in range(1, block.dim()):
        block = take(block, dim, piece.indices[dim])
    piece.local[low:high].copy_(block)


def shifted(index: Sequence[int], by: int) -> Sequence[int]:
    """Subtracts ``by`` from each index; a `range` stays a `range`."""
    if isinstance(index, range):
        return range(index.start - by, index.stop - by)
    return [i - by for i in index]


def scatter(piece: Piece, flat: torch.Tensor, values: torch.Tensor) -> None:
    """Writes into ``piece`` those of ``values`` that are elements of this rank. ``flat`` has the flat index of each
    value in the whole tensor.
    """
    if piece.local is None or piece.local.numel() == 0:
        return
    mask = torch.ones_like(flat, dtype=torch.bool)  # whether the value is at an index of this rank, in every dim
    position = []  # per dim, where each value goes in the local tensor
    for index, coordinate in zip(piece.indices, torch.unravel_index(flat, piece.shape), strict=True):
        sorted_index = torch.as_tensor(index)
        # Also for coordinates that this rank does not have: the comparison then masks them.
        at = torch.searchsorted(sorted_index, coordinate.contiguous()).clamp_(max=len(index) - 1)
        mask &= sorted_index[at] == coordinate
        position.append(at)
    piece.local[tuple(at[mask] for at in position)] = values[mask]


# In-place elementwise ops without the pointwise tag; they overwrite all previous values, as random ones do.
_FILLS = {
    *(aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.copy_.default),
    *(aten._foreach_zero_.default, aten._foreach_copy_.default),
}
# Factories that take a tensor; they return plain tensors if small.
_FACTORIES = {
    *(aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default),
    *(aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default),
}
_FIX = (
    "initialise with in-place fills and elementwise ops (torch.nn.init.normal_, uniform_, zeros_, ...), "
    "or build the model on a real device"
)


@dataclass(eq=False)
class InitShard:
    """This rank's shard of a parameter or buffer during initialisation, and which views of it were filled.

    Args:
        name, shape: qualified name and global shape.
        storage: storage layout; None if the tensor is replicated.
        indices: per dim, the global indices of this rank's shard.
        rank: rank on the layout's mesh.
        before: the tensor before: on ``meta``, unsharded, or a DTensor with this layout.
        limit: largest number of elements to draw at once.
        written: views of it that were filled, as (offset, shape, strides).
    """

    name: str
    shape: tuple[int, ...]
    storage: Layout | None
    indices: tuple[Sequence[int], ...]
    rank: int
    before: torch.Tensor
    limit: int
    written: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = field(default_factory=set)

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, storage: Layout | None, rank: int, limit: int) -> InitShard:
        """Makes the `InitShard` of ``tensor``, a parameter or buffer. It counts as filled unless it is on ``meta``.
        At most ``limit`` elements may be drawn at once.
        """
        shape = tuple(tensor.shape)
        dims = range(len(shape))
        indices = [range(shape[dim]) if storage is None else local_indices(storage, shape, dim, rank) for dim in dims]
        shard = cls(name, shape, storage, tuple(indices), rank, tensor, limit)
        if not tensor.is_meta:
            shard.mark_filled(Virtual.whole(shard))
        return shard

    @property
    def dtype(self) -> torch.dtype:
        return self.before.dtype

    @cached_property
    def padded(self) -> torch.Tensor:
        """Local shard with padding, in CPU memory: a copy of the tensor's values, or zeros if the tensor is on
        ``meta``.
        """
        with torch._C.DisableTorchFunction():  # a mode may return this for the tensor
            before = self.before.detach()
            if before.is_meta:
                return torch.zeros(self.shape if self.storage is None else self.storage.local_shape, dtype=self.dtype)
            if self.storage is None:
                return before.cpu().clone()
            if isinstance(before, DTensor):
                return padded_local(before, self.storage).to(CPU, copy=True)
            return shard_tensor(before, self.storage, self.rank).cpu()

    @cached_property
    def local(self) -> torch.Tensor:
        """View of `padded` without the padding."""
        return self.padded if self.storage is None else cut(self.padded, list(map(len, self.indices)))

    @property
    def touched(self) -> bool:
        """Whether an op has read or written the values of the parameter or buffer."""
        return "padded" in vars(self)

    @cached_property
    def whole(self) -> bool:
        """Whether this rank holds every element of the parameter or buffer."""
        return tuple(map(len, self.indices)) == self.shape

    def mark_filled(self, view: Virtual) -> None:
        """Records that the elements of ``view`` have been filled, for `check_written`."""
        self.written.add((int(view.storage_offset()), tuple(view.shape), view.stride()))

    def is_filled(self, view: torch.Tensor) -> bool:
        """Whether all elements of ``view``, a tensor with the shape and strides of a view of this one, were filled."""
        whole = torch.empty(self.shape, device="meta")
        if not view.numel() or (0, self.shape, whole.stride()) in self.written:  # empty, or all is filled
            return True
        filled = torch.zeros(whole.numel(), dtype=torch.bool)
        for offset, shape, stride in self.written:
            filled.as_strided(shape, stride, offset).fill_(True)
        return bool(filled.as_strided(view.shape, view.stride(), int(view.storage_offset())).all())

    def check_written(self) -> None:
        """Raises InitError if an element of the tensor is in no filled view."""
        if self.is_filled(torch.empty(self.shape, device="meta")):
            return
        extent = "only a part" if self.written else "nothing"
        raise InitError(
            f"{self.name!r} is on meta and the initialisation filled {extent} of it",
            fix="fill it in the function given to init_weights, or in its module's reset_parameters()",
        )


class Virtual(torch.Tensor):
    """CPU tensor of global shape, a parameter or buffer during initialisation, that stores only this rank's shard. It
    may also be a view of such a tensor, in the same memory; ``meta`` has the view's shape and strides.
    """

    meta: torch.Tensor
    init_shard: InitShard

    @staticmethod
    def __new__(cls, meta: torch.Tensor, shard: InitShard) -> Virtual:
        view = _compat.wrapper(cls, meta, CPU)
        view.meta, view.init_shard = meta, shard
        return view

    @classmethod
    def whole(cls, shard: InitShard) -> Virtual:
        """Makes the `Virtual` of a whole parameter or buffer, not of a view."""
        return cls(torch.empty(shard.shape, dtype=shard.dtype, device="meta"), shard)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        # Initialisers that write ``param.data = ...``: a copy of this rank's part; only of the whole tensor, no view.
        if tuple(value.shape) != self.init_shard.shape or value.dtype != self.dtype or self.storage_offset():
            raise unsupported(".data =", self, f"by a tensor of shape {list(value.shape)}, {value.dtype}")
        with torch.no_grad():
            self.copy_(value)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Virtual({self.init_shard.name}, {list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> PyTree:  # type: ignore[override]
        """Runs an op on this rank's shards: views, random fills, fills and elementwise ops in place, factories. Raises
        InitError for any other op on a tensor that is split.
        """
        kwargs = kwargs or {}
        target = args[0]
        if func.is_view and isinstance(target, Virtual):
            # No elements move: the meta tensors track the strides and offset of the view.
            views = func(*pytree.tree_map_only(Virtual, lambda view: view.meta, args), **kwargs)
            return pytree.tree_map_only(torch.Tensor, lambda view: cls(view, target.init_shard), views)
        views = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Virtual)]
        for view in _read(func, args, kwargs, views):
            if not view.init_shard.is_filled(view.meta):
                raise unsupported(
                    func, view, "while it is on meta and some of the elements that this reads were not filled"
                )
        # Any op will do on tensors that are not split.
        if all(view.init_shard.whole for view in views):
            return _on_whole(func, args, kwargs)
        if func in _FACTORIES and isinstance(target, Virtual):
            return _factory(func, target, args, kwargs)
        # From here on, ops that write the shard of their first argument.
        if not isinstance(target, Virtual) or not is_inplace(func):
            raise unsupported(func, views[0])
        # `draw` fills in the order of flat indices, as torch does for contiguous tensors only.
        if draws(func) and target.meta.is_contiguous():
            fill: Callable[[torch.Tensor], object] = lambda buffer: func(buffer, *args[1:], **kwargs)  # noqa: E731
            draw(piece_of(func, target), fill, target.dtype, target.init_shard.limit)
            target.init_shard.mark_filled(target)
        elif func in _FILLS or torch.Tag.pointwise in func.tags:
            _elementwise(func, target, args, kwargs)
        else:
            raise unsupported(func, target)
        return target


def _read(
    func: OpOverload, args: Sequence[PyTree], kwargs: Mapping[str, PyTree], views: Sequence[Virtual]
) -> Iterator[Virtual]:
    """Yields those of ``views``, the operands of ``func``, whose values it reads: not those that it only overwrites."""
    name = func._schema.name.removeprefix("aten::")
    if name.startswith("new_") or name.endswith("_like"):  # a new tensor of the same shape
        return
    # An op in place that is no fill leaves elements as they are (`index_put_`), or computes with them (`mul_`).
    overwrites = not is_inplace(func) or func in _FILLS or draws(func)
    overwritten = set(map(id, written(func, tuple(args), dict(kwargs)))) if overwrites else set()
    yield from (view for view in views if id(view) not in overwritten)


def _on_whole(func: OpOverload, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> PyTree:
    """Runs any op on `Virtual` operands that this rank holds completely, by their local tensors, and returns the
    result.
    """

    def local(view: Virtual) -> torch.Tensor:
        """Returns the view of the parameter's local tensor, which is the whole one, that ``view`` stands for."""
        whole = view.init_shard.local
        return whole.as_strided(view.shape, view.stride(), whole.storage_offset() + view.storage_offset())

    result = func(*pytree.tree_map_only(Virtual, local, args), **pytree.tree_map_only(Virtual, local, kwargs))
    written_views = [x for x in written(func, tuple(args), dict(kwargs)) if isinstance(x, Virtual)]
    for view in written_views:
        view.init_shard.mark_filled(view)
    # An op in place returns its first argument.
    return args[0] if written_views and written_views[0] is args[0] else result


def _factory(func: OpOverload, target: Virtual, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> torch.Tensor:
    """Runs an op that makes a new tensor like ``target`` (``zeros_like``); the result is a plain CPU tensor. Raises
    InitError if it has over ``limit`` elements.
    """
    meta = func(target.meta, *args[1:], **kwargs)
    if meta.numel() > target.init_shard.limit:
        raise unsupported(func, target, f"with a whole tensor of shape {list(meta.shape)}")
    return func(target.meta, *args[1:], **{**kwargs, "device": CPU})


def _elementwise(func: OpOverload, target: Virtual, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> None:
    """Runs an in-place elementwise op on the shard of ``target``, with the matching elements of the other operands."""
    piece = piece_of(func, target)

    def cut_like(other: torch.Tensor) -> torch.Tensor:
        """Returns the elements of operand ``other`` at the positions of this rank's elements of ``target``."""
        if isinstance(other, Virtual):
            # Nothing is communicated: the other shard must have the same elements.
            others = piece_of(func, other)
            if (others.shape, others.indices) != (piece.shape, piece.indices):
                raise unsupported(func, other)
            assert others.local is not None
            return others.local
        if other.is_meta:
            raise unsupported(func, target, "from a tensor on meta, which has no values")
        if other.dim() == 0:
            return other
        # A plain operand is whole on every rank.
        shard = torch.broadcast_to(other, piece.shape)
        for dim, index in enumerate(piece.indices):
            shard = take(shard, dim, index)
        return shard

    if piece.local is not None:  # else other ranks have all elements of the view
        rest, kwargs = pytree.tree_map_only(torch.Tensor, cut_like, (tuple(args[1:]), dict(kwargs)))
        func(piece.local, *rest, **kwargs)
    if func in _FILLS:
        target.init_shard.mark_filled(target)


def piece_of(func: object, view: Virtual) -> Piece:
    """Returns the elements of ``view``, a view of a parameter, that this rank holds, as a `Piece`. They are found by
    the view's offset, shape and strides.

    Each dim of the view must be a range of one dim of the parameter, with one index along the parameter's other dims.
    """
    shard = view.init_shard
    # The parameter is contiguous.
    strides = [prod(shard.shape[dim + 1 :]) for dim in range(len(shard.shape))]
    # Index, along each dim of the parameter, of the view's first element.
    starts, rest = [], int(view.storage_offset())
    for stride in strides:
        start, rest = divmod(rest, max(stride, 1))
        starts.append(start)
    # For each dim of the view, the parameter's dim; then for each of these dims, the view's size.
    sources = _source_dims(func, view, starts, strides)
    lengths = {source: size for source, size in zip(sources, view.shape, strict=True) if source is not None}
    local = shard.local
    indices: list[Sequence[int]] = []
    for dim, index in enumerate(shard.indices):
        # Of this rank's indices along the dim, those in the view, counted from the view's first element.
        low, high = bisect_left(index, starts[dim]), bisect_left(index, starts[dim] + lengths.get(dim, 1))
        local = local.narrow(dim, low, high - low)
        indices.append(shifted(index[low:high], starts[dim]))
    # A dim of size 1 of the view (source None) is no dim of the parameter.
    shape, held_by_view = tuple(view.shape), tuple(range(1) if s is None else indices[s] for s in sources)
    # The view is at one index along these dims, which this rank may not have.
    single = [dim for dim in range(len(shard.shape)) if dim not in lengths]
    if any(not indices[dim] for dim in single):
        return Piece(shape, held_by_view, None)
    # In the order of the view's dims. Those of one index have size 1, and vanish or become its dims of size 1.
    return Piece(shape, held_by_view, local.permute(*lengths, *single).view(list(map(len, held_by_view))))


def _source_dims(func: object, view: Virtual, starts: Sequence[int], strides: Sequence[int]) -> list[int | None]:
    """Returns, for each dim of ``view``, the dim of the parameter of which it is a range, found by its stride; None for
    a dim of size 1. Raises InitError if there is none.

    Args:
        starts: index, along each dim of the parameter, of the view's first element.
        strides: those of the parameter.
    """
    shape = view.init_shard.shape
    sources: list[int | None] = []
    for size, view_stride in zip(view.shape, view.stride(), strict=True):
        fitting = [d for d, stride in enumerate(strides) if stride == view_stride and shape[d] > 1 and d not in sources]
        if size == 1:
            sources.append(None)
        # The range must end within the dim.
        elif fitting and starts[fitting[0]] + size <= shape[fitting[0]]:
            sources.append(fitting[0])
        else:
            raise unsupported(func, view, f"through a view of shape {list(view.shape)}, strides {list(view.stride())}")
    return sources


def unsupported(func: object, view: Virtual, how: str = "shard by shard") -> InitError:
    """Returns the InitError for the op ``func``, which cannot initialise ``view``. ``how`` says in which way it was
    tried ("shard by shard").
    """
    return InitError(
        f"{func} cannot initialise {view.init_shard.name!r} ({list(view.init_shard.shape)}) {how}",
        source=_caller(),
        fix=_FIX,
    )


def _caller() -> str:
    """Returns ``file:line`` of the innermost frame outside of torch and shardc."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "shardc", "contextlib"):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
