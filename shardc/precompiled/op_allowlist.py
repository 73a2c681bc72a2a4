"""The ops that a saved program may call: those that compute tensors from tensors and numbers.

Other ops could read and write files, open sockets or print, and a program may come from somebody else. Allowed are
functional ops of aten and prims, collectives over the mesh's groups, shardc's own ops, and ops of the user's libraries
with a registered rule.
"""

from __future__ import annotations

import operator
import re
from functools import cache
from typing import Any

import torch

from shardc._compat import is_dispatched
from shardc.ir import grammar
from shardc.ir.comm_volume import arguments_of, group_axes
from shardc.ir.op_traits import NAMESPACE, OWN_NAMESPACE
from shardc.rules import is_registered
from shardc.verify.subject import Broken, Subject

_NAMESPACES = (
    "aten",
    "prims",
    NAMESPACE,
    OWN_NAMESPACE,
    "shardc_random",
    "shardc_checks",
    "shardc_recurrent",
    "shardc_experts",
    "shardc_attention",
)
_TYPES = re.compile(r"(Optional|List|Tuple)\[(.*)\]")
_VALUES = {"Tensor", "int", "SymInt", "float", "bool", "number", "Scalar", "ScalarType", "Layout", "Device",
           "MemoryFormat", "SymBool", "SymFloat", "Generator", "Any"}  # fmt: skip
# String arguments that are allowed: none of them is a path, code or a message.
_WORDS = {
    "api_name", "approximate", "axis", "body", "cell", "device", "driver", "equation", "group_name", "held",
    "indexing", "interpolation", "method", "mode", "norm", "ord", "over", "padding", "reduce", "reduce_op",
    "rounding_mode", "side", "UPLO",
}  # fmt: skip
_CHECK: Any = torch.ops.aten._linalg_check_errors.default  # the one op without a result
_WORD = re.compile(r"[\w:,.> -]{0,200}", re.ASCII)
# Ops that reinterpret memory, or do not check an index.
_UNCHECKED = re.compile(r"_test|_nested|.*_unsafe$|_reinterpret|_debug|_validate_sparse|.*_make_per_")


def allowed(subject: Subject) -> Broken:
    """Yield (node, reason) for each call in a graph that a saved program may not contain, or that breaks its schema."""
    for node in subject.calls:
        if node.target is operator.getitem:
            continue
        if not grammar.is_torch_op(node.target) or not allowed_op(node.target):
            yield node, f"a saved program may not call {node.target}"
            continue
        target: Any = node.target
        names = [argument.name for argument in target._schema.arguments]
        if len(node.args) > len(names) or not set(node.kwargs) <= set(names[len(node.args) :]):
            yield node, f"its arguments are not those of {target._schema}"
            continue
        for name, value in arguments_of(node).items():
            if isinstance(value, str) and (name not in _WORDS or not _WORD.fullmatch(value)):
                yield node, f"{name}={value!r} is no word"
            elif name == "group_name" and group_axes(value, subject.mesh) is None:
                yield node, f"{value!r} is no group of the mesh {subject.mesh}"


@cache
def allowed_op(op: Any) -> bool:
    """Return whether a saved program may call ``op``, by its schema."""
    schema = op._schema
    if op.namespace not in _NAMESPACES:
        return is_registered(op)
    # Ops of TorchScript only (aten::save) are not dispatched.
    if op is _CHECK:
        return True
    if not is_dispatched(op) or _UNCHECKED.match(schema.name.partition("::")[2]) or not schema.returns:
        return False
    words = {argument.name for argument in schema.arguments if _kind(argument.type) == "str"}
    kinds = {_kind(x.type) for x in (*schema.arguments, *schema.returns)} - {"str"}
    # Only collectives may write to their arguments.
    return words <= _WORDS and kinds <= _VALUES and (not schema.is_mutable or op.namespace == NAMESPACE)


def is_own(op: Any) -> bool:
    """Return whether ``op`` and its rule are torch's or shardc's, not the user's."""
    plain = op is operator.getitem or grammar.is_torch_op(op) and op.namespace in _NAMESPACES
    return plain and not is_registered(op)


def _kind(kind: Any) -> str:
    """Return the innermost type of a schema's argument: of ``Optional[List[int]]``, ``int``."""
    text = str(kind)
    while match := _TYPES.fullmatch(text):
        text = match[2]
    return text
