"""Collectives of `torch.utils.checkpoint` regions run again or are kept, as `Options(checkpoint_collectives=)` says."""

from __future__ import annotations

import copy
from functools import lru_cache, partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import shardc
from examples.models import llama
from shardc.errors import InputError
from shardc.ir import graph as ir
from shardc.ir.comm_volume import tally
from tests.models.alike import relative
from tests.ranks import run_ranks

CONFIG = llama.LlamaConfig(dim=32, heads=4, kv_heads=4, hidden=64, checkpoint=True)
SEQUENCE = llama.llama_tp("tp", sequence=True)
CHOICES = ("auto", "keep", "recompute")
PLANS = {
    "tp+sp": ({"tp": 2}, SEQUENCE),
    "tp": ({"tp": 2}, llama.llama_tp("tp")),
    "fsdp+tp+sp": ({"dp": 2, "tp": 2}, shardc.fsdp("dp", level=3, threshold=0) | SEQUENCE),
}


@lru_cache
def given() -> tuple[llama.Llama, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return llama.Llama(CONFIG).double(), llama.batch(CONFIG)


def module(plan: str, collectives: str, **options: object) -> shardc.ShardedModule:
    mesh, how = PLANS[plan]
    made = shardc.Options(checkpoint_collectives=collectives, **options)  # type: ignore[arg-type]
    model = copy.deepcopy(given()[0])
    return shardc.compile(model, shardc.Mesh(mesh), how, loss=llama.loss, backend="eager", options=made)


@lru_cache
def program(plan: str, collectives: str) -> shardc.Program:
    return module(plan, collectives).lower(*given()[1])


def kept(plan: str, collectives: str) -> int:
    """Bytes that forward makes in a block and keeps for backward, parameters aside."""
    forward = program(plan, collectives).forward
    assert forward is not None
    saved = [x for role, x in ir.outputs(forward.graph) if role.kind == "saved" and isinstance(x, fx.Node)]
    names = [(ir.info(x).name, x.meta["val"]) for x in saved if x.op == "call_function"]
    return sum(x.numel() * x.element_size() for name, x in names if name.startswith("layers.") and "weight" not in name)


def sent(plan: str, collectives: str, half: str) -> dict[str, int]:
    """Collectives over tp by kind."""
    rows = tally(program(plan, collectives).module(half), shardc.Mesh(PLANS[plan][0]))
    return {row.kind: row.count for row in rows if row.axis == "tp"}


TOKENS = 8 * 16
SHARD = TOKENS * CONFIG.dim * 8 // 2  # of an activation that lies over the sequence


@pytest.mark.parametrize("collectives", CHOICES)
def test_what_a_block_keeps(collectives: str) -> None:
    """Its result, which is the next one's input; what attention's sum makes; with "keep" two gathered norms."""
    whole = 2 * SHARD
    each = {"auto": SHARD + SHARD, "keep": SHARD + SHARD + 2 * whole, "recompute": SHARD}[collectives]
    assert kept("tp+sp", collectives) == CONFIG.layers * each


@pytest.mark.parametrize("collectives", CHOICES)
def test_what_backward_runs_again(collectives: str) -> None:
    plain = sent("tp+sp", "keep", "partition.backward")
    again = sent("tp+sp", collectives, "partition.backward")
    gathers = 0 if collectives == "keep" else 2 * CONFIG.layers
    sums = CONFIG.layers if collectives == "recompute" else 0  # attention's alone: the MLP's is behind all that is used
    assert again["all_gather"] - plain["all_gather"] == gathers
    assert again["reduce_scatter"] - plain["reduce_scatter"] == sums
    assert sent("tp+sp", collectives, "partition") == sent("tp+sp", "keep", "partition")


@pytest.mark.slow
def test_without_sequence_parallelism_sums_are_kept() -> None:
    """They are no larger than what is sent for them."""
    assert sent("tp", "auto", "partition.backward") == sent("tp", "keep", "partition.backward")
    assert kept("tp", "auto") == kept("tp", "keep") == CONFIG.layers * 2 * (2 * SHARD)


@pytest.mark.parametrize("stage", ["schedule", "localize"])
def test_the_schedule_counts_both(stage: str) -> None:
    """The memory that is not held, and the bytes that are sent again, of the graphs that run and before the cut."""
    auto, keep = (program("tp+sp", each).schedule(stage=stage) for each in ("auto", "keep"))
    assert auto.wire - keep.wire == CONFIG.layers * 2 * SHARD
    turn = [next(at for at, op in enumerate(each.step.ops) if op.phase == "backward") for each in (auto, keep)]
    held = [
        next(s for s in reversed(each.memory.samples) if s.at <= at).sizes[4]
        for each, at in zip((auto, keep), turn, strict=True)
    ]
    assert held[1] - held[0] >= CONFIG.layers * 2 * 2 * SHARD, "gathered activations are held"


def test_lint_counts_what_runs_again() -> None:
    """Each of the two gathers of a block, and none where they are kept."""
    said = {
        each: [f for f in program("tp+sp", each).lint() if f.rule == "collective-run-again"]
        for each in ("auto", "keep")
    }
    assert len(said["auto"]) == 2 * CONFIG.layers and not said["keep"]
    assert {f.bytes for f in said["auto"]} == {SHARD}


@pytest.mark.parametrize(
    ("plan", "collectives"), [*((plan, "auto") for plan in PLANS), ("tp+sp", "keep"), ("fsdp+tp+sp", "recompute")]
)
def test_numbers_do_not_depend_on_it(plan: str, collectives: str) -> None:
    source, batch = copy.deepcopy(given()[0]), given()[1]
    expected = llama.loss(source(batch[0]), batch[1])
    expected.backward()
    sim = shardc.Simulation(module(plan, collectives))
    assert relative(sim(*batch), expected.detach()) < 1e-9
    sim.backward()
    for name, param in source.named_parameters():
        assert param.grad is not None
        assert relative(sim.grad(name), param.grad) < 1e-9, name


class Blocks(nn.Module):
    """Two that may drop out behind a gather and behind a sum."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.drop = drop
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.ups = nn.ModuleList(nn.Linear(8, 32) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(32, 8) for _ in range(2))

    def block(self, x: Tensor, at: int) -> Tensor:
        wide = nn.functional.dropout(torch.tanh(self.ups[at](self.norms[at](x))), self.drop)
        return x + nn.functional.dropout(self.downs[at](wide), self.drop)

    def forward(self, x: Tensor) -> Tensor:
        for at in range(2):
            x = checkpoint(self.block, x, at, use_reentrant=False)
        return x


BLOCKS = shardc.tp("tp", colwise=["ups.*"], rowwise=["downs.*"]) | shardc.Plan(
    inputs="_, @tp, _", activations={"norms.*.output": "_, @tp, _"}
)


@pytest.mark.slow
def test_what_is_drawn_between_collectives_is_drawn_again() -> None:
    grads = []
    for collectives in CHOICES:
        torch.manual_seed(0)
        net, options = Blocks(0.5).double(), shardc.Options(checkpoint_collectives=collectives)
        loss = nn.functional.mse_loss
        x, y = torch.randn(4, 6, 8, dtype=torch.float64), torch.randn(4, 6, 8, dtype=torch.float64)
        sim = shardc.Simulation(shardc.compile(net, shardc.Mesh(tp=2), BLOCKS, loss=loss, options=options))
        sim(x, y)
        sim.backward()
        grads.append({name: sim.grad(name) for name, _ in net.named_parameters()})
    for one in grads[1:]:
        for name, grad in grads[0].items():
            assert grad.abs().max() > 0
            torch.testing.assert_close(grad, one[name], rtol=1e-12, atol=1e-12)


def on_ranks(backend: str, collectives: str, sizes: dict[str, int], plan: shardc.Plan) -> None:
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    source, loss = Blocks().double(), nn.functional.mse_loss
    x, y = torch.randn(4, 8, 8, dtype=torch.float64), torch.randn(4, 8, 8, dtype=torch.float64)
    expected = loss(source(x), y)
    expected.backward()
    options = shardc.Options(checkpoint_collectives=collectives)
    made = shardc.compile(source, mesh, plan, loss=loss, backend=backend, options=options)
    value = made(*made.shard_inputs(x, y))
    value.backward()
    backward = made.shardc.cache.program_for(made.shard_inputs(x, y), {}).backward
    assert sum("all_gather" in str(node.target) for node in backward.graph.nodes) >= 2
    assert relative(value.detach(), expected.detach()) < 1e-9
    for name, param in source.named_parameters():
        mine = made.get_parameter(name).grad
        assert isinstance(mine, DTensor) and param.grad is not None
        assert relative(mine.full_tensor(), param.grad) < 1e-9, (name, dist.get_rank())


FULL = shardc.fsdp("dp", level=3, threshold=0) | BLOCKS | shardc.Plan(inputs="@dp, @tp, _")


@pytest.mark.slow
def test_on_two_and_four_ranks() -> None:
    both = (partial(on_ranks, backend, "auto", {"tp": 2}, BLOCKS) for backend in ("eager", "inductor"))
    run_ranks(2, *both, partial(on_ranks, "eager", "recompute", {"tp": 2}, BLOCKS))
    run_ranks(4, partial(on_ranks, "eager", "auto", {"dp": 2, "tp": 2}, FULL))


@pytest.mark.long
def test_compiled_on_four_ranks() -> None:
    run_ranks(4, partial(on_ranks, "inductor", "auto", {"dp": 2, "tp": 2}, FULL))


def test_another_word_is_refused() -> None:
    with pytest.raises(InputError, match="checkpoint_collectives is 'some', not 'auto' or 'keep' or 'recompute'"):
        shardc.Options(checkpoint_collectives="some")
