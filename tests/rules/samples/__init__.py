"""Sample inputs of every rule, by which it is proved."""

from __future__ import annotations

from shardc.rules import contraction, convolution, reduction
from shardc.rules.fused_attention import TABLE as ATTENTION
from shardc.rules.pointwise import TABLE as POINTWISE
from shardc.rules.proof import Sample
from shardc.rules.sequence_attention import TABLE as SEQUENCE
from tests.rules.samples import attention, elements, indexing, matrices, pointwise, structured, windows


def samples(op: str) -> list[Sample]:
    """The samples of the rule named ``op``, e.g. ``aten.mm``; none where it has none."""
    if op in POINTWISE:
        return list(pointwise.samples(op))
    if op in ATTENTION:
        return list(attention.samples(op))
    if op in SEQUENCE:
        return list(attention.of_a_sequence(op))
    if op in convolution.TABLE and any(word in op for word in ("pool", "pad", "upsample")):
        return list(windows.samples(op))
    for family in (contraction, reduction, convolution):
        if op in family.TABLE:
            return list(structured.samples(op, family.__name__.rpartition(".")[2]))
    return elements.samples(op) or indexing.samples(op) or matrices.samples(op)
