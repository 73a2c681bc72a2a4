"""Conversion of a global tensor to the shards of all ranks of a mesh, and back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import torch

from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.runtime.exchange import reduce

NEUTRAL = {"sum": 0, "product": 1}
# Integer views for dtypes with few kernels.
_SAME_BITS = {
    **{torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64},
    **{dtype: torch.uint8 for name, dtype in vars(torch).items() if name.startswith("float8_")},
}


def flat_index(mesh: Mesh, axes: Sequence[str], rank: int) -> int:
    """Returns the index of ``rank`` along ``axes``, the first varying slowest."""
    index = 0
    for axis in axes:
        index = index * mesh.size(axis) + mesh.index(axis, rank)
    return index


def shard(x: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """Splits global ``x`` into shards; on a partial axis only the first rank has the value, others a neutral one."""
    mesh = layout.mesh
    shards = [x[indices(layout, rank)].clone() for rank in range(mesh.ranks)]
    for axis, op in layout.partial:
        for rank in range(mesh.ranks):
            if op in NEUTRAL and mesh.index(axis, rank):
                shards[rank] = torch.full_like(shards[rank], NEUTRAL[op])
    return shards


def scatter_terms(x: torch.Tensor, layout: Layout, generator: torch.Generator) -> list[torch.Tensor]:
    """Splits global ``x`` into shards; partial axes get random integer terms that reduce to it."""
    mesh, terms = layout.mesh, [x]
    for axis, op in layout.partial:
        terms = [part for term in terms for part in _split_term(term, op, mesh.size(axis), generator)]
    return [terms[_term(layout, rank)][indices(layout, rank)].clone() for rank in range(mesh.ranks)]


def assemble(shards: Sequence[torch.Tensor], layout: Layout) -> torch.Tensor:
    """Joins ``shards`` into the global tensor, after pending reductions; AssertionError if replicas differ."""
    mesh, dtype = layout.mesh, shards[0].dtype
    if dtype in _SAME_BITS and not layout.partial:
        return assemble([local.view(_SAME_BITS[dtype]) for local in shards], layout).view(dtype)
    terms = prod(mesh.size(axis) for axis, _ in layout.partial)
    copies: dict[int, list[torch.Tensor]] = {}
    for rank, local in enumerate(shards):
        assert tuple(local.shape) == layout.local_shape, f"rank {rank} holds {tuple(local.shape)}, not that of {layout}"
        replica = _replica(layout, rank)
        if replica not in copies:
            copies[replica] = [local.new_zeros(layout.shape) for _ in range(terms)]
        copies[replica][_term(layout, rank)][indices(layout, rank)] = local
    first, *others = (_reduced(whole, layout) for whole in copies.values())
    for other in others:
        assert same(first, other), f"replicas of {layout} differ"
    return first


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors are equal; NaN equals NaN."""
    return torch.equal(left, right) or torch.allclose(left, right, rtol=0, atol=0, equal_nan=True)


@lru_cache(maxsize=65536)
def indices(layout: Layout, rank: int) -> tuple[torch.Tensor, ...]:
    """Returns an index tensor per dim, which together select the shard of ``rank`` from the global tensor."""
    out = []
    for dim in range(layout.ndim):
        shape = [1] * layout.ndim
        shape[dim] = -1
        out.append(torch.tensor(layout.local_index(dim, rank), dtype=torch.int64).reshape(shape))
    return tuple(out)


def _term(layout: Layout, rank: int) -> int:
    """Returns the index of the term that ``rank`` holds of a partial tensor, over all axes of pending reductions."""
    return flat_index(layout.mesh, [axis for axis, _ in layout.partial], rank)


@lru_cache(maxsize=65536)
def _replica(layout: Layout, rank: int) -> int:
    """Returns how many lower ranks hold the same local tensor: the same shard of the same partial result."""
    mesh = layout.mesh
    coordinates = [mesh.index(axis, rank) for axis in layout.axes]
    return sum([mesh.index(axis, other) for axis in layout.axes] == coordinates for other in range(rank))


def _reduced(terms: list[torch.Tensor], layout: Layout) -> torch.Tensor:
    for axis, op in reversed(layout.partial):
        size = layout.mesh.size(axis)
        terms = [reduce(terms[k : k + size], op) for k in range(0, len(terms), size)]
    return terms[0]


def _split_term(x: torch.Tensor, op: str, count: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Returns ``count`` random tensors whose reduction by ``op`` is ``x``."""

    def noise(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, x.shape, generator=generator).to(x.dtype)

    if op in ("sum", "avg"):
        others = [noise(-8, 8) for _ in range(count - 1)]
        total = x * count if op == "avg" else x
        return [total - sum(others, torch.zeros_like(x)), *others]
    if op == "product":
        signs = [noise(0, 2) * 2 - 1 for _ in range(count - 1)]
        return [x * torch.stack(signs).prod(0), *signs]
    if x.dtype == torch.bool:
        worse = [x & noise(0, 2) if op == "max" else x | noise(0, 2) for _ in range(count - 1)]
    else:
        worse = [x - noise(0, 8) if op == "max" else x + noise(0, 8) for _ in range(count - 1)]
    return [*worse, x]
