"""Rules along dims: reductions, scans, sorts and counts.

A split of a reduced dim leaves a partial sum, maximum, minimum or product; a scanned or sorted dim must be whole.
"""

from __future__ import annotations

from collections.abc import Callable

import shardc.custom_ops.recurrent_ops  # noqa: F401  (the ops)
from shardc.rules.notation import FREE, WHOLE, Loops, mixed, rule
from shardc.rules.rule import ANY, CONTIGUOUS, Call, Rule, SpecOf, rules_for, table
from shardc.rules.spec import Dims, Spec


def reduction(ops: str, kind: str) -> list[Rule]:
    """Return one rule for each op in ``ops``, which reduces dims. ``kind``: what a split of the reduced dims leaves,
    such as "sum" for a partial sum; "whole" if they must not be split.
    """

    def spec(call: Call) -> Spec:
        return reduction_spec(call, kind)

    return rules_for(ops, spec, f"... n -> ...    n: {kind}")


def reduction_spec(call: Call, kind: str) -> Spec:
    """Return the spec of operand 0 reduced over argument ``dim`` (all dims if it is absent, None or empty); ``kind`` as
    in `reduction`.
    """
    loops = Loops(call)
    shape = loops.shapes[0]
    dims = reduced_dims(call, len(shape))
    operand = tuple(loops.dim(f"d{i}", size, kind if i in dims else FREE) for i, size in enumerate(shape))
    # Results have as many dims as the operand only with ``keepdim``, or if nothing is reduced.
    results = [_reduced(operand, dims, keepdim=len(out) == len(shape)) for out in loops.result_shapes]
    return loops.spec([operand], results)


def reduced_dims(call: Call, ndim: int) -> frozenset[int]:
    """Return the dims that the call reduces as non-negative indices; all if its ``dim`` is absent, None or empty."""
    dim = call["dim"] if "dim" in call else None
    dims = (dim,) if isinstance(dim, int) else dim
    return frozenset(d % max(ndim, 1) for d in dims) if dims else frozenset(range(ndim))


def _reduced(operand: Dims, dims: frozenset[int], *, keepdim: bool) -> Dims:
    """Return the factors of the result's dims if an operand with the factors ``operand`` is reduced over ``dims``. With
    ``keepdim`` the reduced dims remain, with size 1.
    """
    return tuple(() if i in dims else factors for i, factors in enumerate(operand) if keepdim or i not in dims)


REDUCTIONS = table(
    reduction("sum nansum count_nonzero", "sum"),
    reduction("amax any", "max"),
    reduction("amin all", "min"),
    reduction("prod", "product"),
    # Ops that return an index, or that need all elements at once: the reduced dim is gathered first.
    reduction(
        "argmax argmin max.default max.dim min.default min.dim mode kthvalue aminmax logsumexp mean "
        "var std var_mean std_mean linalg_vector_norm",
        WHOLE,
    ),
    strides=ANY,
) | table(reduction("median nanmedian", WHOLE), strides=CONTIGUOUS)


def along(ops: str, *, linear: bool = False) -> list[Rule]:
    """Return rules for ops along argument ``dim``, which must not be split and may change its size; ``linear``: operand
    0 may be a partial sum.
    """
    text = "... n -> ... m    n m: whole" + ("    linear in self" if linear else "")
    return rules_for(ops, mixed(lambda call: [call["dim"]], linear=linear), text)


def _counted(fixed: Callable[[Call], bool]) -> SpecOf:
    """Return the function that gives the spec of a histogram. ``fixed(call)`` says whether the bins are the same for
    any data; only then may the elements be split.
    """

    def spec(call: Call) -> Spec:
        loops = Loops(call)
        # Ranks' counts add up only if they count in the same bins.
        elements = "sum" if fixed(call) else WHOLE
        operands = [loops.dims("d", shape, elements) for shape in loops.shapes]
        # Counts are linear in the weights (operand 1): if these are a partial sum, so are the counts.
        return loops.spec(
            operands, [loops.dims("bins", loops.result_shapes[0], WHOLE)], linear=[{1}] if len(operands) > 1 else ()
        )

    return spec


def _recurrent(op: str, text: str) -> Rule:
    """Return the rule of a complete recurrent layer (all time steps), given its notation ``text``: only the batch rows
    ``n`` may be split.
    """
    names = {name for name in text.replace(",", " ").replace("->", " ").split() if name != "n"}
    return rule(f"shardc_recurrent::{op}", text, **dict.fromkeys(sorted(names), WHOLE))  # type: ignore[arg-type]


SCANS = table(
    _recurrent("steps", "t n g, n s, r h -> t n s, t n k"),
    _recurrent("steps_backward", "t n s, n s, r h, t n s, t n g -> t n g, n s"),
    along("cumsum", linear=True),
    along("cumprod cummax cummin logcumsumexp sort argsort topk linalg_cross"),
    Rule("aten.msort", mixed(lambda call: [0]), "n ... -> n ...    n: whole"),
    Rule(
        "aten.histc",
        _counted(lambda call: call["min"] < call["max"]),
        "... -> bins    ...: sum where the range is given",
    ),
    Rule("aten.bincount", _counted(lambda call: False), "n -> bins    n: whole"),
    strides=CONTIGUOUS,
)

TABLE = REDUCTIONS | SCANS
