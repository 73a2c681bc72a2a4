"""What traits say of an op is what it does: whose memory its results lie in, and whose elements they hold."""

from __future__ import annotations

from operator import getitem
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from shardc.ir import op_traits
from shardc.ir.comm import GATHER

aten = torch.ops.aten
X = torch.arange(1.0, 25.0).reshape(4, 6)
CALLS: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.view.default, (X, [24])),
    (aten.reshape.default, (X, [24])),
    (aten.reshape.default, (X.t(), [24])),
    (aten._unsafe_view.default, (X, [24])),
    (aten.t.default, (X,)),
    (aten.permute.default, (X, [1, 0])),
    (aten.expand.default, (X[:1], [4, 6])),
    (aten.slice.Tensor, (X, 0, 1, 3)),
    (aten.select.int, (X, 0, 1)),
    (aten.unsqueeze.default, (X, 0)),
    (aten.split.Tensor, (X, 2)),
    (aten.unbind.int, (X,)),
    (aten.diagonal.default, (X,)),
    (aten.detach.default, (X,)),
    (aten.clone.default, (X,)),
    (aten.cat.default, ([X, X],)),
    (aten.constant_pad_nd.default, (X, [0, 2])),
    (aten.index_select.default, (X, 0, torch.tensor([3, 0]))),
    (aten.add.Tensor, (X, X)),
    (aten.add_.Tensor, (X.clone(), 1.0)),
    (aten.sum.dim_IntList, (X, [0])),
    (aten.mm.default, (X, X.t())),
    (aten.bernoulli.default, (X / 25,)),
]


@pytest.mark.parametrize(("op", "args"), CALLS, ids=lambda x: str(x) if hasattr(x, "_schema") else "")
def test_traits_are_what_ops_do(op: Any, args: tuple[Any, ...]) -> None:
    first = args[0] if isinstance(args[0], Tensor) else args[0][0]
    before = {0.0, *first.flatten().tolist()}
    results = [x for x in pytree.tree_leaves(op(*args)) if isinstance(x, Tensor)]
    shares = any(x.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for x in results)
    assert not shares or op_traits.aliases(op) or op is aten._unsafe_view.default
    assert shares or not op_traits.is_view(op)
    if op_traits.moves_data(op):
        assert all(before.issuperset(x.flatten().tolist()) for x in results)
    else:
        assert op in (aten.add.Tensor, aten.add_.Tensor, aten.sum.dim_IntList, aten.mm.default, aten.bernoulli.default)
    assert op_traits.draws(op) == (op is aten.bernoulli.default)


def test_pointwise_ops_and_collectives() -> None:
    assert op_traits.is_pointwise(aten.add.Tensor) and not op_traits.is_pointwise(aten.sum.dim_IntList)
    assert not op_traits.is_pointwise(aten.bernoulli.p) and not op_traits.is_pointwise(getitem)
    start = torch.ops._c10d_functional.all_reduce.default
    assert [op_traits.communicates(x) for x in (start, GATHER, op_traits.WAIT, aten.add.Tensor)] == [1, 1, 1, 0]
    assert [op_traits.starts(x) for x in (start, GATHER, op_traits.WAIT, getitem)] == [1, 1, 0, 0]
    assert (
        op_traits.may_share_memory(op_traits.WAIT)
        and op_traits.may_share_memory(getitem)
        and not op_traits.may_share_memory(aten.reshape.default)
    )
