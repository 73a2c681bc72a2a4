"""Contractions: products summed over a shared factor."""

from __future__ import annotations

from shardc.rules.notation import rule
from shardc.rules.rule import table

TABLE = table(
    rule("mm", "i k, k j -> i j", k="sum", linear="0|1", flops=2),
    rule("bmm", "b i k, b k j -> b i j", k="sum", linear="0|1", flops=2),
    rule("mv", "i k, k -> i", k="sum", linear="0|1", flops=2),
    rule("dot", "k, k -> ", k="sum", linear="0|1", flops=2),
    rule("vdot", "k, k -> ", k="sum", linear="0|1", flops=2),
    rule("outer", "i, j -> i j", linear="0|1"),
    # The pending sum of a product would count the bias once a rank, so k stays whole; the trace has none of these.
    rule("addmm", "..., i k, k j -> i j", k="whole", linear="", flops=2),
    rule("baddbmm", "..., b i k, b k j -> b i j", k="whole", flops=2),
    rule("addbmm", "..., b i k, b k j -> i j", b="whole", k="whole", flops=2),
    rule("addmv", "..., i k, k -> i", k="whole", flops=2),
    rule("addr", "..., i, j -> i j"),
)
