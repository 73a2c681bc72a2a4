"""Buckets that are sized by the links of their groups."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import shardc
from shardc.cost.hardware import H100, Hardware, Link
from shardc.ir import graph as ir
from shardc.ir.comm_volume import collective_kind

BLOCKS, WIDTH = 6, 64


class Net(nn.Module):
    """Equal blocks between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(BLOCKS)
        )
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x).relu()
        return self.last(x).mean()


def sizes(ranks: int, hardware: Hardware, half: str = "") -> list[list[int]]:
    """Bytes of the larger side of each member, by bucket."""
    options = shardc.Options(bucket_size=hardware, p2p_collectives=False)
    program = shardc.compile(Net(), shardc.Mesh(dp=ranks), shardc.fsdp("dp"), options=options).lower(
        torch.empty(ranks, WIDTH)
    )
    graph = program.graph("bucket" + half)
    out = []
    for node in graph.nodes:
        if collective_kind(node) in ("all_gather", "reduce_scatter"):
            read = node.args[0] if isinstance(node.args[0], list) else [node.args[0]]
            values = zip(ir.info(node).tensors, (ir.value(x) for x in read), strict=True)
            out.append([max(ours.nbytes, theirs.nbytes) for ours, theirs in values])
    return out


@pytest.mark.parametrize("half", ["", ".backward"])
def test_a_bucket_holds_at_most_a_block(half: str) -> None:
    """Latency would allow 94 MB."""
    block = 2 * 4 * (WIDTH * WIDTH + WIDTH)
    found = sizes(8, H100, half)
    assert max(map(sum, found)) <= block
    assert len(found) <= 2 * (BLOCKS + 2), "a block needs no more than two buckets"
    assert any(len(members) > 1 for members in found)


def test_a_bucket_is_as_large_as_its_latency_asks_for() -> None:
    """A link of 1 GB/s, on which a weight takes as long as 20 latencies."""
    weight = 4 * WIDTH * WIDTH
    slow = replace(H100, inside=Link("slow", 1e9, 0.0, 0.0), start=weight / (20 * 1e9 * H100.wire))
    found = sizes(8, slow)
    assert max(map(sum, found)) == weight
    assert max(map(len, found)) > 1, "biases share a bucket"
