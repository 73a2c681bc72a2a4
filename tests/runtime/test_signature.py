"""What calls are told apart by."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree

from shardc.runtime.signature import Arguments

X = torch.ones(2)


@pytest.mark.parametrize(
    "args, kwargs",
    [
        ((), {}), ((X,), {}), ((X, None, 1, 1.0, True, "a"), {}), ((X,), {"labels": X, "mask": None}),
        ((X,), {"mask": None, "labels": X}), (([X, 1],), {}), ((X, (X, None)), {"past": {"k": X}}),
        ((torch.Size((2, 3)),), {}), ((torch.nn.Parameter(X),), {}),
    ],
)  # fmt: skip
def test_calls_are_flattened_as_by_pytrees(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _, _, leaves, spec = Arguments.of(args, kwargs)
    expected, whole = pytree.tree_flatten((args, kwargs))
    assert [id(x) for x in leaves] == [id(x) for x in expected]
    assert spec == whole and hash(spec) == hash(whole)
    assert pytree.tree_unflatten(leaves, spec) == pytree.tree_unflatten(expected, whole)
