"""The rules: one table a family, and the lookups by op and by call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import Any

import torch

from shardc.errors import RuleError
from shardc.ir.flops import flops, is_dense
from shardc.ir.graph import Value
from shardc.rules import (
    advanced_indexing,
    attention,
    contraction,
    convolution,
    experts,
    factory,
    indexing,
    linalg,
    pieces,
    pointwise,
    random,
    reduction,
    scan,
    sequence,
    views,
)
from shardc.rules.fallback import fallback_rule
from shardc.rules.notation import rule
from shardc.rules.rule import ANY, TRACED, Call, Local, Localize, Rule, table
from shardc.rules.spec import Spec
from shardc.validate import typed

FAMILIES = (
    pointwise,
    contraction,
    reduction,
    views,
    pieces,
    indexing,
    advanced_indexing,
    attention,
    sequence,
    convolution,
    experts,
    scan,
    linalg,
    factory,
    random,
)
RULES: Mapping[str, Rule] = table(list(chain.from_iterable(family.TABLE.values() for family in FAMILIES)))
_registered: dict[str, Rule] = {}
_linear: dict[str, str] = {}  # of these
_ANY_STRIDES = ("_c10d_functional", "c10d_functional", "shardc")


def find_rule(target: Any) -> Rule | None:
    """The rule of an op overload: that of the overload, else that of all its overloads, else torch's table."""
    overload = str(target)
    packet = overload.rpartition(".")[0]
    for name in (overload, packet):
        if (found := _registered.get(name) or RULES.get(name)) is not None:
            return found
    return fallback_rule(target)


def strides_of(target: Any) -> str:
    """How the operands of an op may lie in memory, as `Rule.strides` says.

    Collectives and shardc's own moves make contiguous what they send, and Python's functions (getitem) read no memory.
    """
    namespace = getattr(target, "namespace", None)
    if namespace is None or namespace in _ANY_STRIDES:
        return ANY
    found = find_rule(target)
    return TRACED if found is None else found.strides


def is_registered(target: Any) -> bool:
    """Whether this program gave an op overload a rule by `register_rule`."""
    overload = str(target)
    return overload in _registered or overload.rpartition(".")[0] in _registered


def is_written_out(target: Any) -> bool:
    """Whether the rule that this program gave an op overload has a ``localize``, which is code of the user's."""
    found = find_rule(target) if is_registered(target) else None
    return found is not None and found.localize is not Local.same


def registered() -> list[tuple[str, str, str]]:
    """The ops that this program gave rules by `register_rule`, with text and ``linear`` of each."""
    return sorted((rule.op, rule.text, _linear[rule.op]) for rule in _registered.values())


@lru_cache(maxsize=65536)
def spec_of(call: Call) -> Spec | None:
    """The factors of ``call``, or None where its op has no rule; operations of dense ops are as torch counts them.

    Raises:
        RuleError: where the op's rule does not fit the call's shapes.
    """
    found = find_rule(call.target)
    spec = None if found is None else found.spec(call)
    if spec is None or not is_dense(call.target):
        return spec
    args, kwargs = _shapes(call.args), tuple((name, _shapes(x)) for name, x in call.kwargs)
    made = _shapes(call.results)
    return replace(spec, flops=flops(call.target, args, kwargs, made[0] if len(made) == 1 else made))


def _shapes(x: Any) -> Any:
    """``x`` with shapes in the place of tensors."""
    if isinstance(x, tuple):
        return tuple(_shapes(item) for item in x)
    return torch.Size(x.shape) if isinstance(x, Value) else x


@typed(RuleError)
def register_rule(
    op: Any,
    text: str,
    *,
    reduction: Mapping[str, str] | None = None,
    linear: str = "",
    localize: Localize = Local.same,
) -> Rule:
    """Gives a custom op a rule, which replaces any that it had.

    Args:
        op: the op: an overload, or its name (``"mylib::scale"`` for all its overloads).
        text: the notation, e.g. ``"i k, k j -> i j"``: operands in schema order, one name for each factor.
        reduction: factor -> the reduction that is pending if it is split: ``"sum"``, ``"max"``, ``"min"`` or
            ``"product"``; ``"whole"`` for a factor that must not be split. A factor that some result lacks and that is
            not named here is never split.
        linear: sets of operands, by position, that carry a pending sum through: ``"0|1"`` either, ``"0&1"`` both
            together.
        localize: how the op is written on shards; by default the same op with the same arguments.

    Raises:
        RuleError: the text cannot be read; at a call, it does not fit the op's shapes.

    >>> _ = register_rule("mylib::rowwise_scale", "i j, i -> i j", linear="0|1")
    """
    if not isinstance(op, str) and not hasattr(op, "_schema"):
        raise RuleError(f"{op!r} is no op", fix="pass torch.ops.mylib.scale.default, or its name")
    name = op if isinstance(op, str) else str(op).replace(".", "::", 1)
    made = rule(name, text, linear=linear, localize=localize, **dict(reduction or {}))  # type: ignore[arg-type]
    _registered[made.op], _linear[made.op] = made, linear
    spec_of.cache_clear()
    return made


__all__ = [
    "RULES",
    "find_rule",
    "is_registered",
    "is_written_out",
    "register_rule",
    "registered",
    "rule",
    "spec_of",
    "strides_of",
]
