"""Hashes of code objects, and the names they use, independent of files, lines, addresses and the order of sets."""

from __future__ import annotations

import dis
import hashlib
import types
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

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
    parts = [getattr(code, part) for part in _PARTS]
    return f"{parts}{getattr(code, 'co_exceptiontable', b'')!r}{[_constant(x) for x in code.co_consts]}"


def _constant(x: Any) -> str:
    if isinstance(x, types.CodeType):
        return _code_text(x)
    if isinstance(x, tuple):
        return f"({', '.join(map(_constant, x))})"
    return f"{{{', '.join(sorted(map(_constant, x)))}}}" if isinstance(x, frozenset) else repr(x)


def digest(text: str) -> str:
    """Return a short hash of ``text``."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def names_in(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names that ``code`` uses, and its string constants that may be attribute names."""
    names: set[str] = set()
    texts: set[str] = set()
    for part in codes_in(code):
        names.update(part.co_names)
        texts.update(x for x in _flat(part.co_consts) if isinstance(x, str) and x.isidentifier())
    return frozenset(names), frozenset(texts)


@cache
def imports(code: types.CodeType) -> bool:
    return any(_IMPORT in part.co_code[::2] for part in codes_in(code))


def _flat(constants: Iterable[Any]) -> Iterator[Any]:
    for constant in constants:
        if isinstance(constant, (tuple, frozenset)):
            yield from _flat(constant)
        else:
            yield constant
