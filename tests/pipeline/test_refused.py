"""Models, plans and calls that pipeline stages do not have are refused with the plan entry and what to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import shardc
from shardc.errors import PlanError, ShardcError
from shardc.ir.mesh import Mesh
from tests.microbatches.programs import batch_norm
from tests.pipeline.programs import Blocks, blocks
from tests.ranks import device_mesh, run_ranks


def compiled(plan: shardc.Plan, mesh: Mesh, model: nn.Module | None = None, **how: object) -> nn.Module:
    return shardc.compile(Blocks() if model is None else model, mesh, plan, backend="eager", **how)


def pp(**more: object) -> shardc.Plan:
    return shardc.pp("pp", **{"microbatches": 4} | more)


PLANS: dict[str, tuple[Callable[[], object], str, str]] = {
    "more stages than blocks": (
        lambda: compiled(pp(), Mesh(pp=8)),
        "8 stages are asked for, and the model has 6 blocks",
        "use fewer stages, or name the modules that begin stages",
    ),
    "an unknown schedule": (lambda: pp(schedule="1b1f"), "there is no schedule '1b1f'", "1f1b"),
    "a cut that is no list": (lambda: pp(cut="blocks.2"), "neither a list of globs nor 'auto'", "cut=['blocks.2']"),
    "a cut that matches nothing": (
        lambda: compiled(pp(cut=["block.2"]), Mesh(pp=2)),
        "no module with parameters matches the cut 'block.2'",
        "blocks.2",
    ),
    "cuts out of order": (
        lambda: compiled(pp(cut=["blocks.2", "blocks.1", "blocks.3"]), Mesh(pp=4)),
        "the cut 'blocks.1' begins at 'blocks.1.0', which is not behind the cut before it",
        "in the order",
    ),
    "a cut at the first module": (
        lambda: compiled(pp(cut=["first"]), Mesh(pp=2)),
        "the cut 'first' begins at 'first', which is not behind the cut before it",
        "none of them the first",
    ),
    "too few cuts": (
        lambda: compiled(pp(cut=["blocks.2"]), Mesh(pp=4)),
        "1 cuts are named, and 4 stages need 3",
        "name the first module of each stage but the first",
    ),
    "a batch axis": (
        lambda: compiled(shardc.fsdp("pp") | pp(), Mesh(pp=2)),
        "splits the batch over 'pp', the axis of the stages",
        "an axis of their own",
    ),
    "no such axis": (lambda: compiled(pp(), Mesh(dp=2)), "unknown mesh axis 'pp'", "use one of ['dp']"),
    "one microbatch": (lambda: pp(microbatches=1), "microbatches is 1, not an integer of 2 or more", ""),
    "two numbers of microbatches": (
        lambda: compiled(pp() | shardc.microbatches(2), Mesh(pp=2)),
        "the plan says 4 and 2 microbatches",
        "say how many there are in one of the entries",
    ),
    "no microbatches": (
        lambda: compiled(shardc.pp("pp"), Mesh(pp=2)),
        "the plan does not say how many there are",
        "write pp(..., microbatches=8)",
    ),
    "a batch of one row": (
        lambda: compiled(pp(), Mesh(pp=2)).lower(torch.randn(1, 8)),
        "the inputs are not split into microbatches",
        "pass two rows or more on each rank",
    ),
    "stages a rank that the schedule does not have": (
        lambda: compiled(pp(stages_per_rank=2), Mesh(pp=2)),
        "stages_per_rank",
        "interleaved",
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_plans(name: str) -> None:
    call, what, fix = PLANS[name]
    with pytest.raises(ShardcError) as error:
        call()
    text = str(error.value)
    assert what in text and fix in text.partition("fix:")[2], text
    assert "pp(" in text, text


class Gated(nn.Module):
    """The mean of the first features over the batch gates them, by way of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.gate = Blocks(), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.body.first(x)
        with torch.no_grad():
            gate = self.gate(torch.tanh(first.mean(0)))
        return self.body(first * gate).square().sum()


def test_layers_between_the_loops_before_the_forward() -> None:
    case = blocks()
    with pytest.raises(PlanError, match=r"(?s)cannot be cut into stages.*module 'gate'.*plan entry: pp\(") as error:
        compiled(pp(), Mesh(pp=2), Gated().double()).lower(case.args[0])
    assert "test_refused.py:" in str(error.value)


def test_batch_norm() -> None:
    case = batch_norm()
    with pytest.raises(PlanError, match=r"(?s)of module 'norm'.*needed, one after the other.*plan entry: "):
        compiled(pp(microbatches=2), Mesh(pp=2), case.model, loss=case.loss).lower(*case.args)


def raises(call: Callable[[], object], what: str) -> None:
    with pytest.raises(ShardcError, match=f"(?s){what}.*plan entry: pp") as error:
        call()
    assert "fix: " in str(error.value)


def calls() -> None:
    case = blocks()
    module = compiled(pp(), device_mesh(Mesh(pp=2)), case.model, loss=case.loss)

    def unreduced() -> None:
        with module.no_sync():
            module(*case.args).backward()

    def watched() -> None:
        with torch.autograd.detect_anomaly(check_nan=False):
            module(*case.args).backward()

    raises(unreduced, "no_sync")
    raises(watched, "detect_anomaly")
    module(*case.args).backward()  # the module is of use afterwards


def test_calls() -> None:
    run_ranks(2, calls)
