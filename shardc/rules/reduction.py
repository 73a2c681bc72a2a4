"""Rules for reductions over dims: if a reduced dim is split, the result is a partial sum, maximum, minimum or
product.
"""

from __future__ import annotations

from shardc.rules.loops import Loops
from shardc.rules.notation import WHOLE
from shardc.rules.rule import ANY, CONTIGUOUS, Call, Rule, rules_for, table
from shardc.rules.spec import Dims, Spec


def reduction(ops: str, kind: str) -> list[Rule]:
    """Return a rule per op; ``kind`` is the reduce op of the partial result if reduced dims are split, or "whole"."""

    def spec(call: Call) -> Spec:
        return reduction_spec(call, kind)

    return rules_for(ops, spec, f"... n -> ...    n: {kind}")


def reduction_spec(call: Call, kind: str) -> Spec:
    """Return the spec of operand 0 reduced over argument ``dim`` (all dims if it is absent, None or empty)."""
    loops = Loops(call)
    shape = loops.shapes[0]
    dims = reduced_dims(call, len(shape))
    operand = tuple(loops.dim(f"d{i}", size, kind if i in dims else "") for i, size in enumerate(shape))
    results = [_reduced(operand, dims, keepdim=len(out) == len(shape)) for out in loops.result_shapes]
    return loops.spec([operand], results)


def reduced_dims(call: Call, ndim: int) -> frozenset[int]:
    """Return the dims that the call reduces, counted from 0."""
    dim = call["dim"] if "dim" in call else None
    dims = (dim,) if isinstance(dim, int) else dim
    return frozenset(d % max(ndim, 1) for d in dims) if dims else frozenset(range(ndim))


def _reduced(operand: Dims, dims: frozenset[int], *, keepdim: bool) -> Dims:
    """Return the factors of the result: those of ``operand`` without ``dims``, which have size 1 with ``keepdim``."""
    return tuple(() if i in dims else factors for i, factors in enumerate(operand) if keepdim or i not in dims)


TABLE = table(
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
