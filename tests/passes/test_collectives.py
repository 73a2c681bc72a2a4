"""Reshards become steps: text before, text after; and each step is read back from its node."""

from __future__ import annotations

from shardc.cost.redistribute import steps
from shardc.ir import ops
from shardc.ir.graph import layout
from shardc.ir.parse import parse, parse_mesh
from shardc.ir.text import dump
from shardc.passes.lower.collectives import STEPS, Collectives, step_of

BEFORE = """\
mesh dp=2 tp=4
inputs:
  param %w: f32[4096@(tp,dp),1024]
  input %x: bf16[8@dp,128,64]{sum:tp}
  input %q: f32[8@dp,512@tp,16,64]
  tangent w %g: f32[4096,1024]{sum:dp,sum:tp}
  input %loss: f32[]{avg:dp}
  input %same: f32[16@dp]
forward:
  %w.compute: f32[4096@tp,1024] = reshard(%w)
  %x.seq: bf16[8@dp,128@tp,64] = reshard(%x)
  %q.heads: f32[8@dp,512,16@tp,64] = reshard(%q)
  %g.store: f32[4096@tp,1024] = reshard(%g)
  %loss.whole: f32[] = reshard(%loss)
  %same.again: f32[16@dp] = reshard(%same)
  %x.neg: bf16[8@dp,128@tp,64] = neg(%x.seq)
outputs:
  output w = %w.compute
  output x = %x.neg
  output q = %q.heads
  output g = %g.store
  output loss = %loss.whole
  output same = %same.again
"""

AFTER = """\
mesh dp=2 tp=4
inputs:
  param %w: f32[4096@(tp,dp),1024]
  input %x: bf16[8@dp,128,64]{sum:tp}
  input %q: f32[8@dp,512@tp,16,64]
  tangent w %g: f32[4096,1024]{sum:dp,sum:tp}
  input %loss: f32[]{avg:dp}
  input %same: f32[16@dp]
forward:
  %w.full: f32[4096@tp,1024] = all_gather(%w, axis=dp)
  %x.scattered: bf16[8@dp,128@tp,64] = reduce_scatter(%x, axis=tp)
  %q.moved: f32[8@dp,512,16@tp,64] = all_to_all(%q, axis=tp)
  %g.scattered: f32[4096@tp,1024]{sum:dp} = reduce_scatter(%g, axis=tp)
  %g.summed: f32[4096@tp,1024] = all_reduce(%g.scattered, axis=dp)
  %loss.summed: f32[] = all_reduce(%loss, axis=dp, op="avg")
  %x.neg: bf16[8@dp,128@tp,64] = neg(%x.scattered)
outputs:
  output w = %w.full
  output x = %x.neg
  output q = %q.moved
  output g = %g.summed
  output loss = %loss.summed
  output same = %same
comm:
  all_gather(dp) x1 2097152 B/rank
  all_reduce(dp) x2 4194308 B/rank
  all_to_all(tp) x1 1572864 B/rank
  reduce_scatter(tp) x2 12632064 B/rank
"""


def test_reshards_become_steps() -> None:
    assert dump(Collectives()(parse(BEFORE)), parse_mesh(BEFORE)) == AFTER


def test_steps_are_read_back_from_their_nodes() -> None:
    gm = parse(BEFORE)
    planned = []
    for node in gm.graph.nodes:
        if node.target is ops.reshard:
            planned += steps(layout(node.args[0]), layout(node), node.meta["shardc"].value.itemsize, Collectives().cost)
    made = [step_of(node) for node in Collectives()(gm).graph.nodes if node.target in STEPS]
    assert made == planned
    assert len(made) == 6
