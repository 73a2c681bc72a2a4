"""Slices by number in Dynamo's graph: element i, or the i-th piece, of one dim of a tensor."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

WHOLE = slice(None)
Index = tuple[int | None | tuple[Any, Any, Any], ...]  # a slice as (start, stop, step), to be hashable


@dataclass(frozen=True)
class Series:
    """The slices of a tensor that differ in one number: ``source`` cut along ``dim``, then indexed by ``rest``.

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
        """Return ``rest`` as an index."""
        return tuple(slice(*x) if isinstance(x, tuple) else x for x in self.rest)

    @property
    def count(self) -> int:
        """Return how many slices the tensor has; 0 if they do not have equal sizes."""
        length = value_of(self.source).shape[self.dim]
        return length // (self.size or 1) if length % (self.size or 1) == 0 else 0


def value_of(node: fx.Node) -> Any:
    """Return the example value of a node, or None."""
    return node.meta.get("example_value")


def slices(node: fx.Node) -> Iterator[tuple[Series, int]]:
    """Yield each (series, number) such that ``node`` is this slice of the series; an index of several numbers has
    several.
    """
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
    """Return the arguments of a call by name, given the names of the positional ones."""
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def indexed(source: fx.Node, index: Any) -> Iterator[tuple[Series, int]]:
    """Yield each (series, number) such that ``source[index]`` is this slice of the series."""
    shape = value_of(source).shape
    entries = list(index) if isinstance(index, tuple) else [index]
    if not all(x is None or x is Ellipsis or type(x) is int or isinstance(x, slice) for x in entries):
        return
    if Ellipsis in (plain := [x for x in entries if not isinstance(x, slice)]):
        at = next(at for at, x in enumerate(entries) if x is Ellipsis)
        missing = len(shape) - sum(x is not None and x is not Ellipsis for x in entries)
        entries[at : at + 1] = [WHOLE] * missing
        if Ellipsis in plain[plain.index(Ellipsis) + 1 :]:
            return
    dims = [at - entries[:at].count(None) for at in range(len(entries))]
    for at, entry in enumerate(entries):
        if type(entry) is int:
            yield Series(source, dims[at], None, _rest([*entries[:at], *entries[at + 1 :]])), entry
        elif isinstance(entry, slice) and entry != WHOLE and entry.step in (None, 1):
            start, stop, _ = entry.indices(shape[dims[at]])
            rest = _rest([*entries[:at], WHOLE, *entries[at + 1 :]])
            yield from _piece(source, dims[at], start, stop - start, rest)


def _rest(entries: Sequence[Any]) -> Index:
    """Return the index ``entries`` in hashable form; () if it takes all of a slice."""
    if all(isinstance(x, slice) and x == WHOLE for x in entries):
        return ()
    return tuple((x.start, x.stop, x.step) if isinstance(x, slice) else x for x in entries)


def _of_tuple(pieces: fx.Node, at: Any) -> Iterator[tuple[Series, int]]:
    """Yield (series, number) of item ``at`` of ``pieces``, a call of ``unbind``, ``split`` or ``chunk``, if it is a
    slice.
    """
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
    else:
        sizes = {x.shape[dim] for x in value_of(pieces)}
        if len(sizes) == 1:
            yield Series(source, dim, sizes.pop()), at


def _piece(source: fx.Node, dim: int, start: int, size: int, rest: Index) -> Iterator[tuple[Series, int]]:
    """Yield (series of pieces of ``size`` elements along ``dim``, number of the piece that begins at ``start``), if it
    is one.

    ``rest`` is the index of the piece.
    """
    if size > 0 and start % size == 0:
        yield Series(source, dim, size, rest), start // size
