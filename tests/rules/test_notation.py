"""The notation: what it says of an op at given shapes, and the errors where it does not fit them."""

from __future__ import annotations

import pytest
import torch

from shardc import rules
from shardc.errors import RuleError
from shardc.ir.graph import Value
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.rules import find_rule, register_rule, rule, spec_of
from shardc.rules.proof import Sample, prove
from shardc.rules.rule import Call
from shardc.rules.spec import Spec, infer
from shardc.runtime.sim.lockstep import Lockstep

aten = torch.ops.aten
MESHES = (Mesh(x=2), Mesh(x=2, y=2))


def call(op: object, operands: list[tuple[int, ...]], results: list[tuple[int, ...]]) -> Call:
    values = [tuple(Value(torch.float64, shape) for shape in shapes) for shapes in (operands, results)]
    return Call(op, values[0], (), values[1])


def test_factors_take_their_sizes_from_the_dims() -> None:
    spec = rule("mm", "i k, k j -> i j", k="sum").spec(call(aten.mm.default, [(4, 8), (8, 2)], [(4, 2)]))
    assert spec == Spec(
        ((("i",), ("k",)), (("k",), ("j",))), ((("i",), ("j",)),), (("i", 4), ("j", 2), ("k", 8)), (("k", "sum"),),
    )  # fmt: skip


def test_leading_dims_align_at_the_right_and_broadcast() -> None:
    spec = rule("add", "..., ... -> ...").spec(call(aten.add.Tensor, [(4, 1, 8), (6, 1)], [(4, 6, 8)]))
    assert spec.operands == (((".3",), (), (".1",)), ((".2",), ()))
    assert spec.results == (((".3",), (".2",), (".1",)),)


def test_a_factor_may_stand_in_a_product_only() -> None:
    """Heads that share keys: how many share one follows from the sizes."""
    text = "(g r) e, g e -> (g r)"
    spec = rule("heads", text).spec(call(aten.mm.default, [(8, 4), (2, 4)], [(8,)]))
    assert (dict(spec.sizes), spec.operands[0][0]) == ({"g": 2, "r": 4, "e": 4}, ("g", "r"))
    one = rule("heads", text).spec(call(aten.mm.default, [(8, 4), (1, 4)], [(8,)]))
    assert (dict(one.sizes), one.operands[0][0]) == ({"r": 8, "e": 4}, ("r",))


def test_a_factor_of_results_alone_is_whole_without_a_localize() -> None:
    assert rule("expand", "d -> n d").spec(call(aten.expand.default, [(4,)], [(2, 4)])).whole == {"n"}
    free = rule("expand", "d -> n d", localize=lambda local: None)
    assert free.spec(call(aten.expand.default, [(4,)], [(2, 4)])).whole == frozenset()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("i k, k j", "rule 'i k, k j' has no '->'"),
        ("i-k -> i", "'i-k' is not a list of factors"),
    ],
)
def test_a_text_that_cannot_be_read(text: str, said: str) -> None:
    with pytest.raises(RuleError) as error:
        rule("mm", text)
    assert error.value.what == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("i k, k j -> i", "the rule of aten.mm.default has 1 dims (i) for a tensor of shape [4, 2]"),
        ("i k -> i", "the rule of aten.mm.default is for 1 operands, the call has 2"),
        ("i k, k j -> i j, i", "the rule of aten.mm.default is for 2 results, the call has 1"),
        ("i k, j k -> i j", "the rule of aten.mm.default gives operand 1 the shape [8, 8], it is [8, 2]"),
    ],
)
def test_shapes_that_do_not_fit(text: str, said: str) -> None:
    with pytest.raises(RuleError) as error:
        rule("mm", text).spec(call(aten.mm.default, [(4, 8), (8, 2)], [(4, 2)]))
    assert error.value.what == said


@pytest.mark.parametrize(("factors", "said"), [({"z": "sum"}, "no factor 'z'"), ({"k": "mean"}, "says k: 'mean'")])
def test_kinds_are_checked_when_the_rule_is_made(factors: dict[str, str], said: str) -> None:
    with pytest.raises(RuleError, match=said):
        rule("mm", "i k, k j -> i j", **factors)


@torch.library.custom_op("shardc_test::weighted_rows", mutates_args=())
def weighted_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x * weight[:, None]).sum(0)


def test_a_custom_op_gets_a_rule() -> None:
    op = torch.ops.shardc_test.weighted_rows.default
    assert find_rule(op) is None
    made = register_rule("shardc_test::weighted_rows", "i d, i -> d", reduction={"i": "sum"}, linear="0|1")
    assert find_rule(op) is made
    x, weight = torch.randn(4, 8, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    assert prove(made, Sample(op, (x, weight)), Lockstep, MESHES).wrong == ()
    spec = spec_of(call(op, [(4, 8), (4,)], [(8,)]))
    rows = [Layout.parse(text, MESHES[0]) for text in ("[4@x,8]", "[4@x]")]
    assert spec is not None and infer(spec, rows) == (Layout.parse("[8]{sum:x}", MESHES[0]),)


def test_a_registered_rule_replaces_the_one_before() -> None:
    op = torch.ops.shardc_test.weighted_rows.default
    register_rule(op, "i d, i -> d", reduction={"i": "whole"})
    spec = spec_of(call(op, [(4, 8), (4,)], [(8,)]))
    assert spec is not None and not spec.splittable("i") and spec.splittable("d")


def test_a_rule_registered_for_all_overloads_replaces_rules_of_overloads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_registered", {})
    op, packet = torch.ops.aten.max.dim, "aten::max"
    before = find_rule(op)
    of_packet = register_rule(packet, "i j -> i, i", reduction={"j": "whole"})
    assert before is not None and find_rule(op) is of_packet
    of_overload = register_rule(op, "i j -> j, j", reduction={"i": "whole"})
    assert find_rule(op) is of_overload and find_rule(torch.ops.aten.max.default) is of_packet
