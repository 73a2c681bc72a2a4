"""What stands between a parameter and its gather does not keep the gather from its bucket, or from starting early."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

import shardc
from shardc.ir import graph as ir
from shardc.ir.comm import waits_of
from shardc.passes.op_calls import is_start

WIDTH = 256  # weights of more than a small op's bytes
LAYERS = 6


class Turned(nn.Module):
    """A linear layer whose weight is stored the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


def half(plan: shardc.Plan, which: str, **options: object) -> fx.GraphModule:
    model = nn.Sequential(*(Turned() for _ in range(LAYERS)))
    made = shardc.Options(p2p_collectives=True, **options)  # type: ignore[arg-type]
    module = shardc.compile(model, shardc.Mesh(dp=2), plan, loss=lambda y: y.float().square().mean(), options=made)
    gm = getattr(module.lower(torch.randn(8, WIDTH)), which)
    assert isinstance(gm, fx.GraphModule)
    return gm


def gathers(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if is_start(node) and "all_gather" in str(node.target)]


HALF = shardc.precision(param=torch.bfloat16, reduce=torch.float32)
PLAIN, CAST = shardc.fsdp("dp", level=3), shardc.fsdp("dp", level=3) | HALF


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_a_cast_leaves_the_buckets_as_they_are(which: str) -> None:
    sizes = [
        [len(node.meta["val"]) for node in gathers(half(plan, which, bucket_size=size))]
        for plan, size in ((PLAIN, 2 * 4 * WIDTH**2), (CAST, 2 * 2 * WIDTH**2))  # two weights a bucket
    ]
    assert sizes[0] == sizes[1] and max(sizes[0]) == 2


@pytest.mark.parametrize("plan", [PLAIN, CAST], ids=["plain", "cast"])
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_gathers_start_under_the_layer_before(plan: shardc.Plan, which: str) -> None:
    gm = half(plan, which, bucket_size=0)
    order = {node: at for at, node in enumerate(gm.graph.nodes)}
    products = [order[node] for node in gm.graph.nodes if node.target is torch.ops.aten.mm.default]
    started = gathers(gm)
    assert len(started) >= LAYERS - 1
    for node in started:
        use = min(order[user] for wait in waits_of(node) for user in wait.users)
        before = [at for at in products if at < use]
        assert not before or order[node] < before[-1], f"{ir.info(node).name} starts where it is used"


def test_no_more_is_in_flight_than_allowed() -> None:
    weight = 2 * WIDTH**2
    gm = half(CAST, "forward", bucket_size=0, max_in_flight=2 * weight)
    flying = most = 0
    ends: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if node in gathers(gm):
            flying += weight
            (wait,) = waits_of(node)
            ends[next(iter(wait.users))] = node
        most = max(most, flying)
        if node in ends:
            flying -= weight
    assert most == 2 * weight


def test_a_large_value_that_others_use_stays() -> None:
    """An activation that is gathered, and used as it is too, is not made before its time."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = Turned(), Turned()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            out = self.last(self.first(x))
            late = y * 2
            return out + late.sum(0) + torch.relu(late)

    plan = shardc.Plan(inputs={"x": "@dp, _", "y": "@dp, _"})
    module = shardc.compile(Model(), shardc.Mesh(dp=2), plan, options=shardc.Options(p2p_collectives=True))
    gm = module.lower(torch.randn(2 * WIDTH, WIDTH), torch.randn(2 * WIDTH, WIDTH)).inference
    order = {node: at for at, node in enumerate(gm.graph.nodes)}
    (late,) = [node for node in gm.graph.nodes if node.target is torch.ops.aten.mul.Tensor]
    products = [at for node, at in order.items() if node.target is torch.ops.aten.mm.default]
    assert order[late] > products[-1]
