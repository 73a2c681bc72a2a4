"""Views: the factors that two shapes of the same elements share."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardc.ir.mesh import Mesh
from shardc.rules import RULES
from shardc.rules.proof import Sample, prove
from shardc.runtime.sim.lockstep import Lockstep

aten = torch.ops.aten


def viewed(before: list[int], after: list[int]) -> Sample:
    x = torch.arange(torch.Size(before).numel(), dtype=torch.float64).reshape(before)
    return Sample(aten.view.default, (x, after))


@pytest.mark.parametrize(
    ("before", "after", "shared"),
    [
        ([4, 8], [32], {"v0": 4, "v1": 8}),
        ([32], [4, 8], {"v0": 4, "v1": 8}),
        ([2, 4, 8], [8, 8], {"v0": 2, "v1": 4, "v2": 8}),
        ([1, 6, 1], [6], {"v0": 6}),
        ([6, 4], [4, 6], {"v0": 2, "v1": 2}),
        ([4, 9], [6, 6], {"v0": 2, "v1": 3}),
        ([2, 3], [3, 2], {}),
        ([0, 4], [4, 0], {}),
    ],
)
def test_shared_factors(before: list[int], after: list[int], shared: dict[str, int]) -> None:
    sample = viewed(before, after)
    spec = RULES["aten.view.default"].spec(sample.call(sample.dense()))
    assert {factor: size for factor, size in spec.sizes if factor not in spec.whole} == shared


@given(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4), st.data())
def test_any_view_is_right_on_shards(radices: list[int], data: st.DataObject) -> None:
    """Two shapes made of the same radices, grouped differently."""

    def grouped() -> list[int]:
        shape = [1]
        for radix in radices:
            shape = [*shape[:-1], shape[-1] * radix] if data.draw(st.booleans()) else [*shape, radix]
        return shape

    sample = viewed(grouped(), grouped())
    assert prove(RULES["aten.view.default"], sample, Lockstep, [Mesh(x=2), Mesh(x=3), Mesh(x=2, y=2)]).wrong == ()
