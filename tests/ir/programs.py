"""One small program as text: an MLP under FSDP over dp and TP over tp, at global and at local shapes."""

from __future__ import annotations

from shardc.ir.mesh import Mesh

MESH = Mesh(dp=2, tp=2)

MLP = """\
mesh dp=2 tp=2
inputs:
  param %up.weight: f32[32@(tp,dp),8]
  param %down.weight: f32[8@dp,32@tp]
  input %x: f32[16@dp,8]
  tangent out %d.out: f32[16@dp,8]
forward:
  %up.weight.full: f32[32@tp,8] = all_gather(%up.weight, axis=dp)
  %up.t: f32[8,32@tp] = t(%up.weight.full)
  %up.mm: f32[16@dp,32@tp] = mm(%x, %up.t)
  %relu: f32[16@dp,32@tp] = relu(%up.mm)
  %down.weight.full: f32[8,32@tp] = all_gather(%down.weight, axis=dp)
  %down.t: f32[32@tp,8] = t(%down.weight.full)
  %down.mm: f32[16@dp,8]{sum:tp} = mm(%relu, %down.t)
  %down.mm.summed: f32[16@dp,8] = all_reduce(%down.mm, axis=tp)
backward:
  %d.down.t: f32[8,16@dp] = t(%d.out)
  %d.down.mm: f32[8,32@tp]{sum:dp} = mm(%d.down.t, %relu)
  %d.down.mm.scattered: f32[8@dp,32@tp] = reduce_scatter(%d.down.mm, axis=dp)
outputs:
  output out = %down.mm.summed
  grad up.weight = None
  grad down.weight = %d.down.mm.scattered
comm:
  all_gather(dp) x2 512 B/rank
  all_reduce(tp) x1 256 B/rank
  reduce_scatter(dp) x1 256 B/rank
"""

# The forward of the above at local shapes, as each rank runs it.
LOCAL = """\
mesh dp=2 tp=2
no layouts
inputs:
  param %up.weight: f32[8,8]
  param %down.weight: f32[4,16]
  input %x: f32[8,8]
forward:
  %up.weight.full: f32[16,8] = _c10d_functional.all_gather_into_tensor(%up.weight, 2, "shardc:dp")
  %up.weight.full.wait: f32[16,8] = _c10d_functional.wait_tensor(%up.weight.full)
  %up.t: f32[8,16] = t(%up.weight.full.wait)
  %up.mm: f32[8,16] = mm(%x, %up.t)
  %relu: f32[8,16] = relu(%up.mm)
  %down.weight.full: f32[8,16] = _c10d_functional.all_gather_into_tensor(%down.weight, 2, "shardc:dp")
  %down.weight.full.wait: f32[8,16] = _c10d_functional.wait_tensor(%down.weight.full)
  %down.t: f32[16,8] = t(%down.weight.full.wait)
  %down.mm: f32[8,8] = mm(%relu, %down.t)
  %down.mm.summed: f32[8,8] = _c10d_functional.all_reduce(%down.mm, "sum", "shardc:tp")
  %down.mm.summed.wait: f32[8,8] = _c10d_functional.wait_tensor(%down.mm.summed)
outputs:
  output out = %down.mm.summed.wait
comm:
  all_gather(dp) x2 512 B/rank
  all_reduce(tp) x1 256 B/rank
"""
