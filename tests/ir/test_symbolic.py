"""Layouts at symbolic sizes: typed and planned once, right at every value."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import sympy
import torch

from shardc.cost.model import CostModel
from shardc.cost.redistribute import steps, wire_bytes
from shardc.errors import LayoutError
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.ir.symbolic import Generic, at
from shardc.passes.spell import spell
from shardc.runtime.sim.lockstep import Lockstep

MESH = Mesh(dp=2, tp=4)
B, S = sympy.symbols("b s", integer=True, positive=True)
SubDims = Sequence[tuple[object, tuple[str, ...]]]


def of(*dims: SubDims, **partial: str) -> Layout:
    return Layout.of_sub_dims(MESH, dims, partial)  # type: ignore[arg-type]


PAIRS = [
    (of([(2 * B, ("dp",))], [(4 * S, ("tp",))], [(16, ())]), of([(2 * B, ("dp",))], [(4 * S, ())], [(16, ("tp",))])),
    (of([(2 * B, ("dp",))], [(4 * S, ())], tp="sum"), of([(2 * B, ())], [(4 * S, ("tp",))])),
    (of([(2 * B, ("dp",)), (4 * S, ("tp",))]), of([(8 * B * S, ("dp", "tp"))])),
    (of([(4 * (B + 1), ("tp",))], [(2 * S**2, ())]), of([(4 * (B + 1), ())], [(2 * S**2, ("dp",))])),
]


def test_symbolic_layouts_are_typed_and_printed() -> None:
    layout = of([(2 * B, ("dp",))], [(8 * S, ("tp",))])
    assert (layout.shape, layout.local_shape, layout.local_numel) == ((2 * B, 8 * S), (B, 2 * S), 2 * B * S)
    assert str(layout) == "[2*b@dp,8*s@tp]"
    assert layout.unbind(["dp"]) == of([(2 * B, ())], [(8 * S, ("tp",))])
    assert Generic(layout.dims).back(Generic(layout.dims).layout(layout)) == layout


def test_a_size_that_need_not_divide_is_an_error() -> None:
    with pytest.raises(LayoutError, match=r"b elements do not divide over \('dp',\)"):
        of([(B, ("dp",))])
    with pytest.raises(LayoutError, match="size b of .* is b at {}"):
        at(of([(2 * B, ("dp",))]), {})


@pytest.mark.parametrize(("src", "dst"), PAIRS, ids=str)
@pytest.mark.parametrize("values", [{B: 1, S: 1}, {B: 3, S: 2}, {B: 4, S: 6}], ids=str)
def test_one_plan_is_right_at_every_value(src: Layout, dst: Layout, values: dict[sympy.Symbol, int]) -> None:
    sim, begin, end = Lockstep(MESH), at(src, values), at(dst, values)
    whole = torch.arange(begin.numel, dtype=torch.float64).reshape(begin.shape)
    shards = sim.scatter_terms(whole, begin, torch.Generator().manual_seed(0))
    plan = steps(src, dst, 4, CostModel())
    for step in plan:
        concrete = type(step)(step.kind, step.axes, step.op, at(step.src, values), at(step.dst, values))
        shards = spell(concrete, shards, sim)
    assert torch.equal(sim.assemble(shards, end), whole)
    assert wire_bytes(src, dst, 4, CostModel()).subs(values) == sum(  # type: ignore[attr-defined]
        type(step)(step.kind, step.axes, step.op, at(step.src, values), at(step.dst, values)).wire_bytes(4)
        for step in plan
    )
