"""Rules made from the tables that ship with torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardc.ir.mesh import Mesh
from shardc.rules import RULES
from shardc.rules.fallback import fallback_rule
from shardc.rules.proof import Sample, prove
from shardc.runtime.sim.lockstep import Lockstep
from tests.rules.samples import samples

aten = torch.ops.aten
MESHES = (Mesh(x=2), Mesh(x=2, y=2))


def draw(*shape: int) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float64)


# An op, its arguments, the sizes of the factors that the table gives, and the sets of operands that carry sums.
CASES: list[tuple[Any, tuple[Any, ...], list[int], list[set[int]]]] = [
    (aten.mm.default, (draw(4, 8), draw(8, 2)), [2, 4, 8], [{0}, {1}]),
    (aten.index_reduce.default, (draw(4, 8), 0, torch.tensor([0, 2]), draw(2, 8), "amax"), [8], []),
    (aten.diagonal_scatter.default, (draw(4, 4, 8), draw(8, 4)), [8], []),
    (aten.special_hermite_polynomial_h.default, (draw(4, 1), draw(8)), [4, 8], []),
    (aten._native_batch_norm_legit.no_stats, (draw(4, 6, 2), draw(6), draw(6), True, 0.1, 1e-5), [6], []),
]


@pytest.mark.parametrize(
    ("op", "args", "sizes", "linear"), CASES, ids=lambda value: str(value) if callable(value) else ""
)
def test_a_table_becomes_factors(op: Any, args: tuple[Any, ...], sizes: list[int], linear: list[set[int]]) -> None:
    rule, sample = fallback_rule(op), Sample(op, args)
    assert rule is not None
    spec = rule.spec(sample.call(sample.dense()))
    assert sorted(size for factor, size in spec.sizes if spec.splittable(factor)) == sizes
    assert [set(positions) for positions in spec.linear] == linear
    proof = prove(rule, sample, Lockstep, MESHES)
    assert proof.tried and proof.wrong == ()


@pytest.mark.parametrize(
    "op",
    [
        aten.native_dropout.default,  # draws random numbers
        aten.native_group_norm.default,  # is told the size of the batch
        aten.nonzero.default,  # has no table
    ],
)
def test_ops_that_a_table_is_not_enough_for(op: Any) -> None:
    assert fallback_rule(op) is None


@pytest.mark.parametrize("op", ["aten.mm", "aten.bmm", "aten.index_select", "aten.kthvalue", "aten._linalg_det"])
def test_tables_agree_with_our_rules(op: str) -> None:
    """Where torch has a table as well, it splits no dim that our rule does not."""
    for sample in samples(op):
        theirs = fallback_rule(sample.op)
        assert theirs is not None
        call = sample.call(sample.dense())
        ours, table = RULES[op].spec(call), theirs.spec(call)
        for mine, other in zip((*ours.operands, *ours.results), (*table.operands, *table.results), strict=True):
            for one, two in zip(mine, other, strict=True):
                assert not any(table.splittable(f) for f in two) or any(ours.splittable(f) for f in one)
