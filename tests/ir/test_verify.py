"""The verifier: what each stage's spec accepts, and that planted miscompiles are caught at the line that is wrong."""

from __future__ import annotations

from collections.abc import Callable

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
from shardc.ir.verify import SPECS, verify
from shardc.ir.verify.identity import program
from shardc.passes.check import agrees, check

# An MLP under FSDP over dp and TP over tp, forward and the gradient of one weight, every step explicit.
STEPS = """\
mesh dp=2 tp=2
inputs:
  param %up: f32[8,32@(tp,dp)]
  param %gate: f32[8,32@(tp,dp)]
  param %down: f32[32@(tp,dp),8]
  input %x: f32[16@dp,8]
  tangent out %d.out: f32[16@dp,8]
forward:
  %up.full: f32[8,32@tp] = all_gather(%up, axis=dp)
  %up.mm: f32[16@dp,32@tp] = mm(%x, %up.full)
  %gate.full: f32[8,32@tp] = all_gather(%gate, axis=dp)
  %gate.mm: f32[16@dp,32@tp] = mm(%x, %gate.full)
  %mul: f32[16@dp,32@tp] = mul.Tensor(%up.mm, %gate.mm)
  %down.full: f32[32@tp,8] = all_gather(%down, axis=dp)
  %down.mm: f32[16@dp,8]{sum:tp} = mm(%mul, %down.full)
  %down.mm.summed: f32[16@dp,8] = all_reduce(%down.mm, axis=tp)
backward:
  %d.mul.t: f32[32@tp,16@dp] = t(%mul)
  %d.down: f32[32@tp,8]{sum:dp} = mm(%d.mul.t, %d.out)
  %d.down.scattered: f32[32@(tp,dp),8] = reduce_scatter(%d.down, axis=dp)
outputs:
  output out = %down.mm.summed
  grad down = %d.down.scattered
"""

LOCAL = """\
mesh dp=2 tp=2
no layouts
inputs:
  param %down: f32[8,8]
  input %mul: f32[8,16]
  coordinate tp %rank: i64[1]
forward:
  %down.full: f32[16,8] = _c10d_functional.all_gather_into_tensor(%down, 2, "shardc:dp")
  %down.full.wait: f32[16,8] = _c10d_functional.wait_tensor(%down.full)
  %down.mm: f32[8,8] = mm(%mul, %down.full.wait)
  %down.mm.summed: f32[8,8] = _c10d_functional.all_reduce(%down.mm, "sum", "shardc:tp")
  %down.mm.summed.wait: f32[8,8] = _c10d_functional.wait_tensor(%down.mm.summed)
outputs:
  output out = %down.mm.summed.wait
  grad down = %down
"""


def run(text: str, stage: str) -> None:
    check(parse(text), parse_mesh(text), stage)


def lines(*parts: str) -> str:
    return "\n".join([*parts, ""])


def caught(text: str, stage: str) -> VerifyError:
    with pytest.raises(VerifyError) as error:
        run(text, stage)
    return error.value


def edited(text: str, *edits: tuple[str, str]) -> str:
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def test_what_is_right_passes() -> None:
    run(STEPS, "collectives")
    run(LOCAL, "localize")
    run(LOCAL, "partition")


# --- planted miscompiles in the steps

PLANTED = {
    "a dropped all-reduce": (
        [
            ("  %down.mm.summed: f32[16@dp,8] = all_reduce(%down.mm, axis=tp)\n", ""),
            ("out = %down.mm.summed", "out = %down.mm"),
        ],
        "the outputs: output out has a pending reduction: f32[16@dp,8]{sum:tp}",
    ),
    "a reduction over the wrong axis": (
        [("all_reduce(%down.mm, axis=tp)", "all_reduce(%down.mm, axis=dp)")],
        "%down.mm.summed: a sum over dp does not stand between {sum:tp} pending and nothing pending",
    ),
    "a maximum where a sum is pending": (
        [("all_reduce(%down.mm, axis=tp)", 'all_reduce(%down.mm, axis=tp, op="max")')],
        "%down.mm.summed: a max over tp does not stand between {sum:tp} pending and nothing pending",
    ),
    "a gather over the wrong axis": (
        [("all_gather(%gate, axis=dp)", "all_gather(%gate, axis=tp)")],
        "%gate.full: [8,32@(tp,dp)] without tp is [8,(2 16@dp)], not [8,32@tp]",
    ),
    "a partial used as if it were whole": (
        [
            ("%down.mm: f32[16@dp,8]{sum:tp}", "%down.mm: f32[16@dp,8]"),
            ("all_reduce(%down.mm, axis=tp)", "clone(%down.mm)"),
        ],
        "%down.mm: its operands at [16@dp,32@tp], [32@tp,8] give [16@dp,8]{sum:tp}",
    ),
    "a partial through an op that is not linear": (
        [
            (
                "%down.mm.summed: f32[16@dp,8] = all_reduce(%down.mm, axis=tp)",
                "%down.mm.summed: f32[16@dp,8]{sum:tp} = relu(%down.mm)",
            )
        ],
        "%down.mm.summed: operands [0] are partial (sum over tp), which the op does not carry",
    ),
    "a scatter into the wrong dim": (
        [("%d.down.scattered: f32[32@(tp,dp),8]", "%d.down.scattered: f32[32@tp,8@dp]")],
        "the outputs: grad down is f32[32@tp,8@dp], and is wanted as [32@(tp,dp),8]",
    ),
    "a shard of the wrong dim": (
        [("%d.mul.t: f32[32@tp,16@dp] = t(%mul)", "%d.mul.t: f32[32@dp,16@tp] = t(%mul)")],
        "%d.mul.t: its operands at [16@dp,32@tp] give [32@tp,16@dp]",
    ),
    "axes in the wrong order": (
        [("%d.down.scattered: f32[32@(tp,dp),8]", "%d.down.scattered: f32[32@(dp,tp),8]")],
        "%d.down.scattered: [32@(dp,tp),8] without dp is [(2 16@tp),8], not [32@tp,8]",
    ),
    "a wrong weight dim gathered": (
        [
            (
                "%gate.full: f32[8,32@tp] = all_gather(%gate, axis=dp)",
                "%gate.full: f32[8@tp,32] = all_gather(%gate, axis=dp)",
            )
        ],
        "%gate.full: [8,32@(tp,dp)] without dp is [8,32@tp], not [8@tp,32]",
    ),
    "an operand that is split as the other is not": (
        [("%gate.mm: f32[16@dp,32@tp] = mm(%x, %gate.full)", "%gate.mm: f32[16@dp,32] = mm(%x, %gate.full)")],
        "%gate.mm: its operands at [16@dp,8], [8,32@tp] give [16@dp,32@tp]",
    ),
    "a gradient that is still whole": (
        [("grad down = %d.down.scattered", "grad down = %down.full")],
        "the outputs: grad down is f32[32@tp,8], and is wanted as [32@(tp,dp),8]",
    ),
}


@pytest.mark.parametrize("edits, message", PLANTED.values(), ids=PLANTED)
def test_a_planted_miscompile_is_caught(edits: list[tuple[str, str]], message: str) -> None:
    # moves come before agreement before the outputs, as a reader would look for the cause
    assert caught(edited(STEPS, *edits), "collectives").what == f"after collectives: {message}"


STALE = [("mm(%x, %gate.full)", "mm(%x, %up.full)"), ("all_gather(%gate, axis=dp)", "all_gather(%up, axis=dp)")]


@pytest.mark.parametrize("edit", STALE, ids=["a stale gather used", "another parameter gathered"])
def test_a_stale_gather_is_caught_by_what_the_program_computed_before(edit: tuple[str, str]) -> None:
    """%up and %gate are of one type: only the program before the pass tells them apart."""
    stale, mesh = edited(STEPS, edit), parse_mesh(STEPS)
    check(parse(stale), mesh, "collectives")
    with pytest.raises(VerifyError) as error:
        check(parse(stale), mesh, "collectives", program(parse(STEPS)))
    assert error.value.what == "after collectives: %mul: no op took %up.mm, %gate.mm this way before the pass"


def test_outputs_that_change_places_are_caught() -> None:
    text = f"{STEPS}  output #1 a = %up.mm\n  output #2 b = %gate.mm\n"
    swapped = text.replace("#1 a = %up.mm", "#1 a = %gate.mm").replace("#2 b = %gate.mm", "#2 b = %up.mm")
    before = program(parse(text))
    check(parse(text), parse_mesh(text), "collectives", before)
    with pytest.raises(VerifyError) as error:
        check(parse(swapped), parse_mesh(swapped), "collectives", before)
    assert error.value.what == "after collectives: the outputs: output a is not the value that it was"


def test_the_program_stays_the_same_when_data_moves_otherwise() -> None:
    other = edited(
        STEPS,
        (
            "  %down.mm.summed: f32[16@dp,8] = all_reduce(%down.mm, axis=tp)\n",
            lines(
                "  %some: f32[16@(dp,tp),8] = reduce_scatter(%down.mm, axis=tp)",
                "  %all: f32[16@dp,8] = all_gather(%some, axis=tp)",
            ),
        ),
        ("out = %down.mm.summed", "out = %all"),
    )
    check(parse(other), parse_mesh(other), "collectives", program(parse(STEPS)))


# --- the error itself


def test_the_error_shows_the_stage_the_line_and_two_around_it() -> None:
    error = caught(edited(STEPS, ("all_reduce(%down.mm, axis=tp)", "all_reduce(%down.mm, axis=dp)")), "collectives")
    assert (
        str(error)
        == """\
after collectives: %down.mm.summed: a sum over dp does not stand between {sum:tp} pending and nothing pending
  |    %down.full: f32[32@tp,8] = all_gather(%down, axis=dp)
  |    %down.mm: f32[16@dp,8]{sum:tp} = mm(%mul, %down.full)
  | >  %down.mm.summed: f32[16@dp,8] = all_reduce(%down.mm, axis=dp)
  |  backward:
  |    %d.mul.t: f32[32@tp,16@dp] = t(%mul)"""
    )


# --- which ops are legal where

LEGAL = {
    "capture": "tag",
    "canonicalize": "tag",
    "seed": "pad reshard tag unpad",
    "pad": "pad reshard tag unpad",
    "propagate": "pad reshard unpad",
    "objective": "pad reshard unpad",
    "precision": "pad reshard unpad",
    "reshard": "pad reshard unpad",
    "simplify": "pad reshard unpad",
    "collectives": "all_gather all_reduce all_to_all pad permute_ranks reduce_scatter shard to_partial unpad",
    "localize": "",
    "offload": "",
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


def mutated(text: str, change: Callable[[dict[str, fx.Node]], None], stage: str) -> str:
    """What is said of ``text`` when ``change`` was done to its nodes."""
    gm = parse(text)
    change({info(node).name: node for node in gm.graph.nodes if node.op != "output"})
    with pytest.raises(VerifyError) as error:
        verify(gm, parse_mesh(text), stage, agrees)
    return error.value.what


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
        verify(gm, parse_mesh(STEPS), "collectives", agrees)
    assert error.value.what == "after collectives: the outputs: 2 outputs have 1 roles"


def test_a_result_that_is_not_there_is_caught() -> None:
    text = lines(
        "mesh", "no layouts", "inputs:", "  input %x: f32[4]",
        "forward:", "  %max: (f32[], i64[]) = max.dim(%x, 0)", "  %best: f32[] = %max[2]",
    )  # fmt: skip
    assert caught(text, "capture").what == "after capture: %best: %max has no result 2"
    assert caught(text.replace("%max[2]", "%max[1]"), "capture").what == "after capture: %best: result 1 is i64[]"


# --- local programs

LOCAL_PLANTED = {
    "a marker left": (
        [('_c10d_functional.all_reduce(%down.mm, "sum", "shardc:tp")', "all_reduce(%down.mm, axis=tp)")],
        "%down.mm.summed: all_reduce is not legal here",
    ),
    "a group of another size": (
        [('%down, 2, "shardc:dp"', '%down, 4, "shardc:dp"')],
        "%down.full: it says 4 ranks, the group 'shardc:dp' has 2",
    ),
    "a result used before it is there": (
        [("mm(%mul, %down.full.wait)", "mm(%mul, %down.full)")],
        "%down.full: %down.mm uses it before it is waited on",
    ),
    "an output that is not waited on": (
        [("out = %down.mm.summed.wait", "out = %down.mm.summed")],
        "%down.mm.summed: the outputs uses it before it is waited on",
    ),
    "a gradient of the whole shape": (
        [("grad down = %down\n", "grad down = %down.full.wait\n")],
        "the outputs: grad down is f32[16,8], and is wanted as [8, 8]",
    ),
    "a collective that nobody waits for": (
        [
            ("  %down.mm.summed.wait: f32[8,8] = _c10d_functional.wait_tensor(%down.mm.summed)\n", ""),
            ("out = %down.mm.summed.wait", "out = %down.mm"),
        ],
        "%down.mm.summed: nothing waits for it",
    ),
}


@pytest.mark.parametrize("edits, message", LOCAL_PLANTED.values(), ids=LOCAL_PLANTED)
def test_a_planted_miscompile_in_a_local_program_is_caught(edits: list[tuple[str, str]], message: str) -> None:
    assert caught(edited(LOCAL, *edits), "localize").what == f"after localize: {message}"


def test_a_layout_in_a_local_program_is_caught() -> None:
    def place(nodes: dict[str, fx.Node]) -> None:
        set_info(nodes["down.mm"], info(nodes["down.mm"]).at(Layout.whole(Mesh(dp=2, tp=2), (8, 8))))

    assert mutated(LOCAL, place, "localize") == "after localize: %down.mm: a local tensor has a layout: f32[8,8]"


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
