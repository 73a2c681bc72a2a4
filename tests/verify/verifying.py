"""Programs for tests of the verifier, and what it says of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import fx

from shardc.errors import VerifyError
from shardc.ir.graph import info
from shardc.ir.parse import parse, parse_mesh
from shardc.passes.check import check, disagreement
from shardc.verify import verify

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


def mutated(text: str, change: Callable[[dict[str, fx.Node]], None], stage: str) -> str:
    """What is said of ``text`` when ``change`` was done to its nodes."""
    gm = parse(text)
    change({info(node).name: node for node in gm.graph.nodes if node.op != "output"})
    with pytest.raises(VerifyError) as error:
        verify(gm, parse_mesh(text), stage, disagreement)
    return error.value.what
