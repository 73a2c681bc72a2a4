"""Plan expressions of a command line, such as ``fsdp("dp") | llama_tp("tp")``, parsed without `eval`."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from shardc._compat import StridedShard
from shardc.errors import PlanError, ShardcError
from shardc.ir.module_paths import is_public
from shardc.plan.layout_spec import per_rank
from shardc.plan.value import CONSTRUCTORS, Plan
from shardc.validate import near

PLACEMENTS = {"Shard": Shard, "Replicate": Replicate, "Partial": Partial, "_StridedShard": StridedShard}

_FIX = 'write calls joined by |, as fsdp("dp") | ddp("rep")'


def parse_plan(text: str, namespace: Mapping[str, object] | None = None) -> Plan:
    """Return the plan of an expression: calls of known names, constants, lists, tuples, dicts, keywords and ``|``.

    Args:
        text: the expression.
        namespace: further names, such as those of the target's file; they take precedence over shardc's constructors.

    Raises:
        PlanError: the text is not such an expression, or a call in it fails; the message has the column.

    >>> parse_plan('fsdp("dp") | tp("tp", colwise=["*.up"])')
    fsdp("dp", level=3) | tp("tp", colwise=["*.up"])
    """
    names = {**CONSTRUCTORS, **PLACEMENTS, "per_rank": per_rank, **(namespace or {})}
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError as error:
        raise _error(text.strip(), (error.offset or 1) - 1, error.msg) from None
    reader = _Reader(text.strip(), names)
    plan = reader.read(tree.body)
    if not isinstance(plan, Plan):
        fix = f"call it, as {text.strip()}(...)" if callable(plan) else None
        raise _error(text.strip(), 0, f"this is a {type(plan).__name__}, not a plan", fix)
    return plan


def _error(text: str, column: int, what: str, fix: str | None = None) -> PlanError:
    """Return a PlanError that says ``what`` is wrong, and shows ``text`` with a mark below ``column``."""
    return PlanError(f"column {column + 1}: {what}", program=f"{text}\n{' ' * column}^", fix=fix)


class _Reader:
    """Evaluates the syntax nodes that are allowed in a plan expression."""

    def __init__(self, text: str, names: Mapping[str, object]) -> None:
        self.text, self.names = text, names

    def read(self, node: ast.expr) -> Any:
        """Return the value of ``node``; raise PlanError if it is not allowed."""
        match node:
            case ast.Constant():
                return node.value
            case ast.List():
                return [self.read(item) for item in node.elts]
            case ast.Tuple():
                return tuple(self.read(item) for item in node.elts)
            case ast.Dict():
                pairs = zip(node.keys, node.values, strict=True)
                return {self.read(key): self.read(value) for key, value in pairs if key}
            case ast.UnaryOp(op=ast.USub()):
                return -self.read(node.operand)
            case ast.Name():
                return self._name(node)
            case ast.Attribute(value=ast.Name(id="torch")) if isinstance(getattr(torch, node.attr, None), torch.dtype):
                return getattr(torch, node.attr)
            case ast.Attribute(value=ast.Name(id="shardc")) if node.attr in CONSTRUCTORS:
                return CONSTRUCTORS[node.attr]
            case ast.BinOp(op=ast.BitOr()):
                return self._join(node)
            case ast.Call(func=ast.Name() | ast.Attribute(value=ast.Name(id="shardc"))):
                return self._call(node)
        raise self._at(node, f"{ast.unparse(node)} may not stand in a plan", _FIX)

    def _name(self, node: ast.Name) -> object:
        """Return the value of a name in an expression; PlanError for an unknown name."""
        if node.id in self.names:
            return self.names[node.id]
        names = ", ".join(sorted(name for name in self.names if is_public(name)))
        raise self._at(node, f"unknown name {node.id!r}", near(node.id, self.names, f"known are {names}"))

    def _join(self, node: ast.BinOp) -> Plan:
        """Return the plan of an expression ``left | right``; PlanError if a side is not a plan."""
        left, right = self.read(node.left), self.read(node.right)
        for side, value in ((node.left, left), (node.right, right)):
            if not isinstance(value, Plan):
                raise self._at(side, f"{ast.unparse(side)} is a {type(value).__name__}, not a plan")
        joined: Plan = left | right
        return joined

    def _call(self, node: ast.Call) -> object:
        """Evaluate the arguments of the call ``node`` in a plan expression, call the function, and return the
        result.
        """
        function = self.read(node.func)
        if not callable(function):
            raise self._at(node, f"{ast.unparse(node.func)} cannot be called")
        positional = [self.read(argument) for argument in node.args]
        if any(keyword.arg is None for keyword in node.keywords):
            raise self._at(node, "** may not stand in a plan", _FIX)
        keywords = {str(keyword.arg): self.read(keyword.value) for keyword in node.keywords}
        try:
            return function(*positional, **keywords)
        except ShardcError as error:
            raise self._at(node, error.what, error.fix) from None
        except Exception as error:
            raise self._at(node, f"{ast.unparse(node)}: {error}") from None

    def _at(self, node: ast.expr, what: str, fix: str | None = None) -> PlanError:
        """Return a PlanError that says ``what`` and shows the expression with a mark below ``node``."""
        # `col_offset` counts UTF-8 bytes.
        return _error(self.text, len(self.text.encode()[: node.col_offset].decode()), what, fix)
