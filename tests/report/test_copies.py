"""The copies that a step's communication costs: counted on graphs, and by what a rank's tensors do."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import shardc
from examples.models import llama
from shardc.ir import graph as ir
from shardc.report.lint_rules import (
    CONTIGUOUS,
    INTO_MESSAGE,
    OUT_OF_MESSAGE,
    OWN_SHARD,
    RECEIVED,
    TO_SEND,
    TOGETHER,
    Copy,
    copies,
    table,
)
from tests.passes.test_golden import MLP

DIRECT = shardc.Options(p2p_collectives=True)


def of_step(model: nn.Module, mesh: dict[str, int], plan: shardc.Plan, *shape: int) -> list[Copy]:
    module = shardc.compile(model, shardc.Mesh(mesh), plan, loss=F.mse_loss, options=DIRECT)
    program = module.lower(torch.empty(*shape), torch.empty(*shape))
    found = []
    for half in (program.forward, program.backward):
        assert half is not None
        found += copies(half.graph, program.mesh)
    return found


def test_fsdp_copies_each_rank_s_own_shard_and_nothing_else() -> None:
    found = of_step(MLP(), {"dp": 4}, shardc.fsdp("dp"), 16, 8)
    sizes = [p.numel() * 4 // 4 for p in (MLP().up.weight, MLP().up.bias, MLP().down.weight)]
    gathered = sorted(one.bytes for one in found if one.reason == OWN_SHARD)
    assert gathered == sorted([*sizes, sizes[2]]), "forward gathers all, backward what it reads"
    rest = [one for one in found if one.reason != OWN_SHARD]
    # The forward's gathers share a message, and so do the gradients' terms, another to each of three ranks; backward
    # gathers one weight alone. The loss's terms are over four ranks.
    assert sorted((one.reason, one.bytes) for one in rest) == sorted(
        [(INTO_MESSAGE, sum(sizes)), (OUT_OF_MESSAGE, 3 * sum(sizes)), (INTO_MESSAGE, 3 * sum(sizes)), (TOGETHER, 4)]
    )
    assert of_step(MLP(), {"dp": 1}, shardc.fsdp("dp"), 16, 8) == []


def test_a_dim_inside_is_brought_to_the_front_and_back() -> None:
    """Sequence parallelism splits dim 1 of [batch, sequence, width]: each scatter and each gather moves it."""
    model, tokens = llama.Llama(llama.LlamaConfig(layers=2)), torch.empty(8, 16, dtype=torch.int64)
    plan = llama.llama_tp("tp", sequence=True)
    program = shardc.compile(model, shardc.Mesh(tp=2), plan, loss=llama.loss, options=DIRECT).lower(tokens, tokens)
    halves = [half for half in (program.forward, program.backward) if half is not None]
    found = [one for half in halves for one in copies(half.graph, program.mesh)]
    activation = 8 * 16 * 64 * 4
    counts = {reason: sum(one.reason == reason for one in found) for reason in (TO_SEND, RECEIVED, OWN_SHARD)}
    text = "".join(program.text(stage) for stage in ("bucket", "bucket.backward"))
    # The embedding's gradient is scattered along its leading dim, as it is.
    scattered = text.count("(f32[1,8,8,64]) = shardc.reduce_scatter")
    gathered = text.count(" = shardc.all_gather")
    assert scattered == 1 + 2 * 2 + 1 + 2 * 2 and gathered > 0
    assert counts == {TO_SEND: scattered, RECEIVED: gathered, OWN_SHARD: gathered}, "one copy each way"
    assert {one.bytes for one in found if one.reason in (TO_SEND, RECEIVED)} == {activation}
    assert {one.bytes for one in found if one.reason == OWN_SHARD} == {activation // 2}
    assert table(found).splitlines()[-1] == f"copies: x{len(found)} {sum(one.bytes for one in found)} B/rank"


def test_what_is_not_contiguous_is_made_so() -> None:
    """A sum of transposed terms: a collective sends rows."""
    graph = fx.Graph()
    with FakeTensorMode():
        x, made = torch.empty(8, 4), torch.empty(4, 8)
    node = graph.placeholder("x")
    node.meta["val"] = x
    moved = graph.call_function(torch.ops.aten.t.default, (node,))
    moved.meta["val"] = x.t()
    start = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (moved, "sum", "shardc:dp"))
    start.meta["val"] = made
    for one in graph.nodes:
        ir.set_info(one, ir.Info(one.name, None))
    graph.output((start,))
    assert copies(graph, shardc.Mesh(dp=2)) == [Copy("t_default", CONTIGUOUS, 8 * 4 * 4)]
