"""Sample inputs of every rule, by which it is proved."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shardc.rules import pointwise as pointwise_rules
from shardc.rules.proof import Sample
from shardc.rules.samples import pointwise


def samples(op: str) -> list[Sample]:
    """The samples of the rule named ``op``, e.g. ``aten.mm``; none where it has none."""
    if op in pointwise_rules.TABLE:
        return list(pointwise.samples(op))
    return []
