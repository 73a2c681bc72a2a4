"""Every method equals one device: loss, gradients and parameters of two steps, to 1e-9 in float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from tests.experts.alike import trains_alike
from tests.models.zoo import in_float64
from tests.sequence.models import batch, build

METHODS = ("gather", "ring", "ulysses", "auto")
CAUSAL = (True, pytest.param(False, marks=pytest.mark.slow))


def first(*methods: str) -> list[Any]:
    """All methods; of those that are not among these, the cases are slow."""
    return [x if x in methods else pytest.param(x, marks=pytest.mark.slow) for x in METHODS]


MESHES: tuple[dict[str, int], ...] = ({"cp": 2}, {"cp": 4}, {"dp": 2, "cp": 2})


def plan(mesh: dict[str, int], method: str, **options: Any) -> shardc.Plan:
    cp = shardc.cp("cp", method=method, **options)
    return shardc.fsdp(("dp", "cp")) | cp if "dp" in mesh else cp


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("causal", CAUSAL)
def test_one_of_ones_own(mesh: dict[str, int], method: str, causal: bool) -> None:
    trains_alike(partial(build, "own", causal=causal), batch(), mesh, plan(mesh, method))


@pytest.mark.parametrize("method", first("ring", "ulysses"))
@pytest.mark.parametrize("causal", CAUSAL)
def test_lengths_that_do_not_divide(method: str, causal: bool) -> None:
    mesh = {"cp": 4}
    trains_alike(partial(build, "own", causal=causal), batch(3, 10), mesh, plan(mesh, method))


@pytest.mark.parametrize("method", ["gather", "ring"])
def test_three_ranks(method: str) -> None:
    trains_alike(partial(build, "own"), batch(2, 9), {"cp": 3}, plan({"cp": 3}, method))


@pytest.mark.parametrize("method", METHODS)
def test_in_one_piece_each(method: str) -> None:
    """Causal masks know places in the whole sequence, also where each rank has one piece of it."""
    trains_alike(partial(build, "own"), batch(), {"cp": 2}, plan({"cp": 2}, method, order="contiguous"))


@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_few_heads_of_keys(method: str) -> None:
    """Four ranks share four heads of queries, and so two ranks each head of keys; or there is one of these."""
    trains_alike(partial(build, "own", groups=2), batch(), {"cp": 4}, plan({"cp": 4}, method))
    trains_alike(partial(build, "own", groups=1), batch(), {"cp": 2}, plan({"cp": 2}, method))


@pytest.mark.parametrize("methods", [("ulysses", "ring"), ("ring", "ulysses"), ("ring", "ring"), ("gather", "ring")])
def test_two_axes(methods: tuple[str, str]) -> None:
    both = shardc.cp("a", method=methods[0]) | shardc.cp("b", method=methods[1])
    trains_alike(partial(build, "own"), batch(2, 10), {"a": 2, "b": 2}, both)


@pytest.mark.parametrize("method", METHODS)
def test_with_tensor_parallelism(method: str) -> None:
    tp = shardc.tp("tp", colwise=["layers.*.[qkv]"], rowwise=["layers.*.o"])
    trains_alike(partial(build, "own"), batch(), {"cp": 2, "tp": 2}, shardc.cp("cp", method=method) | tp)


def test_by_module() -> None:
    mixed = shardc.cp("cp", method="ulysses") | shardc.cp("cp", method="ring", modules="layers.1")
    sim = trains_alike(partial(build, "own"), batch(), {"cp": 2}, mixed)
    text = sim.state.cache.program_for((), batch()).text("localize")
    assert "layers.1" in text and text.count("permute_ranks") > 0 and text.count("all_to_all") > 0


@pytest.mark.parametrize("method", METHODS)
def test_in_regions_that_run_again_with_replicas_and_levels(method: str) -> None:
    mesh = {"rep": 2, "cp": 2}
    given = shardc.hsdp(shard="cp", replicate="rep", level=2) | shardc.recompute("layers.*")
    trains_alike(partial(build, "own"), batch(), mesh, given | shardc.cp("cp", method=method))


@pytest.mark.parametrize("method", first("auto"))
def test_exactly_chosen(method: str) -> None:
    options = shardc.Options(layout_solver="exact")
    mesh = {"dp": 2, "cp": 2}
    trains_alike(partial(build, "own"), batch(), mesh, plan(mesh, method), options=options)


@pytest.mark.parametrize("method", first("ring", "auto"))
@pytest.mark.filterwarnings("ignore::shardc.ShardcWarning")
def test_with_dropout(method: str) -> None:
    """Draws are the mesh's own: the same on one rank and on several."""
    made = (
        shardc.compile(build("own", dropout=0.3), shardc.Mesh(cp=n), plan({}, method), backend="eager") for n in (1, 2)
    )
    one, several = map(shardc.Simulation, made)
    with in_float64():
        torch.manual_seed(3)
        expected = one(**batch())["loss"]
        torch.manual_seed(3)
        assert abs(several(**batch())["loss"] - expected) < 1e-9


@pytest.mark.parametrize("method", first("ring"))
def test_one_program_for_many_lengths(method: str) -> None:
    with in_float64():
        model = build("own")
        dynamic = {"input_ids": {1: "t"}, "labels": {1: "t"}}
        module = shardc.compile(build("own"), shardc.Mesh(cp=2), plan({}, method), backend="eager", dynamic=dynamic)
        sim = shardc.Simulation(module)
        for length in (8, 12, 20):
            given = batch(2, length)
            expected = model(**given)["loss"]
            model.zero_grad()
            expected.backward()
            assert abs(sim(**given)["loss"] - expected.detach()) < 1e-9
            sim.grads.clear()
            sim.backward()
            for name, param in model.named_parameters():
                torch.testing.assert_close(sim.grad(name), param.grad, rtol=0, atol=1e-9)


class Cross(nn.Module):
    """Queries of one sequence, keys of another that is longer, and a bias of each pair."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(8, 8), nn.Linear(8, 16)

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor) -> dict[str, Tensor]:
        q = self.q(x).unflatten(-1, (2, 4)).transpose(1, 2)
        k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.kv(memory).chunk(2, -1))
        return {"loss": F.scaled_dot_product_attention(q, k, v, bias).square().mean()}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("length", [12, 9])
def test_two_sequences_and_a_bias(method: str, length: int) -> None:
    torch.manual_seed(0)
    model = Cross().double().state_dict()

    def make() -> nn.Module:
        made = Cross().double()
        made.load_state_dict(model)
        return made

    given = {"x": torch.randn(2, 8, 8), "memory": torch.randn(2, length, 8), "bias": torch.randn(2, 1, 8, length)}
    given = {name: x.double() for name, x in given.items()}
    given["bias"][:, :, 3] = float("-inf")  # a query that sees nothing
    trains_alike(make, given, {"cp": 2}, shardc.cp("cp", method=method))


@pytest.mark.parametrize("method", first("ring", "ulysses"))
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_models_of_transformers(name: str, method: str) -> None:
    mesh = {"dp": 2, "cp": 2}
    trains_alike(partial(build, name), batch(4, 10, padding=True), mesh, plan(mesh, method))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma2"])
@pytest.mark.filterwarnings("ignore::shardc.ShardcWarning")
@pytest.mark.long
def test_more_models_of_transformers(name: str, method: str, mesh: dict[str, int]) -> None:
    for length, padding in ((8, False), (10, True)):
        trains_alike(partial(build, name), batch(4, length, padding), mesh, plan(mesh, method))


@pytest.mark.parametrize("method", first("ring", "ulysses"))
def test_padding_in_an_encoder(method: str) -> None:
    """By gradients: that of the keys' bias is zero but for rounding, of which AdamW would make steps."""
    with in_float64():
        model, given = build("bert"), batch(4, 10, padding=True)
        sim = shardc.Simulation(
            shardc.compile(build("bert"), shardc.Mesh(dp=2, cp=2), plan({"dp": 2}, method), backend="eager")
        )
        loss = model(**given)["loss"]
        loss.backward()
        made = sim(**given)
        assert abs(made["loss"] - loss.detach()) < 1e-9
        sim.backward(torch.ones((), dtype=torch.float64), *[None] * (len(made) - 1))
        for name, param in model.named_parameters():
            if param.grad is not None:
                torch.testing.assert_close(sim.grad(name), param.grad, rtol=0, atol=1e-9)
