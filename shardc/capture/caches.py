"""Registers the key-value caches of ``transformers`` as pytrees, so that their tensors are inputs and outputs.

A program does not change a cache that is passed in. The cache that it returns has the added keys and values.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

_BASES = ("Cache", "CacheLayerMixin", "LinearAttentionCacheLayerMixin", "DummyLayer")
_registered: dict[str, type] = {}


def register_caches() -> None:
    """Registers every class of caches and cache layers that is already imported; imports none."""
    module = sys.modules.get("transformers.cache_utils")
    for base in (getattr(module, name) for name in _BASES if hasattr(module, name)):
        for kind in (base, *_below(base)):
            _registered[f"{kind.__module__}.{kind.__qualname__}"] = kind
            if kind not in pytree.SUPPORTED_NODES:
                unflatten = partial(_unflatten, kind)
                pytree.register_pytree_node(kind, _flatten, unflatten, flatten_with_keys_fn=_flatten_with_keys)


def _below(kind: type) -> Iterator[type]:
    derived: type
    for derived in kind.__subclasses__():
        yield derived
        yield from _below(derived)


def _flatten(cache: Any) -> tuple[list[Any], Any]:
    """Return the attributes that may hold tensors; as context, their names and the values of the others."""
    attributes = {name: value for name, value in vars(cache).items() if _may_hold(value)}
    others = {name: _written(value) for name, value in vars(cache).items() if name not in attributes}
    return list(attributes.values()), [list(attributes), others]


def _flatten_with_keys(cache: Any) -> tuple[list[Any], Any]:
    values, context = _flatten(cache)
    return [(pytree.GetAttrKey(name), value) for name, value in zip(context[0], values, strict=True)], context


def _unflatten(kind: Any, values: Any, context: Any) -> Any:
    cache = kind.__new__(kind)
    for name, value in zip(context[0], values, strict=True):
        setattr(cache, name, value)
    for name, value in context[1].items():
        setattr(cache, name, _read(value))
    return cache


def is_cache(value: Any) -> bool:
    """Return whether ``value`` is a registered cache, or a layer of one."""
    return type(value) in _registered.values()


def _may_hold(value: Any) -> bool:
    return isinstance(value, (Tensor, dict, list, tuple)) or is_cache(value)


def _written(value: Any) -> Any:
    """Return ``value`` in the form that a saved program stores (see `shardc.precompiled.tree_spec`), if it has one."""
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, type):
        return {"class": f"{value.__module__}.{value.__qualname__}"}
    return value


def _read(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, name),) = value.items()
    return getattr(torch, name) if kind == "dtype" else torch.device(name) if kind == "device" else _registered[name]
