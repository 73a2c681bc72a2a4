"""Checks values against their annotations: fields of options, and the content of JSON files.

    @dataclass(frozen=True)
    class Options:
        strict: bool = False
        comm: Literal["real", "none"] = "real"
        bucket_size: Annotated[int | str | None, Bytes(-1)] = None

        def __post_init__(self) -> None:
            check_fields(self)

`checked` returns the converted value: sizes as numbers of bytes, lists as tuples, tables as dataclasses.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import lru_cache, wraps
from inspect import Parameter, signature
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

from shardc.errors import InputError, ShardcError

Function = TypeVar("Function", bound=Callable[..., Any])
T = TypeVar("T")
Readers = Mapping[type, Callable[[Any], object]]
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def torch_name(constant: torch.dtype | torch.layout | torch.memory_format) -> str:
    """Return the name of one of torch's constants: ``bfloat16`` for ``torch.bfloat16``."""
    return str(constant).removeprefix("torch.")


DTYPES = {torch_name(x): x for x in vars(torch).values() if isinstance(x, torch.dtype)}
_NAMES = {bool: "True or False", int: "an integer", float: "a number", str: "a string", type(None): "None"}


@dataclass(frozen=True)
class Range:
    """Type annotation for a number that must lie between ``least`` (excluded if ``above``) and ``most``, or in
    ``also``.
    """

    least: float = -math.inf
    most: float = math.inf
    also: tuple[int, ...] = ()
    above: bool = False

    def holds(self, value: float) -> bool:
        """Return whether ``value`` is in the range."""
        low = value > self.least if self.above else value >= self.least
        return (low and value <= self.most) or value in self.also

    def __str__(self) -> str:
        low = f"of {self.least:g} or more" if self.most == math.inf else f"from {self.least:g} to {self.most:g}"
        low = f"above {self.least:g}" if self.above else low
        return f"{low}{''.join(f', or {value}' for value in self.also)}"


class Bytes:
    """Type annotation for a number of bytes, also as text with a unit ("8 MiB"). ``also`` lists special values that are
    allowed too.
    """

    def __init__(self, *also: int) -> None:
        self.also = also

    def __str__(self) -> str:
        return f"a number of bytes{''.join(f', or {value}' for value in self.also)}"


class _Mismatch(Exception):
    """Raised if ``value`` at ``path`` is not ``expected``."""

    def __init__(self, path: tuple[str, ...], value: object, expected: str, fix: str | None = None) -> None:
        self.path, self.value, self.expected, self.fix = path, value, expected, fix


def checked(
    value: object,
    kind: Any,
    what: str,
    error: type[ShardcError] = InputError,
    *,
    tables: bool = False,
    readers: Readers = MappingProxyType({}),
    **context: Any,
) -> Any:
    """Checks ``value`` against the type annotation ``kind`` and returns it converted.

    Args:
        what: names the value in messages.
        error: the class that is raised.
        tables: dicts are taken for dataclasses and named tuples, and text for dtypes, as JSON has them.
        readers: class -> function that converts JSON data to it.
        context: further arguments of the error (``plan_entry``).

    Raises:
        ShardcError: of class ``error``; the value, or one inside it, has another type or is out of range.

    >>> checked("1.5 GiB", Annotated[int | str, Bytes()], "memory_budget")
    1610612736
    """
    try:
        return _Reader(tables, readers).read(value, kind, ())
    except _Mismatch as wrong:
        path = "".join(part if part.startswith("[") else f".{part}" for part in wrong.path)
        context.setdefault("fix", wrong.fix)
        raise error(f"{what}{path} is {_short_repr(wrong.value)}, not {wrong.expected}", **context) from None


def check_fields(
    instance: object, error: type[ShardcError] = InputError, what: str | None = None, **context: Any
) -> None:
    """Checks the fields of a dataclass by `checked` and stores the converted values; for ``__post_init__``."""
    name = type(instance).__name__ if what is None else what
    kind: Any = type(instance)
    for key, hint in _hints(kind).items():
        value = getattr(instance, key)
        converted = checked(value, hint, f"{name}: {key}" if name else key, error, **context)
        if converted is not value:
            object.__setattr__(instance, key, converted)


def renamed(**names: str) -> Callable[[T], T]:
    """Decorator for functions or classes with renamed arguments, given as old name = new name. A call with an old name
    raises an error that gives the new name.

    >>> @renamed(way="dispatch")
    ... def ep(dispatch: str = "auto") -> None: ...
    >>> ep(way="send")
    Traceback (most recent call last):
    shardc.errors.InputError: ep() has no argument 'way'
      fix: it is called 'dispatch' now
    """

    def decorate(function: T) -> T:
        init: Callable[..., object] = function.__init__ if isinstance(function, type) else function  # type: ignore

        @wraps(init)
        def call(*args: object, **kwargs: object) -> object:
            for old in kwargs.keys() & names.keys():
                raise InputError(
                    f"{function.__name__}() has no argument {old!r}",  # type: ignore[attr-defined]
                    fix=f"it is called {names[old]!r} now",
                )
            return init(*args, **kwargs)

        if isinstance(function, type):
            function.__init__ = call  # type: ignore[misc]
            return function
        return call  # type: ignore[return-value]

    return decorate


_SEVERAL = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def typed(error: type[ShardcError] = InputError) -> Callable[[Function], Function]:
    """Decorator that checks arguments against the function's type annotations (see `checked`). The function gets its
    arguments unconverted.

    Missing and unexpected arguments raise Python's own errors.
    """

    def decorate(function: Function) -> Function:
        shown = signature(function)
        hints: dict[str, Any] = {}

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> object:
            if not hints:
                hints.update(get_type_hints(function, include_extras=True))
            for name, value in shown.bind(*args, **kwargs).arguments.items():
                if name in hints and shown.parameters[name].kind not in _SEVERAL:
                    checked(value, hints[name], name, error)
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def did_you_mean(similar: list[str], otherwise: str) -> str:
    """Returns the fix for a wrong name: its ``similar`` names, or ``otherwise`` if there are none."""
    return f"did you mean {' or '.join(map(repr, similar))}?" if similar else otherwise


def near(word: object, choices: Iterable[object], otherwise: str = "") -> str:
    """Returns the fix for a ``word`` that is not in ``choices``: the closest match, or else ``otherwise``.

    >>> near("inductr", ["inductor", "eager"])
    "did you mean 'inductor'?"
    """
    names = list(map(str, choices))
    otherwise = otherwise or f"use one of {', '.join(map(repr, names))}"
    return did_you_mean(get_close_matches(str(word), names, n=1), otherwise)


@lru_cache(maxsize=256)
def _hints(kind: Any) -> dict[str, Any]:
    """Returns the type annotations of the fields of a dataclass or named tuple: field -> annotation."""
    hints = get_type_hints(kind, include_extras=True)
    names = [field.name for field in fields(kind) if field.init] if is_dataclass(kind) else kind._fields
    return {name: hints[name] for name in names}


class _Reader:
    """Checks values against type annotations, and converts them. ``tables`` and ``readers`` are the arguments of
    `checked`.
    """

    def __init__(self, tables: bool, readers: Readers) -> None:
        self.tables, self.readers = tables, readers

    def read(self, value: object, kind: Any, path: tuple[str, ...]) -> Any:
        """Return ``value`` converted to the type annotation ``kind``. Raises `_Mismatch` if it is of another type."""
        origin = get_origin(kind)
        if kind is Any:
            return value
        if origin is Annotated:
            inner, *marks = get_args(kind)
            return self.marked(value, inner, marks, path)
        if origin in (Union, types.UnionType):
            return self.one_of(value, get_args(kind), path)
        if origin is Literal:
            if not any(type(value) is type(one) and value == one for one in get_args(kind)):
                close = get_close_matches(str(value), [one for one in get_args(kind) if isinstance(one, str)], n=1)
                raise _Mismatch(path, value, expected(kind), did_you_mean(close, "") or None)
            return value
        if origin is tuple:
            return self.items(value, get_args(kind), kind, path)
        if origin is not None and issubclass(origin, Mapping):
            key_kind, item = get_args(kind)
            if not isinstance(value, Mapping):
                raise _Mismatch(path, value, expected(kind))
            return {
                self.read(key, key_kind, path): self.read(one, item, (*path, f"[{key!r}]"))
                for key, one in value.items()
            }
        if origin is not None:  # Callable[...]
            if not isinstance(value, origin):
                raise _Mismatch(path, value, expected(kind))
            return value
        return self.plain(value, kind, path)

    def plain(self, value: Any, kind: Any, path: tuple[str, ...]) -> object:
        """Return ``value`` converted to the class ``kind``. Raises `_Mismatch` if it is neither an instance nor can be
        converted.
        """
        if kind in self.readers:
            return self.readers[kind](value)
        if self.tables and kind is torch.dtype and isinstance(value, str):
            if value not in DTYPES:
                raise _Mismatch(path, value, "a dtype", near(value, DTYPES))
            return DTYPES[value]
        if self.tables and isinstance(value, dict) and (is_dataclass(kind) or hasattr(kind, "_fields")):
            return self.table(value, kind, path)
        if kind is float:
            if type(value) not in (int, float) or value != value:
                raise _Mismatch(path, value, expected(kind))
            return value
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise _Mismatch(path, value, expected(kind), "write torch.bfloat16" if kind is torch.dtype else None)
        return value

    def marked(self, value: Any, inner: Any, marks: list[object], path: tuple[str, ...]) -> object:
        """Return ``value`` checked against ``Annotated[inner, *marks]`` and converted. ``marks`` are ranges, byte sizes
        and literals.
        """
        for mark in marks:
            if get_origin(mark) is Literal:
                inner = mark
            if isinstance(mark, Bytes) and isinstance(value, str):
                value = _bytes(value, path)
            value = self.read(value, inner, path)
            if isinstance(mark, Range) and value is not None:
                if not mark.holds(value):
                    raise _Mismatch(path, value, f"{expected(inner)} {mark}")
            elif isinstance(mark, Bytes) and value is not None and value < 0 and value not in mark.also:
                raise _Mismatch(path, value, str(mark))
        return value

    def one_of(self, value: object, kinds: tuple[Any, ...], path: tuple[str, ...]) -> object:
        """Return ``value`` converted to the first of the types ``kinds`` that it fits. If it fits none, raise the
        `_Mismatch` of the closest type.
        """
        deepest: _Mismatch | None = None
        for kind in kinds:
            try:
                return self.read(value, kind, path)
            except _Mismatch as wrong:
                if deepest is None or len(wrong.path) > len(deepest.path):
                    deepest = wrong
        assert deepest is not None
        if len(deepest.path) > len(path) or deepest.fix is not None:
            raise deepest
        raise _Mismatch(path, value, " or ".join(expected(kind) for kind in kinds))

    def items(self, value: object, items: tuple[Any, ...], kind: Any, path: tuple[str, ...]) -> tuple[object, ...]:
        """Return ``value``, a list or tuple, converted to a tuple of the type ``kind``, whose item types are ``items``.
        Raises `_Mismatch` if it does not fit.
        """
        many = len(items) == 2 and items[1] is Ellipsis
        if not isinstance(value, list | tuple) or (not many and len(value) != len(items)):
            raise _Mismatch(path, value, expected(kind))
        kinds = [items[0]] * len(value) if many else items
        converted = tuple(
            self.read(one, item, (*path, f"[{at}]")) for at, (one, item) in enumerate(zip(value, kinds, strict=True))
        )
        same = type(value) is tuple and all(a is b for a, b in zip(converted, value, strict=True))
        return value if same else converted  # type: ignore[return-value]

    def table(self, value: Mapping[str, object], kind: Any, path: tuple[str, ...]) -> object:
        """Converts a JSON object to a dataclass or named tuple."""
        hints = _hints(kind)
        for key in value:
            if key not in hints:
                raise _Mismatch((*path, f"[{key!r}]"), value[key], "known", near(key, hints))
        if is_dataclass(kind):
            needed = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING and f.init]
        else:
            needed = [key for key in hints if key not in kind._field_defaults]
        for key in needed:
            if key not in value:
                raise _Mismatch(path, value, f"complete: it has no {key!r}")
        return kind(**{key: self.read(one, hints[key], (*path, key)) for key, one in value.items()})


def _bytes(text: str, path: tuple[str, ...]) -> int:
    """Return the number of bytes that ``text`` says with a unit: ``"8 MiB"``."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]+)\s*", text)
    if match is None or match[2].upper() not in UNITS:
        fix = 'write an integer, or a size with a unit, like "8 MiB" or "1.5GB"'
        raise _Mismatch(path, text, "a number of bytes", fix)
    return (
        int(float(match[1]) * UNITS[match[2].upper()]) if "." in match[1] else int(match[1]) * UNITS[match[2].upper()]
    )


def expected(kind: Any) -> str:
    """Describes the annotation ``kind`` in words."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        args = next(((mark,) for mark in args if get_origin(mark) is Literal), args)
        marks = " ".join(str(mark) for mark in args[1:] if isinstance(mark, Range))
        sizes = [str(mark) for mark in args[1:] if isinstance(mark, Bytes)]
        return sizes[0] if sizes else f"{expected(args[0])} {marks}".rstrip()
    if origin in (Union, types.UnionType):
        return " or ".join(expected(one) for one in args)
    if origin is Literal:
        return " or ".join(map(repr, args))
    if origin is tuple:
        if len(args) == 2 and args[1] is Ellipsis:
            return f"a list, each item {expected(args[0])}"
        return f"a list of {len(args)}"
    if origin is not None:
        words = {type: "a class", Mapping: "a table", Iterable: "a list"}
        return next((word for known, word in words.items() if issubclass(origin, known)), "a function")
    article = "an" if kind.__name__[0] in "AEIO" else "a"
    return _NAMES.get(kind) or ("a table" if hasattr(kind, "_fields") else f"{article} {kind.__name__}")


def _short_repr(value: object) -> str:
    """Return the repr of ``value``, at most 80 characters of it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
