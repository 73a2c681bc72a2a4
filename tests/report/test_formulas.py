"""Costs as formulas: exact at sizes and meshes that they were not made from, closed forms, errors where none is."""

from __future__ import annotations

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from examples.models import llama
from shardc.__main__ import main
from shardc.cost.compute import model_flops
from shardc.errors import PlanError
from shardc.ir import graph as ir
from shardc.ir.mesh import Mesh
from shardc.report.derive import verify
from shardc.report.formulas import Costs, axis_symbol, unrounded
from tests.report.test_schedule import WIDTH, stack_program

DP, TP = axis_symbol("dp"), axis_symbol("tp")
BATCH, SEQUENCE = (sympy.Symbol(name, integer=True, positive=True) for name in ("batch", "sequence"))
DIM, HIDDEN, HEADS, VOCAB = 256, 512, 8, 512
PLAN = shardc.fsdp("dp") | shardc.tp("tp", colwise=["qkv.*", "up"], rowwise=["out", "down"])


class Block(nn.Module):
    """Tokens ``[B, S]`` to the mean of what attention and an MLP make of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.qkv = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.out = nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        q, k, v = (layer(x).unflatten(2, (HEADS, -1)).transpose(1, 2) for layer in self.qkv)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return (x + self.down(F.relu(self.up(x)))).square().mean()


def block(dp: int, tp: int, batch: int, sequence: int, model: type[nn.Module] = Block) -> shardc.Program:
    with torch.device("meta"):
        made, tokens = model(), torch.zeros(batch, sequence, dtype=torch.int64)
    return shardc.compile(made, Mesh(dp=dp, tp=tp), PLAN).lower(tokens)


@pytest.fixture(scope="module")
def costs() -> Costs:
    return block(2, 2, 8, 64).costs("a100")


# --- exact elsewhere


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dp", "tp", "batch", "sequence"), [(4, 2, 16, 64), (2, 8, 24, 32), (8, 4, 8, 256), (16, 2, 48, 96)]
)
def test_a_formula_is_exact_where_it_was_not_made(costs: Costs, dp: int, tp: int, batch: int, sequence: int) -> None:
    """Bytes to the byte and seconds to rounding, in one node and over several; bytes of what runs, too."""
    program = block(dp, tp, batch, sequence)
    values = costs.values(Mesh(dp=dp, tp=tp), batch=batch, sequence=sequence)
    joint, runs = (program.schedule("a100", stage=stage).totals("axis") for stage in ("localize", "schedule"))
    assert set(joint) == set(costs.axes)
    for axis, total in joint.items():
        cost = costs.cost(axis)
        assert (cost.count, int(cost.wire.subs(values))) == (total.count, total.wire)
        assert float(cost.seconds.subs(values)) == pytest.approx(total.seconds, rel=1e-12)
        assert runs[axis].wire == total.wire
    assert int(costs.flops.subs(values)) == sum(flops for _, flops in model_flops(program.graph("collectives")))


@pytest.mark.slow
def test_a_schedule_has_its_programs_formulas() -> None:
    program = stack_program(shardc.fsdp("dp"), dp=2)
    schedule = program.schedule("a100")
    assert schedule.cost("dp") == program.costs("a100").cost("dp")
    with pytest.raises(PlanError, match="nothing moves over 'pp'") as raised:
        schedule.cost("pp")
    assert "dp" in str(raised.value.fix)


# --- closed forms


@pytest.mark.slow
def test_closed_forms_of_data_parallelism() -> None:
    weights = 3 * WIDTH * WIDTH * 4
    for plan, times in ((shardc.ddp("dp"), 2), (shardc.fsdp("dp"), 3)):
        moves = stack_program(plan, dp=2).costs().moves
        moved = unrounded(sympy.Add(*(each.wire for each in moves if each.size == WIDTH * WIDTH * 4)))
        assert sympy.simplify(moved - times * (DP - 1) / DP * weights) == 0


@pytest.mark.slow
def test_closed_form_of_tensor_parallelism(costs: Costs) -> None:
    """All-reduces of the activation of a rank's part of the batch: twice its (tp-1)/tp each."""
    activation = BATCH * SEQUENCE * DIM * 4 / DP
    (reductions,) = [each for each in costs.cost("tp").moves if each.kind == "all_reduce"]
    assert sympy.simplify(unrounded(reductions.wire) - reductions.count * 2 * (TP - 1) / TP * activation) == 0


# --- crossovers


@pytest.mark.slow
def test_meshes_take_equally_long_at_a_crossover(costs: Costs) -> None:
    one, other = Mesh(dp=8, tp=2), Mesh(dp=2, tp=8)
    found = costs.crossover(one, other)
    assert len(found.at) == 1 and set(found.faster) == {str(one), str(other)}

    def seconds(mesh: Mesh, batch: float) -> float:
        values = costs.values(mesh) | {BATCH: batch}
        return float(unrounded(costs.seconds).subs(values))

    (at,) = found.at
    assert seconds(one, at) == pytest.approx(seconds(other, at), rel=1e-9)
    below, above = (min((one, other), key=lambda mesh: seconds(mesh, at * by)) for by in (0.5, 2))
    assert (str(below), str(above)) == found.faster
    assert str(found) == f"{below} is faster below batch {at:.4g}, {above} above {at:.4g}"
    assert str(costs.crossover(one, one)) == f"{one} is faster at every batch"


# --- where there is no formula


class Jumps(Block):
    """At long sequences another program."""

    def forward(self, tokens: Tensor) -> Tensor:
        out = super().forward(tokens)
        return out + self.down.weight.square().sum() if tokens.shape[1] > 200 else out


@pytest.mark.slow
def test_another_size_of_an_input_that_needs_a_gradient() -> None:
    """The gradient of the input is computed and reduced at each size."""
    program = shardc.compile(nn.Linear(8, 8), Mesh(dp=2), shardc.ddp("dp")).lower(torch.ones(4, 8, requires_grad=True))
    assert program.rebuild is not None
    first, second = (
        [role.name for role, _ in ir.outputs(p.half("backward").graph)]
        for p in (program, program.rebuild(Mesh(dp=4), [[8, 8]]))
    )
    assert first == second and len(first) == 3


def test_what_has_no_formula_says_so() -> None:
    with pytest.raises(PlanError, match="no formula: dp=2 tp=2 at batch 24, sequence 256 has other collectives: "):
        block(2, 2, 8, 64, Jumps).costs()


@pytest.mark.slow
def test_a_formula_that_is_wrong_is_refused(costs: Costs) -> None:
    """The check itself: the schedule of another batch than it is told."""
    schedule = block(2, 2, 16, 64).schedule("a100", stage="localize")
    verify(costs, schedule, (16, 64))
    with pytest.raises(PlanError, match="no formula: over tp it says"):
        verify(costs, schedule, (8, 64))


# --- the command


@pytest.mark.slow
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    target = ["examples/models/mlp.py:example", "--mesh", "dp=2", "--plan", 'ddp("dp")']
    assert main(["cost", *target, "--against", "dp=4"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and "  bytes a rank: " in out and "(dp - 1)/dp" in out
    assert "a step in which nothing hides: dp=" in out
    assert main(["cost", *target, "--against", "tp=4"]) == 2
    assert capsys.readouterr().err == "shardc: error: --against tp=4: its axes are not dp\n"


@pytest.mark.long
def test_a_decoder() -> None:
    config = llama.LlamaConfig(layers=2, dim=256, hidden=512)

    def program(dp: int, tp: int, batch: int, length: int) -> shardc.Program:
        with torch.device("meta"):
            model, args = llama.Llama(config), llama.batch(config, size=batch, length=length)
        plan = shardc.fsdp("dp") | llama.llama_tp("tp", sequence=True)
        return shardc.compile(model, Mesh(dp=dp, tp=tp), plan, loss=llama.loss).lower(*args)

    costs = program(2, 2, 8, 64).costs()
    for dp, tp, batch, length in [(4, 2, 8, 128), (2, 4, 24, 64)]:
        verify(costs, program(dp, tp, batch, length).schedule(stage="localize"), (batch, length))
