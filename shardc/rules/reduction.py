"""Reductions over dims: what is reduced leaves a pending sum, maximum, minimum or product."""

from __future__ import annotations

from collections.abc import Sequence

from shardc.rules.loops import Loops
from shardc.rules.notation import WHOLE
from shardc.rules.rule import ANY, CONTIGUOUS, Call, Rule, each, table
from shardc.rules.spec import Dims, Spec


def reduction(ops: str, kind: str) -> list[Rule]:
    """One rule for each of ``ops``, whose split reduced factors leave ``kind`` pending (or are ``whole``)."""

    def spec(call: Call) -> Spec:
        return reduction_spec(call, kind)

    return each(ops, spec, f"... n -> ...    n: {kind}")


def reduction_spec(call: Call, kind: str) -> Spec:
    """Operand 0 reduced over the dims of argument ``dim`` (all of them where it is absent, None or empty)."""
    loops = Loops(call)
    shape = loops.shapes[0]
    dims = reduced_dims(call, len(shape))
    operand = tuple(loops.dim(f"d{i}", size, kind if i in dims else "") for i, size in enumerate(shape))
    results = [_kept(operand, dims, len(made) == len(shape)) for made in loops.made]
    return loops.spec([operand], results)


def reduced_dims(call: Call, ndim: int) -> frozenset[int]:
    dim = call["dim"] if "dim" in call else None
    dims = (dim,) if isinstance(dim, int) else dim
    return frozenset(d % max(ndim, 1) for d in dims) if dims else frozenset(range(ndim))


def _kept(operand: Dims, dims: frozenset[int], keepdim: bool) -> Dims:
    reduced: Sequence[tuple[str, ...]] = [()] if keepdim else []
    return tuple(kept for i, factors in enumerate(operand) for kept in (reduced if i in dims else [factors]))


TABLE = table(
    reduction("sum nansum count_nonzero", "sum"),
    reduction("amax any", "max"),
    reduction("amin all", "min"),
    reduction("prod", "product"),
    # Which index wins, or a value that needs all elements at once: the reduced dim is gathered first.
    reduction(
        "argmax argmin max.default max.dim min.default min.dim mode kthvalue aminmax logsumexp mean "
        "var std var_mean std_mean linalg_vector_norm",
        WHOLE,
    ),
    strides=ANY,
) | table(reduction("median nanmedian", WHOLE), strides=CONTIGUOUS)
