"""`torch.utils.checkpoint`: a region is computed again in backward, and no parameter is gathered twice for it."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import shardc
from shardc.ir import graph as ir
from tests.models.alike import trains_alike

WIDTH, BATCH, LAYERS = 8, 12, 2


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(torch.tanh(self.up(x))))


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0, regions: bool = True) -> None:
        super().__init__()
        self.blocks, self.regions = nn.ModuleList(Block(dropout) for _ in range(LAYERS)), regions

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.regions else block(x)
        return x


PLANS = {
    "fsdp3": ({"dp": 2}, lambda: shardc.fsdp("dp", level=3, threshold=0)),
    "fsdp2": ({"dp": 2}, lambda: shardc.fsdp("dp", level=2, threshold=0)),
    "fsdp3+tp": (
        {"dp": 2, "tp": 2},
        lambda: shardc.fsdp("dp", level=3, threshold=0) | shardc.tp("tp", colwise=["**.up"], rowwise=["**.down"]),
    ),
}


@lru_cache
def compiled(plan: str, regions: bool) -> shardc.Program:
    mesh, make = PLANS[plan]
    net = Net(regions=regions).double()
    return shardc.compile(net, shardc.Mesh(mesh), make()).lower(torch.empty(BATCH, WIDTH, dtype=torch.float64))


def ops(half: fx.GraphModule | None, name: str) -> list[fx.Node]:
    assert half is not None
    return [node for node in half.graph.nodes if name in str(node.target)]


def saved(program: shardc.Program) -> list[str]:
    """What is made in forward and kept for backward; neither parameters nor inputs."""
    assert program.forward is not None
    made = [x for role, x in ir.outputs(program.forward.graph) if role.kind == "saved" and isinstance(x, fx.Node)]
    return [ir.info(x).name for x in made if x.op == "call_function"]


@pytest.mark.parametrize("plan", PLANS)
def test_a_region_runs_again_in_backward(plan: str) -> None:
    program, plain = compiled(plan, True), compiled(plan, False)
    assert len(ops(program.forward, "aten.mm")) == len(ops(plain.forward, "aten.mm")) == 2 * LAYERS
    # The second product of a block is not needed: what is added to it has a gradient that does without it.
    assert len(ops(program.backward, "aten.mm")) == len(ops(plain.backward, "aten.mm")) + LAYERS
    wide = [name for name in saved(program) if ".tanh" in name or ".up" in name]
    assert (wide == []) == (plan != "fsdp2"), "a gathered weight is all that is kept of a region, and under level 2"


@pytest.mark.parametrize("plan", PLANS)
def test_no_parameter_is_gathered_twice(plan: str) -> None:
    program, plain = compiled(plan, True), compiled(plan, False)
    assert _bytes(program.forward, "all_gather") == _bytes(plain.forward, "all_gather")
    assert _bytes(program.backward, "all_gather") <= _bytes(program.forward, "all_gather")
    for kind in ("all_reduce", "reduce_scatter"):
        assert _bytes(program.backward, kind) == _bytes(plain.backward, kind), f"{kind} is run again"


def _bytes(half: fx.GraphModule | None, kind: str) -> int:
    """Bytes of the results of all collectives of one kind, bucketed or not."""
    found = [node.meta["val"] for node in ops(half, kind)]
    tensors = [x for made in found for x in (made if isinstance(made, (list, tuple)) else [made])]
    return sum(x.numel() * x.element_size() for x in tensors)


@pytest.mark.parametrize("plan", PLANS)
def test_training_is_the_same(plan: str) -> None:
    mesh, make = PLANS[plan]
    trains_alike(Net(), (torch.randn(BATCH, WIDTH),), mesh, make())


@pytest.mark.parametrize("plan", PLANS)
def test_what_is_drawn_in_a_region_is_drawn_again(plan: str) -> None:
    """With and without regions the same numbers: the recomputed masks are those of forward."""
    mesh, make = PLANS[plan]
    grads = []
    for regions in (True, False):
        torch.manual_seed(0)
        net = Net(0.5, regions).double()
        sim = shardc.Simulation(shardc.compile(net, shardc.Mesh(mesh), make(), loss=lambda y: y.square().mean()))
        sim(torch.randn(BATCH, WIDTH, dtype=torch.float64))
        sim.backward()
        grads.append({name: sim.grad(name) for name, _ in net.named_parameters()})
    for name, grad in grads[0].items():
        assert grad.abs().max() > 0
        torch.testing.assert_close(grad, grads[1][name], rtol=1e-12, atol=1e-12)


class Attends(nn.Module):
    """Layers whose fused attention is tagged as random, though it drops nothing."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True) for _ in range(LAYERS))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def test_fused_attention_in_a_region() -> None:
    sim = trains_alike(Attends(), (torch.randn(BATCH, 5, WIDTH),), {"dp": 2}, shardc.fsdp("dp", threshold=0), steps=1)
    (program,) = (sim.module.shardc.cache.program_for((torch.empty(BATCH, 5, WIDTH, dtype=torch.float64),), {}),)
    assert len(ops(program.backward, "flash_attention_for_cpu.default")) == LAYERS, "is kept, not run again"


# --- regions that a plan names


@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_names_a_region(plan: str) -> None:
    """The program is that of a model with the region in its own code."""
    mesh, make = PLANS[plan]
    x = torch.empty(BATCH, WIDTH, dtype=torch.float64)
    named = shardc.compile(Net(regions=False).double(), shardc.Mesh(mesh), make() | shardc.recompute("blocks.*")).lower(
        x
    )
    own = compiled(plan, True)
    assert saved(named) == saved(own)
    for half in ("forward", "backward"):
        assert [str(n.target) for n in ops(getattr(named, half), "")] == [
            str(n.target) for n in ops(getattr(own, half), "")
        ]


def test_one_block_runs_again() -> None:
    mesh, make = PLANS["fsdp3"]
    x = torch.empty(BATCH, WIDTH, dtype=torch.float64)
    plan = make() | shardc.recompute("blocks.1")
    program = shardc.compile(Net(regions=False).double(), shardc.Mesh(mesh), plan).lower(x)
    plain = compiled("fsdp3", False)
    assert len(ops(program.backward, "aten.mm")) == len(ops(plain.backward, "aten.mm")) + 1
    assert [name for name in saved(program) if ".up" in name or ".tanh" in name] == ["blocks.0.tanh"]


@pytest.mark.parametrize("globs", ["blocks.*", ["blocks.0", "blocks.1.drop"], "blocks"], ids=str)
def test_training_is_the_same_where_a_plan_names_regions(globs: str | list[str]) -> None:
    mesh, make = PLANS["fsdp3+tp"]
    trains_alike(Net(regions=False), (torch.randn(BATCH, WIDTH),), mesh, make() | shardc.recompute(globs))


def test_masks_of_a_region_that_a_plan_names_are_those_of_forward() -> None:
    grads = []
    for plan in (shardc.fsdp("dp") | shardc.recompute("blocks.*"), shardc.fsdp("dp")):
        torch.manual_seed(0)
        net = Net(0.5, regions=False).double()
        sim = shardc.Simulation(shardc.compile(net, shardc.Mesh(dp=2), plan, loss=lambda y: y.square().mean()))
        sim(torch.randn(BATCH, WIDTH, dtype=torch.float64))
        sim.backward()
        grads.append({name: sim.grad(name) for name, _ in net.named_parameters()})
    for name, grad in grads[0].items():
        assert grad.abs().max() > 0
        torch.testing.assert_close(grad, grads[1][name], rtol=1e-12, atol=1e-12)


def test_a_module_that_there_is_not_is_refused() -> None:
    with pytest.raises(shardc.ShardcError) as error:
        shardc.compile(Net(), shardc.Mesh(dp=2), shardc.recompute("block.*")).lower(torch.empty(BATCH, WIDTH))
    assert error.value.what == "'block.*' matches no module" and error.value.plan_entry == 'recompute("block.*")'
