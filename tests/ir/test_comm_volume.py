"""The communication tally: wire bytes, and that a program counts alike before and after it is local."""

from __future__ import annotations

import pytest

from shardc.errors import VerifyError
from shardc.ir.comm_volume import Row, tally, wire_elements
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.ir.parse import parse
from tests.ir.programs import LOCAL, MESH, MLP


def test_the_tally_counts_what_each_rank_sends() -> None:
    assert wire_elements("all_gather", 4, 1000) == 3000
    assert [wire_elements(kind, 4, 1000) for kind in ("reduce_scatter", "all_to_all")] == [750, 750]
    assert wire_elements("all_reduce", 4, 1000) == 1500
    assert wire_elements("all_reduce", 3, 1) == 2  # 4/3, rounded up
    assert wire_elements("permute_ranks", 4, 1000) == 1000
    assert [wire_elements(kind, 1, 1000) for kind in ("all_gather", "all_reduce", "permute_ranks")] == [0, 0, 0]


def test_the_tally_of_a_program_is_the_same_before_and_after_it_is_local() -> None:
    rows = [Row("all_gather", "dp", 2, 512), Row("all_reduce", "tp", 1, 256)]
    forward = MLP.partition("backward:")[0] + "outputs:\n  output out = %down.mm.summed\n"
    assert tally(parse(forward), MESH) == rows
    assert tally(parse(LOCAL), MESH) == rows


SPELLED = [
    ("all_gather", "f32[16@dp,8]", "f32[16,8]", "all_gather(%x, axis=dp)", "all_gather_into_tensor(%x, 2, {})"),
    (
        "all_gather",
        "f32[16@(dp,tp),8]",
        "f32[16,8]",
        "all_gather(%x, axis=(dp,tp))",
        "all_gather_into_tensor(%x, 8, {})",
    ),
    (
        "reduce_scatter",
        "f32[16,8]{sum:tp}",
        "f32[16@tp,8]",
        "reduce_scatter(%x, axis=tp)",
        'reduce_scatter_tensor(%x, "sum", 4, {})',
    ),
    ("all_reduce", "f32[]{sum:tp}", "f32[]", "all_reduce(%x, axis=tp)", 'all_reduce(%x, "sum", {})'),
    (
        "all_to_all",
        "f32[16@tp,8]",
        "f32[16,8@tp]",
        "all_to_all(%x, axis=tp)",
        "all_to_all_single(%x, [8, 8, 8, 8], [8, 8, 8, 8], {})",
    ),
    (
        "permute_ranks",
        "f32[16@(dp,tp),8]",
        "f32[16@(tp,dp),8]",
        "permute_ranks(%x, axis=(dp,tp))",
        "permute_ranks(%x, [0, 2, 4, 6, 1, 3, 5, 7], {})",
    ),
]


@pytest.mark.parametrize("kind, source, made, marker, spelled", SPELLED)
def test_a_marker_and_its_spelling_count_alike(kind: str, source: str, made: str, marker: str, spelled: str) -> None:
    mesh = Mesh(dp=2, tp=4)

    def shape(text: str) -> str:
        return ",".join(map(str, Layout.parse(text.removeprefix("f32"), mesh).local_shape))

    axes = marker.partition("axis=")[2].strip("()")
    group = f'"shardc:{axes}"'
    whole = f"mesh dp=2 tp=4\ninputs:\n  %x: {source}\nforward:\n  %y: {made} = {marker}\noutputs:\n  output = %y\n"
    namespace = "shardc" if kind == "permute_ranks" else "_c10d_functional"
    local = (
        f"mesh dp=2 tp=4\nno layouts\ninputs:\n  %x: f32[{shape(source)}]\nforward:\n"
        f"  %y: f32[{shape(made)}] = {namespace}.{spelled.format(group)}\noutputs:\n  output = %y\n"
    )
    rows = tally(parse(whole), mesh)
    assert [(row.kind, row.axis, row.count) for row in rows] == [(kind, axes, 1)]
    assert rows[0].bytes > 0
    assert tally(parse(local), mesh) == rows


def test_a_collective_over_no_group_of_the_mesh_is_an_error() -> None:
    with pytest.raises(VerifyError) as error:
        parse(LOCAL.replace('"shardc:tp"', '"world"'))
    assert error.value.what == "%down.mm.summed communicates over 'world', no group of the mesh dp=2 tp=2"
