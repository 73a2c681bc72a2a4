"""Code of a wrapper subclass that is replaced: the next call, and the next compile, compute with the new code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from tests.semantics.quantised import Int8, adapted, batch, loss

aten: Any = torch.ops.aten
Op = Callable[..., Any]


def values(x: Any) -> Any:
    return x.dequantize() if isinstance(x, Int8) else x


def doubled_values(x: Any) -> Any:
    return x.dequantize() * 2 if isinstance(x, Int8) else x


def apply(op: Any, args: Any, kwargs: Any) -> Any:
    return op(*map(values, args), **kwargs)


def double(op: Any, args: Any, kwargs: Any) -> Any:
    return op(*map(values, args), **kwargs) * 2


def linear(x: Tensor, weight: Any, bias: Tensor) -> Tensor:
    return F.linear(x, values(weight) * 3, bias)


class Table(Int8):
    """Looks its ops up in tables, as libraries let others register them."""

    OPS: dict[type, dict[Any, Op]] = {}
    FUNCTIONS: dict[Any, Op] = {}

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in cls.FUNCTIONS:
            return cls.FUNCTIONS[func](*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        op = cls.OPS[cls].get(func)
        return super().__torch_dispatch__(func, types, args, kwargs) if op is None else op(func, args, kwargs or {})


TRANSPOSES = (aten.t.default, aten.transpose.int)
Table.OPS[Table] = dict.fromkeys(TRANSPOSES, apply)
before: Any = Table.__torch_dispatch__


def dispatch(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    out = before(func, types, args, kwargs)
    return out * 2 if func in TRANSPOSES else out


@contextmanager
def other_code() -> Iterator[None]:
    code, values.__code__ = values.__code__, doubled_values.__code__
    yield
    values.__code__ = code


HERE = __name__
REPLACED: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "an entry of a table": partial(patch.dict, Table.OPS[Table], dict.fromkeys(TRANSPOSES, double)),
    "an entry that is new": partial(patch.dict, Table.FUNCTIONS, {F.linear: linear}),
    "a table": partial(patch.object, Table, "OPS", {Table: dict.fromkeys(TRANSPOSES, double)}),
    "a method": partial(patch.object, Table, "__torch_dispatch__", classmethod(dispatch)),
    "a global": partial(patch, f"{HERE}.values", doubled_values),
    "code of a function": other_code,
}


@pytest.mark.parametrize("what", REPLACED)
def test_what_is_replaced(what: str) -> None:
    model, other = adapted(Table.of), adapted(Table.of)
    mesh = shardc.Mesh(dp=2)

    def compiled(of: nn.Module) -> Any:
        return shardc.compile(of, mesh, shardc.fsdp("dp", 3), loss=loss, backend="eager")

    module = compiled(model)
    first = module.lower(*batch())
    old = loss(model(batch()[0]), batch()[1])
    with REPLACED[what]():
        new = loss(model(batch()[0]), batch()[1])
        assert not torch.allclose(old, new)
        for again in (module, compiled(other)):
            torch.testing.assert_close(shardc.Simulation(again)(*batch()), new.detach(), rtol=1e-9, atol=0)
    assert module.lower(*batch()) is first, "what was put back has its program"
    torch.testing.assert_close(shardc.Simulation(module)(*batch()), old.detach(), rtol=1e-9, atol=0)
