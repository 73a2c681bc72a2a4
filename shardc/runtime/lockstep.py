"""Every rank of a mesh stepped in lockstep inside one process, with no process group.

A value is one tensor a rank (`PerRank`). Local ops run rank by rank; a collective reads the tensors of
all ranks of its group, which its name says. Passes are tested by it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils._pytree import tree_map

from shardc.ir.comm import group_axes, group_name
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh


class PerRank(list[Any]):
    """One value a rank: a tensor, or a list of tensors where an op makes several."""


class Lockstep:
    """All ranks of ``mesh`` at once. Also a builder (`shardc.passes.spell.Builder`) that computes eagerly."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    # --- the builder's interface

    def call(self, target: OpOverload, *args: Any, **kwargs: Any) -> Any:
        """``target`` on every rank: `PerRank` arguments rank by rank, others as they are."""
        if target.namespace in ("_c10d_functional", "shardc"):
            return self._collective(target, args)
        return self._each(target, args, kwargs)

    def coordinate(self, axes: tuple[str, ...]) -> PerRank:
        return PerRank(torch.tensor([flat_index(self.mesh, axes, rank)]) for rank in range(self.mesh.ranks))

    def shape(self, x: PerRank) -> tuple[int, ...]:
        return tuple(x[0].shape)

    def group(self, axes: tuple[str, ...]) -> tuple[int, str]:
        return prod(self.mesh.size(axis) for axis in axes), group_name(axes)

    def _each(self, function: Callable[..., Any], args: Any, kwargs: Any) -> PerRank:
        def of_rank(rank: int) -> Any:
            def pick(x: Any) -> Any:
                return x[rank] if isinstance(x, PerRank) else x

            picked = tree_map(pick, (args, kwargs), is_leaf=lambda x: isinstance(x, PerRank))
            return function(*picked[0], **picked[1])

        return PerRank(of_rank(rank) for rank in range(self.mesh.ranks))

    # --- collectives

    def _collective(self, target: OpOverload, args: Sequence[Any]) -> Any:
        name = target._opname
        if name == "wait_tensor":
            return args[0]
        x, *options, group = args
        groups = _groups(self.mesh, group_axes(group))
        if name.removesuffix("_").endswith("_coalesced"):
            each = _COLLECTIVES[name.removesuffix("_").removesuffix("_coalesced")]
            results = [_run_groups(each, one, options, groups, len(args)) for one in x]
            return PerRank([result[rank] for result in results] for rank in range(self.mesh.ranks))
        return _run_groups(_COLLECTIVES[name.removesuffix("_")], x, options, groups, len(args))

    # --- global values

    def shard(self, x: torch.Tensor, layout: Layout) -> PerRank:
        """The shards of global ``x``; over a partial axis the first rank has the value, the others nothing to add."""
        shards = PerRank(x[_indices(layout, rank)].clone() for rank in range(self.mesh.ranks))
        for axis, op in layout.partial:
            if op in ("sum", "product"):
                for rank in range(self.mesh.ranks):
                    if self.mesh.index(axis, rank):
                        shards[rank] = torch.full_like(shards[rank], 0 if op == "sum" else 1)
        return shards

    def scatter_terms(self, x: torch.Tensor, layout: Layout, generator: torch.Generator) -> PerRank:
        """As `shard`, but with random integers as the terms of pending sums, and random losers of max and min."""
        terms = list(_random_terms(x, self.mesh, layout, generator))
        return PerRank(terms[_term(layout, rank)][_indices(layout, rank)].clone() for rank in range(self.mesh.ranks))

    def assemble(self, values: Sequence[torch.Tensor], layout: Layout) -> torch.Tensor:
        """The global tensor whose shards ``values`` are, pending reductions done.

        Raises:
            AssertionError: replicas that differ, or a shard of a wrong shape.
        """
        terms = prod(self.mesh.size(axis) for axis, _ in layout.partial)
        copies: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for rank, shard in enumerate(values):
            assert tuple(shard.shape) == layout.local_shape, f"rank {rank}: {tuple(shard.shape)}, not that of {layout}"
            blank = [shard.new_zeros(layout.shape) for _ in range(terms)]
            whole = copies.setdefault(_copy(self.mesh, layout, rank), blank)
            whole[_term(layout, rank)][_indices(layout, rank)] = shard
        reduced = [_reduce_terms(whole, self.mesh, layout) for whole in copies.values()]
        for other in reduced[1:]:
            assert torch.equal(reduced[0], other), f"replicas of {layout} differ"
        return reduced[0]

    # --- graphs

    @torch.no_grad()
    def run(self, gm: fx.GraphModule, inputs: Sequence[Sequence[torch.Tensor]]) -> list[PerRank | None]:
        """The outputs of a local graph on ``inputs`` (for each placeholder one tensor a rank)."""
        values: dict[fx.Node, Any] = {}
        feed = iter(inputs)
        last = _last_uses(gm.graph)
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                values[node] = PerRank(next(feed))
            elif node.op == "get_attr":
                values[node] = PerRank([operator.attrgetter(node.target)(gm)] * self.mesh.ranks)
            elif node.op == "output":
                return [None if out is None else values[out] for out in node.args[0]]
            else:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
                run = self.call if isinstance(node.target, OpOverload) else self._plain
                values[node] = run(node.target, *args, **kwargs)
            for dead in last.get(node, ()):
                del values[dead]
        raise AssertionError("the graph has no output")

    def _plain(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> PerRank:
        return self._each(target, args, kwargs)


def flat_index(mesh: Mesh, axes: Sequence[str], rank: int) -> int:
    """The index of ``rank`` along ``axes``, the first varying slowest."""
    index = 0
    for axis in axes:
        index = index * mesh.size(axis) + mesh.index(axis, rank)
    return index


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node the values that nothing after it reads."""
    seen: set[fx.Node] = set()
    last: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        for read in (node, *node.all_input_nodes):
            if read not in seen:
                seen.add(read)
                last.setdefault(node, []).append(read)
    return last


# --- collectives on the tensors of one group, in group order


def _run_groups(each: Callable[..., Any], x: PerRank, options: Sequence[Any], groups: Any, _: int) -> PerRank:
    out = PerRank([None] * len(x))
    for ranks in groups:
        for rank, result in zip(ranks, each([x[r] for r in ranks], *options), strict=True):
            out[rank] = result
    return out


@lru_cache(maxsize=1024)
def _groups(mesh: Mesh, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(dict.fromkeys(mesh.group(axes, rank) for rank in range(mesh.ranks)))


def _reduce(tensors: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    total = tensors[0]
    for x in tensors[1:]:
        total = _COMBINE[op](total, x)
    return total / len(tensors) if op == "avg" else total.clone()


_COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


def _all_gather(shards: list[torch.Tensor], size: int) -> list[torch.Tensor]:
    assert size == len(shards), f"a group of {len(shards)} ranks was called one of {size}"
    whole = torch.cat(shards) if shards[0].ndim else torch.stack(shards)
    return [whole.clone() for _ in shards]


def _reduce_scatter(terms: list[torch.Tensor], op: str, size: int) -> list[torch.Tensor]:
    assert size == len(terms), f"a group of {len(terms)} ranks was called one of {size}"
    assert terms[0].shape[0] % size == 0, f"{tuple(terms[0].shape)} cannot be scattered over {size} ranks"
    return [part.clone() for part in _reduce(terms, op).chunk(size)]


def _all_reduce(terms: list[torch.Tensor], op: str) -> list[torch.Tensor]:
    total = _reduce(terms, op)
    return [total.clone() for _ in terms]


def _all_to_all(shards: list[torch.Tensor], receives: Sequence[int], sends: Sequence[int]) -> list[torch.Tensor]:
    pieces = [shard.split(list(sends)) for shard in shards]
    out = [torch.cat([piece[k] for piece in pieces]) for k in range(len(shards))]
    assert all(result.shape[0] == sum(receives) for result in out), f"sends {sends} do not make receives {receives}"
    return out


def _broadcast(copies: list[torch.Tensor], src: int) -> list[torch.Tensor]:
    return [copies[src].clone() for _ in copies]


def _permute_ranks(shards: list[torch.Tensor], destinations: Sequence[int]) -> list[torch.Tensor]:
    return [shards[list(destinations).index(k)].clone() for k in range(len(shards))]


_COLLECTIVES: dict[str, Callable[..., list[torch.Tensor]]] = {
    "all_gather_into_tensor": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all_single": _all_to_all,
    "broadcast": _broadcast,
    "permute_ranks": _permute_ranks,
}


# --- which part of a global tensor a rank holds


@lru_cache(maxsize=65536)
def _indices(layout: Layout, rank: int) -> tuple[torch.Tensor, ...]:
    """Index tensors that pick the shard of ``rank`` out of the global tensor."""
    out = []
    for dim in range(layout.ndim):
        shape = [1] * layout.ndim
        shape[dim] = -1
        out.append(torch.tensor(layout.local_index(dim, rank), dtype=torch.int64).reshape(shape))
    return tuple(out)


def _term(layout: Layout, rank: int) -> int:
    """Which term of the pending reductions ``rank`` holds."""
    return flat_index(layout.mesh, [axis for axis, _ in layout.partial], rank)


def _copy(mesh: Mesh, layout: Layout, rank: int) -> tuple[int, ...]:
    """Which replica ``rank`` is part of: the ranks with its shard and its term, numbered by the rest."""
    same = [
        other
        for other in range(mesh.ranks)
        if all(mesh.index(axis, other) == mesh.index(axis, rank) for axis in layout.axes)
    ]
    return (same.index(rank),)


def _reduce_terms(terms: list[torch.Tensor], mesh: Mesh, layout: Layout) -> torch.Tensor:
    for axis, op in reversed(layout.partial):
        size = mesh.size(axis)
        terms = [_reduce(terms[k : k + size], op) for k in range(0, len(terms), size)]
    return terms[0]


def _random_terms(x: torch.Tensor, mesh: Mesh, layout: Layout, generator: torch.Generator) -> list[torch.Tensor]:
    terms = [x]
    for axis, op in layout.partial:
        terms = [part for term in terms for part in _split_term(term, op, mesh.size(axis), generator)]
    return terms


def _split_term(x: torch.Tensor, op: str, count: int, generator: torch.Generator) -> list[torch.Tensor]:
    """``count`` tensors whose reduction is ``x``."""

    def noise(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, x.shape, generator=generator).to(x.dtype)

    if op in ("sum", "avg"):
        others = [noise(-8, 8) for _ in range(count - 1)]
        total = x * count if op == "avg" else x
        return [total - sum(others, torch.zeros_like(x)), *others]
    if op == "product":
        signs = [noise(0, 2) * 2 - 1 for _ in range(count - 1)]
        return [x * torch.stack(signs).prod(0), *signs] if signs else [x]
    worse = [x - noise(0, 8) if op == "max" else x + noise(0, 8) for _ in range(count - 1)]
    return [*worse, x]
