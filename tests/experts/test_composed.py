"""Experts beside the rest of a plan and of training: regions that run again, replicas, the host, sizes that change."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

import shardc
from tests.experts.alike import trains_alike
from tests.experts.models import CHOICES, DECODER, Own, batch, build, gated
from tests.models.zoo import in_float64

EP, OWN = shardc.ep("ep", "*.experts"), shardc.ep("ep", "experts")


def checkpointed() -> nn.Module:
    model = build("qwen3-moe")
    model.gradient_checkpointing_enable()
    return model


def deep() -> nn.Module:
    torch.manual_seed(0)
    config = {**DECODER, **CHOICES, "num_hidden_layers": 7, "moe_intermediate_size": 12, "use_cache": False}
    model = hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**config)).double().train()
    model.set_experts_implementation("eager")
    return model


@pytest.mark.parametrize("way", ["gather", "send"])
def test_in_regions_that_run_again(way: str) -> None:
    mesh = {"dp": 2, "ep": 2}
    trains_alike(checkpointed, batch(), mesh, shardc.fsdp(("dp", "ep")) | shardc.ep("ep", "*.experts", dispatch=way))


def test_with_replicas_and_on_the_host() -> None:
    plan = shardc.hsdp(shard="ep", replicate="rep") | EP | shardc.offload(["*.experts.*"])
    trains_alike(partial(build, "qwen3-moe"), batch(), {"rep": 2, "ep": 2}, plan)


@pytest.mark.parametrize("level", [1, 2])
def test_levels(level: int) -> None:
    trains_alike(partial(build, "olmoe"), batch(), {"dp": 2, "ep": 2}, shardc.fsdp(("dp", "ep"), level=level) | EP)


@pytest.mark.slow
def test_layers_that_are_folded() -> None:
    sim = trains_alike(deep, batch(), {"ep": 2}, shardc.fsdp("ep") | EP, options=shardc.Options(fold=True))
    assert sim.state.cache.program_for((), batch()).folded is not None


@pytest.mark.slow
def test_exactly_chosen() -> None:
    options = shardc.Options(layout_solver="exact")
    trains_alike(partial(build, "mixtral"), batch(), {"dp": 2, "ep": 2}, shardc.fsdp("dp") | EP, options=options)


@pytest.mark.parametrize("way", [{"dispatch": "send"}, {"dispatch": "bounded", "capacity": 1.9}], ids=str)
def test_one_program_for_many_sizes(way: dict[str, object]) -> None:
    with in_float64():
        model = build("own")
        dynamic = {"input_ids": {0: "b", 1: "t"}, "labels": {0: "b", 1: "t"}}
        plan = shardc.ep("ep", "experts", **way)
        module = shardc.compile(build("own"), shardc.Mesh(ep=2), plan, backend="eager", dynamic=dynamic)
        sim = shardc.Simulation(module)
        for rows, length in ((4, 6), (8, 5), (2, 9)):
            given = batch(rows, length)
            expected = model(**given)["loss"]
            assert abs(sim(**given)["loss"] - expected.detach()) < 1e-9
            model.zero_grad()
            expected.backward()
            sim.grads.clear()
            sim.backward()
            for name, param in model.named_parameters():
                torch.testing.assert_close(sim.grad(name), param.grad, rtol=0, atol=1e-9)


class Balanced(Own):
    """A router whose bias is moved after each step by how many tokens of all ranks each expert got."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.zeros(8, dtype=torch.float64))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids).flatten(0, 1)
        scores = self.router(x).sigmoid()
        chosen = (scores + self.bias).topk(self.choices).indices
        counts = F.one_hot(chosen, 8).sum((0, 1)).double()
        with torch.no_grad():
            self.bias.add_(0.1 * torch.sign(counts.mean() - counts))
        weights = [getattr(self.experts, name) for name in ("gate", "up", "down")]
        out = self.head(x + gated(x, chosen, scores.gather(1, chosen), *weights))
        return {"loss": F.cross_entropy(out, labels.flatten(), ignore_index=-100)}


def test_what_balances_routers_is_of_all_ranks_tokens() -> None:
    torch.manual_seed(0)
    model = Balanced().double()
    sim = trains_alike(partial(copy.deepcopy, model), batch(8), {"dp": 2, "ep": 2}, shardc.fsdp("dp") | OWN)
    assert sim.buffer("bias").unique().numel() > 1


def test_without_gradients() -> None:
    with in_float64():
        model = build("gpt-oss")
        sim = shardc.Simulation(shardc.compile(build("gpt-oss"), shardc.Mesh(ep=2), EP, backend="eager"))
        given = {"input_ids": batch()["input_ids"]}
        torch.testing.assert_close(sim(grad=False, **given)["logits"], model(**given).logits, rtol=0, atol=1e-9)


def test_a_norm_behind_each_expert() -> None:
    """Whose weights all experts share, and whose gradient is of all ranks' rows."""
    library = pytest.importorskip("transformers.models.muse_spark.modeling_muse_spark")
    config = SimpleNamespace(num_local_experts=8, moe_hidden_size=16, moe_intermediate_size=12, hidden_act="silu")
    config.post_norm_eps, config._experts_implementation = 1e-6, "eager"

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.experts, self.router = library.MuseSparkExperts(config), nn.Linear(16, 8)
            for param in self.parameters():
                nn.init.normal_(param, std=0.4)
            self.double()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            weights, chosen = self.router(x).softmax(-1).topk(2)
            return {"loss": self.experts(x, chosen, weights).square().mean()}

    trains_alike(Layer, {"x": torch.randn(12, 16, dtype=torch.float64)}, {"ep": 2}, OWN)


@shardc.experts
def without_its_last(rows: Tensor, gate: Tensor, unused: Tensor) -> Tensor:
    return rows @ gate


def test_a_parameter_that_no_expert_reads() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.unused = (nn.Parameter(torch.randn(4, 8, 8).double()) for _ in range(2))

        def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            return without_its_last(x, chosen, weights, self.gate, self.unused)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.experts, self.router = Experts(), nn.Linear(8, 4).double()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            weights, chosen = self.router(x).softmax(-1).topk(2)
            return {"loss": self.experts(x, chosen, weights).square().mean()}

    trains_alike(Layer, {"x": torch.randn(12, 8, dtype=torch.float64)}, {"ep": 2}, OWN)
