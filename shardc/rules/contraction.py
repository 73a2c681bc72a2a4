"""Rules for contractions: products summed over a shared factor."""

from __future__ import annotations

from shardc.rules.notation import bind, parse, rule
from shardc.rules.rule import ANY, Call, Rule, table
from shardc.rules.spec import Spec


def biased(op: str, text: str, *summed: str) -> Rule:
    """Return the rule of ``operand 0 + product``; ``summed`` is whole, or each rank would add operand 0."""
    operands, results = parse(text)
    kinds = dict.fromkeys(summed, "whole")

    def spec(call: Call) -> Spec:
        first = operands[0][len(operands[0]) - len(call.operands[0].shape) :]
        linear = (frozenset({0, 1}), frozenset({0, 2}))
        return bind(call, (first, *operands[1:]), results, kinds, linear, False)

    return Rule(f"aten.{op}", spec, f"{text}    {', '.join(summed)}: whole".removesuffix("    : whole"))


TABLE = table(
    rule("mm", "i k, k j -> i j", k="sum", linear="0|1"),
    rule("bmm", "b i k, b k j -> b i j", k="sum", linear="0|1"),
    rule("mv", "i k, k -> i", k="sum", linear="0|1"),
    rule("dot", "k, k -> ", k="sum", linear="0|1"),
    rule("vdot", "k, k -> ", k="sum", linear="0|1"),
    rule("outer", "i, j -> i j", linear="0|1"),
    biased("addmm", "i j, i k, k j -> i j", "k"),
    biased("baddbmm", "b i j, b i k, b k j -> b i j", "k"),
    biased("addbmm", "i j, b i k, b k j -> i j", "b", "k"),
    biased("addmv", "i, i k, k -> i", "k"),
    biased("addr", "i j, i, j -> i j"),
    strides=ANY,
)
