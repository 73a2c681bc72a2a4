"""The data-movement ops of the global graph: FX targets that say what moves, never run.

Each takes a value at its global shape and returns the same global value under another layout; the
layouts stand on the nodes (`shardc.ir.graph.Value`). `passes/localize.py` spells them as local ops and
collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


def _never(name: str) -> NoReturn:
    raise RuntimeError(f"shardc.ir.ops.{name} is a graph marker and is never run; localize the graph first")


def tag(x: Any, *, name: str) -> Any:
    """Names the output or input of a module, so that a plan entry finds it; an identity."""
    _never("tag")


def reshard(x: Any, *, to: str = "") -> Any:
    """Any change of layout, before it is spelled as the ops below; the target layout is the node's own.

    ``to`` is kept empty: the text form shows the layout in the type.
    """
    _never("reshard")


def all_gather(x: Any, *, axis: str) -> Any:
    """``axis`` (names joined by commas) no longer splits the value."""
    _never("all_gather")


def reduce_scatter(x: Any, *, axis: str, op: str = "sum") -> Any:
    """A pending reduction over ``axis`` is done, and ``axis`` splits the result."""
    _never("reduce_scatter")


def all_reduce(x: Any, *, axis: str, op: str = "sum") -> Any:
    """A pending reduction over ``axis`` is done, and every rank along it holds the result."""
    _never("all_reduce")


def all_to_all(x: Any, *, axis: str) -> Any:
    """``axis`` moves from one digit to another."""
    _never("all_to_all")


def permute_ranks(x: Any, *, axis: str) -> Any:
    """Whole shards change ranks: the axes exchange their digits."""
    _never("permute_ranks")


def shard(x: Any, *, axis: str) -> Any:
    """Each rank along ``axis`` takes its own slice of what it holds whole; nothing moves."""
    _never("shard")


def to_partial(x: Any, *, axis: str, op: str = "sum") -> Any:
    """A whole value as a pending reduction over ``axis``; nothing moves."""
    _never("to_partial")


def pad(x: Any, *, dim: int, size: int) -> Any:
    """``dim`` grown to ``size`` with zeros at its end."""
    _never("pad")


def unpad(x: Any, *, dim: int, size: int) -> Any:
    """``dim`` cut to its first ``size`` elements."""
    _never("unpad")


COLLECTIVES: tuple[Callable[..., Any], ...] = (all_gather, reduce_scatter, all_reduce, all_to_all, permute_ranks)
LOCAL_MOVES: tuple[Callable[..., Any], ...] = (shard, to_partial)
_EVERY: tuple[Callable[..., Any], ...] = (*COLLECTIVES, *LOCAL_MOVES, tag, reshard, pad, unpad)
MARKERS: dict[str, Callable[..., Any]] = {f.__name__: f for f in _EVERY}
