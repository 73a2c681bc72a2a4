"""Texts of torch's classes that a model reads: peft's DoRA asks for the module of a weight's class."""

from __future__ import annotations

from typing import Any

from torch._dynamo.variables import ConstantVariable, TorchInGraphFunctionVariable
from torch._dynamo.variables.misc import GetAttrVariable

_call_method = GetAttrVariable.call_method


def _on_texts(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
    """A method of an attribute; Dynamo knows those of texts, but not that an attribute of such a class is one."""
    text = getattr(self.obj.value, self.name, None) if isinstance(self.obj, TorchInGraphFunctionVariable) else None
    if isinstance(text, str):
        return ConstantVariable.create(text).call_method(tx, name, args, kwargs)
    return _call_method(self, tx, name, args, kwargs)


OTHER_FORMS: tuple[tuple[Any, str, Any], ...] = ((GetAttrVariable, "call_method", _on_texts),)
