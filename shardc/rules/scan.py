"""Scans, sorts and counts along a dim: the dim is whole, all others are free."""

from __future__ import annotations

from collections.abc import Callable

import shardc.ir.recurrent  # noqa: F401  (the ops)
from shardc.rules.loops import Loops, mixed
from shardc.rules.notation import WHOLE, rule
from shardc.rules.rule import CONTIGUOUS, Call, Rule, SpecOf, each, table
from shardc.rules.spec import Spec


def along(ops: str, *, linear: bool = False) -> list[Rule]:
    """Rules for ops along argument ``dim``, which may be of another size in the results."""

    def spec(call: Call) -> Spec:
        return mixed(call, [call["dim"]], linear=[{0}] if linear else ())

    said = "... n -> ... m    n m: whole" + ("    linear in self" if linear else "")
    return each(ops, spec, said)


def _counted(fixed: Callable[[Call], bool]) -> SpecOf:
    """Elements counted into bins that are ``fixed`` beforehand: each rank counts its own."""

    def spec(call: Call) -> Spec:
        loops = Loops(call)
        elements = "sum" if fixed(call) else WHOLE
        operands = [loops.dims("d", shape, elements) for shape in loops.shapes]
        # With weights, a pending sum of the weights is one of the counts.
        return loops.spec(
            operands, [loops.dims("bins", loops.made[0], WHOLE)], linear=[{1}] if len(operands) > 1 else ()
        )

    return spec


def _recurrent(op: str, text: str) -> Rule:
    """All steps of a recurrent layer: rows are free."""
    names = {name for name in text.replace(",", " ").replace("->", " ").split() if name != "n"}
    return rule(f"shardc_recurrent::{op}", text, **dict.fromkeys(sorted(names), WHOLE))  # type: ignore[arg-type]


TABLE = table(
    _recurrent("steps", "t n g, n s, r h -> t n s, t n k"),
    _recurrent("steps_backward", "t n s, n s, r h, t n s, t n g -> t n g, n s"),
    along("cumsum", linear=True),
    along("cumprod cummax cummin logcumsumexp sort argsort topk linalg_cross"),
    Rule("aten.msort", lambda call: mixed(call, [0]), "n ... -> n ...    n: whole"),
    Rule(
        "aten.histc",
        _counted(lambda call: call["min"] < call["max"]),
        "... -> bins    ...: sum where the range is given",
    ),
    Rule("aten.bincount", _counted(lambda call: False), "n -> bins    n: whole"),
    strides=CONTIGUOUS,
)
