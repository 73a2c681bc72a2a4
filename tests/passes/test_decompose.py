"""Decompose: products and collectives in pieces give what they gave whole, and are cut where that takes less time."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shardc
from examples.models import llama
from shardc import passes
from shardc.cost.model import CostModel, Measured, Messages
from shardc.ir.mesh import Mesh
from shardc.passes.lower.decompose import Candidate, candidates
from tests.models.alike import relative
from tests.ranks import device_mesh, run_ranks

CONFIG = llama.LlamaConfig(64, 32, 2, heads=4, kv_heads=4, hidden=64)
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute_ranks")


def link(bandwidth: float, latency: float = 1e-5) -> CostModel:
    """Links that were measured, between ranks of a CPU."""
    return CostModel(kinds=tuple(Measured(kind, 2, latency, bandwidth) for kind in KINDS))


def model(layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    made = llama.Llama(replace(CONFIG, layers=layers))
    for module in made.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return made


def batch(rows: int = 4, length: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 64, (rows, length), generator=torch.Generator().manual_seed(1))
    return tokens, tokens.roll(-1, 1)


def collectives(program: shardc.Program) -> int:
    return len(re.findall(r"= _c10d_functional.(all|reduce)_", program.text("decompose")))


@pytest.mark.parametrize("pieces", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(
    "mesh", [{"tp": 2}, pytest.param({"tp": 4}, marks=pytest.mark.slow), {"dp": 2, "tp": 2}], ids=str
)
def test_in_pieces_it_is_the_same(mesh: dict[str, int], sequence: bool, pieces: int) -> None:
    plan = llama.llama_tp("tp", sequence=sequence)
    plan = shardc.fsdp("dp") | plan if "dp" in mesh else plan
    alone, given = model().double(), batch()
    expected = llama.loss(alone(given[0]), given[1])
    expected.backward()
    made = []
    for count in (1, pieces):
        options = shardc.Options(decompose=count)
        module = shardc.compile(model().double(), Mesh(mesh), plan, loss=llama.loss, backend="eager", options=options)
        made.append(collectives(module.lower(*given)))
        sim = shardc.Simulation(module)
        assert relative(sim(*given), expected.detach()) < 1e-9
        sim.backward()
        for name, param in alone.named_parameters():
            assert relative(sim.grad(name), param.grad) < 1e-9, name
    assert made[1] > made[0]


def test_lengths_that_do_not_divide() -> None:
    alone, given = model().double(), batch(3, 7)
    plan = llama.llama_tp("tp", sequence=True)
    options = shardc.Options(decompose=2)
    module = shardc.compile(model().double(), Mesh(tp=2), plan, loss=llama.loss, backend="eager", options=options)
    made = shardc.Simulation(module)(*given)
    assert relative(made, llama.loss(alone(given[0]), given[1]).detach()) < 1e-9


@pytest.mark.slow
def test_one_program_of_many_lengths() -> None:
    alone = model().double()
    options = shardc.Options(decompose=2, strict=True)
    plan = llama.llama_tp("tp", sequence=True)
    module = shardc.compile(
        model().double(), Mesh(tp=2), plan, loss=llama.loss, backend="eager", options=options,
        dynamic={"tokens": {1: "length"}, "target": {1: "length"}},
    )  # fmt: skip
    sim = shardc.Simulation(module)
    for length in (8, 16, 12, 40):
        given = batch(4, length)
        assert relative(sim(*given), llama.loss(alone(given[0]), given[1]).detach()) < 1e-9


def decided(cost: CostModel, sequence: bool = True, layers: int = 1, **options: Any) -> list[Candidate]:
    config = llama.LlamaConfig(512, 512, layers, heads=8, kv_heads=8, hidden=1024)
    with torch.device("meta"):
        large, tokens = llama.Llama(config), torch.empty(4, 256, dtype=torch.int64)
    module = shardc.compile(
        large, Mesh(tp=2), llama.llama_tp("tp", sequence=sequence), loss=llama.loss, backend="eager",
        options=shardc.Options(cost=cost, **options),
    )  # fmt: skip
    program = module.lower(tokens, tokens)
    return candidates(program.graph("hoist_grad_epilogue"), program.pipeline[passes.Decompose])


def test_it_is_decided_by_cost() -> None:
    """Cut on a slow link; whole where messages cost more than they hide, or where nobody said what they cost."""
    slow, fast, late = decided(link(1e8)), decided(link(1e11)), decided(link(1e9, latency=1e-2))
    assert any(one.pieces > 1 for one in slow)
    assert all(one.pieces == 1 for one in [*fast, *late])
    assert all(
        re.fullmatch(r".* (us|beside it|whose rows divide|ranks split)", one.reason) for one in [*slow, *fast, *late]
    )
    assert all("whole it takes" in one.reason for one in fast if "beside it" not in one.reason)
    assert decided(CostModel()) == []


@pytest.mark.parametrize("bandwidth", [1e9, *(pytest.param(x, marks=pytest.mark.slow) for x in (4e9, 16e9))])
def test_depth_does_not_decide(bandwidth: float) -> None:
    """What is added to the residual stream reaches the products of all later layers, but waits for theirs first."""
    said: dict[str, set[tuple[int, str]]] = {}
    for one in decided(link(bandwidth), False, layers=5):
        where = re.fullmatch(r"layers\.[1-3]\.(attn\.wo|mlp\.down)", one.module)
        if where and not one.name.startswith("d."):
            said.setdefault(where[1], set()).add((one.pieces, one.reason))
    assert set(said) == {"attn.wo", "mlp.down"} and all(len(reasons) == 1 for reasons in said.values())


def test_messages_that_were_measured_decide() -> None:
    """As `shardc.measure_links` has them: a link that a core keeps busy hides nothing, and one that waits does."""
    slow = CostModel(messages=Messages(2e-4, 1e-4, 5e-5, 0.0, 1.2e8, 0.1))
    loopback = CostModel(messages=Messages(1e-4, 1e-4, 5e-5, 0.0, 1.5e9, 0.9))
    assert any(one.pieces > 1 for one in decided(slow, p2p_collectives=True))
    assert all(one.pieces == 1 for one in decided(loopback, p2p_collectives=True))
    # Not where collectives are the backend's, which nobody has measured.
    assert all(one.pieces == 1 for one in decided(slow, p2p_collectives=False))


@pytest.mark.parametrize("pieces", [2, 4])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_one_dim_is_left_whole(ranks: int, pieces: int) -> None:
    """Of a vector the features are what a reduce-scatter splits: pieces of it would come to other ranks."""
    plan = shardc.tp("tp", colwise=["0", "2"], rowwise=["1", "3"]) | shardc.Plan(activations={"1.output": "@tp"})
    x, models = torch.linspace(-1, 1, 24, dtype=torch.float64), []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(*(nn.Linear(*io) for io in ((24, 48), (48, 24), (24, 48), (48, 24)))).double())
    options = shardc.Options(decompose=pieces)
    module = shardc.compile(
        models[1], Mesh(tp=ranks), plan, loss=lambda made: made.sum(), backend="eager", options=options
    )
    sim, expected = shardc.Simulation(module), models[0](x).sum()
    assert relative(sim(x), expected.detach()) < 1e-9
    expected.backward()
    sim.backward()
    for name, param in models[0].named_parameters():
        assert relative(sim.grad(name), param.grad) < 1e-9, name


def test_gradients_of_parameters_are_left_alone() -> None:
    """They are hidden under the rest of backward, and no product waits for them."""
    given = batch()
    options = shardc.Options(decompose=2)
    plain, cut = (
        shardc.compile(model(), Mesh(dp=2), shardc.fsdp("dp"), loss=llama.loss, backend="eager", options=said)
        for said in (shardc.Options(decompose=1), options)
    )
    assert plain.lower(*given).text("decompose") == cut.lower(*given).text("decompose")


def trains(backend: str, pieces: int) -> None:
    alone, given = model(), batch(4, 16)
    expected = llama.loss(alone(given[0]), given[1])
    expected.backward()
    plan = llama.llama_tp("tp", sequence=True)
    options = shardc.Options(decompose=pieces)
    module = shardc.compile(model(), device_mesh(Mesh(tp=2)), plan, loss=llama.loss, backend=backend, options=options)
    made = module(*module.shard_inputs(*given))
    assert relative(made.detach(), expected.detach()) < 1e-5
    made.backward()
    for (name, mine), theirs in zip(module.named_parameters(), alone.parameters(), strict=True):
        assert relative(mine.grad.full_tensor(), theirs.grad, 1e-3) < 1e-4, name


def trains_folded() -> None:
    """Blocks in pieces that are captured on six of them run as the whole model does."""
    alone, given = model(8).double(), batch(4, 16)
    expected = llama.loss(alone(given[0]), given[1])
    expected.backward()
    plan = shardc.fsdp("dp") | llama.llama_tp("tp", sequence=True)
    module = shardc.compile(
        model(8).double(), device_mesh(Mesh(dp=2, tp=2)), plan, loss=llama.loss, backend="eager",
        options=shardc.Options(decompose=2),
    )  # fmt: skip
    made = module(*module.shard_inputs(*given))
    assert relative(made.detach(), expected.detach()) < 1e-9
    made.backward()
    assert [program.folded is not None for program in module.shardc.programs.values()] == [True]
    for (name, mine), theirs in zip(module.named_parameters(), alone.parameters(), strict=True):
        assert relative(mine.grad.full_tensor(), theirs.grad) < 1e-9, name


@pytest.mark.slow
def test_folded_on_ranks() -> None:
    run_ranks(4, trains_folded)


@pytest.mark.slow
def test_on_ranks() -> None:
    run_ranks(2, partial(trains, "eager", 2), partial(trains, "inductor", 4))


@pytest.mark.parametrize("value", [0, 65, "some", True])
def test_bad_options(value: Any) -> None:
    with pytest.raises(shardc.ShardcError, match="decompose"):
        shardc.Options(decompose=value)


@pytest.mark.slow
def test_lint_says_why() -> None:
    given = batch()
    options = shardc.Options(cost=link(1e8))
    plan = llama.llama_tp("tp", sequence=True)
    program = shardc.compile(model(), Mesh(tp=2), plan, loss=llama.loss, options=options).lower(*given)
    said = [finding for finding in program.lint() if finding.rule == "product-in-pieces"]
    assert len(said) > 8 and {finding.message.split(":")[0] for finding in said} >= {"not cut in pieces"}
    assert not [one for one in shardc.compile(model(), Mesh(tp=2), plan, loss=llama.loss).lower(*given).lint()
                if one.rule == "product-in-pieces"]  # fmt: skip
