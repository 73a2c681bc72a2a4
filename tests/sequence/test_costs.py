"""What the methods send, compute and keep is what the page says."""

from __future__ import annotations

import pytest
import torch

import shardc
from examples.models.llama import Llama, LlamaConfig, loss
from shardc.custom_ops.flops import is_attention
from shardc.ir import graph as ir
from shardc.ir.comm_volume import tally
from shardc.passes.op_calls import call_of
from shardc.rules import spec_of
from tests.sequence.models import Own

KINDS = {"gather": ("all_gather", "reduce_scatter"), "ring": ("permute_ranks",), "ulysses": ("all_to_all",)}
ROWS, LENGTH, WIDTH, HEADS, GROUPS = 2, 64, 32, 8, 4


def lowered(method: str, ranks: int, length: int = LENGTH, layers: int = 1, causal: bool = True) -> shardc.Program:
    with torch.device("meta"):
        model = Own(causal, HEADS, GROUPS, width=WIDTH, layers=layers)
    module = shardc.compile(model, shardc.Mesh(cp=ranks), shardc.cp("cp", method=method), backend="eager")
    ids = torch.zeros(ROWS, length, dtype=torch.int64, device="meta")
    return module.lower(input_ids=ids, labels=ids)


def sent(program: shardc.Program, method: str) -> list[int]:
    """Bytes a rank sends of attention, forward and backward."""
    return [
        sum(row.bytes for row in tally(half.gm, program.mesh) if row.kind in KINDS[method]) for half in program.step()
    ]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("method", KINDS)
def test_bytes_are_those_of_the_page(method: str, ranks: int) -> None:
    of_queries = 4 * ROWS * LENGTH * WIDTH // ranks
    of_keys = 2 * of_queries * GROUPS // HEADS
    if method == "ulysses":
        each = (ranks - 1) * (2 * of_queries + of_keys) // ranks
        expected = [each, each]
    else:
        expected = [(ranks - 1) * of_keys, 2 * (ranks - 1) * of_keys]
    assert sent(lowered(method, ranks), method) == expected


@pytest.mark.slow
@pytest.mark.parametrize("method", KINDS)
def test_what_is_kept_for_backward_falls_with_the_ranks(method: str) -> None:
    """Beside tables of positions, which are small, and what attention gives, which is kept twice by heads."""

    def kept(ranks: int) -> int:
        samples = lowered(method, ranks, 512, layers=4).schedule("h100").memory.samples
        return max(sample.sizes[4] for sample in samples)

    assert kept(4) < (1.4 if method == "ulysses" else 1.1) * kept(1) / 4


@pytest.mark.parametrize("method", [*KINDS, "auto"])
def test_no_rank_computes_in_vain(method: str) -> None:
    """Llama 3 8B, one layer, 8 sequences of 8,192 tokens on 8 x 8 ranks: at most 1.1 of a rank's share."""
    config = LlamaConfig(128256, 4096, 1, heads=32, kv_heads=8, hidden=14336)
    with torch.device("meta"):
        model = Llama(config)
        ids = torch.empty(8, 8192, dtype=torch.int64)
    mesh, plan = shardc.Mesh(dp=8, cp=8), shardc.fsdp(("dp", "cp")) | shardc.cp("cp", method=method)
    program = shardc.compile(model, mesh, plan, loss=loss).lower(ids, ids)
    alone = shardc.compile(model, shardc.Mesh(dp=1), shardc.ddp("dp"), loss=loss).lower(ids, ids)
    assert program.schedule("h100").flops < 1.1 * alone.schedule("h100").flops / mesh.ranks


@pytest.mark.parametrize("method", ["gather", "ring"])
def test_causal_pieces_are_as_large_on_every_rank(method: str) -> None:
    """Each kernel is causal by itself, and of as many queries as keys: none computes more than half in vain."""
    graph = lowered(method, 4).forward.graph
    kernels = [node for node in graph.nodes if is_attention(node.target)]
    assert len(kernels) == 4
    for node in kernels:
        call = call_of(node)
        assert call["causal"] and call["bias"] is None and spec_of(call) is not None
        assert ir.value(node.args[0]).shape[2] == ir.value(node.args[1]).shape[2] == LENGTH // 4
