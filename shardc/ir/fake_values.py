"""Computes the fake values of inserted ops, with a cache of results by op and operand types (`fake_result`).

A run of an op in a fake mode takes some 150 us. The same op comes at the same shapes in each repeated block, and in
each plan that a search tries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from shardc._compat import FakeTensor, FakeTensorMode, OpOverload, new_fake_tensor
from shardc.ir.op_traits import NAMESPACE, OWN_NAMESPACE, aliases, draws

_SCALARS = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
_BY_VALUE = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


class _Type(NamedTuple):
    """Shape, strides, dtype and device of a dense fake tensor: all of it that an op's result depends on, unless the
    result is a view.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _NoKeyError(Exception):
    """Raised for an argument that cannot be part of a key, such as a symbolic size."""


_tables: WeakKeyDictionary[FakeTensorMode, dict[object, _Type | tuple[_Type, ...]]] = WeakKeyDictionary()


def fake_result(
    mode: AbstractContextManager[object],
    target: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> object:
    """Return the result of ``target`` on fake values in ``mode``. Its type is cached; its tensors are new in each call.

    An op runs if its result is in no table: at new types of operands, or if types and other arguments do not determine
    the result, as with views, random draws and shapes that depend on values.
    """
    table: dict[object, _Type | tuple[_Type, ...]] = {}
    key = None
    if isinstance(mode, FakeTensorMode) and _is_pure(target):
        table = _tables.setdefault(mode, {})
        with suppress(_NoKeyError):
            key = target, torch.get_default_dtype(), _key(args), tuple((name, _key(x)) for name, x in kwargs.items())
        if (types := table.get(key)) is not None:
            return _tensor(mode, types) if isinstance(types, _Type) else tuple(_tensor(mode, x) for x in types)
    with mode, torch.no_grad():
        result = target(*args, **kwargs)
    if key is not None and (types := _types(result)) is not None:
        table[key] = types
    return result


@cache
def _is_pure(target: object) -> bool:
    """Return whether the types of an op's results follow from its operands' types and its other arguments."""
    return (
        isinstance(target, OpOverload)
        and target.namespace in ("aten", NAMESPACE, OWN_NAMESPACE)
        and not (target._schema.is_mutable or aliases(target) or draws(target) or _BY_VALUE & {*target.tags})
        and any("Tensor" in str(argument.type) for argument in target._schema.arguments)
    )


def _key(x: object) -> object:
    """Return a hashable key of an argument. Arguments with equal keys lead to results of equal types. Raise _NoKeyError
    if the argument can have no key.
    """
    if isinstance(x, FakeTensor):
        if x.layout is not torch.strided or x.dtype.is_complex or x.is_neg():
            raise _NoKeyError
        return _Type(_ints(x.shape), _ints(x.stride()), x.dtype, x.device)
    if isinstance(x, list | tuple):
        return tuple(map(_key, x))
    if type(x) in _SCALARS:
        return type(x), x  # 1, 1.0 and True are equal
    raise _NoKeyError


def _ints(sizes: Sequence[object]) -> tuple[int, ...]:
    """Return ``sizes`` as a tuple; _NoKeyError if one of them is symbolic."""
    out = tuple(size for size in sizes if type(size) is int)
    if len(out) != len(sizes):
        raise _NoKeyError
    return out


def _types(result: object) -> _Type | tuple[_Type, ...] | None:
    """Return the types of an op's result (a tensor or a tuple of tensors). None if they do not describe the result
    completely, as for a view.
    """
    if type(result) is tuple:
        types = [_types(x) for x in result]
        return tuple(x for x in types if isinstance(x, _Type)) if all(isinstance(x, _Type) for x in types) else None
    if not isinstance(result, FakeTensor):
        return None
    try:
        of_tensor = _key(result)
    except _NoKeyError:
        return None
    assert isinstance(of_tensor, _Type)
    twin = _tensor(result.fake_mode, of_tensor)
    same = (result.storage_offset(), result.untyped_storage().nbytes(), result.requires_grad) == (
        0, twin.untyped_storage().nbytes(), False,
    )  # fmt: skip
    return of_tensor if same else None


def _tensor(mode: FakeTensorMode, kind: _Type) -> Tensor:
    """Return a new fake tensor of type ``kind``."""
    return new_fake_tensor(mode, *kind)
