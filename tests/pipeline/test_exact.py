"""Steps in pipeline stages compute what one device computes on the whole batch: loss, gradients, training steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import shardc
from examples.models import gpt2, llama
from tests.microbatches.programs import contrastive
from tests.microbatches.test_exact import agrees
from tests.models.alike import trains_alike
from tests.pipeline.programs import CASES, balanced, blocks, decoder, tied

PP2, PP4, DP_PP = shardc.Mesh(pp=2), shardc.Mesh(pp=4), shardc.Mesh(dp=2, pp=2)
WITHIN = {"experts": 1e-6}  # their norms and loss are in float32
SCHEDULES = ["gpipe", "1f1b", "interleaved", "zb", "zbv", "dualpipev"]


@pytest.fixture(autouse=True)
def _float64() -> None:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def pp(schedule: str = "1f1b", microbatches: int = 4, **more: object) -> shardc.Plan:
    return shardc.pp("pp", schedule, microbatches=microbatches, **more)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_models(name: str, stages: int) -> None:
    agrees(CASES[name](), shardc.Mesh(pp=stages), pp(), within=WITHIN.get(name, 1e-9))


@pytest.mark.parametrize("statistics", [False, True])
def test_instance_norms(statistics: bool) -> None:
    first, second = (torch.nn.InstanceNorm1d(5, affine=True, track_running_stats=statistics) for _ in range(2))
    model = torch.nn.Sequential(first, torch.nn.GELU(), second)
    for p in model.parameters():  # the gradients of biases of zero are rounding errors
        torch.nn.init.normal_(p)
    trains_alike(model, (torch.randn(4, 5, 8),), {"pp": 2}, pp(microbatches=2), steps=1)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["masked", "tied"])
def test_schedules(name: str, schedule: str) -> None:
    agrees(CASES[name](), DP_PP, shardc.fsdp("dp") | pp(schedule), steps=2)


@pytest.mark.parametrize("name", ["skips", "encoder and decoder", "experts"])
@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_schedules_with_several_stages_a_rank(name: str, schedule: str) -> None:
    agrees(CASES[name](), PP2, pp(schedule), within=WITHIN.get(name, 1e-9))


WHOLE_BATCH = {
    "experts": (balanced, PP2, pp("gpipe")),
    "experts in two backwards": (balanced, PP2, pp("zb")),
    "experts, gathered once": (balanced, DP_PP, shardc.fsdp("dp", level=2) | pp("interleaved")),
    "experts, four stages": (balanced, shardc.Mesh(dp=2, pp=4), shardc.fsdp("dp") | pp()),
    "contrastive": (contrastive, PP2, pp()),
    "contrastive, in a V": (contrastive, PP2, pp("zbv")),
    "contrastive, gathered once": (contrastive, DP_PP, shardc.fsdp("dp", level=2) | pp("interleaved")),
}


@pytest.mark.parametrize("name", WHOLE_BATCH)
def test_losses_that_need_results_of_the_whole_batch_first(name: str) -> None:
    case, mesh, plan = WHOLE_BATCH[name]
    agrees(case(), mesh, plan, steps=2)


MESHES = {
    "pp first": (shardc.Mesh(pp=2, dp=2), shardc.fsdp("dp")),
    "four stages": (shardc.Mesh(dp=2, pp=4), shardc.fsdp("dp", level=2)),
    "tp": (shardc.Mesh(pp=2, tp=2), llama.llama_tp("tp")),
    "sequence": (shardc.Mesh(dp=2, pp=2, tp=2), shardc.fsdp("dp") | llama.llama_tp("tp", sequence=True)),
    "tp around": (shardc.Mesh(tp=2, pp=2, dp=2), shardc.fsdp("dp") | llama.llama_tp("tp")),
    "ddp": (DP_PP, shardc.ddp("dp")),
    "level 1": (DP_PP, shardc.fsdp("dp", level=1)),
    "level 2": (DP_PP, shardc.fsdp("dp", level=2)),
    "hsdp": (shardc.Mesh(rep=2, pp=2, dp=2), shardc.hsdp("dp", "rep")),
    "cp": (shardc.Mesh(dp=2, pp=2, cp=2), shardc.fsdp(("dp", "cp")) | shardc.cp("cp")),
    "cp alone": (shardc.Mesh(pp=2, cp=2), shardc.cp("cp")),
    "recomputed": (DP_PP, shardc.fsdp("dp") | shardc.recompute("layers.*")),
    "offloaded": (DP_PP, shardc.fsdp("dp") | shardc.offload("layers.*")),
    "one rank": (shardc.Mesh(dp=2, pp=1), shardc.fsdp("dp")),
}


@pytest.mark.parametrize("name", MESHES)
def test_plans(name: str) -> None:
    mesh, plan = MESHES[name]
    agrees(decoder(masks=True, layers=2), mesh, plan | pp())


@pytest.mark.parametrize("schedule", ["zb", "zbv"])
@pytest.mark.parametrize("on", ["host", "recompute"])
def test_saved_values_of_backwards_in_two(on: str, schedule: str) -> None:
    agrees(blocks(), shardc.Mesh(pp=2), shardc.save("blocks.*", on=on) | pp(schedule), steps=2)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("level", [1, 2])
def test_tied_weights_at_each_level(level: int, schedule: str) -> None:
    agrees(tied(layers=2), DP_PP, shardc.fsdp("dp", level=level) | pp(schedule))


class Outputs(torch.nn.Module):
    """Tied weights in the first and the last stage; outputs of both behind constants."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 8)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

    def forward(self, tokens: Tensor) -> dict[str, Any]:
        first = x = self.embedding(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits = x @ self.embedding.weight.t()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        return {"name": "tied", "cached": [True, None], "loss": loss, "logits": logits, "rows": len(x), "first": first}


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_outputs_beside_tied_weights(schedule: str) -> None:
    model, tokens = Outputs(), torch.randint(11, (8, 3))
    sim = shardc.Simulation(shardc.compile(model, PP2, pp(schedule), backend="eager"))
    results, expected = sim(tokens), model(tokens)
    assert list(results) == list(expected)
    for name, value in expected.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(results[name], value.detach(), rtol=1e-12, atol=1e-14)
        else:
            assert results[name] == value


@pytest.mark.parametrize("layers, stages", [(3, 2), (5, 2), (5, 4), (7, 4)])
def test_uneven_blocks(layers: int, stages: int) -> None:
    agrees(blocks(layers=layers), shardc.Mesh(pp=stages), pp())


CUTS = {
    "in a block": ["layers.1.mlp_norm"],
    "at the first module of a block": ["layers.3"],
    "at the head": ["norm"],
    "behind the embedding": ["layers.0"],
}


@pytest.mark.parametrize("name", CUTS)
def test_cuts(name: str) -> None:
    agrees(decoder(), PP2, pp(cut=CUTS[name]))


def test_cuts_inside_of_blocks() -> None:
    agrees(tied(), PP4, pp("1f1b", cut=["layers.0.mlp", "layers.1.mlp.down", "layers.3.attn"]))


@pytest.mark.parametrize("rows, count", [(14, 4), (13, 4), (6, 8), (5, 2)])
def test_uneven_rows(rows: int, count: int) -> None:
    agrees(decoder(rows=rows, layers=2), DP_PP, shardc.fsdp("dp") | pp(microbatches=count))


@pytest.mark.parametrize("count", [2, 3, 8])
def test_counts(count: int) -> None:
    agrees(decoder(masks=True, layers=2), PP4, pp(microbatches=count), steps=2)


def test_alike_blocks_are_folded() -> None:
    case, plan = decoder(layers=8), shardc.fsdp("dp") | pp()
    agrees(case, DP_PP, plan, fold=True)


def test_the_count_of_a_microbatches_entry() -> None:
    agrees(blocks(), PP2, shardc.pp("pp") | shardc.microbatches(4))


def test_gradients_reduced_for_each_microbatch() -> None:
    agrees(decoder(layers=2), DP_PP, shardc.fsdp("dp") | shardc.pp("pp") | shardc.microbatches(4, reduce="microbatch"))


def dropped(plan: shardc.Plan, mesh: shardc.Mesh) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    case = tied(dropout=0.2)
    sim = shardc.Simulation(shardc.compile(case.model, mesh, plan, loss=gpt2.loss, backend="eager"))
    torch.manual_seed(7)
    loss = sim(*case.args)
    sim.backward()
    return loss, {name: sim.grad(name) for name in sim.grads}


@pytest.mark.slow
def test_dropout_is_that_of_any_number_of_stages() -> None:
    loss, grads = dropped(shardc.fsdp("dp") | shardc.microbatches(4), shardc.Mesh(dp=2))
    for stages, schedule in ((2, "1f1b"), (2, "zbv"), (4, "1f1b")):
        other, found = dropped(shardc.fsdp("dp") | pp(schedule), shardc.Mesh(dp=2, pp=stages))
        torch.testing.assert_close(other, loss, rtol=1e-12, atol=0)
        for name, grad in grads.items():
            torch.testing.assert_close(found[name], grad, rtol=1e-9, atol=1e-14)
