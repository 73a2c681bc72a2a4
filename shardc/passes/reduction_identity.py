"""Identity of a reduction: the value that does not change its result, with which padded operands are filled."""

from __future__ import annotations

from math import inf

from shardc.rules.rule import Call
from shardc.rules.spec import Spec

# Reductions of the elements themselves; others (a norm, a deviation) transform each element before.
PLAIN = {
    "aten.sum": 0.0,
    "aten.nansum": 0.0,
    "aten.count_nonzero": 0.0,
    "aten.amax": -inf,
    "aten.amin": inf,
    "aten.prod": 1.0,
    "aten.any": 0.0,
    "aten.all": 1.0,
}


def reduction_identity(call: Call, spec: Spec, factor: str) -> float | None:
    """Returns the filling of operands along ``factor`` (a loop of the op) that does not change the op's result.

    It is zero if the op sums over the factor and is linear in some operand that runs over it: that operand's slice is
    zero there, and so is its term of the sum. None if no such value is known.
    """
    if spec.routed is not None and factor == spec.routed.owners:
        return 0.0  # padded experts get no rows
    plain = PLAIN.get(call.name.rpartition(".")[0])
    if plain is None and dict(spec.reduce).get(factor) == "sum":
        runs = {at for at, dims in enumerate(spec.operands) if any(factor in factors for factors in dims)}
        return 0.0 if any(len(group) == 1 and group <= runs for group in spec.linear) else None
    return plain
