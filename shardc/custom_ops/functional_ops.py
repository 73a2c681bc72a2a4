"""Functional forms of custom ops that write to their arguments: ops that return the new values instead of writing them.

``mylib::scale_(Tensor(a!) x, float by) -> ()`` becomes ``shardc_functional::scale_.mylib(Tensor x, float by) ->
Tensor``, which runs the op on a copy of each argument that it writes to. Its results are those of the op that are no
arguments, then the written arguments in the order of the schema; a list if one of them is a list or optional. A graph
has no other form of such an op, so that each of its values is written once. The op's sharding rule, in this order of
results, is that of its functional form.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from shardc._compat import OpOverload

NAMESPACE = "shardc_functional"
_library = torch.library.Library(NAMESPACE, "DEF")
_WRITE = re.compile(r"\(\w+!\)")
_IN_TEXT = re.compile(rf"\b{NAMESPACE}\.(\w+)\.(\w+)\(", re.ASCII)
_written_ops: dict[object, OpOverload[..., Any]] = {}  # functional op -> the op


def written_names(op: OpOverload[..., Any]) -> list[str]:
    """Return the names of the arguments that ``op`` writes to, by its schema."""
    return [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


@cache
def functional(op: OpOverload[..., Any]) -> OpOverload[..., Any]:
    """Return the functional form of ``op``, a custom op that writes to arguments. The form is defined as an op at the
    first call.
    """
    schema, written = op._schema, written_names(op)
    plain = all(str(a.type) == "Tensor" for a in schema.arguments if a.name in written)
    new = [result.alias_info is None for result in schema.returns]
    results = ["Tensor"] * (sum(new) + len(written)) if plain else ["Tensor[]"]
    namespace, _, qualified = op.name().partition("::")
    packet, _, overload = qualified.partition(".")
    name = f"{packet}.{namespace}__{overload}" if overload else f"{packet}.{namespace}"
    arguments = _WRITE.sub("", str(schema)).partition("(")[2].rpartition(" -> ")[0]
    _library.define(f"{name}({arguments} -> {results[0] if len(results) == 1 else '(' + ', '.join(results) + ')'}")
    names = [argument.name for argument in schema.arguments]

    def run(*args: Any, **kwargs: Any) -> Tensor | list[Tensor] | tuple[Tensor, ...]:
        values = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        values |= dict(zip(names, args, strict=False)) | kwargs
        values |= {key: _copied(values[key]) for key in written}
        keywords = {a.name: values[a.name] for a in schema.arguments if a.kwarg_only}
        returned = op(*(values[a.name] for a in schema.arguments if not a.kwarg_only), **keywords)
        every = list(compress(returned if isinstance(returned, tuple) else (returned,), new))
        every += [x for key in written for x in _tensors(values[key])]
        return (every[0] if len(every) == 1 else tuple(every)) if plain else every

    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", run, lib=_library)
    form: OpOverload[..., Any] = getattr(getattr(torch.ops.shardc_functional, packet), name.partition(".")[2])
    _written_ops[form] = op
    return form


def written_op(target: object) -> OpOverload[..., Any] | None:
    """Return the custom op whose functional form is ``target``; None if ``target`` is no functional form."""
    return _written_ops.get(target)


def define_in(text: str) -> None:
    """Define the functional forms that are named in ``text``, a graph as text, if this process has their custom ops."""
    for packet, where in set(_IN_TEXT.findall(text)):
        namespace, _, overload = where.partition("__")
        op = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload or "default", None)
        if isinstance(op, torch._ops.OpOverload) and written_names(op):
            functional(op)


def _tensors(value: Any) -> Sequence[Tensor]:
    """Return the tensors in the value of an argument: the value itself, the items of a list, or none."""
    return [value] if isinstance(value, Tensor) else [x for x in value or () if x is not None]


def _copied(value: Any) -> Any:
    """Return a copy of the value of an argument (a tensor, a list of tensors or None), with each tensor cloned."""
    if isinstance(value, (list, tuple)):
        return [_copied(x) for x in value]
    return None if value is None else value.clone()
