"""Which ranks hold which part of a tensor: every element's owners, the table and the picture."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

import shardc
from shardc.errors import InputError
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.report.tiles import Tiles

MESH = Mesh(dp=2, tp=4)
LAYOUTS = [
    "[16@dp,8@tp]", "[16@(dp,tp),8]", "[16@(tp,dp),8]", "[16,(3 8@tp 2)]", "[16@tp:1x2,8@dp]", "[16,8]",
    "[16@dp,8]{sum:tp}", "[16@tp]", "[4,16@dp,8@tp]", "[]",
]  # fmt: skip


@pytest.mark.parametrize("text", LAYOUTS)
def test_every_element_is_in_the_tile_of_those_who_hold_it(text: str) -> None:
    layout = Layout.parse(text, MESH)
    tiles = Tiles("x", layout)
    rows, columns = tiles.grid
    shown = tiles.dims
    spans = [rows, columns] if len(shown) == 2 else [columns]
    for dim, stretches in zip(shown, spans, strict=False):
        assert [s.start for s in stretches] == [0, *(s.stop for s in stretches[:-1])]
        assert stretches[-1].stop == layout.shape[dim]
    for at in product(*(range(layout.shape[dim]) for dim in shown)):
        owners = set(range(8))
        for i, stretches in zip(at, spans, strict=False):
            owners &= next(each.ranks for each in stretches if each.start <= i < each.stop)
        held = [
            rank for rank in range(8)
            if all(i in layout.local_index(dim, rank) for i, dim in zip(at, shown, strict=True))
        ]  # fmt: skip
        assert owners == set(held)


def test_a_program_draws_its_tensors(tmp_path: Path) -> None:
    plan = shardc.Plan(params={"up.weight": ("tp", "dp"), "up.bias": ("tp",)})
    model = nn.Sequential()
    model.add_module("up", nn.Linear(8, 8))
    program = shardc.compile(model, Mesh(dp=2, tp=2), plan, backend="eager").lower(torch.empty(4, 8))
    assert (
        str(program.draw("up.bias"))
        == """\
up.bias [8@tp] on mesh dp=2 tp=2; ranks that hold each part
+-------+-------+
| 0:4   | 4:8   |
+=======+=======+
| 0, 2  | 1, 3  |
+-------+-------+"""
    )
    program.draw("%up.weight").save(tmp_path / "weight.png")
    assert (tmp_path / "weight.png").stat().st_size > 1000
    with pytest.raises(InputError, match="there is no tensor 'up.wight'.*\n.*did you mean 'up.weight'"):
        program.draw("up.wight")
    with pytest.raises(InputError, match="with a layout after 'capture'"):
        program.draw("up.weight", "capture")


def test_the_title_of_the_picture_is_not_cut_off() -> None:
    drawn = Tiles("layers.0.attention.projection.weight", Layout.parse("[16@(tp,dp),8]", MESH)).figure()
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(drawn)
    canvas.draw()
    box = drawn.axes[0].title.get_window_extent(canvas.get_renderer())
    assert box.x0 >= 0 and box.x1 <= drawn.bbox.x1
