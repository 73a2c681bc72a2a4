"""Traces string attributes of torch's classes: peft's DoRA reads ``__module__`` of a weight's class."""

from __future__ import annotations

from typing import Any

from torch._dynamo.variables import ConstantVariable, TorchInGraphFunctionVariable
from torch._dynamo.variables.misc import GetAttrVariable

_call_method = GetAttrVariable.call_method


def _on_texts(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Replaces how Dynamo traces a method call on a torch class's attribute: the attribute may be a string."""
    text = getattr(self.obj.value, self.name, None) if isinstance(self.obj, TorchInGraphFunctionVariable) else None
    if isinstance(text, str):
        return ConstantVariable.create(text).call_method(tx, name, args, kwargs)
    return _call_method(self, tx, name, args, kwargs)


OTHER_FORMS: tuple[tuple[Any, str, Any], ...] = ((GetAttrVariable, "call_method", _on_texts),)
