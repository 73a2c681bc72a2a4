"""Rules derived from the tables of ``torch.distributed.tensor``, for ops without a rule in this package.

Each row of torch's table lists, for one mesh dim, the dims of operands and results that are split together. A row
becomes one factor. Ops that take sizes or draw random numbers are left out: their arguments depend on the shard.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch

from shardc._compat import OpOverload, has_single_dim_table, single_dim_table
from shardc.ir.graph import Value
from shardc.ir.op_traits import draws
from shardc.rules.notation import WHOLE, Loops
from shardc.rules.rule import Call, Rule
from shardc.rules.spec import Factors, Spec

TEXT = "the table of torch.distributed.tensor"
_ORDINAL = "k"  # the only symbolic argument that is not a size (kthvalue): it selects an element of a whole dim


@lru_cache(maxsize=4096)
def fallback_rule(target: object) -> Rule | None:
    """Return a rule for an op overload that is derived from DTensor's table of strategies. Return None if DTensor has
    no table for it, or if the op takes sizes or draws random numbers.
    """
    if not isinstance(target, OpOverload) or draws(target):
        return None
    # A symbolic argument is a size (but for the ordinal of `kthvalue`), which would have to be that of the shard.
    if any(name != _ORDINAL for name in re.findall(r"SymInt\S* (\w+)", str(target._schema))):
        return None
    return Rule(str(target), _spec, TEXT) if has_single_dim_table(target) else None


def _spec(call: Call) -> Spec:
    """Return the spec of a call, derived from DTensor's table: each usable row of the table (one way to shard the op)
    becomes a factor, which the dims that the row splits share. All other dims are whole.

    Example: of ``mm`` the row (0, 0, ...), "result and first operand are split along dim 0, the second is replicated",
    is the factor i of ``i k, k j -> i j``.
    """
    loops = Loops(call)
    tensor_results = [i for i, result in enumerate(call.results) if result is not None]
    rows = [_Row(row, len(call.results), tensor_results) for row in _rows(call)]
    factor_of: dict[tuple[int, int], tuple[str, str]] = {}  # (tensor, dim) -> factor, kind; results first
    linear = []
    for number, row in enumerate(rows):
        if row.linear is not None:  # the row is about partial sums, and splits nothing
            linear.append(row.linear)
        elif row.usable(loops, factor_of):
            factor_of |= {at: (f"r{number}", row.kind) for at in row.split}

    def factors(at: int, dim: int, size: int) -> Factors:
        """Return the factors of a dim of tensor ``at`` (results first): the factor of a row, or a whole one."""
        name, kind = factor_of.get((at, dim), (f"x{at}.{dim}", WHOLE))
        return loops.dim(name, size, kind)

    shapes, results = [*loops.result_shapes, *loops.shapes], len(loops.result_shapes)
    dims = [tuple(factors(at, i, size) for i, size in enumerate(shape)) for at, shape in enumerate(shapes)]
    return loops.spec(operands=dims[results:], results=dims[:results], linear=linear)


def _rows(call: Call) -> list[list[object]]:
    """Return the rows of DTensor's table for ``call``. A row has one entry per result and operand: the dim that is
    split, a reduce op (partial), or ``...`` (replicated). Return [] if torch raises.
    """

    def meta(x: object) -> object:  # torch reads shapes and dtypes of its arguments
        if isinstance(x, Value):
            return torch.empty(x.shape, dtype=x.dtype, device="meta")
        return [meta(item) for item in x] if isinstance(x, tuple) else x

    try:
        table_rows = single_dim_table(
            call.target, tuple(map(meta, call.args)), {name: meta(x) for name, x in call.kwargs}
        )
    except (NotImplementedError, LookupError, TypeError, ValueError, AssertionError, AttributeError, RuntimeError):
        return []
    width = len(call.results) + len(call.operands)  # other rows do not fit the call's tensors
    return [row for row in table_rows if len(row) == width]


class _Row:
    """One row of DTensor's table: one way to shard the op over one mesh dim.

    Args:
        row: an entry for each result, then for each operand: the dim that is split, a reduce op (partial), or ``...``
            (replicated).
        result_count: number of results, with those that are not tensors.
        tensor_results: positions of the results that are tensors.

    Attributes:
        split: (tensor, dim) pairs that are split together; tensors are numbered results first.
        linear: positions of the operands that may be partial sums, if the row splits nothing; else None.
        kind: kind of the factor: the reduce op of the results that lack it, or "" (free) if all have it.
    """

    def __init__(self, row: Sequence[object], result_count: int, tensor_results: Sequence[int]) -> None:
        self._results = results = [row[i] for i in tensor_results]
        self._operands = operands = list(row[result_count:])
        entries = [*results, *operands]
        self.split = [(at, dim) for at, dim in enumerate(entries) if type(dim) is int]
        reduce_ops = [op for op in results if isinstance(op, str)]
        self.kind = reduce_ops[0] if reduce_ops else ""
        # A row that splits nothing, of partial sums that give a partial sum, says in which operands the op is linear.
        passes_sums = results and all(op == "sum" for op in results) and all(x in ("sum", ...) for x in operands)
        partial_operands = frozenset(i for i, x in enumerate(operands) if x == "sum")
        self.linear = partial_operands if passes_sums and not self.split else None

    def usable(self, loops: Loops, factor_of: Mapping[tuple[int, int], object]) -> bool:
        """Return whether this row can become a factor (loop) of the op: it splits dims of one size, and says nothing
        that a factor cannot, such as an operand that must be partial.

        Args:
            factor_of: (tensor, dim) -> factor of an earlier row; tensors are numbered results first.
        """
        shapes = [*loops.result_shapes, *loops.shapes]
        return (
            # A single loop: one size, carried by some operand, not claimed by an earlier row.
            all(dim < len(shapes[at]) for at, dim in self.split)
            and len({shapes[at][dim] for at, dim in self.split}) == 1
            and any(type(x) is int for x in self._operands)
            and not any(at in factor_of for at in self.split)
            # Operands are split or replicated; results are split or partial, all with the same reduce op.
            and all(type(x) is int or x is ... for x in self._operands)
            and all(x is not ... for x in self._results)
            and len({x for x in self._results if isinstance(x, str)}) <= 1
        )
