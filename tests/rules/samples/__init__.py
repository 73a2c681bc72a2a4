"""Sample inputs of every rule, by which it is proved."""

from __future__ import annotations

from shardc.rules import contractions, reduction
from shardc.rules.attention_rules import FUSED as ATTENTION
from shardc.rules.attention_rules import PACKED, SEQUENCE
from shardc.rules.flex_rules import TABLE as FLEX
from shardc.rules.pointwise import TABLE as POINTWISE
from shardc.rules.proof import Sample
from tests.rules.samples import (
    attention,
    elements,
    functions,
    indexing,
    matrices,
    packed,
    pointwise,
    structured,
    windows,
)


def samples(op: str) -> list[Sample]:
    """The samples of the rule named ``op``, e.g. ``aten.mm``; none where it has none."""
    if op.startswith("shardc_float8"):
        return elements.samples(op)
    if op.startswith("shardc_function"):
        return functions.samples(op)
    if op in POINTWISE:
        return list(pointwise.samples(op))
    if op in ATTENTION:
        return list(attention.samples(op))
    if op in PACKED:
        return list(packed.samples(op))
    if op in SEQUENCE:
        return list(attention.of_a_sequence(op))
    if op in FLEX:
        return list(attention.of_functions(op))
    if op in contractions.CONVOLUTIONS and any(word in op for word in ("pool", "pad", "upsample")):
        return list(windows.samples(op))
    families = {
        "contraction": contractions.CONTRACTIONS,
        "reduction": reduction.REDUCTIONS,
        "convolution": contractions.CONVOLUTIONS,
    }
    for family, table in families.items():
        if op in table:
            return list(structured.samples(op, family))
    return elements.samples(op) or indexing.samples(op) or matrices.samples(op)
