"""The rewriter: a graph before, what is inserted, replaced and erased, and the graph after."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardc.ir import ops
from shardc.ir.graph import ancestors, dependents, info, output_node, update, value
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.ir.parse import parse
from shardc.ir.rewriter import GraphRewriter, inline_graph
from shardc.ir.text import dump

aten = torch.ops.aten
BEFORE = """\
mesh dp=2
no layouts
inputs:
  input %x: f32[4,6]
forward:
  %up.mm: f32[4,4] = mm(%x, %x)  # up | model.py:3 | fsdp("dp")
  %up.relu: f32[4,4] = relu(%up.mm)  # up | model.py:4 | -
outputs:
  output = %up.relu
"""


def _read() -> tuple[torch.fx.GraphModule, dict[str, torch.fx.Node]]:
    gm = parse(BEFORE)
    nodes = {info(node).name: node for node in gm.graph.nodes if node.op != "output"}
    with FakeTensorMode():
        for node in nodes.values():
            node.meta["val"] = torch.empty(value(node).shape)
    return gm, nodes


def test_inserted_ops_have_types_names_and_provenance() -> None:
    gm, nodes = _read()
    rewriter = GraphRewriter(gm.graph)
    mm, relu = nodes["up.mm"], nodes["up.relu"]
    at = rewriter.before(relu, like=mm, suffix="padded", cause="pad")
    padded = at.call(aten.constant_pad_nd.default, at.call(aten.constant_pad_nd.default, mm, [0, 1]), [0, 1])
    relu.replace_input_with(mm, padded)
    back = rewriter.after(relu).call(aten.slice.Tensor, relu, 1, 0, 4)
    relu.replace_all_uses_with(back, lambda user: user is not back)
    assert (
        dump(gm, Mesh(dp=2), origins=True)
        == """\
mesh dp=2
no layouts
inputs:
  input %x: f32[4,6]  # - | - | -
forward:
  %up.mm: f32[4,4] = mm(%x, %x)  # up | model.py:3 | fsdp("dp")
  %up.mm.padded: f32[4,5] = constant_pad_nd(%up.mm, [0, 1])  # up | model.py:3 | pad
  %up.mm.padded.1: f32[4,6] = constant_pad_nd(%up.mm.padded, [0, 1])  # up | model.py:3 | pad
  %up.relu: f32[4,4] = relu(%up.mm.padded.1)  # up | model.py:4 | -
  %up.relu.slice: f32[4,4] = slice.Tensor(%up.relu, 1, 0, 4)  # up | model.py:4 | -
outputs:
  output = %up.relu.slice
"""
    )
    assert padded.meta["val"].shape == (4, 6)


def test_replaced_and_unused_nodes_go() -> None:
    gm, nodes = _read()
    rewriter = GraphRewriter(gm.graph, reusable=[nodes["up.relu"]])
    twice = rewriter.before(nodes["up.relu"]).call(aten.mul.Tensor, nodes["x"], 2.0)
    rewriter.replace(nodes["up.relu"], twice, rename=True)
    rewriter.erase_unused()
    assert dump(gm, Mesh(dp=2)).splitlines()[4:] == [
        "forward:", "  %up.relu: f32[4,4] = mul.Tensor(%x, 2.0)", "outputs:", "  output = %up.relu"
    ]  # fmt: skip


def test_a_layout_says_what_operands_an_op_needs() -> None:
    mesh = Mesh(dp=2)
    gm = parse("mesh dp=2\ninputs:\n  input %x: f32[4@dp]\nforward:\n  %neg: f32[4@dp] = neg(%x)\noutputs:\n")
    neg = list(gm.graph.nodes)[1]
    update(neg, is_kept_part=True, true_sizes=(3,))
    rewriter = GraphRewriter(gm.graph)
    total = rewriter.after(neg).typed(value(neg), aten.add.Tensor, neg, neg)
    whole = rewriter.after(neg).typed(value(neg), ops.reshard, neg)
    split = Layout.parse("[4@dp]", mesh)
    assert info(total).needs == (split, split) and info(whole).needs is None
    assert not info(total).is_kept_part and info(total).true_sizes is None


def test_users_of_a_value_read_what_is_computed_from_it() -> None:
    gm, nodes = _read()
    rewriter, mm, relu = GraphRewriter(gm.graph), nodes["up.mm"], nodes["up.relu"]
    at = rewriter.after(mm, suffix="turned")
    back = at.call(aten.t.default, at.call(aten.t.default, mm))
    rewriter.redirect(mm, back)
    assert relu.args == (back,)
    assert [info(user).name for user in mm.users] == ["up.mm.turned"]


def test_ancestors_and_dependents() -> None:
    gm, nodes = _read()
    x, mm, relu = nodes["x"], nodes["up.mm"], nodes["up.relu"]
    assert ancestors([relu, None]) == {x, mm, relu}
    assert ancestors([relu], lambda node: node is mm) == {mm, relu}
    assert dependents(gm.graph, [mm]) == {mm, relu, output_node(gm.graph)}


def test_a_traced_function_is_inlined() -> None:
    gm, nodes = _read()
    traced = torch.fx.Graph()
    a, _, b = map(traced.placeholder, "abc")
    traced.output((traced.call_function(aten.sub.Tensor, (b, a)), a))
    at, mm, relu = GraphRewriter(gm.graph).after(nodes["up.relu"]), nodes["up.mm"], nodes["up.relu"]
    results = inline_graph(traced, [mm, None, relu], lambda node, args, kwargs: at.call(node.target, *args, **kwargs))
    assert results[1] is mm
    assert (results[0].target, results[0].args) == (aten.sub.Tensor, (relu, mm))
