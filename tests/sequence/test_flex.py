"""`flex_attention` of a split sequence: equals one device, skips what a mask hides, sends what the page says."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.attention.flex_attention as flex
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import shardc
from shardc.custom_ops import flex_ops
from shardc.ir import graph as ir
from shardc.ir.comm_volume import tally
from tests.higher_order.test_flex_attention import KINDS, Net, batch, scored
from tests.models.alike import trains_alike
from tests.sequence.test_costs import KINDS as SENT

FSDP = shardc.fsdp("dp", threshold=0)
METHODS = ("gather", "ring", "ulysses")
MESHES: tuple[dict[str, int], ...] = ({"cp": 2}, {"cp": 3}, {"dp": 2, "cp": 2})
LENGTH, WIDTH = 256, 8


def by_number(net: Net, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Reads the batch and the head otherwise than at their own place."""
    return score + net.by_distance[(h + b) % 4, (i - j) % 7 + b % 3]


KINDS = KINDS | {"places of rows and heads": scored(by_number)}
QUICK = {
    ("documents in a window", "ring", 1), ("a trained bias by distance", "gather", 0),
    ("places of rows and heads", "ulysses", 0), ("the log-sum-exp", "ring", 0),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _gradients_on_cpus() -> Iterator[None]:
    with patch.object(flex, "_validate_device", lambda *_: None), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        yield


def cases() -> list[Any]:
    every = [
        (kind, method, at) for kind in KINDS for method in METHODS for at in range(3) if (method, at) != ("ulysses", 1)
    ]
    return [pytest.param(*x, marks=() if x in QUICK else pytest.mark.slow) for x in every]


@pytest.mark.parametrize(("kind", "method", "mesh"), cases())
def test_equals_one_device(kind: str, method: str, mesh: int) -> None:
    torch.manual_seed(0)
    plan = shardc.cp("cp", method=method)
    with patch.dict("tests.higher_order.test_flex_attention.KINDS", KINDS):
        trains_alike(Net(kind), batch(), MESHES[mesh], FSDP | plan if "dp" in MESHES[mesh] else plan, steps=1)


@pytest.mark.parametrize("kind", ["documents in a window", "a trained bias by distance"])
def test_keys_of_two_axes_are_gathered_in_order(kind: str) -> None:
    torch.manual_seed(0)
    plan = shardc.cp("a", method="gather") | shardc.cp("b", method="gather")
    trains_alike(Net(kind), batch(), {"a": 2, "b": 2}, plan, steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_in_one_piece_each(method: str) -> None:
    torch.manual_seed(0)
    plan = shardc.cp("cp", method=method, order="contiguous")
    trains_alike(Net("documents in a window"), batch(), {"cp": 2}, plan, steps=1)


class Packed(nn.Module):
    """Four heads of queries and two of keys, under a mask of documents or of a window."""

    def __init__(self, documents: bool) -> None:
        super().__init__()
        self.q, self.kv, self.documents = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH), documents

    def forward(self, x: Tensor, document: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (4, WIDTH)).transpose(1, 2)
        k, v = (y.unflatten(-1, (2, WIDTH)).transpose(1, 2) for y in self.kv(x).chunk(2, -1))

        def of_document(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (document[b, i] == document[b, j]) & (i >= j)

        def of_window(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (i >= j) & (i - j < 40)

        mask = create_block_mask(
            of_document if self.documents else of_window, x.shape[0], None, x.shape[1], x.shape[1], device=x.device
        )
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)


def packed(documents: bool, ranks: int, method: str) -> tuple[Any, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    module = shardc.compile(
        Packed(documents),
        shardc.Mesh(cp=ranks),
        shardc.cp("cp", method=method),
        loss=lambda out: out.square().mean(),
        backend="eager",
    )
    sizes = torch.tensor([30, 5, 100, 17, 70, 34])
    document = torch.arange(6).repeat_interleave(sizes).expand(2, -1).contiguous()
    return module, (torch.randn(2, LENGTH, WIDTH), document)


@pytest.mark.parametrize(
    ("method", "documents"),
    [
        ("ring", True),
        ("gather", False),
        pytest.param("ring", False, marks=pytest.mark.slow),
        pytest.param("gather", True, marks=pytest.mark.slow),
    ],
)
def test_ranks_share_the_scores_that_a_mask_leaves(method: str, documents: bool) -> None:
    """A rank computes at most 1.1 of its share of the pairs that are seen, and skips most of those that are not."""
    module, inputs = packed(documents, 4, method)
    seen: Counter[int] = Counter()
    computed: Counter[int] = Counter()
    scores = flex_ops._Blocks.scores

    def counted(blocks: Any, query: Tensor, at: Any, take: Any, hidden: Tensor | None) -> Any:
        result = scores(blocks, query, at, take, hidden)
        rank = int(blocks.mask.rows[0]) % 4
        seen[rank] += int((result[0] > -torch.inf).sum())
        computed[rank] += result[0].numel()
        return result

    with patch.object(flex_ops._Blocks, "scores", counted), patch.object(flex_ops, "ROWS", 8):
        shardc.Simulation(module)(*inputs)
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    mask = (i >= j) & ((inputs[1][0][:, None] == inputs[1][0]) if documents else (i - j < 40))
    total = 8 * int(mask.sum())  # of two rows and four heads
    assert sum(seen.values()) == total
    assert max(seen.values()) <= 1.1 * total / 4
    assert sum(computed.values()) < 0.5 * 8 * LENGTH**2, "nothing was skipped"


class Layers(nn.Module):
    """Layers with a residual whose attention has the same documents."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Packed(True) for _ in range(count))
        self.out = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: Tensor, document: Tensor) -> Tensor:
        for layer, out in zip(self.layers, self.out, strict=True):
            x = x + out(layer(x, document).transpose(1, 2).flatten(-2))
        return x


@pytest.mark.parametrize("plan", [shardc.cp("x", method="gather"), shardc.fsdp("x", threshold=0)], ids=["cp", "dp"])
def test_visible_blocks_are_computed_once_for_all_layers_and_their_gradients(plan: shardc.Plan) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(2, LENGTH, WIDTH), torch.arange(8).repeat_interleave(LENGTH // 8).expand(2, -1).contiguous()
    trains_alike(Layers(5), inputs, {"x": 2}, plan, steps=1)
    module = shardc.compile(Layers(5), shardc.Mesh(x=2), plan, loss=lambda out: out.square().mean(), backend="eager")
    program = module.lower(*inputs)
    assert isinstance(program, shardc.Program)
    calls = [half.gm.graph.find_nodes(op="call_function", target=flex_ops.FLEX_VISIBLE) for half in program.step()]
    assert list(map(len, calls)) == [1, 0]


@pytest.mark.parametrize("method", ["gather", "ring"])
def test_bytes_are_those_of_the_page_and_no_tensor_has_all_scores(method: str) -> None:
    module, inputs = packed(True, 2, method)
    program = module.lower(*inputs)
    of_queries = 4 * 2 * LENGTH * 4 * WIDTH // 2
    of_keys = 2 * of_queries // 2
    # Gathered beside: the documents, which are read by position.
    documents = inputs[1].nbytes // 2 if method == "gather" else 0
    counts = [
        sum(row.bytes for row in tally(half.gm, program.mesh) if row.kind in SENT[method]) for half in program.step()
    ]
    assert counts == [of_keys + documents, 2 * of_keys]
    for half in program.step():
        for node in half.gm.graph.nodes:
            for value in ir.info(node).tensors if node.op != "output" else ():
                assert prod(value.shape) < LENGTH**2 // 2, f"{node} has {value.shape}"


def test_operations_are_of_the_scores_that_a_window_leaves() -> None:
    """Known for masks of places alone; a mask that reads tensors counts all."""
    (window, inputs), (documents, _) = packed(False, 2, "gather"), packed(True, 2, "gather")
    flops = [module.lower(*inputs).schedule("h100").flops for module in (window, documents)]
    assert flops[0] < 0.35 * flops[1]


def test_what_the_op_does_not_do_is_written_out() -> None:
    class Other(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + q[b, h, i].sum())

    q = torch.randn(2, 2, 12, 4, dtype=torch.float64)
    module = shardc.compile(Other(), shardc.Mesh(dp=2), shardc.ddp("dp"), backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(shardc.Simulation(module)(q, grad=False), Other()(q), rtol=1e-9, atol=1e-12)
    text = module.lower(q).text("capture")
    assert "bmm(" in text and "shardc_attention" not in text
