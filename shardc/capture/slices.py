"""Finds slices by number in Dynamo's graph: nodes that are element i, or the i-th of equal pieces, along one dim of a
tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

WHOLE = slice(None)
Index = tuple[int | None | tuple[Any, Any, Any], ...]  # a slice as (start, stop, step), to be hashable


@dataclass(frozen=True)
class Series:
    """All slices of a tensor along one dim. Slice number i is element i, or the i-th piece of ``size`` elements, of dim
    ``dim`` of ``source``; ``rest`` indexes the other dims.

    Args:
        source: the tensor.
        dim: the dim that is cut.
        size: number of elements of a slice; None if a slice does not have the dim.
        rest: index of the slice, ``()`` for all of it.
    """

    source: fx.Node
    dim: int
    size: int | None
    rest: Index = ()

    @property
    def index(self) -> tuple[Any, ...]:
        """Return ``rest``, which is stored in hashable form, as an index for a tensor."""
        return tuple(slice(*x) if isinstance(x, tuple) else x for x in self.rest)

    @property
    def count(self) -> int:
        """Return the number of slices in the series; 0 if the dim is not divisible into pieces of equal size."""
        length = value_of(self.source).shape[self.dim]
        return length // (self.size or 1) if length % (self.size or 1) == 0 else 0


def value_of(node: fx.Node) -> Any:
    """Return the example value of a node, or None."""
    return node.meta.get("example_value")


def memory_of(node: fx.Node) -> Any:
    """Return an id of the memory of the tensor ``node``; a tensor and its views have equal ids. None for other values.

    A tensor of a transform of ``torch.func`` has the id of the tensor that it wraps.
    """
    x = value_of(node)
    if not isinstance(x, Tensor):
        return None
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x.untyped_storage()._cdata if x.layout is torch.strided else id(x)


def slices(node: fx.Node) -> Iterator[tuple[Series, int]]:
    """Yield (series, number) for each way in which ``node`` is slice ``number`` of a series. ``x[1, 2]`` is slice 1
    along dim 0 and slice 2 along dim 1.
    """
    # The parameters of ``select`` and ``narrow`` (whose third, the start, is "index" here).
    named = arguments(node, "input", "dim", "index", "length")
    source = named.get("input")
    if not isinstance(source, fx.Node):
        return
    if node.target is operator.getitem:
        if isinstance(value_of(source), (tuple, list)):
            yield from _of_tuple(source, node.args[1])
        elif isinstance(value_of(source), Tensor):
            yield from indexed(source, node.args[1])
    elif not isinstance(value_of(source), Tensor) or not all(isinstance(named.get(x), int) for x in ("dim", "index")):
        return
    elif node.target in ("select", torch.select):
        yield Series(source, named["dim"] % value_of(source).ndim, None), named["index"]
    elif node.target in ("narrow", torch.narrow) and isinstance(named.get("length"), int):
        yield from _piece(source, named["dim"] % value_of(source).ndim, named["index"], named["length"], ())


def arguments(node: fx.Node, *names: str) -> dict[str, Any]:
    """Return name -> argument of a call. ``names`` are the names of the positional parameters."""
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def indexed(source: fx.Node, index: Any) -> Iterator[tuple[Series, int]]:
    """Yield (series, number) for each way in which ``source[index]`` is slice ``number`` of a series."""
    shape = value_of(source).shape
    entries = list(index) if isinstance(index, tuple) else [index]
    if not all(x is None or x is Ellipsis or type(x) is int or isinstance(x, slice) for x in entries):
        return
    if Ellipsis in (non_slices := [x for x in entries if not isinstance(x, slice)]):
        at = next(at for at, x in enumerate(entries) if x is Ellipsis)
        missing = len(shape) - sum(x is not None and x is not Ellipsis for x in entries)
        entries[at : at + 1] = [WHOLE] * missing
        if Ellipsis in non_slices[non_slices.index(Ellipsis) + 1 :]:  # a second one, which torch refuses
            return
    dims = [at - entries[:at].count(None) for at in range(len(entries))]  # the dim of the source for each entry
    for at, entry in enumerate(entries):
        if type(entry) is int:
            yield Series(source, dims[at], None, _rest([*entries[:at], *entries[at + 1 :]])), entry
        elif isinstance(entry, slice) and entry != WHOLE and entry.step in (None, 1):
            start, stop, _ = entry.indices(shape[dims[at]])
            rest = _rest([*entries[:at], WHOLE, *entries[at + 1 :]])
            yield from _piece(source, dims[at], start, stop - start, rest)


def _rest(entries: Sequence[Any]) -> Index:
    """Return the index ``entries`` in hashable form, or () if it selects everything."""
    if all(isinstance(x, slice) and x == WHOLE for x in entries):
        return ()
    return tuple((x.start, x.stop, x.step) if isinstance(x, slice) else x for x in entries)


def _of_tuple(pieces: fx.Node, at: Any) -> Iterator[tuple[Series, int]]:
    """Yield (series, number) if item ``at`` of ``pieces`` is a slice. ``pieces`` is a call that returns a tuple, such
    as ``unbind`` or ``split``.
    """
    # Function -> the name of its second parameter.
    second = {"unbind": "dim", "split": "split_size_or_sections", "chunk": "chunks"}
    name = pieces.target if pieces.op == "call_method" else getattr(pieces.target, "__name__", "")
    if name not in second or type(at) is not int:
        return
    named = arguments(pieces, "input", second[name], *(["dim"] if name != "unbind" else []))
    source, dim = named.get("input"), named.get("dim", 0)
    if not isinstance(source, fx.Node) or not isinstance(value_of(source), Tensor) or type(dim) is not int:
        return
    dim %= value_of(source).ndim
    if name == "unbind":
        yield Series(source, dim, None), at
    else:  # pieces of ``split`` or ``chunk`` may differ in size: these are no series
        sizes = {x.shape[dim] for x in value_of(pieces)}
        if len(sizes) == 1:
            yield Series(source, dim, sizes.pop()), at


def _piece(source: fx.Node, dim: int, start: int, size: int, rest: Index) -> Iterator[tuple[Series, int]]:
    """Yield (series, number) if the ``size`` elements of ``dim`` from ``start`` on are one of equal pieces: piece
    ``number`` of the series of all such pieces. Yield nothing if ``start`` is no multiple of ``size``.

    ``rest`` is the index of the piece.
    """
    if size > 0 and start % size == 0:
        yield Series(source, dim, size, rest), start // size
