"""Rows in blocks of a fixed size: one device's numbers while they fit, an error on all ranks before the step if not."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc._compat import FakeTensorMode
from shardc.custom_ops import expert_ops
from shardc.errors import InputError
from tests.experts.alike import trains_alike
from tests.experts.models import Own, batch, build, route
from tests.models.zoo import in_float64

RANKS, TOKENS, CHOICES, EXPERTS = 2, 24, 2, 8


def capacity(ranks: int, rows: int, tokens: int) -> float:
    """The capacity with room for ``rows`` rows in a block, of ``tokens`` tokens a rank."""
    return (rows - 0.5) * ranks / (tokens * CHOICES)


def fullest(model: Own, given: dict[str, Tensor], ranks: int) -> int:
    """The most rows that one of ``ranks`` sends to one of them, by what the router of one device chooses."""
    x = model.embed(given["input_ids"]).flatten(0, 1)
    owner = model.router(x).softmax(-1).topk(CHOICES).indices // (EXPERTS // ranks)
    return max(int(part.flatten().bincount().max()) for part in owner.chunk(ranks))


def bounded(ranks: int, rows: int, tokens: int) -> shardc.Plan:
    return shardc.ep("ep", "experts", dispatch="bounded", capacity=capacity(ranks, rows, tokens))


@pytest.mark.parametrize("ranks", [2, 4])
def test_blocks_that_are_just_full_train(ranks: int) -> None:
    with in_float64():
        given, model = batch(8), build("own")
        rows = fullest(model, given, ranks)
    trains_alike(partial(build, "own"), given, {"ep": ranks}, bounded(ranks, rows + 2, 48 // ranks))


def test_a_row_too_many_raises_before_the_step() -> None:
    with in_float64():
        given, model = batch(8), build("own")
        rows = fullest(model, given, RANKS)
        for room in (rows, rows - 1):
            module = shardc.compile(build("own"), shardc.Mesh(ep=RANKS), bounded(RANKS, room, TOKENS), backend="eager")
            sim = shardc.Simulation(module)
            loss = sim(**given)["loss"]
            if room == rows:
                torch.testing.assert_close(loss, model(**given)["loss"].detach(), rtol=0, atol=1e-9)
                sim.backward()
                continue
            assert loss.isnan(), "a row was dropped in silence"
            with pytest.raises(InputError, match=f"experts: rank . has {rows} rows .* leaves room for {room}"):
                sim.backward()
            assert not sim.grads
            with pytest.raises(InputError, match="leaves room"):
                sim(grad=False, **given)


def test_the_layer_and_the_rank_are_named() -> None:
    """The router of the second layer sends all tokens to experts of one rank."""
    model = build("qwen3-moe", torch.float32)
    with torch.no_grad():
        gate = model.model.layers[1].mlp.gate.weight
        gate.zero_()
        gate[:4] = torch.tensor([[1.0], [-1.0], [0.9], [-0.9]])
    plan = shardc.ep("ep", "*.experts", dispatch="bounded", capacity=1.6)
    sim = shardc.Simulation(shardc.compile(model, shardc.Mesh(ep=2), plan, backend="eager"))
    with pytest.raises(InputError, match="model.layers.1.mlp.experts: rank 1 has 24 rows .* room for 20"):
        sim(grad=False, **batch())


@pytest.mark.parametrize("mesh", [{"ep": 2}, {"dp": 2, "ep": 2}], ids=str)
def test_in_microbatches(mesh: dict[str, int]) -> None:
    plan = shardc.fsdp(tuple(mesh)) | bounded(2, 24, 12) | shardc.microbatches(2)
    trains_alike(partial(build, "own"), batch(8), mesh, plan)


def test_microbatches_raise_at_the_call() -> None:
    model = build("own", torch.float32)
    route(model, "to one")
    plan = bounded(2, 20, 12) | shardc.microbatches(2)
    sim = shardc.Simulation(shardc.compile(model, shardc.Mesh(ep=2), plan, backend="eager"))
    with pytest.raises(InputError, match="experts: rank . has"):
        sim(**batch(8))


def test_no_op_reads_numbers_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """With products of all experts at once, as on a GPU: every kernel of the step runs on tensors without values."""
    monkeypatch.setattr(expert_ops, "suits", lambda *_: True)
    module = shardc.compile(Own(inner=16).bfloat16(), shardc.Mesh(ep=4), bounded(4, 24, 12), backend="eager")
    kernels = {"noted": expert_ops._note, "order": expert_ops._order, "blocks": expert_ops._blocks}
    kernels |= {"arrived": expert_ops._arrived, "within": expert_ops._within}
    kernels |= {"run": expert_ops._run, "run_gradient": expert_ops._run_gradient}
    seen = set()
    for half in module.lower(**batch(8)).step():
        for node in half.graph.nodes:
            if getattr(node.target, "namespace", "") == "shardc_experts":
                name = node.target._opname
                with FakeTensorMode(allow_non_fake_inputs=True):
                    arguments = torch.fx.node.map_arg(node.args, lambda x: empty_like(x.meta["val"]))
                    kernels[name](*arguments)
                seen.add(name)
    assert seen == set(kernels)


def empty_like(x: object) -> object:
    if isinstance(x, list | tuple):
        return [empty_like(each) for each in x]
    return torch.empty(x.shape, dtype=x.dtype) if isinstance(x, Tensor) else x


def test_kernels_that_read_would_be_noticed() -> None:
    with FakeTensorMode(), pytest.raises(Exception, match="local_scalar"):
        expert_ops._live(torch.zeros(9, dtype=torch.int64), torch.ones(4, dtype=torch.int64), 4, True)


def test_a_module_alone_is_named() -> None:
    """Experts that are the model's own parameters."""

    @shardc.experts
    def product(rows: Tensor, weight: Tensor) -> Tensor:
        return rows @ weight

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 8, 8))

        def forward(self, x: Tensor) -> Tensor:
            chosen = torch.zeros(x.shape[0], 1, dtype=torch.int64)
            return product(x, chosen, torch.ones(x.shape[0], 1), self.weight).sum()

    plan = shardc.ep("ep", "", dispatch="bounded", capacity=1.0)
    sim = shardc.Simulation(shardc.compile(Layer(), shardc.Mesh(ep=2), plan, backend="eager"))
    sim(torch.randn(8, 8))
    with pytest.raises(InputError, match="the model: rank 1 has 4 rows"):
        sim.backward()
