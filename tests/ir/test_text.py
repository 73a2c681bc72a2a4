"""The text form: dump, parse, the tally, and that they are one grammar."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from shardc.errors import TextError, VerifyError
from shardc.ir.graph import ROLES, Info, Origin, Role, Value, info, outputs, set_info, update
from shardc.ir.layout import Digit, Layout
from shardc.ir.mesh import Mesh
from shardc.ir.parse import parse, parse_mesh
from shardc.ir.text import dump
from tests.ir.programs import LOCAL, MESH, MLP

ARGUMENTS = """\
mesh dp=2
no layouts
inputs:
  buffer bn.running_mean %bn.mean: f32[8]
  input #3 args.x %x: f32[4,8]
  coordinate dp %rank: i64[]
  %saved: bf16[]
forward:
  %full: f64[4,8] = full([4, 8], -inf, dtype=f64, device=cpu, pin_memory=False)
  %ones: f32[4] = full([4], 1e-05, layout=strided, device=cuda:0)
  %nan: f32[] = full([], nan)
  %phase: c64[4,8] = mul.Tensor(%x, 0.0+1.0j)
  %odd: c64[] = full([], -inf-1e-05j)
  %cat: f32[8,8] = cat([%x, %x])
  %sum: f32[1,8] = sum.dim_IntList(%x, [0], True)
  %index: f32[4] = index.Tensor(%x, [None, %rank])
  %gelu: f32[4,8] = gelu(%x, approximate="tanh")
  %clone: f32[4,8] = clone(%x, memory_format=contiguous_format)
  %"odd name!": bf16[4,8] = _to_copy(%x, dtype=bf16)
  %max: (f32[4], i64[4]) = max.dim(%x, -1)
  %best: f32[4] = %max[0]
  %where: i64[4] = %max[1]
  %size: None = sym_size.int(%x, 0)
  %aten.pad: f32[4,10] = aten.pad(%x, [1, 1])
backward:
  %cut: bool[4,8] = gt.Scalar(%x, 0)
forward:
  %late: f32[8,4] = t(%x)
  %table: bf16[2,3] = constant("_table", [1.0, -0.5, inf, 0.0, 2.0, 3.0])
  %none: f32[0,3] = constant("_none", [])
  %large: i64[65] = constant("sub.large")
outputs:
  output #1 "a b" = %best
  output = %late
  none #2 = None
  buffer bn.running_mean = %bn.mean
"""

DECIDED = """\
mesh dp=2 tp=2
inputs:
  param %w: f32[8@dp,4]
  input %x: f32[6@dp,8]
forward:
  %y: f32[6@dp,4] = mm(%x, %w as [8,4])
  %z: f32[6@dp,4]{sum:tp} = neg(%y)
  %cat: f32[(2 6@dp),4] = cat([%y, %z as [6@dp,4]])
outputs:
  output out = %cat as [12,4]
  grad w = None
"""

MOVES = """\
mesh dp=2 tp=4
inputs:
  input %x: f32[16@dp,(3 512@tp),8]
  input %y: f32[16,8]?
forward:
  %part: f32[16@dp,(3 512@tp:1x2),8] = all_gather(%x, axis=tp:2x2)
  %both: f32[16,1536,8] = all_gather(%x, axis=(dp,tp))
  %max: f32[16,8]{max:dp} = to_partial(%y, axis=dp, op="max")
  %most: f32[16,8] = all_reduce(%max, axis=dp, op="max")
  %named: f32[16,8]? = tag(%y, name="layers.0.out")
  %padded: f32[18,8] = pad(%most, dim=0, size=18)
  %to: f32[18,8@tp] = reshard(%padded)
outputs:
  output out = %to
comm:
  all_gather(dp,tp) x1 688128 B/rank
  all_gather(tp:2x2) x1 98304 B/rank
  all_reduce(dp) x1 512 B/rank
"""


@pytest.mark.parametrize(
    "text", [MLP, LOCAL, ARGUMENTS, DECIDED, MOVES], ids=["global", "local", "arguments", "decided", "moves"]
)
def test_a_text_that_is_parsed_and_dumped_is_the_same(text: str) -> None:
    assert dump(parse(text), parse_mesh(text)) == text


def test_parse_gives_records_and_roles() -> None:
    gm = parse(ARGUMENTS)
    made = {info(node).name: info(node) for node in gm.graph.nodes if node.op != "output"}
    assert made["bn.mean"] == Info("bn.mean", Value(torch.float32, (8,)), role=Role("buffer", "bn.running_mean"))
    assert made["x"].role == Role("input", "args.x", 3)
    assert made["saved"] == Info("saved", Value(torch.bfloat16, ()))
    assert made["max"].value == (Value(torch.float32, (4,)), Value(torch.int64, (4,)))
    assert made["size"].value is None
    assert made["cut"].origin == Origin(phase="backward")
    assert [(role, made and info(made).name) for role, made in outputs(gm.graph)] == [
        (Role("output", "a b", 1), "best"),
        (Role("output", ""), "late"),
        (Role("none", "", 2), None),
        (Role("buffer", "bn.running_mean"), "bn.mean"),
    ]
    calls = {
        info(node).name: (node.target, node.args, node.kwargs) for node in gm.graph.nodes if "=" in node.format_node()
    }
    x = next(node for node in gm.graph.nodes if node.name == "x")
    assert calls["sum"] == (torch.ops.aten.sum.dim_IntList, (x, [0], True), {})
    assert calls["ones"][2] == {"layout": torch.strided, "device": torch.device("cuda:0")}
    assert calls["clone"][2] == {"memory_format": torch.contiguous_format}


def test_a_constant_holds_what_is_shown_and_a_large_one_nothing() -> None:
    gm = parse(ARGUMENTS)
    table = torch.tensor([[1.0, -0.5, float("inf")], [0.0, 2.0, 3.0]], dtype=torch.bfloat16)
    torch.testing.assert_close(gm.get_buffer("_table"), table)
    assert gm.get_buffer("_none").shape == (0, 3)
    assert gm.get_buffer("sub.large").is_meta


def test_what_is_wanted_is_read_where_it_differs() -> None:
    gm = parse(DECIDED)
    made = {info(node).name: info(node) for node in gm.graph.nodes if node.op != "output"}
    whole, rows = Layout.parse("[8,4]", MESH), Layout.parse("[6@dp,8]", MESH)
    assert made["y"].needs == (rows, whole)
    assert made["z"].needs is None
    assert made["cat"].needs == (Layout.parse("[6@dp,4]", MESH), Layout.parse("[6@dp,4]", MESH))
    assert [role.layout for role, _ in outputs(gm.graph)] == [Layout.parse("[12,4]", MESH), None]


def test_layouts_are_read_on_the_mesh_of_the_header() -> None:
    gm = parse(MLP)
    found = {info(node).name: info(node).value for node in gm.graph.nodes if node.op == "placeholder"}
    assert found["up.weight"] == Value(torch.float32, (32, 8), Layout.parse("[32@(tp,dp),8]", MESH))
    assert found["x"].layout == Layout(MESH, [[Digit(2, "dp"), Digit(8)], [Digit(8)]])


def test_a_local_program_runs() -> None:
    text = LOCAL.replace(
        '_c10d_functional.all_gather_into_tensor(%up.weight, 2, "shardc:dp")', "cat([%up.weight, %up.weight])"
    )
    text = text.replace(
        '_c10d_functional.all_gather_into_tensor(%down.weight, 2, "shardc:dp")', "cat([%down.weight, %down.weight])"
    )
    text = text.replace('_c10d_functional.all_reduce(%down.mm, "sum", "shardc:tp")', "mul.Tensor(%down.mm, 2)")
    text = text.replace("_c10d_functional.wait_tensor", "clone").partition("comm:")[0]
    up, down, x = torch.randn(8, 8), torch.randn(4, 16), torch.randn(8, 8)
    (out,) = parse(text)(up, down, x)
    expected = 2 * torch.relu(x @ torch.cat([up, up]).T) @ torch.cat([down, down]).T
    torch.testing.assert_close(out, expected)


def test_origins_are_shown_on_demand_and_read_back() -> None:
    gm = parse("mesh dp=2\nno layouts\ninputs:\n  input %x: f32[4]\nforward:\n  %neg: f32[4] = neg(%x)\noutputs:\n")
    neg = next(node for node in gm.graph.nodes if node.op == "call_function")
    origin = Origin("layers.0", "model.py:12", "forward", 'fsdp("dp") | tp("tp")')
    set_info(neg, Info("neg", info(neg).value, origin))
    expected = """\
mesh dp=2
no layouts
inputs:
  input %x: f32[4]  # - | - | -
forward:
  %neg: f32[4] = neg(%x)  # layers.0 | model.py:12 | fsdp("dp") | tp("tp")
outputs:
"""
    text = dump(gm, Mesh(dp=2), origins=True)
    assert text == expected
    back = parse(text)
    assert dump(back, Mesh(dp=2), origins=True) == expected
    assert info(next(node for node in back.graph.nodes if node.op == "call_function")).origin == origin


@pytest.mark.parametrize(
    ("fields", "comment"),
    [
        ({"origin": Origin("m", "a.py:1", consumer="layers.0.add")}, "m | a.py:1 | needed by layers.0.add"),
        ({"origin": Origin("m", region=2), "is_kept_part": True}, "m | - | - | region 2 | kept"),
        ({"origin": Origin("m", cause="a | b"), "regathers": "w.full"}, "m | - | a | b | regathers w.full"),
    ],
)
def test_fields_of_provenance_are_read_back(fields: dict[str, Any], comment: str) -> None:
    gm = parse("mesh dp=2\nno layouts\ninputs:\n  input %x: f32[4]\nforward:\n  %neg: f32[4] = neg(%x)\noutputs:\n")
    neg = list(gm.graph.nodes)[1]
    expected = update(neg, **fields).meta["shardc"]
    text = dump(gm, Mesh(dp=2), origins=True)
    assert f"neg(%x)  # {comment}\n" in text
    assert info(list(parse(text).graph.nodes)[1]) == expected


def test_arguments_that_the_op_has_by_default_are_left_out() -> None:
    graph = fx.Graph()
    x = set_info(graph.placeholder("x"), Info("x", Value(torch.float32, (4,)), role=Role("input", "x")))
    aten = torch.ops.aten
    calls = [
        ("add", graph.call_function(aten.add.Tensor, (x, x), {"alpha": 1})),
        ("scaled", graph.call_function(aten.add.Tensor, (x, x), {"alpha": 2})),
        ("soft", graph.call_function(aten._softmax.default, (x, 0, False))),
        ("sum", graph.call_function(aten.sum.dim_IntList, (x, [0], False), {"dtype": None})),
    ]
    for name, node in calls:
        set_info(node, Info(name, Value(torch.float32, (4,))))
    graph.output((x,)).meta[ROLES] = (Role("output", ""),)
    text = dump(fx.GraphModule(torch.nn.Module(), graph), Mesh())
    assert (
        text
        == """\
mesh
no layouts
inputs:
  input %x: f32[4]
forward:
  %add: f32[4] = add.Tensor(%x, %x)
  %scaled: f32[4] = add.Tensor(%x, %x, alpha=2)
  %soft: f32[4] = _softmax(%x, 0, False)
  %sum: f32[4] = sum.dim_IntList(%x, [0])
outputs:
  output = %x
"""
    )
    assert dump(parse(text), Mesh()) == text


def test_a_node_without_a_record_is_an_error() -> None:
    graph = fx.Graph()
    graph.output((graph.placeholder("x"),)).meta[ROLES] = (Role("output", ""),)
    with pytest.raises(VerifyError) as error:
        dump(fx.GraphModule(torch.nn.Module(), graph), MESH)
    assert str(error.value).splitlines()[0] == "the node 'x' carries no Info"


# --- errors

BROKEN = [
    ("mesh dp=2 tp=2", "mash dp=2 tp=2", "line 1: expected 'mesh', found 'mash dp=2 tp=2'"),
    ("inputs:\n", "", "line 2: expected 'inputs:', found 'param %up.weight: f32[32@(tp,dp),8]'"),
    (
        "f32[16@dp,8]\n  tangent",
        "f33[16@dp,8]\n  tangent",
        "line 5: expected a type such as f32[16@dp,8], found 'f33[16@dp,8]'",
    ),
    (
        "%relu: f32[16@dp,32@tp] =",
        "%relu: f32[16@pp,32@tp] =",
        "line 11: expected a layout on the mesh dp=2 tp=2 (unknown mesh axis 'pp'; the mesh is dp=2 tp=2), "
        "found 'f32[16@pp,32@tp] = relu(%up.mm)'",
    ),
    (
        "%relu: f32[16@dp,",
        "%relu: f32[15@dp,",
        "line 11: expected a layout on the mesh dp=2 tp=2 (dim 0: 15 elements do not divide over ('dp',) (2 shards)), "
        "found 'f32[15@dp,32@tp] = relu(%up.mm)'",
    ),
    (
        "relu(%up.mm)",
        "rely(%up.mm)",
        "line 11: expected an op such as mm, sum.dim_IntList or all_gather, found 'rely(%up.mm)'",
    ),
    ("relu(%up.mm)", "relu(%down.mm)", "line 11: expected the name of a value that is defined above, found 'down.mm)'"),
    ("relu(%up.mm)", "relu(%up.mm", "line 11: expected ',', found the end of the line"),
    ("relu(%up.mm)", "relu(%up.mm) mm", "line 11: expected the end of the line, found 'mm'"),
    ("relu(%up.mm)", "relu(%up.mm, on=1, 2)", "line 11: expected a keyword argument, found '2)'"),
    (
        "relu(%up.mm)",
        "relu(banana)",
        "line 11: expected a value, a number, a string, a list, a dtype, a device or None, found 'banana)'",
    ),
    (
        "%relu: ",
        "%up.mm: ",
        "line 11: expected a new name (%up.mm is defined above), found 'up.mm: f32[16@dp,32@tp] = relu(%up.mm)'",
    ),
    (
        "all_gather(%up.weight, axis=dp)",
        "all_gather(%up.weight, axis=ep)",
        "line 8: expected an axis of the mesh dp=2 tp=2, found 'ep)'",
    ),
    (
        "  output out = ",
        "  = ",
        "line 21: expected a kind such as 'param', 'input' or 'output', found '= %down.mm.summed'",
    ),
    (
        "all_gather(dp) x2 512",
        "all_gather(dp) x2 513",
        "line 25: expected 'all_gather(dp) x2 512 B/rank', found 'all_gather(dp) x2 513 B/rank'",
    ),
    (
        "  reduce_scatter(dp) x1 256 B/rank\n",
        "",
        "line 26: expected one more line: 'reduce_scatter(dp) x1 256 B/rank', found the end of the line",
    ),
]


@pytest.mark.parametrize("old, new, message", BROKEN)
def test_a_broken_text_says_where_and_what_was_expected(old: str, new: str, message: str) -> None:
    assert MLP.count(old) == 1
    broken = MLP.replace(old, new)
    with pytest.raises(TextError) as error:
        parse(broken)
    assert error.value.what == message
    number = int(message.split()[1].rstrip(":"))
    assert error.value.program.splitlines()[0] == broken.splitlines()[number - 1]


def test_a_caret_points_at_the_place() -> None:
    with pytest.raises(TextError) as error:
        parse(MLP.replace("relu(%up.mm)", "rely(%up.mm)"))
    assert error.value.program == "  %relu: f32[16@dp,32@tp] = rely(%up.mm)\n                            ^"


def test_an_empty_text_is_an_error() -> None:
    with pytest.raises(TextError) as error:
        parse("\n")
    assert error.value.what == "line 1: expected 'mesh', found nothing"


@pytest.mark.slow
def test_a_dump_does_not_depend_on_the_hash_seed() -> None:
    code = "\n".join(
        [
            "from shardc.ir.parse import parse, parse_mesh",
            "from shardc.ir.text import dump",
            f"print(dump(parse({MLP!r}), parse_mesh({MLP!r})), end='')",
        ]
    )
    for seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
        )
        assert run.stdout == MLP, run.stderr
