"""Sharding rules of ops: one table per family of ops, and the lookup of a rule by overload and of a `Spec` by call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from shardc._compat import pytree
from shardc.custom_ops.flops import flops, is_dense
from shardc.custom_ops.functional_ops import written_op
from shardc.errors import RuleError
from shardc.ir.graph import Value
from shardc.rules import (
    attention_rules,
    contractions,
    factory,
    flex_rules,
    function_rules,
    indexing,
    pointwise,
    reduction,
    routed_experts,
    slicing,
    view_ops,
    window_rules,
)
from shardc.rules.fallback import fallback_rule
from shardc.rules.notation import rule as rule
from shardc.rules.rule import ANY, TRACED, Call, Local, Localize, Rule, table
from shardc.rules.spec import Spec
from shardc.validate import typed

FAMILIES = (
    pointwise,
    reduction,
    view_ops,
    slicing,
    indexing,
    attention_rules,
    flex_rules,
    window_rules,
    contractions,
    routed_experts,
    factory,
)
_registered: dict[str, Rule] = {}  # name of an op -> the rule that the user gave it
_linear: dict[str, str] = {}  # of these
_ANY_STRIDES = ("_c10d_functional", "c10d_functional", "shardc")  # namespaces of ops that copy their operands


def find_rule(target: object) -> Rule | None:
    """Return the rule of an op overload, or None. Tried in this order: rules that the user registered, shardc's own,
    torch's table (`fallback_rule`); of the first two, a rule for the overload before a rule for all overloads of the
    op. The functional form of a custom op that writes to its arguments has the rule of that op.
    """
    names = _names(target)
    matches = (rules[name] for rules in (_registered, RULES) for name in names if name in rules)
    return next(matches, None) or fallback_rule(target)


def _names(target: object) -> tuple[str, str]:
    """Return the two names by which rules are looked up for ``target``: the name of the overload (``aten.add.Tensor``),
    and the name of its op (``aten.add``).
    """
    overload = str(written_op(target) or target)  # of a functional form, the op that writes to its arguments
    return overload, overload.rpartition(".")[0]


def strides_of(target: object) -> str:
    """Return which strides an op accepts of its operands: ANY, CONTIGUOUS (contiguous, or as in the trace), or TRACED
    (only as in the trace).

    Collectives and shardc's own ops copy their operands into contiguous memory. Python functions (getitem) read none.
    """
    namespace = getattr(target, "namespace", None)  # None for a Python function
    if namespace is None or namespace in _ANY_STRIDES:
        return ANY
    op_rule = find_rule(target)
    return TRACED if op_rule is None else op_rule.strides  # of an op without a rule nothing is certain


def is_registered(target: object) -> bool:
    """Return whether the user gave this op overload a rule by `register_rule`."""
    return any(name in _registered for name in _names(target))


def is_written_out(target: object) -> bool:
    """Return whether the user's rule for this overload has its own ``localize`` function, which writes the op out on
    shards.
    """
    op_rule = find_rule(target) if is_registered(target) else None
    return op_rule is not None and op_rule.localize is not Local.same


def registered() -> list[tuple[str, str, str]]:
    """Return (op, notation, ``linear``) of each rule that the user gave by `register_rule`, sorted by op."""
    return sorted((rule.op, rule.text, _linear[rule.op]) for rule in _registered.values())


@lru_cache(maxsize=65536)
def spec_of(call: Call) -> Spec | None:
    """Return the `Spec` (factors) of ``call`` by the rule of its op; None if the op has no rule. For a dense op the
    spec has torch's count of floating-point operations.

    Raises:
        RuleError: the op's rule does not fit the call's shapes.
    """
    op_rule = find_rule(call.target)
    spec = None if op_rule is None else op_rule.spec(call)
    if spec is None or not is_dense(call.target):
        return spec
    # torch's formulas take shapes in place of tensors.
    args, kwargs, shapes = pytree.tree_map_only(
        Value, lambda value: torch.Size(value.shape), (call.args, call.kwargs, call.results)
    )
    result_shapes = shapes[0] if len(shapes) == 1 else shapes
    return replace(spec, flops=flops(call.target, args, kwargs, result_shapes))


# Ops with functions have the rules of the ops in these.
RULES: Mapping[str, Rule] = table(
    [rule for family in FAMILIES for rule in family.TABLE.values()] + function_rules.rules(find_rule, spec_of)
)


@typed(RuleError)
def register_rule(
    op: Any,
    text: str,
    *,
    reduction: Mapping[str, str] | None = None,
    linear: str = "",
    localize: Localize = Local.same,
) -> Rule:
    """Gives a custom op a sharding rule, replacing any rule that it has, and returns the rule.

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
        raise RuleError(f"{op!r} is not an op", fix="pass torch.ops.mylib.scale.default, or its name")
    name = op if isinstance(op, str) else str(op).replace(".", "::", 1)  # "mylib::scale.default"
    op_rule = rule(name, text, linear=linear, localize=localize, **dict(reduction or {}))  # type: ignore[arg-type]
    _registered[op_rule.op], _linear[op_rule.op] = op_rule, linear
    spec_of.cache_clear()  # it may have results of the rule that this one replaces
    return op_rule
