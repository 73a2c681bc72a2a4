"""Each gradient's reduction starts behind the product that makes it, whatever cheap ops stand between the two."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import pytest
import torch
from torch import Tensor, fx, nn

import shardc
from shardc import Mesh, fsdp, hsdp, precision, tp
from shardc.ir import graph as ir
from shardc.ir.comm import waits_of
from shardc.passes.op_calls import is_start, result_bytes

WIDTH, LAYERS = 256, 6
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
HALF = precision(param=torch.bfloat16, reduce=torch.float32)


class Stack(nn.Module):
    """Layers ``x -> tanh(x @ weight)``; ``prepare`` makes what the layers use of all weights, before the first."""

    def __init__(self, prepare: Callable[[Tensor], Tensor] = lambda w: w, width: int = WIDTH, tied: int = 1) -> None:
        super().__init__()
        made = [nn.Linear(WIDTH, width, bias=False) for _ in range(LAYERS // tied)]
        self.up = nn.ModuleList(made[at // tied] for at in range(LAYERS))
        self.down = nn.ModuleList(nn.Linear(width, WIDTH, bias=False) for _ in range(LAYERS))
        self.prepare = prepare

    def forward(self, x: Tensor) -> Tensor:
        weights = [self.prepare(layer.weight) for layer in self.up]
        for weight, down in zip(weights, self.down, strict=True):
            wide = x.to(weight.dtype) @ weight.t()
            x = torch.tanh(down(wide.to(down.weight.dtype)).to(x.dtype))
        return x


def backward(model: nn.Module, mesh: Mesh, plan: shardc.Plan, no_sync: bool = False, bucket_size: int = 0) -> fx.Graph:
    options = shardc.Options(bucket_size=bucket_size, max_in_flight=-1, p2p_collectives=True)
    with torch.device("meta"):
        module = shardc.compile(model, mesh, plan, loss=lambda y: y.float().square().mean(), options=options)
    if no_sync:
        with module.no_sync():
            return module.lower(torch.empty(2048, WIDTH, device="meta")).backward.graph
    return module.lower(torch.empty(2048, WIDTH, device="meta")).backward.graph


def products_between(graph: fx.Graph, node: fx.Node) -> int:
    """How many matrix products stand between ``node`` and the last one, or collective, that its value is made of."""
    order = {each: at for at, each in enumerate(graph.nodes)}
    sources, work = [], list(node.all_input_nodes)
    while work:
        x = work.pop()
        if x.target in PRODUCTS or x.op == "placeholder" or is_start(x):
            sources.append(order[x])
        else:
            work += x.all_input_nodes
    return sum(max(sources) < order[each] < order[node] for each in graph.nodes if each.target in PRODUCTS)


def reductions(graph: fx.Graph) -> list[fx.Node]:
    """The collectives that reduce gradients of weights."""
    return [
        node for node in graph.nodes
        if is_start(node) and "reduce" in str(node.target) and result_bytes(node) >= WIDTH**2 // 2
        and all(leaves(wait) for wait in waits_of(node))
    ]  # fmt: skip


def leaves(node: fx.Node) -> bool:
    return all(user.op == "output" or (user.target not in PRODUCTS and leaves(user)) for user in node.users)


FSDP, DP = fsdp("dp", level=2), Mesh(dp=2)
CASES: dict[str, tuple[Callable[[], nn.Module], Mesh, shardc.Plan]] = {
    "cast": (Stack, DP, FSDP | HALF),
    "cast and low gradients": (
        Stack, DP, FSDP | precision(param=torch.bfloat16, reduce=torch.float32, keep_low_precision_grads=True),
    ),
    "cast by the model": (lambda: Stack(lambda w: w.bfloat16()), DP, FSDP),
    "cast and turned by the model": (lambda: Stack(lambda w: w.t().bfloat16().t()), DP, FSDP | HALF),
    "scaled by the model": (lambda: Stack(lambda w: w * 0.5 + w * w.detach()), DP, FSDP | HALF),
    "uneven": (lambda: Stack(width=WIDTH - 1), DP, FSDP),
    "uneven, cast": (lambda: Stack(width=WIDTH - 1), DP, FSDP | HALF),
    "tied": (lambda: Stack(tied=2), DP, FSDP | HALF),
    "tp": (Stack, Mesh(dp=2, tp=2), FSDP | tp("tp", colwise=["up.*"], rowwise=["down.*"]) | HALF),
    "hsdp": (Stack, Mesh(rep=2, dp=4), hsdp(shard="dp", replicate="rep", level=2) | HALF),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_gradient_is_reduced_behind_the_product_that_makes_it(case: str) -> None:
    make, mesh, plan = CASES[case]
    with torch.device("meta"):
        model = make()
    graph = backward(model, mesh, plan)
    found = reductions(graph)
    assert len(found) >= len({id(p) for p in model.parameters()})
    assert [products_between(graph, node) for node in found] == [0] * len(found)
    order = {node: at for at, node in enumerate(graph.nodes)}
    products = [order[node] for node in graph.nodes if node.target in PRODUCTS]
    done = [sum(at < order[node] for at in products) / len(products) for node in found]
    assert 0.4 <= median(done) <= 0.6


def test_what_is_summed_up_without_reduction_is_cast_where_it_is_made() -> None:
    with torch.device("meta"):
        model = Stack()
    graph = backward(model, DP, FSDP | HALF, no_sync=True)
    casts = [node for role, node in ir.outputs(graph) if role.kind == "grad"]
    assert len(casts) == 2 * LAYERS and all(ir.value(node).dtype == torch.float32 for node in casts)
    assert [products_between(graph, node) for node in casts] == [0] * len(casts)


@pytest.mark.parametrize(("bucket", "counts"), [(0, (12, 12)), (4 << 20, (6, 2))])
def test_a_gradient_that_is_reduced_twice_is_not_waited_for_in_between(bucket: int, counts: tuple[int, int]) -> None:
    """Under hsdp the second reduction starts behind the next of the first kind, under the products between."""
    with torch.device("meta"):
        model = Stack(width=8 * WIDTH)  # 2 MiB a weight, a quarter of it on each rank
    graph = backward(model, Mesh(rep=2, dp=4), hsdp(shard="dp", replicate="rep", level=2), bucket_size=bucket)
    order = {node: at for at, node in enumerate(graph.nodes)}
    scatters = [node for node in reductions(graph) if "reduce_scatter" in str(node.target)]
    again = [node for node in reductions(graph) if "all_reduce" in str(node.target)]
    assert (len(scatters), len(again)) == counts
    for node, following in zip(scatters, scatters[1:], strict=False):
        assert all(order[following] < order[wait] for wait in waits_of(node))
