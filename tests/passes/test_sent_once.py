"""Nothing is sent twice, or for nobody: what one use asks for is had by the others, in both halves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from torch import fx, nn

import shardc
from examples.models import llama
from shardc.errors import VerifyError
from shardc.ir import graph as ir
from shardc.ir.comm_volume import collective_kind, tally
from shardc.lower.min_cut import min_cut, must_recompute, must_save
from shardc.passes.lower.partition import Partition
from shardc.verify import verify_halves

TOKENS, WIDTH, TP = 8 * 8192, 4096, 8


@lru_cache
def program(layers: int) -> shardc.Program:
    """Llama 3 8B, the first layers of it, over the sequence and tensor-parallel, at 8 sequences of 8,192 tokens."""
    model, given = llama.llama3_8b(layers)
    plan = llama.llama_tp("tp", sequence=True) | shardc.precision(param=torch.bfloat16, reduce=torch.float32)
    targets = torch.empty(8, 8192, dtype=torch.int64, device="meta")
    return shardc.compile(model, shardc.Mesh(tp=TP), plan, loss=llama.loss).lower(*given, targets)


def wire(stage: str, kind: str, layers: int) -> tuple[int, int]:
    """How many collectives of a kind there are in a stage, and the bytes that a rank sends for them."""
    each = [row for row in tally(program(layers).module(stage), shardc.Mesh(tp=TP)) if row.kind == kind]
    return sum(row.count for row in each), sum(row.bytes for row in each)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_a_layer_of_sequence_parallelism_moves_its_activations_four_times(kind: str) -> None:
    """Forward gathers what attention and MLP read and scatters what they make; backward the other way round."""
    more = [two - one for one, two in zip(wire("collectives", kind, 1), wire("collectives", kind, 2), strict=True)]
    assert more == [4, 4 * (TP - 1) * TOKENS * WIDTH * 2 // TP]


def test_row_parallel_weights_take_their_input_as_it_lies() -> None:
    """Their gradient reads what backward gathers for the product beside it; no all-to-all, no sum of a gradient."""
    assert wire("collectives", "all_to_all", 2) == (0, 0)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
def test_the_cut_moves_nothing_twice(kind: str) -> None:
    halves = [wire(stage, kind, 2) for stage in ("partition", "partition.backward")]
    assert tuple(map(sum, zip(*halves, strict=True))) == wire("collectives", kind, 2)


# --- planted

c10d = torch.ops._c10d_functional
MESH = shardc.Mesh(dp=2)
Halves = tuple[fx.GraphModule, fx.GraphModule]


def small(level: int) -> shardc.Program:
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
    options = shardc.Options(bucket_size=0)
    module = shardc.compile(model, MESH, shardc.fsdp("dp", level=level), loss=nn.functional.mse_loss, options=options)
    return module.lower(torch.empty(16, 8), torch.empty(16, 8))


def call(like: fx.Node, before: fx.Node, target: object, *args: object, **record: object) -> fx.Node:
    """A node of what ``like`` is, under another name."""
    with before.graph.inserting_before(before):
        made = before.graph.call_function(target, args)  # type: ignore[arg-type]
    made.meta = dict(like.meta)
    return ir.set_info(made, replace(ir.info(like), name=f"{ir.info(like).name}.{made.name}", role=None, **record))  # type: ignore[arg-type]


def exchanged(x: fx.Node, before: fx.Node, origin: ir.Origin) -> fx.Node:
    """``x`` after an all-to-all of its two halves."""
    rows = x.meta["val"].shape[0] // 2
    sent = call(x, before, c10d.all_to_all_single.default, x, [rows, rows], [rows, rows], "shardc:dp", origin=origin)
    return call(x, before, c10d.wait_tensor.default, sent, origin=origin)


def test_what_backward_alone_asks_for_is_sent_once() -> None:
    """A collective of a forward value for backward: neither in forward, unread, nor in both."""
    gm = small(2).localized
    products = [
        n for n in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default) if "d." in ir.info(n).name
    ]
    node, x = next((n, x) for n in products for x in n.all_input_nodes if ir.info(x).name == "1.tanh")
    origin = ir.info(node).origin
    node.replace_input_with(x, exchanged(exchanged(x, node, origin), node, origin))
    first, second = Partition(lambda graph: {}, min_cut, must_recompute, must_save)(gm)
    assert second is not None
    counts = [sum(collective_kind(n) == "all_to_all" for n in half.graph.nodes) for half in (first, second)]
    assert sum(counts) == 2, counts


def gather(gm: fx.GraphModule) -> fx.Node:
    return next(node for node in gm.graph.nodes if collective_kind(node) == "all_gather")


def unread(halves: Halves) -> None:
    node = gather(halves[1])
    twin = call(node, node, node.target, *node.args)
    call(node, node, c10d.wait_tensor.default, twin)


def repeated(halves: Halves) -> None:
    node = gather(halves[1])
    (wait,) = node.users
    twin = call(node, wait, node.target, *node.args)
    user = next(iter(wait.users))
    both = call(wait, user, c10d.wait_tensor.default, twin)
    user.replace_input_with(wait, call(wait, user, torch.ops.aten.maximum.default, wait, both))


def kept(halves: Halves) -> None:
    first, second = halves
    name = ir.info(next(iter(gather(second).users))).name
    wait = next(node for node in first.graph.nodes if node.op != "output" and ir.info(node).name == name)
    output = ir.output_node(first.graph)
    output.args = ((*output.args[0], wait),)
    output.meta[ir.ROLES] = (*output.meta[ir.ROLES], ir.Role("saved", wait.name))


@pytest.mark.parametrize(
    ("plant", "said"), [(unread, "nobody reads what it brings"), (repeated, "it brings what"), (kept, "forward keeps")]
)
def test_the_verifier_names_it(plant: Callable[[Halves], None], said: str) -> None:
    halves = Partition(lambda graph: {"0.weight": 3, "2.weight": 3}, min_cut, must_recompute, must_save)(
        small(3).localized
    )
    verify_halves(*halves, MESH)
    plant(halves)  # type: ignore[arg-type]
    with pytest.raises(VerifyError, match=f"2.weight.*{said}"):
        verify_halves(*halves, MESH)


def test_lint_counts_it() -> None:
    """Where nothing was verified."""
    program = small(3)
    assert program.backward is not None and program.forward is not None
    before = [f.rule for f in program.lint()]
    unread((program.forward, program.backward))
    after = [f for f in program.lint() if f.rule == "unread-collective"]
    assert "unread-collective" not in before and [f.subject for f in after] == ["2.weight"]
