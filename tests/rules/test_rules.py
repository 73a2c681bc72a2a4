"""Every rule, under every strategy that it offers on one and on two axes, equals the dense op in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardc.ir.graph import Value
from shardc.ir.layout import Digit, Layout
from shardc.ir.mesh import Mesh
from shardc.rules import RULES, find_rule, rule, spec_of
from shardc.rules.proof import Sample, prove
from shardc.rules.rule import Call, Local, Rule
from shardc.rules.spec import strategies
from shardc.runtime.sim.lockstep import Lockstep
from tests.rules.samples import samples

MESHES = (Mesh(x=2), Mesh(x=2, y=2))
aten = torch.ops.aten


GPU = {op for op in RULES if any(sample.device == "cuda" for sample in samples(op))}


@pytest.mark.parametrize("op", [pytest.param(op, marks=pytest.mark.gpu if op in GPU else ()) for op in RULES])
def test_rule_is_right(op: str) -> None:
    given = samples(op)
    assert given, f"the rule of {op} has no samples"
    for sample in given:
        assert find_rule(sample.op) is RULES[op], f"{sample} is a sample of another rule"
        assert prove(RULES[op], sample, Lockstep, MESHES).wrong == ()


@pytest.mark.parametrize("op", sorted(GPU))
def test_gpu_rule_fits_its_shapes(op: str) -> None:
    """Without a GPU the kernels' shapes are known all the same, and batch and heads can be split."""
    for sample in samples(op):
        with FakeTensorMode(allow_non_fake_inputs=True):
            on_gpu = [torch.empty_like(x, device="cuda") if isinstance(x, torch.Tensor) else x for x in sample.args]
            made = replace(sample, args=tuple(on_gpu)).dense()
        spec = RULES[op].spec(sample.call(made))
        assert spec.splittable("b") and spec.splittable("g")


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


WRONG: dict[str, tuple[Rule, Sample]] = {
    "a contracted factor that leaves nothing pending": (
        rule("mm", "i k, k j -> i j", k="max"),
        Sample(aten.mm.default, (draw(4, 8), draw(8, 4))),
    ),
    "a softmax over a split dim": (
        rule("_softmax", "i j -> i j"),
        Sample(aten._softmax.default, (draw(4, 8), 1, False)),
    ),
    "dims the wrong way round": (rule("t", "i j -> i j"), Sample(aten.t.default, (draw(8, 8),))),
    "a sum that is not linear": (rule("relu", "i j -> i j", linear="0"), Sample(aten.relu.default, (draw(4, 8),))),
    "operands that carry only together": (
        rule("add", "i j, i j -> i j", linear="0|1"),
        Sample(aten.add.Tensor, (draw(4, 8), draw(4, 8))),
    ),
    "a size that stays global": (
        replace(RULES["aten.expand"], localize=Local.same),
        Sample(aten.expand.default, (draw(1, 4), [8, 4])),
    ),
    "an index that stays global": (
        replace(RULES["aten.embedding"], localize=Local.same),
        Sample(aten.embedding.default, (draw(8, 4), torch.arange(8))),
    ),
    "a bias on every rank": (
        rule("addmm", "j, i k, k j -> i j", k="sum"),
        Sample(aten.addmm.default, (draw(4), draw(4, 8), draw(8, 4))),
    ),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_wrong_rules_are_found(mistake: str) -> None:
    found = prove(*WRONG[mistake], Lockstep, MESHES)
    assert found.wrong


def test_every_strategy_of_a_product_is_tried() -> None:
    """Three factors and two carried operands on one axis, each factor cut at both ends."""
    tried = prove(RULES["aten.mm"], Sample(aten.mm.default, (draw(4, 4), draw(4, 4))), Lockstep, MESHES[:1]).tried
    assert tried == 3 * 2 + 2


def test_an_axis_and_a_part_of_it() -> None:
    """One operand is split over an axis, another over a part of it: no strategy has the part twice."""
    mesh = Mesh(dp=4)
    table = Layout(mesh, [[Digit(4)], [Digit(2)], [Digit(2), Digit(2, "dp:2x2")]])
    index = Layout(mesh, [[Digit(4, "dp")], [Digit(2)], [Digit(5)]])
    values = Value(torch.float64, table.shape), Value(torch.int64, index.shape)
    call = Call(torch.ops.aten.gather.default, (values[0], -1, values[1]), (), (Value(torch.float64, index.shape),))
    spec = spec_of(call)
    assert spec is not None
    found = {tuple(map(str, each.operands)) for each in strategies(spec, (table, index))}
    assert ("[4@dp,2,4]", "[4@dp,2,5]") in found
    assert ("[4@dp:1x2,2,(2 2@dp:2x2)]", "[4@dp:1x2,2,5]") in found
