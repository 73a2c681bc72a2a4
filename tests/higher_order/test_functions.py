"""``cond``, ``scan``, ``map``, ``associative_scan``, ``while_loop`` and ``nested_compile_region`` in a model."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_slices
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import shardc
from shardc.errors import CaptureError, InputError, RuleError
from shardc.ir.parse import parse
from shardc.ir.text import dump
from tests.higher_order.on_ranks import equal_one_device
from tests.models.alike import trains_alike
from tests.ranks import run_ranks

FSDP = shardc.fsdp("dp", threshold=0)
MESHES: list[tuple[dict[str, int], shardc.Plan]] = [
    ({"dp": 2}, FSDP),
    ({"dp": 3}, shardc.ddp("dp")),
    ({"dp": 2, "tp": 2}, FSDP | shardc.tp("tp", colwise=["a"], rowwise=["b"])),
]


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.kind = nn.Linear(4, 4), nn.Linear(4, 4), kind

    def forward(self, x: Tensor) -> Tensor:
        return KINDS[self.kind](self, self.a(x))


def branches(over: float, net: Net, h: Tensor) -> Tensor:
    return torch.cond(h.square().sum() > over, lambda h: torch.tanh(net.b(h)), lambda h: h * 3 - 1, (h,))


def steps(net: Net, h: Tensor) -> Tensor:
    def step(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        carry = torch.tanh(net.b(carry) + x)
        return carry, carry * 2 + x

    last, every = scan(step, torch.zeros_like(h[:, 0]), h, dim=1)
    return every + last.unsqueeze(1)


def backwards(net: Net, h: Tensor) -> Tensor:
    def step(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        carry = carry * torch.sigmoid(x) + net.b(x)
        return carry, torch.tanh(carry)

    return scan(step, torch.ones_like(h[:, 0]), h, dim=1, reverse=True)[1]


def gates(net: Net, h: Tensor) -> Tensor:
    """Batch and features are each their own."""

    def step(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        carry = carry * torch.sigmoid(x) + x
        return carry, torch.tanh(carry)

    return net.b(scan(step, torch.ones_like(h[:, 0]), h.repeat(1, 60, 1), dim=1)[1])


def totals(net: Net, h: Tensor) -> Tensor:
    """A branch sums over the batch, the other has the same on every rank."""
    rows = torch.cond(h.sum() > 1e9, lambda h, b: h.sum((0, 1)), lambda h, b: b * 2, (h, net.b.bias))
    return net.b(h) + rows


def nested(net: Net, h: Tensor) -> Tensor:
    def step(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        carry = torch.cond(x.sum() > 0, lambda c, x: c + net.b(x), lambda c, x: c - x, (carry, x))
        return carry, carry.clone()

    return scan(step, torch.zeros_like(h[:, 0]), h.repeat(1, 20, 1), dim=1)[1]


def looped(condition: Callable[..., Tensor], net: Net, h: Tensor) -> Tensor:
    """A loop; on one device, where torch's has no gradient, a loop of Python's."""

    def step(n: Tensor, h: Tensor, total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return n + 1, torch.tanh(net.b(h)), total * 0.5 + h.sum((0, 1))

    values = torch.zeros((), dtype=torch.int64), h, net.b.bias * 2
    if torch.compiler.is_compiling():
        return sum(while_loop(condition, step, values)[1:])
    while condition(*values):
        values = step(*values)
    return values[1] + values[2]


@torch.compiler.nested_compile_region
def region(net: Net, h: Tensor) -> Tensor:
    return torch.tanh(net.b(h)) * 2


KINDS: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "a branch": partial(branches, 0.0),
    "the other branch": partial(branches, 1e9),
    "a scan": steps,
    "a scan from the end": backwards,
    "a long scan": lambda net, h: steps(net, h.repeat(1, 40, 1)),
    "a long scan from the end": lambda net, h: backwards(net, h.repeat(1, 40, 1)),
    "a long scan of gates": gates,
    "a branch that sums": totals,
    "a loop by a count": partial(looped, lambda n, h, total: n < 7),
    "a loop by values": partial(looped, lambda n, h, total: (n < 7) & (h.abs().max() > 0.1)),
    "a branch in a scan": nested,
    "a map over rows": lambda net, h: map_slices(lambda h: torch.tanh(net.b(h)), h),
    "a map over a dim": lambda net, h: map_slices(lambda x, y: x + net.b(y).mean(0), h.transpose(0, 1), h[0].clone()),
    "an associative scan": lambda net, h: associative_scan(torch.mul, net.b(h), 1, combine_mode="generic"),
    "a region": lambda net, h: region(net, h) + region(net, h * 2),
}
WHOLE = ("a branch in a scan", "a loop by values")  # which values of all rows decide


@pytest.mark.parametrize(("mesh", "plan"), MESHES)
@pytest.mark.parametrize("kind", KINDS)
def test_trains_as_on_one_device(kind: str, mesh: dict[str, int], plan: shardc.Plan) -> None:
    torch.manual_seed(0)
    trains_alike(Net(kind), (torch.randn(6, 5, 4),), mesh, plan, steps=2)


def total(out: Tensor) -> Tensor:
    return out.sum()


Function = Callable[[Net, Tensor], Tensor]


def lowered(function: Function, loss: Any = total, mesh: Any = None, plan: Any = None) -> shardc.Program:
    class Other(Net):
        def forward(self, x: Tensor) -> Tensor:
            return function(self, self.a(x))

    mesh = shardc.Mesh(mesh or {"dp": 2})
    module = shardc.compile(Other(""), mesh, plan or shardc.ddp("dp"), loss=loss, backend="eager")
    program = module.lower(torch.randn(6, 5, 4))
    assert isinstance(program, shardc.Program)
    return program


def kinds_of_collectives(program: shardc.Program) -> set[str]:
    tally = program.text("collectives").rpartition("comm:")[2].splitlines()
    return {line.split(" x")[0].strip() for line in tally if line.strip()}


@pytest.mark.parametrize("kind", KINDS)
def test_text_and_what_is_gathered(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if kind in WHOLE else "error", shardc.ShardcWarning)
        program = lowered(KINDS[kind])
    text = program.text("localize")
    assert dump(parse(text), shardc.Mesh(dp=2)) == text
    assert (kinds_of_collectives(program) == {"all_reduce(dp)"}) == (kind not in WHOLE)


def test_what_no_step_changes_is_saved_once() -> None:
    """Torch's scan saves the transpose of the weight at each step."""
    assert "[200,4,4]" not in lowered(KINDS["a long scan"]).text("propagate")


def test_features_stay_split() -> None:
    plan = shardc.ddp("dp") | shardc.tp("tp", colwise=["a"], rowwise=["b"])
    with warnings.catch_warnings():
        warnings.simplefilter("error", shardc.ShardcWarning)
        program = lowered(gates, mesh={"dp": 2, "tp": 2}, plan=plan)
    assert kinds_of_collectives(program) == {"all_reduce(dp)", "all_reduce(tp)"}


def test_a_product_of_split_features_is_computed_whole_with_a_warning() -> None:
    plan = shardc.ddp("dp") | shardc.tp("tp", colwise=["a"], rowwise=["b"])
    with pytest.warns(shardc.ShardcWarning) as caught:
        lowered(KINDS["a long scan"], mesh={"dp": 2, "tp": 2}, plan=plan)
    what = r"scan cannot be split along tp.*along tp, 19264 bytes gathered\n  source: .*test_functions.py:\d+"
    assert [x for x in caught if re.match(what, str(x.message))], [str(x.message) for x in caught]


def test_under_strict_an_op_that_is_computed_whole_is_an_error() -> None:
    module = shardc.compile(Net(WHOLE[0]), shardc.Mesh(dp=2), FSDP, options=shardc.Options(strict=True))
    what = r"scan cannot be split along dp(.|\n)*source: .*test_functions.py:\d+(.|\n)*fix: strict=False"
    with pytest.raises(RuleError, match=what):
        module.lower(torch.randn(6, 5, 4))


def test_a_loop_without_gradients() -> None:
    net, x = Net("a loop by values").double(), torch.randn(6, 5, 4, dtype=torch.float64)
    simulation = shardc.Simulation(shardc.compile(net, shardc.Mesh(dp=2), FSDP, backend="eager"))
    with torch.no_grad():
        torch.testing.assert_close(simulation(x, grad=False), net(x), rtol=1e-9, atol=1e-12)


def test_a_loop_with_a_branch_in_its_step_has_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    def choosing(net: Net, h: Tensor) -> Tensor:
        def step(n: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            return n + 1, torch.cond(n > 1, lambda h: h * 2, lambda h: net.b(h), (h,))

        return while_loop(lambda n, h: n < 7, step, (torch.zeros((), dtype=torch.int64), h))[1]

    monkeypatch.setitem(KINDS, "a loop with a branch", choosing)
    net, x = Net("a loop with a branch").double(), torch.randn(6, 5, 4, dtype=torch.float64)
    simulation = shardc.Simulation(shardc.compile(net, shardc.Mesh(dp=2), FSDP, loss=total, backend="eager"))
    torch.testing.assert_close(simulation(x), net(x).sum(), rtol=1e-9, atol=1e-12)
    with pytest.raises(InputError, match=r"while_loop in whose step(.|\n)*has no gradient(.|\n)*fix: write a scan"):
        simulation.backward()


def test_a_function_that_draws_is_refused_with_its_line() -> None:
    def dropped(net: Net, h: Tensor) -> Tensor:
        return torch.cond(h.sum() > 0, lambda h: nn.functional.dropout(h), lambda h: h * 1, (h,))

    with pytest.raises(CaptureError, match=r"cond draws random numbers(.|\n)*source: .*test_functions.py:\d+"):
        lowered(dropped)


def test_a_number_that_a_loop_carries_is_refused_with_its_line() -> None:
    def counted(net: Net, h: Tensor) -> Tensor:
        return while_loop(lambda n, h: n < 3, lambda n, h: (n + 1, h * 2), (0, h))[1]

    with pytest.raises(CaptureError, match=r"number through a while_loop(.|\n)*source: .*test_functions.py:\d+"):
        lowered(counted)


ON_RANKS = ("a branch", "a branch that sums", "a long scan", "a loop by a count", "a branch in a scan")


def on_ranks(found: bool) -> None:
    models = [partial(Net, kind) for kind in ON_RANKS]
    equal_one_device(models, (torch.randn(6, 5, 4, dtype=torch.float64),), ("eager", "inductor"), found)


def test_on_two_ranks_and_from_the_store(tmp_path: Path) -> None:
    run_ranks(2, partial(on_ranks, False), programs=tmp_path)
    run_ranks(2, partial(on_ranks, True), programs=tmp_path)
