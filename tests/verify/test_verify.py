"""The verifier: what each stage's spec accepts."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from shardc.errors import VerifyError
from shardc.ir import ops
from shardc.ir.graph import ROLES, Info, Value, info, set_info
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.ir.parse import parse, parse_mesh
from shardc.ir.text import dump
from shardc.passes.check import disagreement
from shardc.verify import SPECS, verify
from tests.verify.verifying import LOCAL, STEPS, caught, edited, lines, mutated, run

# --- which ops are legal where

LEGAL = {
    "capture": "tag",
    "experts": "tag",
    "attention": "tag",
    "windows": "tag",
    "canonicalize": "tag",
    "float8": "tag",
    "seed": "pad reshard tag unpad",
    "pad": "pad reshard tag unpad",
    "propagate": "pad reshard unpad",
    "objective": "pad reshard unpad",
    "precision": "pad reshard unpad",
    "reshard": "pad reshard unpad",
    "simplify": "pad reshard unpad",
    "collectives": "all_gather all_reduce all_to_all pad permute_ranks reduce_scatter shard to_partial unpad",
    "keep_part": "all_gather all_reduce all_to_all pad permute_ranks reduce_scatter shard to_partial unpad",
    "localize": "",
    "offload": "",
    "hoist_grad_epilogue": "",
    "chunk_loss": "",
    "decompose": "",
    "partition": "",
}


def test_each_stage_says_which_markers_are_legal() -> None:
    assert set(LEGAL) == set(SPECS)
    found = {}
    for stage in SPECS:
        allowed = []
        for name, marker in sorted(ops.MARKERS.items()):
            graph = fx.Graph()
            x = set_info(graph.placeholder("x"), Info("x", None))
            set_info(graph.call_function(marker, (x,)), Info("y", None))
            graph.output(()).meta[ROLES] = ()
            subject = fx.GraphModule(torch.nn.Module(), graph)
            illegal = [c for c in SPECS[stage] if c.__name__ == "legal" and list(c(_Subject(subject)))]
            allowed += [] if illegal else [name]
        found[stage] = " ".join(allowed)
    assert found == LEGAL


class _Subject:
    def __init__(self, gm: fx.GraphModule) -> None:
        self.calls = [node for node in gm.graph.nodes if node.op == "call_function"]


def test_a_collective_of_torch_is_illegal_before_localize() -> None:
    text = edited(
        STEPS,
        (
            "%mul: f32[16@dp,32@tp] = mul.Tensor(%up.mm, %gate.mm)",
            "%mul: f32[16@dp,32@tp] = _c10d_functional.wait_tensor(%up.mm)",
        ),
    )
    gm, mesh = parse(text), parse_mesh(text)
    with pytest.raises(VerifyError) as error:
        verify(gm, mesh, "collectives")
    assert error.value.what == "after collectives: %mul: a collective of torch is not legal before localize"


# --- layouts that are missing or wrong


def test_every_stage_says_where_layouts_must_be() -> None:
    seeded = lines(
        "mesh dp=2",
        "inputs:",
        "  param %w: f32[8@dp,4]",
        "  input %x: f32[6,8]?",
        "forward:",
        "  %y: f32[6,4]? = mm(%x, %w)",
        "outputs:",
        "  output = %y",
    )
    assert caught(seeded, "seed").what == "after seed: %x: a placeholder has no layout"
    pinned = seeded.replace("%x: f32[6,8]?", "%x: f32[6@dp,8]")
    run(pinned, "seed")
    assert caught(pinned, "propagate").what == "after propagate: %y: f32[6,4] has no layout"
    wanting = pinned.replace("f32[6,4]? = mm(%x, %w)", "f32[6@dp,4] = mm(%x, %w as [8,4])")
    run(wanting, "propagate")
    assert caught(wanting, "reshard").what == (
        "after reshard: %y: operand 1 at [8@dp,4] splits factor k differently from an operand before it"
    )
    agreed = wanting.replace("%w as [8,4])", "%w.at)").replace("  %y:", "  %w.at: f32[8,4] = reshard(%w)\n  %y:")
    run(agreed, "reshard")
    assert caught(agreed, "collectives").what == "after collectives: %w.at: reshard is not legal here"


def test_a_decision_that_does_not_give_the_result_is_caught_after_propagate() -> None:
    text = lines("mesh dp=2", "inputs:", "  input %x: f32[6@dp,8]", "forward:", "  %y: f32[6@dp,8] = relu(%x as [6,8])")
    assert caught(text, "propagate").what == "after propagate: %y: its operands at [6,8] give [6,8]"


def test_an_op_without_a_rule_must_be_whole() -> None:
    text = lines("mesh dp=2", "inputs:", "  input %x: f32[4@dp,4]", "forward:", "  %y: f32[6] = _pdist_forward(%x)")
    assert caught(text, "reshard").what == "after reshard: %y: the op has no rule and must be whole, not [4@dp,4]"


def test_a_layout_of_another_shape_or_mesh_is_caught() -> None:
    def reshape(nodes: dict[str, fx.Node]) -> None:
        set_info(nodes["mul"], Info("mul", Value(torch.float32, (16, 16), info(nodes["mul"]).value.layout)))

    def move(nodes: dict[str, fx.Node]) -> None:
        set_info(nodes["mul"], info(nodes["mul"]).at(Layout.whole(Mesh(ep=4), (16, 32))))

    assert (
        mutated(STEPS, reshape, "collectives")
        == "after collectives: %mul: its layout [16@dp,32@tp] is not of its shape [16, 16]"
    )
    assert (
        mutated(STEPS, move, "collectives")
        == "after collectives: %mul: its layout is on the mesh ep=4, not on dp=2 tp=2"
    )


def test_a_layout_in_a_local_program_is_caught() -> None:
    def place(nodes: dict[str, fx.Node]) -> None:
        set_info(nodes["down.mm"], info(nodes["down.mm"]).at(Layout.whole(Mesh(dp=2, tp=2), (8, 8))))

    assert mutated(LOCAL, place, "localize") == "after localize: %down.mm: a local tensor has a layout: f32[8,8]"


# --- the graph itself


def test_a_node_without_a_record_or_with_a_taken_name_is_caught() -> None:
    def strip(nodes: dict[str, fx.Node]) -> None:
        del nodes["mul"].meta["shardc"]

    def rename(nodes: dict[str, fx.Node]) -> None:
        set_info(nodes["mul"], Info("up.mm", info(nodes["mul"]).value))

    assert mutated(STEPS, strip, "collectives") == "after collectives: the node 'mul': it carries no Info"
    assert mutated(STEPS, rename, "collectives") == "after collectives: %up.mm: its name is taken by a node above"


def test_an_order_that_cannot_run_is_caught() -> None:
    def swap(nodes: dict[str, fx.Node]) -> None:
        nodes["mul"].append(nodes["up.mm"])

    assert mutated(STEPS, swap, "collectives") == "after collectives: %mul: it uses %up.mm, which is not above it"


def test_a_record_that_is_not_what_the_op_makes_is_caught() -> None:
    def fake(nodes: dict[str, fx.Node]) -> None:
        nodes["mul"].meta["val"] = torch.empty(16, 32, dtype=torch.float64, device="meta")

    assert (
        mutated(STEPS, fake, "collectives")
        == "after collectives: %mul: its value is f32[16@dp,32@tp], the op makes f64[16,32]"
    )


def test_outputs_without_a_role_each_are_caught() -> None:
    gm = parse(STEPS)
    last = next(iter(reversed(gm.graph.nodes)))
    last.meta[ROLES] = last.meta[ROLES][:1]
    with pytest.raises(VerifyError) as error:
        verify(gm, parse_mesh(STEPS), "collectives", disagreement)
    assert error.value.what == "after collectives: the outputs: 2 outputs have 1 roles"


def test_a_result_that_is_not_there_is_caught() -> None:
    text = lines(
        "mesh", "no layouts", "inputs:", "  input %x: f32[4]",
        "forward:", "  %max: (f32[], i64[]) = max.dim(%x, 0)", "  %best: f32[] = %max[2]",
    )  # fmt: skip
    assert caught(text, "capture").what == "after capture: %best: %max has no result 2"
    assert caught(text.replace("%max[2]", "%max[1]"), "capture").what == "after capture: %best: result 1 is i64[]"


# --- pads

PADDED = """\
mesh dp=4
inputs:
  param %w: f32[8@dp,3]
forward:
  %w.full: f32[8,3] = all_gather(%w, axis=dp)
  %w.unpadded: f32[6,3] = unpad(%w.full, dim=0, size=6)
  %d.w: f32[6,3] = neg(%w.unpadded)
  %d.w.padded: f32[8,3] = pad(%d.w, dim=0, size=8)
  %d.w.shard: f32[8@dp,3] = shard(%d.w.padded, axis=dp)
outputs:
  grad w = %d.w.shard
"""


def test_pads_are_checked() -> None:
    run(PADDED, "collectives")
    assert dump(parse(PADDED), Mesh(dp=4)).startswith(PADDED)
    grown = edited(
        PADDED,
        (
            "%w.unpadded: f32[6,3] = unpad(%w.full, dim=0, size=6)",
            "%w.unpadded: f32[6,3] = unpad(%w.full, dim=1, size=6)",
        ),
    )
    assert caught(grown, "collectives").what == (
        "after collectives: %w.unpadded: f32[8,3] does not become f32[6,3] when dim 1 gets 6 elements"
    )
    split = edited(
        PADDED,
        ("%d.w.padded: f32[8,3] =", "%d.w.padded: f32[8@dp,3] ="),
        ("shard(%d.w.padded, axis=dp)", "neg(%d.w.padded)"),
    )
    assert caught(split, "collectives").what == (
        "after collectives: %d.w.padded: dim 0 is split, from f32[6,3] to f32[8@dp,3], so its end is on one rank only"
    )
