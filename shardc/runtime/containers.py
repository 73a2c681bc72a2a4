"""Containers that torch's pytrees do not know (a ``BatchEncoding``, a dataclass), opened to dicts and closed again."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from shardc._compat import PyTree, pytree
from shardc.errors import InputError


def to_dicts(tree: PyTree) -> PyTree:
    """Returns ``tree`` with a dict in place of each mapping and dataclass that torch's pytrees do not know.

    Raises:
        InputError: another object in it has tensors as attributes, which would stay as they are.
    """
    leaves, spec = pytree.tree_flatten(tree)
    return pytree.tree_unflatten([_open(leaf) for leaf in leaves], spec)


def from_dicts(tree: PyTree, values: PyTree) -> PyTree:
    """Inverts `to_dicts`: converts ``values``, which are structured like ``to_dicts(tree)``, back to the containers and
    classes of ``tree``.
    """
    leaves, spec = pytree.tree_flatten(tree)
    parts = spec.flatten_up_to(values)
    return pytree.tree_unflatten([_close(leaf, part) for leaf, part in zip(leaves, parts, strict=True)], spec)


def _open(leaf: Any) -> PyTree:
    """Converts ``leaf`` to a dict of its values if it is a mapping or a dataclass that torch's pytrees do not know;
    returns any other leaf as it is.
    """
    if isinstance(leaf, Tensor):
        return leaf
    if isinstance(leaf, Mapping):
        return {key: to_dicts(value) for key, value in leaf.items()}
    if _is_record(leaf):
        return {name: to_dicts(getattr(leaf, name)) for name in _names(leaf)}
    # An object of any other class stays whole, so no tensor may be in it.
    for name, value in getattr(leaf, "__dict__", {}).items():
        values = value.values() if isinstance(value, Mapping) else (value,)
        if any(isinstance(x, Tensor) for x in values):
            kind = type(leaf).__name__
            raise InputError(
                f"a batch has a {kind} with tensors in its attribute {name!r}; torch's pytrees do not know the class, "
                "so they cannot be cut",
                fix=f"pass its tensors, in a dict or a tuple, and make it in forward; or register {kind} with "
                "torch.utils._pytree",
            )
    return leaf


def _close(leaf: Any, part: PyTree) -> Any:
    """Inverts `_open`: returns a copy of the container ``leaf`` with the values ``part``. If ``leaf`` is no
    container, returns ``part``.
    """
    if isinstance(leaf, Tensor) or not (isinstance(leaf, Mapping) or _is_record(leaf)):
        return part
    if isinstance(leaf, Mapping):
        values = {key: from_dicts(leaf[key], value) for key, value in part.items()}
        if not isinstance(leaf, MutableMapping):
            return type(leaf)(values)  # type: ignore[call-arg]
        out: Any = copy.copy(leaf)  # a copy keeps other attributes of the mapping
        for key, value in values.items():
            out[key] = value
        return out
    out = copy.copy(leaf)
    for name, value in part.items():  # also of a frozen dataclass, whose own `__setattr__` raises
        object.__setattr__(out, name, from_dicts(getattr(leaf, name), value))
    return out


def _is_record(leaf: object) -> bool:
    """Whether ``leaf`` is an instance of a dataclass."""
    return is_dataclass(leaf) and not isinstance(leaf, type)


def _names(leaf: Any) -> list[str]:
    """Returns the names of those fields of the dataclass instance ``leaf`` that are set."""
    return [field.name for field in fields(leaf) if hasattr(leaf, field.name)]
