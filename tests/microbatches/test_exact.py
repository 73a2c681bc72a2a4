"""Steps in microbatches compute what one device computes on the whole batch: loss, gradients, training steps."""

from __future__ import annotations

import pytest
import torch

import shardc
from examples.models import llama
from tests.microbatches.programs import CASES, Case, decoder

DP = shardc.Mesh(dp=2)


@pytest.fixture(autouse=True)
def _float64() -> None:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def agrees(
    case: Case, mesh: shardc.Mesh, plan: shardc.Plan, steps: int = 1, within: float = 1e-9, **options: object
) -> None:
    """Trains ``case`` on the simulated ranks of ``mesh`` and on one device, and compares losses and gradients."""
    options = shardc.Options(**options)
    module = shardc.compile(case.model, mesh, plan, loss=case.loss, backend="eager", options=options)
    sim = shardc.Simulation(module)
    step = sim.optimizers(lambda params: torch.optim.AdamW(params, lr=1e-2))
    reference = torch.optim.AdamW(case.model.parameters(), lr=1e-2)
    for _ in range(steps):
        loss = sim(*case.args)
        sim.backward()
        expected, grads = case.reference()
        torch.testing.assert_close(loss, expected, rtol=within, atol=0)
        assert set(sim.grads) == set(grads)
        largest = max(float(grad.norm()) for grad in grads.values())
        for name, grad in grads.items():
            error = float((sim.grad(name) - grad).norm()) / max(float(grad.norm()), 1e-6 * largest)
            assert error < within, f"{name}: {error}"
        for name, grad in grads.items():
            case.model.get_parameter(name).grad = grad
        step()
        reference.step()
    with torch.no_grad():
        case.model.eval(), module.eval()
        torch.testing.assert_close(sim(*case.args, grad=False), case.reference_loss(), rtol=1e-7, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_losses(name: str) -> None:
    agrees(CASES[name](), DP, shardc.fsdp("dp") | shardc.microbatches(4), steps=1 if name != "masked" else 3)


def test_a_batch_without_rows() -> None:
    plan = shardc.fsdp("dp") | shardc.microbatches(2)
    module = shardc.compile(torch.nn.Linear(4, 3), DP, plan, loss=lambda out: out.sum(), backend="eager")
    sim = shardc.Simulation(module)
    assert sim(torch.randn(0, 4)) == 0
    sim.backward()
    assert not sim.grad("weight").any()


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_counts(count: int) -> None:
    """Of 8 rows a rank; of three microbatches the last has two rows."""
    agrees(CASES["masked"](), DP, shardc.fsdp("dp") | shardc.microbatches(count), steps=3)


@pytest.mark.parametrize("rows, count", [(14, 4), (13, 4), (6, 8)])
def test_uneven_rows(rows: int, count: int) -> None:
    agrees(decoder(llama.loss, rows=rows), DP, shardc.fsdp("dp") | shardc.microbatches(count))


PLANS = {
    "ddp": (DP, shardc.ddp("dp")),
    "level 1": (DP, shardc.fsdp("dp", level=1)),
    "level 2": (DP, shardc.fsdp("dp", level=2)),
    "hsdp": (shardc.Mesh(rep=2, dp=2), shardc.hsdp("dp", "rep")),
    "tp": (shardc.Mesh(tp=2), llama.llama_tp("tp")),
    "fsdp and tp": (shardc.Mesh(dp=2, tp=2), shardc.fsdp("dp") | llama.llama_tp("tp")),
    "sequence": (shardc.Mesh(dp=2, tp=2), shardc.fsdp("dp") | llama.llama_tp("tp", sequence=True)),
    "cp": (shardc.Mesh(dp=2, cp=2), shardc.fsdp(("dp", "cp")) | shardc.cp("cp")),
    "cp alone": (shardc.Mesh(cp=2), shardc.cp("cp")),
    "one rank": (shardc.Mesh(dp=1), shardc.ddp("dp")),
    "recomputed": (DP, shardc.fsdp("dp") | shardc.recompute("layers.*")),
    "kept over 2 of 4": (shardc.Mesh(dp=4), shardc.fsdp("dp", reshard_after_forward=2)),
    "offloaded": (DP, shardc.fsdp("dp") | shardc.offload("layers.*")),
}


@pytest.mark.parametrize("name", PLANS)
def test_plans(name: str) -> None:
    mesh, plan = PLANS[name]
    agrees(CASES["masked"](), mesh, plan | shardc.microbatches(4))


@pytest.mark.parametrize("level", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_alike_blocks_are_folded(level: int) -> None:
    case = decoder(llama.loss, masks=True, layers=7, dim=32, hidden=32)
    plan = shardc.fsdp("dp", level=level) | shardc.microbatches(2)
    agrees(case, DP, plan, fold=True)
    options = shardc.Options(fold=True)
    program = shardc.compile(case.model, DP, plan, loss=case.loss, options=options).lower(*case.args)
    assert program.folded is not None


@pytest.mark.parametrize("name", ["orthogonal", "masked"])
def test_the_exact_solver(name: str) -> None:
    """It uses the axis of microbatches for the batch alone."""
    agrees(CASES[name](), DP, shardc.fsdp("dp") | shardc.microbatches(4), layout_solver="exact")


@pytest.mark.parametrize("level", [1, 2, 3])
def test_a_loop_before_the_forward_reads_gathered_parameters(level: int) -> None:
    agrees(CASES["factor of all"](), DP, shardc.fsdp("dp", level=level) | shardc.microbatches(4))


def test_draws_are_those_of_the_whole_batch() -> None:
    """Dropout draws by global place: any number of microbatches drops the same elements."""
    from examples.models import gpt2

    config = gpt2.GPT2Config(dropout=0.1)
    results = []
    for count in (1, 2, 4):
        torch.manual_seed(0)
        model, _ = gpt2.build(config, "cpu")
        module = shardc.compile(
            model, DP, shardc.fsdp("dp") | shardc.microbatches(count), loss=gpt2.loss, backend="eager"
        )
        batch = gpt2.batch(config, size=16)
        sim = shardc.Simulation(module)
        torch.manual_seed(7)
        loss = sim(*batch)
        sim.backward()
        results.append((loss, sim.grad("blocks.0.mlp.up.weight") if "blocks.0.mlp.up.weight" in sim.params else None))
    for loss, grad in results[1:]:
        torch.testing.assert_close(loss, results[0][0], rtol=1e-12, atol=0)
        torch.testing.assert_close(grad, results[0][1], rtol=1e-9, atol=1e-15)
