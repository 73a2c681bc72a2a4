"""Rules from the tables that ship with ``torch.distributed.tensor``, for ops that have none of our own.

A table says for one mesh dim which dims of the operands and results are split together. Each of its rows is
one factor. Ops that take sizes or draw random numbers are left out: their arguments would have to change
with the shards.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from shardc._compat import has_single_dim_table, single_dim_table
from shardc.ir.graph import Value
from shardc.rules.loops import Loops
from shardc.rules.notation import WHOLE
from shardc.rules.rule import Call, Rule
from shardc.rules.spec import Dims, Spec

TEXT = "the table of torch.distributed.tensor"
_ORDINAL = "k"  # the one symbolic argument that is no size: which element of a dim that is whole


@lru_cache(maxsize=4096)
def fallback_rule(target: Any) -> Rule | None:
    """The rule of an op overload by torch's table, or None where it has none that can be used."""
    schema = getattr(target, "_schema", None)
    if schema is None or torch.Tag.nondeterministic_seeded in target.tags:
        return None
    if any(name != _ORDINAL for name in re.findall(r"SymInt\S* (\w+)", str(schema))):
        return None
    return Rule(str(target), _spec, TEXT) if has_single_dim_table(target) else None


def _spec(call: Call) -> Spec:
    loops = Loops(call)
    places = [i for i, result in enumerate(call.results) if result is not None]
    rows = [_Row(row, len(call.results), places) for row in _rows(call)]
    named: dict[tuple[int, int], tuple[str, str]] = {}  # (tensor, dim) -> factor, kind; results first
    linear = []
    for number, row in enumerate(rows):
        if row.linear is not None:
            linear.append(row.linear)
        elif row.usable(loops, named):
            named |= {at: (f"r{number}", row.kind) for at in row.split}
    shapes = [*loops.made, *loops.shapes]
    dims: list[Dims] = [
        tuple(loops.dim(*_factor(named, at, i, n)) for i, n in enumerate(shape)) for at, shape in enumerate(shapes)
    ]
    return loops.spec(dims[len(loops.made) :], dims[: len(loops.made)], linear=linear)


def _factor(named: dict[tuple[int, int], tuple[str, str]], at: int, dim: int, size: int) -> tuple[str, int, str]:
    name, kind = named.get((at, dim), (f"x{at}.{dim}", WHOLE))
    return name, size, kind


def _rows(call: Call) -> list[list[Any]]:
    """The table's rows for ``call``; none where torch cannot tell."""

    def meta(x: Any) -> Any:
        if isinstance(x, Value):
            return torch.empty(x.shape, dtype=x.dtype, device="meta")
        return [meta(one) for one in x] if isinstance(x, tuple) else x

    try:
        made = single_dim_table(call.target, tuple(map(meta, call.args)), {name: meta(x) for name, x in call.kwargs})
    except (NotImplementedError, LookupError, TypeError, ValueError, AssertionError, AttributeError, RuntimeError):
        return []
    width = len(call.results) + len(call.operands)
    return [row for row in made if len(row) == width]


class _Row:
    """One row of a table.

    Attributes:
        split: the (tensor, dim) that are split together, results first.
        linear: the operands that carry a pending sum, in a row that splits nothing; else None.
        kind: the factor's kind: the reduce op of the results that lack it, or free.
    """

    def __init__(self, row: Sequence[Any], results: int, places: Sequence[int]) -> None:
        self._made = made = [row[i] for i in places]
        self._given = given = list(row[results:])
        entries = [*made, *given]
        self.split = [(at, dim) for at, dim in enumerate(entries) if type(dim) is int]
        pending = [op for op in made if isinstance(op, str)]
        self.kind = pending[0] if pending else ""
        sums = made and all(op == "sum" for op in made) and all(x in ("sum", ...) for x in given)
        self.linear = frozenset(i for i, x in enumerate(given) if x == "sum") if sums and not self.split else None

    def usable(self, loops: Loops, taken: dict[tuple[int, int], Any]) -> bool:
        """Whether the row can be one factor beside those before it."""
        shapes = [*loops.made, *loops.shapes]
        return (
            # One loop, of one size, that some operand has and that no row before has taken.
            all(dim < len(shapes[at]) for at, dim in self.split)
            and len({shapes[at][dim] for at, dim in self.split}) == 1
            and any(type(x) is int for x in self._given)
            and not any(at in taken for at in self.split)
            # Operands are split or whole, results split or pending in one way.
            and all(type(x) is int or x is ... for x in self._given)
            and all(x is not ... for x in self._made)
            and len({x for x in self._made if isinstance(x, str)}) <= 1
        )
