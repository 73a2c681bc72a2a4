"""Layouts of strategies over parts of axes: canonical, and what they answer is what they are."""

from __future__ import annotations

from functools import cached_property

import pytest

from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.rules.spec import Spec, infer, strategies

MESH = Mesh(dp=2, tp=4)
ADD = Spec(operands=((("a",), ("b",)),) * 2, results=((("a",), ("b",)),), sizes=(("a", 8), ("b", 8)))
VIEW = Spec(operands=((("a", "b"),),), results=((("a",), ("b",)),), sizes=(("a", 2), ("b", 32)))
ASKED = [name for name, what in vars(Layout).items() if isinstance(what, cached_property | property)]

CASES = {
    "an axis beside its major part": (ADD, ["[8@tp,8]", "[8@tp:1x2,8]"]),
    "an axis beside its parts on two dims": (ADD, ["[8@tp,8]", "[8@tp:1x2,8@tp:2x2]"]),
    "parts the other way round": (ADD, ["[8@(tp:2x2,tp:1x2),8]", "[8@tp,8]"]),
    "an axis over two factors": (VIEW, ["[64@tp]"]),
}


@pytest.mark.parametrize("case", CASES)
def test_layouts_answer_what_they_are(case: str) -> None:
    spec, texts = CASES[case]
    operands = [Layout.parse(text, MESH) for text in texts]
    found = list(strategies(spec, operands))
    assert found
    for strategy in found:
        assert infer(spec, strategy.operands) == strategy.results
        for layout in (*strategy.operands, *strategy.results):
            again = Layout(MESH, layout.dims, layout.partial)
            assert layout == again == Layout.parse(str(layout), MESH)
            assert {name: getattr(layout, name) for name in ASKED} == {name: getattr(again, name) for name in ASKED}


def test_reading_strategies_leaves_the_operands_as_they_were() -> None:
    operand, beside = Layout.parse("[8@tp,8]", MESH), Layout.parse("[8@tp:1x2,8]", MESH)
    before = [(str(layout), layout.bound, hash(layout)) for layout in (operand, beside)]
    list(strategies(ADD, [operand, beside]))
    assert [(str(layout), layout.bound, hash(layout)) for layout in (operand, beside)] == before
