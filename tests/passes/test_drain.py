"""Reductions of gradients are waited for as late as the bytes on their way allow."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardc
from shardc.ir.comm import waits_of
from shardc.passes.op_calls import is_start, result_bytes

WIDTH, LAYERS = 32, 6
SHARD = 4 * WIDTH * WIDTH // 2  # bytes of a reduced gradient


def most_on_their_way(limit: int | None) -> int:
    """The most bytes of reduce-scatters that were started and not yet waited for, in the backward."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    options = shardc.Options(bucket_size=0, max_in_flight=limit, p2p_collectives=True)
    module = shardc.compile(
        model, shardc.Mesh(dp=2), shardc.fsdp("dp", level=2), loss=lambda y: y.square().mean(), options=options
    )
    graph = module.lower(torch.randn(8, WIDTH)).backward.graph
    started = [node for node in graph.nodes if is_start(node) and "reduce_scatter" in str(node.target)]
    assert len(started) == LAYERS and all(result_bytes(node) == SHARD for node in started)
    order = {node: at for at, node in enumerate(graph.nodes)}
    spans = [(order[node], min(order[wait] for wait in waits_of(node))) for node in started]
    return max(sum(SHARD for start, end in spans if start <= at < end) for at in order.values())


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (-1, LAYERS * SHARD),
        (LAYERS * SHARD, LAYERS * SHARD),
        (3 * SHARD, 4 * SHARD),  # waited for behind the start that takes it over the limit
        (0, 2 * SHARD),
        (None, LAYERS * SHARD),
    ],
)
def test_as_many_as_allowed(limit: int | None, expected: int) -> None:
    assert most_on_their_way(limit) == expected
