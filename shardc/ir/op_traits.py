"""Traits of ops by schema and tags: whether an op views memory, only moves data, draws random numbers, communicates."""

from __future__ import annotations

from functools import cache
from operator import getitem

import torch

aten = torch.ops.aten
NAMESPACE = "_c10d_functional"
OWN_NAMESPACE = "shardc"  # the collectives that torch has no functional op for (`shardc.ir.comm`)
WAIT = torch.ops._c10d_functional.wait_tensor.default
CAST = aten._to_copy.default

RESHAPES = frozenset({aten.view.default, aten.reshape.default, aten._unsafe_view.default})
TRANSPOSES = frozenset({aten.t.default, aten.transpose.int, aten.permute.default})
# Ops that copy elements to other positions, and add at most padding.
COPIES = frozenset(
    {
        aten.clone.default, aten.reshape.default, aten._unsafe_view.default, aten.constant_pad_nd.default,
        aten.index_select.default, aten.cat.default,
    }
)  # fmt: skip


@cache
def aliases(target: object) -> bool:
    """Return whether results of the op ``target`` may share memory with operands: views, in-place ops,
    waits, getitems.
    """
    if target is WAIT or target is getitem:
        return True
    schema = getattr(target, "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)


@cache
def may_share_memory(target: object) -> bool:
    """Return whether results of the op ``target`` may share memory with its operands. ``reshape`` counts as a copy.

    In `aliases`, ``reshape`` counts as a view.
    """
    return aliases(target) and target is not aten.reshape.default


@cache
def is_view(target: object) -> bool:
    """Return whether the op ``target`` always returns a view of its operand, as a single tensor. ``reshape``, which may
    copy, does not.
    """
    schema = getattr(target, "_schema", None)
    if schema is None or len(schema.returns) != 1 or target is aten.reshape.default:
        return False
    (result,) = schema.returns
    return result.alias_info is not None and not result.alias_info.is_write and str(result.type) == "Tensor"


@cache
def moves_data(target: object) -> bool:
    """Return whether an op only moves data: every element of its results is padding or an element of an operand, as in
    views, copies and getitems.
    """
    return target is getitem or target in COPIES or getattr(target, "is_view", False)


@cache
def draws(target: object) -> bool:
    """Return whether an op may draw random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


@cache
def is_pointwise(target: object) -> bool:
    """Return whether an op is pointwise: each element of its result depends only on the operands' elements at its
    (broadcast) position.

    An op that draws random numbers is not pointwise.
    """
    return torch.Tag.pointwise in getattr(target, "tags", ()) and not draws(target)


@cache
def communicates(target: object) -> bool:
    """Return whether an op starts a collective or a copy between host and device, or waits for one."""
    return getattr(target, "namespace", "") in (NAMESPACE, OWN_NAMESPACE)


@cache
def starts(target: object) -> bool:
    """Return whether an op starts a collective, or a copy between host and device."""
    return communicates(target) and target is not WAIT
