"""Text and hashes of code and values that are equal in every process: no addresses, no set order.

*Versioned* code is torch's, shardc's or Python's: its version identifies it. All other code is the user's.
"""

from __future__ import annotations

import dis
import enum
import hashlib
import os
import pickle
import sys
import sysconfig
import traceback
import types
from collections.abc import Iterable, Iterator
from functools import _lru_cache_wrapper, cache, cached_property, partial, partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardc.validate import torch_name

# Of code, what its run depends on besides constants; names of local variables are those of keyword arguments.
_PARTS = (
    "co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_argcount", "co_posonlyargcount",
    "co_kwonlyargcount", "co_flags", "co_name",
)  # fmt: skip
_IMPORT = dis.opmap["IMPORT_NAME"]


@cache
def code_hash(code: types.CodeType) -> str:
    """Return a hash of the behaviour of ``code``, independent of its file and lines."""
    return digest(_code_text(code))


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield ``code`` and the code objects of functions and classes nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)


def _code_text(code: types.CodeType) -> str:
    """Return ``code`` as text, without its file and lines."""
    parts = [getattr(code, part) for part in _PARTS]
    return f"{parts}{getattr(code, 'co_exceptiontable', b'')!r}{[_constant(x) for x in code.co_consts]}"


def _constant(x: object) -> str:
    """Return a constant of a code object as text. Sets are sorted, and nested code objects are written out."""
    if isinstance(x, types.CodeType):
        return _code_text(x)
    if isinstance(x, tuple):
        return f"({', '.join(map(_constant, x))})"
    return f"{{{', '.join(sorted(map(_constant, x)))}}}" if isinstance(x, frozenset) else repr(x)


def digest(text: str) -> str:
    """Return the first 16 hex digits of the SHA-256 of ``text``."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def names_in(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return (the names that ``code`` uses, its string constants that may be attribute names), those of nested code
    included.
    """
    names: set[str] = set()
    texts: set[str] = set()
    for part in codes_in(code):
        names.update(part.co_names)
        texts.update(x for x in _flat(part.co_consts) if isinstance(x, str) and x.isidentifier())
    return frozenset(names), frozenset(texts)


@cache
def imports(code: types.CodeType) -> bool:
    """Return whether ``code``, or code nested in it, has an import statement."""
    return any(_IMPORT in part.co_code[::2] for part in codes_in(code))


def _flat(constants: Iterable[object]) -> Iterator[object]:
    """Yield the elements of nested tuples and frozensets of constants."""
    for constant in constants:
        if isinstance(constant, (tuple, frozenset)):
            yield from _flat(constant)
        else:
            yield constant


# Wrappers of functions -> the attributes with what they wrap.
_WRAPPERS: dict[type, tuple[str, ...]] = {
    types.MethodType: ("__func__", "__self__"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset", "fdel"),
    partial: ("func", "args", "keywords"),
    partialmethod: ("func", "args", "keywords"),
    _lru_cache_wrapper: ("__wrapped__",),
    cached_property: ("func",),
}


def wrapped_in(value: object) -> list[object] | None:
    """Return what ``value`` wraps if it is a method, a property, a partial or a cached function; None for any other
    object.
    """
    attributes = next((names for cls, names in _WRAPPERS.items() if isinstance(value, cls)), None)
    return None if attributes is None else [getattr(value, name) for name in attributes]


PACKAGE = Path(__file__).parents[1]
VERSIONED_ROOTS = [PACKAGE, Path(torch.__file__).parent, Path(sysconfig.get_path("stdlib"))]


@cache
def versioned_path(file: str) -> str | None:
    """Return the path of a file of torch, shardc or Python, relative to their folder.

    Returns None for any other file, also for one of a package installed inside these folders.
    """
    if file.startswith("<frozen "):
        return file
    for root in VERSIONED_ROOTS:
        if Path(file).is_relative_to(root) and "-packages" not in (inside := str(Path(file).relative_to(root))):
            return f"{root.name}/{inside}"
    return None


def is_versioned(code: types.CodeType) -> bool:
    """Return whether ``code`` is torch's, shardc's or Python's. Their versions then identify the code."""
    return versioned_path(code.co_filename) is not None


def calling_line() -> str | None:
    """Return ``file:line`` of the innermost frame of user code; None if there is none."""
    stack = ((frame.f_code, line) for frame, line in traceback.walk_stack(None))
    return next((f"{code.co_filename}:{line}" for code, line in stack if not is_versioned(code)), None)


def is_versioned_class(cls: type) -> bool:
    """Return whether ``cls`` is torch's, shardc's or Python's."""
    return _is_versioned_name(str(cls.__module__))


def is_versioned_module(module: types.ModuleType) -> bool:
    """Return whether ``module`` is torch's, shardc's or Python's."""
    return _is_versioned_name(module.__name__)


@cache
def _is_versioned_name(module: str) -> bool:
    """Return whether the module named ``module`` belongs to torch, shardc or Python. False for a user's module that
    shadows one of Python's.
    """
    root = sys.modules.get(module.partition(".")[0])
    file, origin = getattr(root, "__file__", None), getattr(getattr(root, "__spec__", None), "origin", None)
    return origin in ("built-in", "frozen") or file is not None and versioned_path(file) is not None


MAIN = getattr(getattr(sys.modules["__main__"], "__spec__", None), "name", "__main__")


def is_of_library(module: str) -> bool:
    """Return whether the module named ``module`` belongs to torch, shardc, Python or an installed library. Also true
    for a module that is not loaded.
    """
    loaded = sys.modules.get("__main__" if module == MAIN else module)
    file = getattr(loaded, "__file__", None) or ""
    return loaded is None or is_versioned_module(loaded) or f"{os.sep}site-packages{os.sep}" in file


def text_of(value: object) -> str:
    """Return a value as text: constants and tensors by value, functions by their code, other objects by their class."""
    if is_plain(value):
        return plain_text(value)
    if isinstance(value, Tensor):
        return tensor_text(value)
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)} sha256 {digest(repr(value.tolist()))}"
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
    if hasattr(value, "__qualname__"):
        return qualified_name(value)
    return qualified_name(type(value)) + _arguments(value)


def _arguments(value: object) -> str:
    """Return, as text, the arguments with which a copy of ``value`` would be made, if it has no attributes of its own:
    these are the content of an object of a class written in C, such as a compiled pattern.
    """
    if hasattr(value, "__dict__"):
        return ""
    try:
        reduced = value.__reduce_ex__(2)
    except Exception:  # it cannot be copied
        return ""
    # A text is the name of a global that the copy would be.
    return f"({', '.join(map(text_of, reduced[1]))})" if isinstance(reduced, tuple) else ""


def is_plain(value: object) -> bool:
    """Return whether ``value`` is an atomic constant: a number, a string, an enum member, a dtype and so on."""
    return value is None or isinstance(value, _PLAIN)


_PLAIN = (
    bool, int, float, complex, str, bytes, enum.Enum, type(...), torch.dtype, torch.device, torch.layout,
    torch.memory_format,
)  # fmt: skip


class Identity:
    """Key that equals only the key of the same object, which it keeps alive."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


# Classes whose values equal only themselves in all that code can tell, or are equal if their parts are the same.
_EXACT = frozenset({bool, int, str, bytes, type(None), types.MethodType, types.BuiltinFunctionType})


def constant_key(value: object) -> tuple[object, object]:
    """Return the type of ``value`` and what equals for constants of that type only that code cannot tell apart.

    A class may call values equal that differ (0.0 == -0.0, ``range(0) == range(0, 0, 2)``), or a value unequal to
    itself (NaN). Its values are compared by their pickles, or by identity if they cannot be pickled.
    """
    kind = type(value)
    if kind in (float, complex):
        return kind, repr(value)
    if kind in _EXACT or kind.__eq__ is object.__eq__:
        return kind, value
    if isinstance(value, type):  # a pickle has the name only
        return kind, Identity(value)
    try:
        return kind, pickle.dumps(value)
    except Exception:  # whatever the class raises
        return kind, Identity(value)


def plain_text(value: object) -> str:
    """Return an atomic constant (see `is_plain`) as text."""
    if isinstance(value, enum.Enum):
        return f"{qualified_name(type(value))}.{value.name}={text_of(value.value)}"
    if type(value) in (type(None), bool, str, type(...)):
        return repr(value)
    if not isinstance(value, (int, float, complex, str, bytes)):
        return str(value)
    base = next(kind for kind in (int, float, complex, str, bytes) if isinstance(value, kind))
    return f"{qualified_name(type(value))} {base.__repr__(value)}"


def tensor_text(tensor: Tensor) -> str:
    """Return the dtype and shape of ``tensor`` as text, with a hash of its values unless it is on ``meta``."""
    text = f"{torch_name(tensor.dtype)}{list(tensor.shape)}"
    return text if tensor.is_meta else f"{text} sha256 {digest(repr(tensor.detach().reshape(-1).tolist()))}"


def module_name(name: str) -> str:
    """Return ``name``, except for ``__main__``: there return NAME if the program runs as ``python -m NAME``."""
    return MAIN if name == "__main__" else name


def qualified_name(obj: Any) -> str:
    """Return the qualified name of a class or function with its module; only the bare name for builtins."""
    owner = getattr(obj, "__objclass__", obj)  # a method of a builtin class has no module
    module = getattr(owner, "__module__", "builtins")
    return f"{module_name(str(module))}.{obj.__qualname__}".removeprefix("builtins.")
