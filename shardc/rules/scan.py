"""Rules for scans, sorts and counts along a dim: the dim must be whole, all others may be split."""

from __future__ import annotations

from collections.abc import Callable

import shardc.custom_ops.recurrent  # noqa: F401  (the ops)
from shardc.rules.loops import Loops, mixed
from shardc.rules.notation import WHOLE, rule
from shardc.rules.rule import CONTIGUOUS, Call, Rule, SpecOf, rules_for, table
from shardc.rules.spec import Spec


def along(ops: str, *, linear: bool = False) -> list[Rule]:
    """Return rules for ops along argument ``dim``, which must be whole and may have another size in the results."""

    def spec(call: Call) -> Spec:
        return mixed(call, [call["dim"]], linear=[{0}] if linear else ())

    text = "... n -> ... m    n m: whole" + ("    linear in self" if linear else "")
    return rules_for(ops, spec, text)


def _counted(fixed: Callable[[Call], bool]) -> SpecOf:
    """Return the spec function of a histogram; with bins ``fixed`` in advance, ranks count their own elements."""

    def spec(call: Call) -> Spec:
        loops = Loops(call)
        elements = "sum" if fixed(call) else WHOLE
        operands = [loops.dims("d", shape, elements) for shape in loops.shapes]
        # Counts are linear in the weights (operand 1).
        return loops.spec(
            operands, [loops.dims("bins", loops.result_shapes[0], WHOLE)], linear=[{1}] if len(operands) > 1 else ()
        )

    return spec


def _recurrent(op: str, text: str) -> Rule:
    """Return the rule of a complete recurrent layer (all time steps): batch rows may be split, all else is whole."""
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
