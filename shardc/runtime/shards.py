"""Shards of all ranks in one process, for simulations and tests: made from global tensors and back, with collectives
as plain functions. Also fingerprints of tensors.

The simulator uses the first two. A fingerprint is a hash of a tensor, by which ranks compare values.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh

COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


def reduce(terms: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """Reduces ``terms`` in order, by ``op``: "sum", "avg", "max", "min" or "product"."""
    total = terms[0]
    for term in terms[1:]:
        total = COMBINE[op](total, term)
    return total / len(terms) if op == "avg" else total.clone()


def all_gather(shards: list[torch.Tensor], size: int) -> list[torch.Tensor]:
    """Reference of an all-gather: returns, for each rank, the concatenation of all ranks' ``shards`` along dim 0.
    Scalars are stacked.
    """
    _check_size(shards, size)
    whole = torch.cat(shards) if shards[0].ndim else torch.stack(shards)
    return [whole.clone() for _ in shards]


def reduce_scatter(terms: list[torch.Tensor], op: str, size: int) -> list[torch.Tensor]:
    """Reference of a reduce-scatter: reduces all ranks' ``terms`` by ``op``, and returns, for each rank, its chunk
    along dim 0 of the result.
    """
    _check_size(terms, size)
    assert terms[0].shape[0] % size == 0, f"{tuple(terms[0].shape)} cannot be scattered over {size} ranks"
    return [part.clone() for part in reduce(terms, op).chunk(size)]


def all_reduce(terms: list[torch.Tensor], op: str) -> list[torch.Tensor]:
    """Reference of an all-reduce: returns, for each rank, the reduction of all ranks' ``terms`` by ``op``."""
    total = reduce(terms, op)
    return [total.clone() for _ in terms]


def all_to_all(shards: list[torch.Tensor], receives: Sequence[int], sends: Sequence[int]) -> list[torch.Tensor]:
    """Reference of an all-to-all: every rank sends its first ``sends[0]`` rows to rank 0, the next ``sends[1]`` to
    rank 1, and so on. Returns the rows that each rank receives; ``receives`` has their expected counts by sender.
    """
    pieces = [shard.split(list(sends)) for shard in shards]  # sender -> piece for each receiver
    out = [torch.cat([piece[k] for piece in pieces]) for k in range(len(shards))]
    assert all(result.shape[0] == sum(receives) for result in out), f"sends {sends} do not make receives {receives}"
    return out


def broadcast(copies: list[torch.Tensor], src: int) -> list[torch.Tensor]:
    """Reference of a broadcast: returns, for each rank, the tensor of rank ``src``."""
    return [copies[src].clone() for _ in copies]


def permute_ranks(shards: list[torch.Tensor], destinations: Sequence[int]) -> list[torch.Tensor]:
    """Reference of a permutation of ranks: each rank sends its tensor to rank ``destinations[rank]``. Returns, for
    each rank, the tensor that it receives.
    """
    return [shards[list(destinations).index(k)].clone() for k in range(len(shards))]


def send_rows(
    rows: list[torch.Tensor], sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor], size: int
) -> list[torch.Tensor]:
    """Reference of the exchange of rows between experts' ranks: returns, for each rank, the rows that all ranks send
    to it. The rest, up to ``size`` rows, is NaN (-1 in integers).

    Args:
        sends, receives: per rank, the number of rows to and from each rank.
        size: rows of the result.
    """
    pieces = [x[: int(n.sum())].split(n.tolist()) for x, n in zip(rows, sends, strict=True)]
    out = []
    for k, counts in enumerate(receives):
        received = torch.cat([piece[k] for piece in pieces])
        assert counts.tolist() == [piece[k].shape[0] for piece in pieces], "ranks do not agree on the rows that go"
        unused = received.new_full(
            (size - received.shape[0], *received.shape[1:]), float("nan") if received.is_floating_point() else -1
        )
        out.append(torch.cat([received, unused]))
    return out


def _check_size(tensors: list[torch.Tensor], size: int) -> None:
    """Raises AssertionError unless a collective gets one tensor for each of its ``size`` ranks."""
    assert size == len(tensors), f"a group of {len(tensors)} ranks was called one of {size}"


# By the name of torch's op, without suffixes such as ``_coalesced``.
COLLECTIVES: dict[str, Callable[..., list[torch.Tensor]]] = {
    "all_gather_into_tensor": all_gather,
    "reduce_scatter_tensor": reduce_scatter,
    "all_reduce": all_reduce,
    "all_to_all_single": all_to_all,
    "broadcast": broadcast,
    "permute_ranks": permute_ranks,
    "send_rows": send_rows,
}


_WORDS = 1 << 16  # 8-byte words per block, which fits in a core's cache
_MASK = (1 << 64) - 1
_MIX = 0x9E3779B97F4A7C15  # odd


def bytes_of(x: Tensor) -> Tensor:
    """Returns the values of ``x`` as uint8 in one dim: a view if ``x`` is contiguous."""
    flat = x.detach().resolve_conj().resolve_neg().contiguous()
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)  # a tensor of one element may have any stride


def fingerprint(x: Tensor) -> int:
    """Hashes values, dtype and shape of ``x`` to 64 bits, on its device; several GB/s on one core.

    Each 8-byte word is multiplied by its own odd number and the products are summed modulo 2^64, per block. A change of
    a single word always changes the result.
    """
    flat = bytes_of(x)
    # A view as int64 needs an aligned start.
    if flat.storage_offset() % 8:
        flat = flat.clone()
    whole = flat.numel() // 8 * 8  # bytes in whole words; up to 7 more follow
    blocks = flat[:whole].view(torch.int64).split(_WORDS) if whole else ()
    weights = _weights(x.device)
    products = torch.empty_like(weights)  # one buffer for all blocks, so that it stays in the cache
    sums = [torch.mul(block, weights[: len(block)], out=products[: len(block)]).sum() for block in blocks]
    total = zlib.crc32(f"{x.dtype} {tuple(x.shape)}".encode())
    # Each step depends on the total before, so the order of the blocks counts too. `_MASK` keeps 64 bits.
    for value in (*(torch.stack(sums).tolist() if sums else ()), *flat[whole:].tolist()):
        total = ((total ^ value) * _MIX) & _MASK
    return total


@lru_cache(maxsize=8)
def _weights(device: torch.device) -> Tensor:
    """Returns the odd multipliers of the words of a block in `fingerprint`, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(-(2**62), 2**62, (_WORDS,), generator=generator) * 2 + 1).to(device)


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
    """Splits global ``x`` into a list with the shard of each rank.

    On an axis with a pending reduction the first rank has the value, and the others the neutral element.
    """
    mesh = layout.mesh
    shards = [x[indices(layout, rank)].clone() for rank in range(mesh.ranks)]
    for axis, op in layout.partial:
        for rank in range(mesh.ranks):
            # Of a maximum, minimum or average, all ranks have the value: it reduces to itself.
            if op in NEUTRAL and mesh.index(axis, rank):
                shards[rank] = torch.full_like(shards[rank], NEUTRAL[op])
    return shards


def scatter_terms(x: torch.Tensor, layout: Layout, generator: torch.Generator) -> list[torch.Tensor]:
    """Splits the global tensor ``x`` into a shard per rank, for tests. Under a pending reduction ranks get random terms
    that reduce to ``x`` (where `shard` gives ``x`` to one rank and neutral elements to the others).
    """
    mesh, terms = layout.mesh, [x]
    # Each pending axis splits every term: the flat index of a term has the first axis slowest, as `_term` counts.
    for axis, op in layout.partial:
        terms = [part for term in terms for part in _split_term(term, op, mesh.size(axis), generator)]
    return [terms[_term(layout, rank)][indices(layout, rank)].clone() for rank in range(mesh.ranks)]


def assemble(shards: Sequence[torch.Tensor], layout: Layout) -> torch.Tensor:
    """Joins ``shards``, one per rank, into the global tensor. Pending reductions are done first. Raises
    AssertionError if replicas differ.
    """
    mesh, dtype = layout.mesh, shards[0].dtype
    # These dtypes have few kernels: assemble their bits.
    if dtype in _SAME_BITS and not layout.partial:
        return assemble([local.view(_SAME_BITS[dtype]) for local in shards], layout).view(dtype)
    terms = prod(mesh.size(axis) for axis, _ in layout.partial)
    copies: list[list[torch.Tensor]] = []  # replica -> terms of the global tensor
    replicas: Counter[int] = Counter()  # index along the axes of the layout -> replicas of that shard so far
    for rank, local in enumerate(shards):
        assert tuple(local.shape) == layout.local_shape, f"rank {rank} holds {tuple(local.shape)}, not that of {layout}"
        index = flat_index(mesh, layout.axes, rank)
        if replicas[index] == len(copies):  # of this shard there are more replicas than of any before
            copies.append([local.new_zeros(layout.shape) for _ in range(terms)])
        copies[replicas[index]][_term(layout, rank)][indices(layout, rank)] = local
        replicas[index] += 1
    # Each replica of all shards gives the global tensor.
    first, *others = (_reduced(whole, layout) for whole in copies)
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
    """Returns which term of a pending reduction ``rank`` holds: its flat index along the axes with pending
    reductions.
    """
    return flat_index(layout.mesh, [axis for axis, _ in layout.partial], rank)


def _reduced(terms: list[torch.Tensor], layout: Layout) -> torch.Tensor:
    """Performs the pending reductions of ``layout``. ``terms`` has one tensor for each flat index along the pending
    axes.
    """
    for axis, op in reversed(layout.partial):  # the last axis varies fastest: its terms are neighbours
        size = layout.mesh.size(axis)
        terms = [reduce(terms[k : k + size], op) for k in range(0, len(terms), size)]
    return terms[0]


def _split_term(x: torch.Tensor, op: str, count: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Splits ``x`` into ``count`` random tensors whose reduction by ``op`` is ``x``, as a partial layout has them."""

    def noise(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, x.shape, generator=generator).to(x.dtype)

    if op in ("sum", "avg"):
        others = [noise(-8, 8) for _ in range(count - 1)]
        total = x * count if op == "avg" else x
        return [total - sum(others, torch.zeros_like(x)), *others]
    if op == "product":
        signs = [noise(0, 2) * 2 - 1 for _ in range(count - 1)]  # 1 or -1: the product is exact
        return [x * torch.stack(signs).prod(0), *signs]
    # Of a maximum or minimum, one term is `x`, and the others are no better.
    if x.dtype == torch.bool:
        worse = [x & noise(0, 2) if op == "max" else x | noise(0, 2) for _ in range(count - 1)]
    else:
        worse = [x - noise(0, 8) if op == "max" else x + noise(0, 8) for _ in range(count - 1)]
    return [*worse, x]
