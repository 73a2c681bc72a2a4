"""What the cut into forward and backward leaves behind is a graph that the passes after it take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn

import shardc
from examples.models.llama import Llama, LlamaConfig, loss
from shardc.errors import VerifyError
from shardc.ir import graph as ir
from shardc.passes import Partition
from shardc.passes.pipeline import Pipeline


class Sum(nn.Module):
    """Two layers that are added up: the gradients of their biases are one sum."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x.tanh())


@pytest.mark.parametrize("direct", [False, True])
def test_equal_sums_are_reduced_once(direct: bool) -> None:
    model, x = Sum().double(), torch.randn(4, 6, dtype=torch.float64)
    options = shardc.Options(p2p_collectives=direct, bucket_size=0)
    plan = shardc.ddp("dp")
    module = shardc.compile(
        model, shardc.Mesh(dp=2), plan, loss=lambda y: y.square().mean(), backend="eager", options=options
    )
    sim = shardc.Simulation(module)
    sim(x)
    sim.backward()
    model(x).square().mean().backward()
    for name, param in model.named_parameters():
        assert param.grad is not None
        torch.testing.assert_close(sim.grad(name), param.grad, rtol=1e-9, atol=1e-12)
    backward = module.shardc.cache.program_for((x,), {}).backward
    assert len([node for node in backward.graph.nodes if "wait_tensor" in str(node.target)]) == 3  # two weights, a sum


PLANS = {
    "fsdp": shardc.fsdp("dp"),
    "fsdp, bf16": shardc.fsdp("dp") | shardc.precision(param=torch.bfloat16),
    "tp": shardc.tp("dp", colwise=["0"], rowwise=["2"]),
    "regions": shardc.fsdp("dp") | shardc.recompute("0"),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_evaluation_is_the_same_before_and_behind_training(plan: shardc.Plan) -> None:
    """Halves are cut from one joint graph, which none of them changes for the next."""
    texts = []
    for trained in (False, True):
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.Dropout(0.1))
        options = shardc.Options(p2p_collectives=True, decompose=2)
        program = shardc.compile(model, shardc.Mesh(dp=2), plan, backend="eager", options=options).lower(
            torch.randn(64, 64)
        )
        if trained:
            assert "tangents_1" in program.backward.code
        texts.append(program.inference.code)
    assert texts[0] == texts[1]


def test_a_block_behind_an_embedding_saves_what_the_others_do() -> None:
    """So that all of them are compiled once; torch's cut alone takes the embedding for something that never fuses."""
    module = shardc.compile(
        Llama(LlamaConfig(64, 16, 3, heads=2, kv_heads=1, hidden=32)), shardc.Mesh(dp=2), shardc.fsdp("dp"), loss=loss
    )
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    graph = module.lower(tokens, tokens).forward.graph
    names = [ir.info(node).name for role, node in ir.outputs(graph) if role.kind == "saved"]
    blocks = [{name.partition(f"layers.{at}.")[2] for name in names if f"layers.{at}." in name} for at in range(3)]
    assert blocks[0] == blocks[1] and len(blocks[0]) > 5


class Padded(nn.Module):
    """Five rows on two ranks: what is padded for the op is padded for storage, too."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.up = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(x + self.scale, x + self.up, x)


class Signs(nn.Module):
    """Zeros of both signs, which are equal numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        plus, minus = (torch.full((3,), zero, dtype=x.dtype) for zero in (0.0, -0.0))
        return torch.copysign(h, plus) + 2 * torch.copysign(h.square(), minus)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("model", "rows"), [(Padded(), 5), (Signs(), 4)], ids=["pads", "zeros"])
def test_equal_numbers_are_not_the_same_argument(model: nn.Module, rows: int) -> None:
    """Of ops that the cut takes for one the arguments are the same, and not just equal."""
    torch.manual_seed(0)
    model, x = model.double(), torch.randn(rows, 3, dtype=torch.float64)
    plan = shardc.fsdp("dp", threshold=0) | shardc.Plan(inputs={"x": ("dp", None)})
    sim = shardc.Simulation(
        shardc.compile(model, shardc.Mesh(dp=2), plan, loss=lambda y: y.square().sum(), backend="eager")
    )
    wanted = model(x).square().sum()
    torch.testing.assert_close(sim(x), wanted.detach(), rtol=1e-9, atol=0)
    sim.backward()
    wanted.backward()
    for name, param in model.named_parameters():
        torch.testing.assert_close(sim.grad(name), param.grad, rtol=1e-9, atol=1e-12)


def test_another_number_behind_the_cut_is_caught_and_can_be_reported() -> None:
    """One pad is filled with something else, as a cut would that takes 0 for -0.0; the error names a report."""

    class Other(Partition):
        def __call__(self, gm: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule | None]:
            forward, backward = super().__call__(gm)
            assert backward is not None
            full = next(node for node in forward.graph.nodes if node.target is torch.ops.aten.full.default)
            full.args = (full.args[0], -full.args[1])
            return forward, backward

    def edit(pipeline: Pipeline) -> Pipeline:
        return pipeline.replaced(Other(**vars(pipeline[Partition])))

    options = shardc.Options(pipeline=edit)
    module = shardc.compile(Signs(), shardc.Mesh(dp=2), shardc.fsdp("dp"), backend="eager", options=options)
    with pytest.raises(VerifyError, match="is not the value that it was") as caught:
        _ = module.lower(torch.randn(4, 3)).backward
    assert caught.value.fix is not None and "fault of shardc" in caught.value.fix
    report = Path(next(word for word in caught.value.fix.split() if "shardc-report-" in word).rstrip(","))
    assert [line for line in report.read_text().splitlines() if line.startswith("---")] == [
        "--- before",
        "--- forward",
        "--- backward",
    ]
    report.unlink()
