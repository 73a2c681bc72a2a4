"""`Lazy`: a tensor that is read from its source when copied, and only the part that is copied."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

aten = torch.ops.aten
CPU = torch.device("cpu")
Read = Callable[[tuple[Sequence[int], ...]], torch.Tensor]
# Ops that return the same elements in the same order.
_SAME = {aten.detach.default, aten.alias.default, aten.clone.default, aten.contiguous.default, aten.lift_fresh.default}


class Lazy(torch.Tensor):
    """A CPU tensor without memory. Ops on it return lazy tensors; `value` and ``copy_`` from it read the elements.

    Slices and casts read only the elements they need. Any other op reads its operands in full.

    Args:
        meta: a meta tensor with its shape, strides and dtype.
        read: function from indices per dim to the elements there.
    """

    meta: torch.Tensor
    read: Read

    @staticmethod
    def __new__(cls, meta: torch.Tensor, read: Read) -> Lazy:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), storage_offset=meta.storage_offset(), dtype=meta.dtype, device=CPU
        )
        tensor.meta, tensor.read = meta, read
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Lazy({list(self.shape)}, {self.dtype})"

    def value(self) -> torch.Tensor:
        """Reads and returns all elements."""
        return self.read(tuple(range(size) for size in self.shape))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        source = args[0]
        if func._schema.is_mutable:
            return func(*pytree.tree_map_only(Lazy, Lazy.value, args), **kwargs)
        if func is aten._to_copy.default:
            kwargs.pop("device", None)
        metas = func(*pytree.tree_map_only(Lazy, lambda x: x.meta, args), **kwargs)
        if func in _SAME:
            return cls(metas, source.read)
        if func is aten._to_copy.default:
            return cls(metas, lambda index: source.read(index).to(metas.dtype))
        if func is aten.slice.Tensor:
            arguments: list[Any] = [*args[1:], *[0, None, None, 1][len(args) - 1 :]]
            return cls(metas, _narrowed(source, arguments[0], range(source.shape[arguments[0]])[slice(*arguments[1:])]))
        if func is aten.index_select.default:
            return cls(metas, _narrowed(source, args[1], args[2].tolist()))

        def read(at: int, index: tuple[Sequence[int], ...]) -> torch.Tensor:
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
        along = index[dim]
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
