"""Ops in pieces: put together, what they make is what the op makes of the whole."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from shardc.ir import graph as ir
from shardc.ir.chunking import ChunkSpec, make_pieces, operands, through, viewed

aten = torch.ops.aten
Op = Callable[..., torch.Tensor]


def traced(steps: list[tuple[Op, tuple]], *given: torch.Tensor) -> fx.GraphModule:
    """A graph of ``steps``; numbers among operands that are strings name what was made before."""
    graph, made = fx.Graph(), []

    def record(node: fx.Node, val: torch.Tensor) -> None:
        node.meta["val"] = val
        made.append(ir.set_info(node, ir.Info(str(len(made)), ir.value_of(val))))

    for number, x in enumerate(given):
        record(graph.placeholder(f"x{number}"), x)
    for op, args in steps:
        nodes = [made[int(x)] if isinstance(x, str) else x for x in args]
        node = graph.call_function(op, tuple(nodes))
        record(node, op(*fx.map_arg(nodes, lambda x: x.meta["val"])))
    graph.output(made[-1])
    return fx.GraphModule(nn.Module(), graph)


def cut_all(gm: fx.GraphModule, cut: ChunkSpec) -> int:
    """Cuts all ops behind the first input, as far as it goes; gives how many."""
    first, *nodes = gm.graph.nodes
    cuts = {first: cut}
    for node in nodes:
        read = {x: cuts[x] for x in node.all_input_nodes if x in cuts}
        made = through(node, read) if read else None
        if made is not None:
            need = operands(node, made)
            assert need is not None and set(need) == set(node.all_input_nodes)
            cuts[node] = made
    del cuts[first]
    if cuts:
        make_pieces(gm.graph, cuts)
        gm.graph.lint()
        gm.recompile()
    return len(cuts)


def x_of(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


CASES = {
    "norm": (
        [(aten.mul.Tensor, ("0", "0")), (aten.mean.dim, ("2", [-1], True)), (aten.rsqrt.default, ("3",)),
         (aten.mul.Tensor, ("0", "4")), (aten.mul.Tensor, ("5", "1"))],
        (x_of(4, 6, 8).abs(), x_of(8)), ChunkSpec(0, 1, 2, 2), 5,
    ),
    "linear": (
        [(aten.reshape.default, ("0", [24, 8])), (aten.t.default, ("1",)), (aten.addmm.default, ("2", "3", "4")),
         (aten.reshape.default, ("5", [4, 6, 5])), (aten.relu.default, ("6",))],
        (x_of(4, 6, 8), x_of(5, 8), x_of(5)), ChunkSpec(1, 1, 3, 2), 4,
    ),
    "a bias of rows": (
        [(aten.addmm.default, ("1", "0", "2"))], (x_of(4, 3), x_of(4, 5), x_of(3, 5)), ChunkSpec(0, 2, 2, 1), 1
    ),
    "batches of products": ([(aten.bmm.default, ("0", "1"))], (x_of(4, 3, 2), x_of(4, 2, 5)), ChunkSpec(0, 1, 4, 1), 1),
    "moved dims": (
        [(aten.permute.default, ("0", [2, 0, 1])), (aten.transpose.int, ("1", 0, -1)),
         (aten.sum.dim_IntList, ("2", [2])),
         (aten.neg.default, ("3",))],
        (x_of(4, 6, 8),), ChunkSpec(1, 1, 2, 3), 4,
    ),
    "a sum over the pieces": ([(aten.sum.dim_IntList, ("0", [0]))], (x_of(4, 6),), ChunkSpec(0, 1, 2, 2), 0),
    "a sum over all": ([(aten.sum.dim_IntList, ("0", None))], (x_of(4, 6),), ChunkSpec(0, 1, 2, 2), 0),
    "spread": (
        [(aten.expand.default, ("0", [3, 4, 6])), (aten.add.Tensor, ("1", "0"))],
        (x_of(4, 6),), ChunkSpec(0, 1, 2, 2), 2,
    ),
    "one that spreads": ([(aten.add.Tensor, ("0", "1"))], (x_of(4, 1), x_of(1, 6)), ChunkSpec(0, 1, 2, 2), 1),
    "the other side": ([(aten.mm.default, ("1", "0"))], (x_of(4, 6), x_of(3, 4)), ChunkSpec(0, 1, 2, 2), 0),
    "both sides": ([(aten.mm.default, ("0", "0"))], (x_of(4, 4),), ChunkSpec(0, 1, 2, 2), 0),
    "draws": ([(aten.rand_like.default, ("0",))], (x_of(4, 4),), ChunkSpec(0, 1, 2, 2), 0),
    "features of a softmax": ([(aten._softmax.default, ("0", -1, False))], (x_of(4, 4),), ChunkSpec(1, 1, 2, 2), 0),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_ops_in_pieces(name: str) -> None:
    steps, given, cut, expected = CASES[name]
    whole, pieces = traced(steps, *given), traced(steps, *given)
    assert cut_all(pieces, cut) == expected
    if name != "draws":
        assert torch.allclose(pieces(*given), whole(*given), rtol=1e-12, atol=0)


@st.composite
def views(draw: st.DrawFn) -> tuple[list[int], list[int], ChunkSpec]:
    """Two shapes of equal size, and a cut of the first."""
    factors = draw(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=6))
    shapes = []
    for _ in range(2):
        ends = [0, *sorted(draw(st.lists(st.integers(0, len(factors)), max_size=4))), len(factors)]
        shapes.append([int(torch.tensor(factors[a:b]).prod()) for a, b in pairwise(ends)])
    dim = draw(st.integers(0, len(shapes[0]) - 1))
    size = shapes[0][dim]
    outer = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    count = draw(st.sampled_from([n for n in range(1, size // outer + 1) if size // outer % n == 0]))
    return shapes[0], shapes[1], ChunkSpec(dim, outer, count, size // outer // count)


def piece(x: torch.Tensor, cut: ChunkSpec, number: int) -> torch.Tensor:
    shape = list(x.shape)
    whole = x.reshape(*shape[: cut.dim], cut.outer, cut.count, cut.inner, *shape[cut.dim + 1 :])
    return whole.select(cut.dim + 1, number).reshape(cut.shape(shape))


@settings(max_examples=500, deadline=None)
@given(views())
def test_a_cut_seen_in_another_shape(case: tuple[list[int], list[int], ChunkSpec]) -> None:
    shape, other, cut = case
    made = viewed(cut, shape, other)
    x = torch.arange(torch.Size(shape).numel()).reshape(shape)
    if made is None:
        return
    assert made.count == cut.count
    for number in range(cut.count):
        assert torch.equal(piece(x, cut, number).flatten(), piece(x.reshape(other), made, number).flatten())
