"""Reference semantics of collectives on the tensors of one group, in group order; used by the lockstep simulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


def reduce(terms: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """Reduces ``terms`` in order, by ``op``."""
    total = terms[0]
    for term in terms[1:]:
        total = COMBINE[op](total, term)
    return total / len(terms) if op == "avg" else total.clone()


def all_gather(shards: list[torch.Tensor], size: int) -> list[torch.Tensor]:
    _check_size(shards, size)
    whole = torch.cat(shards) if shards[0].ndim else torch.stack(shards)
    return [whole.clone() for _ in shards]


def reduce_scatter(terms: list[torch.Tensor], op: str, size: int) -> list[torch.Tensor]:
    _check_size(terms, size)
    assert terms[0].shape[0] % size == 0, f"{tuple(terms[0].shape)} cannot be scattered over {size} ranks"
    return [part.clone() for part in reduce(terms, op).chunk(size)]


def all_reduce(terms: list[torch.Tensor], op: str) -> list[torch.Tensor]:
    total = reduce(terms, op)
    return [total.clone() for _ in terms]


def all_to_all(shards: list[torch.Tensor], receives: Sequence[int], sends: Sequence[int]) -> list[torch.Tensor]:
    pieces = [shard.split(list(sends)) for shard in shards]
    out = [torch.cat([piece[k] for piece in pieces]) for k in range(len(shards))]
    assert all(result.shape[0] == sum(receives) for result in out), f"sends {sends} do not make receives {receives}"
    return out


def broadcast(copies: list[torch.Tensor], src: int) -> list[torch.Tensor]:
    return [copies[src].clone() for _ in copies]


def permute_ranks(shards: list[torch.Tensor], destinations: Sequence[int]) -> list[torch.Tensor]:
    return [shards[list(destinations).index(k)].clone() for k in range(len(shards))]


def send_rows(
    rows: list[torch.Tensor], sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor], size: int
) -> list[torch.Tensor]:
    """Sends rows by their counts (see `shardc.ir.comm`). Unused rows of the result are NaN, so that a read shows."""
    pieces = [x[: int(n.sum())].split(n.tolist()) for x, n in zip(rows, sends, strict=True)]
    out = []
    for k, counts in enumerate(receives):
        came = torch.cat([piece[k] for piece in pieces])
        assert counts.tolist() == [piece[k].shape[0] for piece in pieces], "ranks do not agree on the rows that go"
        left = came.new_full((size - came.shape[0], *came.shape[1:]), float("nan") if came.is_floating_point() else -1)
        out.append(torch.cat([came, left]))
    return out


def _check_size(tensors: list[torch.Tensor], size: int) -> None:
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
