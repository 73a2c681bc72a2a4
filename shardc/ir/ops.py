"""Marker ops: targets of FX nodes that move data in the global graph, and are lowered before it runs.

Each takes a value at its global shape and returns the same value in another layout; the layouts are those of the nodes
(`shardc.ir.graph.Value`). `passes/lower/localize.py` lowers them to local ops and collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from torch import Tensor


def _never(name: str) -> NoReturn:
    """Raise a RuntimeError: the marker op ``name`` was called, although marker ops are lowered before a graph runs."""
    raise RuntimeError(f"shardc.ir.ops.{name} is a graph marker and is never run; localize the graph first")


def tag(x: Tensor, *, name: str) -> Tensor:
    """Marker op that returns ``x``. It marks ``x`` as the activation ``name``, an input or output of a module such as
    ``layers.0.output.0``, to which plan entries may give a layout.
    """
    _never("tag")


def reshard(x: Tensor, *, to: str = "") -> Tensor:
    """Marker op that returns ``x`` in another layout, the one recorded on the node. A pass lowers it to collectives and
    local moves, other ops of this file.

    ``to`` is kept empty: the text form shows the layout in the type.
    """
    _never("reshard")


def all_gather(x: Tensor, *, axis: str) -> Tensor:
    """All-gathers ``x`` over ``axis`` (one mesh axis, or several joined by commas). The axis does not split the
    result.
    """
    _never("all_gather")


def reduce_scatter(x: Tensor, *, axis: str, op: str = "sum") -> Tensor:
    """Reduces ``x`` over the mesh axis ``axis`` by the reduce op ``op``, and scatters the result: the axis splits
    it.
    """
    _never("reduce_scatter")


def all_reduce(x: Tensor, *, axis: str, op: str = "sum") -> Tensor:
    """Reduces ``x`` over the mesh axis ``axis`` by the reduce op ``op``. Every rank along the axis has the result."""
    _never("all_reduce")


def all_to_all(x: Tensor, *, axis: str) -> Tensor:
    """Changes which dim the mesh axis ``axis`` splits. It splits one dim (or factor of a dim) of ``x``, and another one
    of the result.
    """
    _never("all_to_all")


def permute_ranks(x: Tensor, *, axis: str) -> Tensor:
    """Sends whole shards of ``x`` to other ranks. In the result, the mesh axes ``axis`` have exchanged the dims (or
    factors of dims) that they split.
    """
    _never("permute_ranks")


def shard(x: Tensor, *, axis: str) -> Tensor:
    """Takes each rank's slice of the replicated ``x``, so that the mesh axis ``axis`` splits the result. No
    communication.
    """
    _never("shard")


def to_partial(x: Tensor, *, axis: str, op: str = "sum") -> Tensor:
    """Turns the replicated ``x`` into a value with a pending reduction ``op`` over the mesh axis ``axis``. No
    communication.
    """
    _never("to_partial")


def pad(x: Tensor, *, dim: int, size: int) -> Tensor:
    """Pads ``dim`` to ``size`` with zeros at its end."""
    _never("pad")


def unpad(x: Tensor, *, dim: int, size: int) -> Tensor:
    """Cuts ``dim`` to its first ``size`` elements."""
    _never("unpad")


COLLECTIVES: tuple[Callable[..., Tensor], ...] = (all_gather, reduce_scatter, all_reduce, all_to_all, permute_ranks)
LOCAL_MOVES: tuple[Callable[..., Tensor], ...] = (shard, to_partial)
_EVERY: tuple[Callable[..., Tensor], ...] = (*COLLECTIVES, *LOCAL_MOVES, tag, reshard, pad, unpad)
MARKERS: dict[str, Callable[..., Tensor]] = {f.__name__: f for f in _EVERY}
