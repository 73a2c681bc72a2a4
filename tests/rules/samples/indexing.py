"""Samples of lookups and writes by index."""

from __future__ import annotations

from typing import Any

import torch

from tests.rules.samples.values import Draw, Sample

aten = torch.ops.aten


def _one_dim(d: Draw) -> dict[str, list[tuple[Any, ...]]]:
    """Arguments by overload, after the op."""
    x, rows = d.normal(4, 16), d.order(4, 16)
    return {
        "embedding.default": [(d.normal(16, 4), d.below(16, 2, 4)), (d.normal(16, 4), d.below(16, 4).int(), 3)],
        "embedding_dense_backward.default": [
            (d.normal(2, 4, 8), d.below(16, 2, 4), 16, -1, False),
            (d.normal(8, 4), d.below(4, 8), 4, 2, False),
            (d.normal(8, 4), d.below(4, 8), 4, 2, True),
        ],
        "_embedding_bag.default": [
            (d.normal(16, 4), d.below(16, 6), torch.tensor([0, 2, 4]), False, mode) for mode in (0, 1, 2)
        ],
        "gather.default": [
            (x, 1, d.below(16, 4, 2)),
            (d.normal(8, 4), 0, d.below(8, 2, 3)),
            (d.normal(8), -1, d.below(8, 4)),
        ],
        "index_select.default": [(x, 1, d.below(16, 4)), (d.normal(8), 0, d.below(8, 4)), (x, 0, d.below(4))],
        "scatter.value": [(x, 1, d.below(16, 4, 1), 2.0), (d.normal(16, 4), 0, d.below(16, 3, 4), 0)],
        "scatter.src": [(x, -1, rows[:, :4], d.normal(4, 4)), (x, 1, rows[:, :4], d.normal(4, 6))],
        "scatter_add.default": [(x, -1, d.below(16, 4, 8), d.normal(4, 8)), (x, 1, rows[:, :4], d.normal(4, 6))],
        "index_copy.default": [(x, 1, rows[0, :4], d.normal(4, 4)), (d.normal(8), 0, d.below(8), d.normal())],
        "index_fill.int_Scalar": [(x, 1, d.below(16, 4), 2.0), (x, 0, d.below(4, 2), 0)],
        "index_fill.int_Tensor": [(x, 1, d.below(16, 4), d.normal())],
        "bucketize.Tensor": [(x, d.normal(5).sort().values)],
        "bucketize.Scalar": [(0.5, d.normal(5).sort().values)],
        "searchsorted.Tensor": [(d.normal(8).sort().values, x), (x.sort().values, d.normal(4, 6))],
        "searchsorted.Scalar": [(d.normal(8).sort().values, 0.5)],
        "isin.Tensor_Tensor": [(rows, d.below(16, 8)), (rows, d.below(16, 2, 4))],
        "isin.Tensor_Scalar": [(rows, 3)],
        "isin.Scalar_Tensor": [(3, rows)],
    }


def _several_dims(d: Draw) -> dict[str, list[tuple[Any, ...]]]:
    x = d.normal(8, 4, 8)
    i, j = d.below(8, 4), d.below(4, 2, 1)
    picks: list[tuple[Any, tuple[int, ...]]] = [
        ([i - 8], (4, 4, 8)),
        ([None, j, i], (8, 2, 4)),
        ([i, None, j], (2, 4, 4)),
        ([None, None, d.below(8)], (8, 4)),
    ]
    writes = [(x, indices, d.normal(*shape), accumulate) for indices, shape in picks for accumulate in (True,)]
    unique = d.order(8)[:4]
    replaces = [
        (x, [unique], d.normal(4, 1, 8)),
        (x, [None, None, unique], d.normal()),
        (x, [unique, d.below(4, 4)], d.normal(8)),
    ]
    masked = [(x, [d.bools(8)], d.normal())]
    found: dict[str, list[tuple[Any, ...]]] = {
        "index.Tensor": [(x, indices) for indices, _ in picks] + [(x, [None, d.bools(4)])]
    }
    found["_unsafe_index.Tensor"] = [(x, indices) for indices, _ in picks[1:]]
    found["index_put.default"] = found["_unsafe_index_put.default"] = [*writes, *replaces]
    found["index_put.default"] = [*writes, *replaces, *masked]
    return found


def samples(op: str) -> list[Sample]:
    """The samples of a rule of indexing, with or without an overload in its name."""
    draw = Draw(op)
    calls = {f"aten.{name}": given for table in (_one_dim(draw), _several_dims(draw)) for name, given in table.items()}
    made = [
        Sample(getattr(getattr(aten, name.split(".")[1]), name.split(".")[2]), call)
        for name, given in calls.items()
        if name == op or name.startswith(f"{op}.")
        for call in given
    ]
    return made + (_with_keywords(draw).get(op) or [])


def _with_keywords(d: Draw) -> dict[str, list[Sample]]:
    x, rows = d.normal(4, 16), d.order(4, 16)
    add = [(x, 1, d.below(16, 8), d.normal(4, 8)), (d.normal(8), 0, d.below(8, 4), d.normal(4))]
    reduced = (x, 1, d.below(16, 4, 8), d.normal(4, 8))
    return {
        "aten.isin": [Sample(aten.isin.Tensor_Tensor, (rows, d.below(16, 8)), {"invert": True})],
        "aten.index_add": [Sample(aten.index_add.default, call, {"alpha": 2.0}) for call in add],
        "aten.scatter": [
            Sample(aten.scatter.reduce, (x, 1, rows[:, :4], d.normal(4, 4)), {"reduce": "multiply"}),
            Sample(aten.scatter.value_reduce, (x, 1, rows[:, :4], 2.0), {"reduce": "add"}),
        ],
        "aten.scatter_reduce": [
            Sample(aten.scatter_reduce.two, (*reduced, how), {"include_self": own})
            for how, own in (("sum", True), ("amax", False), ("mean", False), ("prod", True))
        ],
    }
