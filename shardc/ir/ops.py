"""Marker ops: targets of FX nodes that move data in the global graph, and are lowered before it runs.

Each takes a value at its global shape and returns the same value in another layout; the layouts are those of the nodes
(`shardc.ir.graph.Value`). `passes/lower/localize.py` lowers them to local ops and collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from torch import Tensor


def _never(name: str) -> NoReturn:
    """Raise the error for a call of the marker op ``name``, which no graph runs."""
    raise RuntimeError(f"shardc.ir.ops.{name} is a graph marker and is never run; localize the graph first")


def tag(x: Tensor, *, name: str) -> Tensor:
    """Returns ``x``; marks it as the input or output of the module ``name``, to which plan entries apply."""
    _never("tag")


def reshard(x: Tensor, *, to: str = "") -> Tensor:
    """Returns ``x`` in the layout that is recorded on the node; a pass lowers this op to the collectives below.

    ``to`` is kept empty: the text form shows the layout in the type.
    """
    _never("reshard")


def all_gather(x: Tensor, *, axis: str) -> Tensor:
    """Gathers over ``axis`` (names joined by commas), which then no longer splits the value."""
    _never("all_gather")


def reduce_scatter(x: Tensor, *, axis: str, op: str = "sum") -> Tensor:
    """Reduces over ``axis`` by the reduce op ``op``; the axis then splits the result."""
    _never("reduce_scatter")


def all_reduce(x: Tensor, *, axis: str, op: str = "sum") -> Tensor:
    """Reduces over ``axis`` by the reduce op ``op``; every rank along it has the result."""
    _never("all_reduce")


def all_to_all(x: Tensor, *, axis: str) -> Tensor:
    """Moves ``axis`` from the dim (or factor of one) that it splits to another."""
    _never("all_to_all")


def permute_ranks(x: Tensor, *, axis: str) -> Tensor:
    """Sends shards to other ranks, so that mesh axes exchange the dims, or the factors of dims, that they split."""
    _never("permute_ranks")


def shard(x: Tensor, *, axis: str) -> Tensor:
    """Takes each rank's slice along ``axis`` of a replicated value; no communication."""
    _never("shard")


def to_partial(x: Tensor, *, axis: str, op: str = "sum") -> Tensor:
    """Turns a replicated value into a pending reduction ``op`` over ``axis``; no communication."""
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
