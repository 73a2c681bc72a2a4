"""Prints values as text that is equal in every process: no addresses, no set order."""

from __future__ import annotations

import enum
import sys
import types
from typing import Any

import torch
from torch import Tensor

from shardc.ir.code import code_hash, digest

MAIN = getattr(getattr(sys.modules["__main__"], "__spec__", None), "name", "__main__")


def text_of(value: Any) -> str:
    """Return a value as text: constants and tensors by value, functions by their code, other objects by their class."""
    if is_plain(value):
        return plain_text(value)
    if isinstance(value, Tensor):
        return tensor_text(value)
    if isinstance(value, type):
        return qualified_name(value)
    if isinstance(value, types.ModuleType):
        return f"module {module_name(value.__name__)}"
    if isinstance(value, types.MethodType):
        return f"method {text_of(value.__func__)} of {qualified_name(type(value.__self__))}"
    if isinstance(value, types.FunctionType):
        return f"{qualified_name(value)} {code_hash(value.__code__)}"
    if isinstance(value, (tuple, list)):
        return f"{qualified_name(type(value))}({', '.join(map(text_of, value))})"
    if isinstance(value, (set, frozenset)):
        return f"{qualified_name(type(value))}({', '.join(sorted(map(text_of, value)))})"
    return qualified_name(value) if hasattr(value, "__qualname__") else qualified_name(type(value))


def is_plain(value: Any) -> bool:
    """Return whether ``value`` is an atomic constant: a number, a string, an enum member, a dtype and so on."""
    return value is None or isinstance(value, _PLAIN)


_PLAIN = (
    bool, int, float, complex, str, bytes, enum.Enum, type(...), torch.dtype, torch.device, torch.layout,
    torch.memory_format,
)  # fmt: skip


def plain_text(value: Any) -> str:
    """Return a value that `is_plain` as text."""
    if isinstance(value, enum.Enum):
        return f"{qualified_name(type(value))}.{value.name}={text_of(value.value)}"
    if type(value) in (type(None), bool, str, type(...)):
        return repr(value)
    if not isinstance(value, (int, float, complex, str, bytes)):
        return str(value)
    base = next(kind for kind in (int, float, complex, str, bytes) if isinstance(value, kind))
    return f"{qualified_name(type(value))} {base.__repr__(value)}"


def tensor_text(tensor: Tensor) -> str:
    """Return shape, dtype, and a hash of the values if there are any."""
    text = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    return text if tensor.is_meta else f"{text} sha256 {digest(repr(tensor.detach().reshape(-1).tolist()))}"


def module_name(name: str) -> str:
    """Return the name of a module, also if it runs as ``python -m name``."""
    return MAIN if name == "__main__" else name


def qualified_name(obj: Any) -> str:
    """Return the qualified name of a class or function with its module; only the bare name for builtins."""
    owner = getattr(obj, "__objclass__", obj)  # a method of a builtin class has no module
    module = getattr(owner, "__module__", "builtins")
    return f"{module_name(str(module))}.{obj.__qualname__}".removeprefix("builtins.")
