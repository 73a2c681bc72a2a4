"""Miscompiles that are planted in a program are caught by the verifier, at the line that is wrong."""

from __future__ import annotations

import pytest

from shardc.errors import VerifyError
from shardc.ir.parse import parse, parse_mesh
from shardc.passes.check import check
from shardc.verify.identity import program_fingerprints
from tests.verify.verifying import LOCAL, STEPS, caught, edited, lines, run


def test_what_is_right_passes() -> None:
    run(STEPS, "collectives")
    run(LOCAL, "localize")
    run(LOCAL, "partition")


# --- in the steps, every move explicit

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
        check(parse(stale), mesh, "collectives", program_fingerprints(parse(STEPS)))
    assert error.value.what == "after collectives: %mul: no op took %up.mm, %gate.mm this way before the pass"


def test_outputs_that_change_places_are_caught() -> None:
    text = f"{STEPS}  output #1 a = %up.mm\n  output #2 b = %gate.mm\n"
    swapped = text.replace("#1 a = %up.mm", "#1 a = %gate.mm").replace("#2 b = %gate.mm", "#2 b = %up.mm")
    before = program_fingerprints(parse(text))
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
    check(parse(other), parse_mesh(other), "collectives", program_fingerprints(parse(STEPS)))


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


# --- in a local program

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
