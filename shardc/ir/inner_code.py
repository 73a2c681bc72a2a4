"""A snapshot of the code that wrapper subclasses run for an op: tables and functions that tracing does not reach.

It is compared by identity within one process. For other starts `shardc.ir.reach` names the traced code.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from functools import _lru_cache_wrapper, cached_property, partial
from operator import is_
from typing import Any

from torch import Tensor, nn

from shardc._compat import pytree
from shardc.ir.code import names_in
from shardc.ir.inner import InnerTensors
from shardc.ir.told import is_told, is_told_class, is_told_module
from shardc.ir.value_text import is_plain

_ABSENT = object()
_MAPPINGS = (dict, types.MappingProxyType)
_SEQUENCES = (list, tuple, set, frozenset)


class InnerCode:
    """The functions and tables that the wrapper subclasses in ``model`` may call, without code that a version
    identifies.
    """

    def __init__(self, model: nn.Module) -> None:
        self._mappings: dict[int, Any] = {}  # all of whose entries count
        self._names: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}  # globals, and attributes of modules
        self._functions: dict[int, types.FunctionType] = {}
        self._sequences: dict[int, Any] = {}
        self._tensors: dict[int, Tensor] = {}
        self._seen: dict[Any, Any] = {}
        self._todo: list[Any] = []
        for module in model.modules():
            if isinstance(module, InnerTensors):
                leaves = pytree.tree_leaves((module.context, module.attributes))
                self._todo += [module.cls, *(x if callable(x) else type(x) for x in leaves)]
        while self._todo:
            self._visit(self._todo.pop())
        self._before = tuple(self._now())

    def __bool__(self) -> bool:
        return bool(self._before)

    def holds(self) -> bool:
        """Return whether the code and the tensors that it names are the same as when this was created."""
        return _same(self._before, tuple(self._now()))

    @cached_property
    def text(self) -> str:
        """Return a text that is equal within this process exactly if the code is the same."""
        for at, state in enumerate(_states):
            if _same(state, self._before):
                return f"state {at}"
        _states.append(self._before)
        return f"state {len(_states) - 1}"

    def _now(self) -> Iterator[Any]:
        for owner in self._mappings.values():
            entries = owner if isinstance(owner, _MAPPINGS) else vars(owner)
            yield len(entries)
            yield from entries
            yield from entries.values()
        for scope, name in self._names.values():
            yield scope.get(name, _ABSENT)
        for function in self._functions.values():
            yield function.__code__
            yield function.__defaults__
            yield function.__kwdefaults__
            yield from map(_contents, function.__closure__ or ())
        for row in self._sequences.values():
            yield len(row)
            yield from row
        for tensor in self._tensors.values():
            yield tensor
            yield tensor._version

    def _visit(self, x: Any) -> None:
        if is_plain(x) or id(x) in self._seen:
            return
        self._seen[id(x)] = x  # so that its id stays its own
        if isinstance(x, types.FunctionType):
            self._function(x)
        elif isinstance(x, type):
            if not is_told_class(x):
                self._mappings[id(x)] = x
                self._todo += [type(x), *x.__bases__, *vars(x).values()]
        elif isinstance(x, _MAPPINGS):
            self._mappings[id(x)] = x
            self._todo += [*x, *x.values()]
        elif isinstance(x, _SEQUENCES):
            self._sequences[id(x)] = x
            self._todo += x
        elif isinstance(x, Tensor):
            if not x.is_inference():
                self._tensors[id(x)] = x
        elif isinstance(x, (staticmethod, classmethod, types.MethodType)):
            self._todo += [x.__func__, getattr(x, "__self__", None)]
        elif isinstance(x, property):
            self._todo += [x.fget, x.fset, x.fdel]
        elif isinstance(x, partial):
            self._todo += [x.func, x.args, x.keywords]
        elif isinstance(x, _lru_cache_wrapper):
            self._todo.append(x.__wrapped__)
        elif not isinstance(x, types.ModuleType) and not is_told_class(type(x)):
            self._todo.append(type(x))
            if hasattr(x, "__dict__"):
                self._mappings[id(x)] = x
                self._todo += vars(x).values()

    def _function(self, function: types.FunctionType) -> None:
        cells = list(map(_contents, function.__closure__ or ()))
        if is_told(function.__code__):  # a decorator of torch or Python is around the user's functions
            self._todo += [x for x in cells if isinstance(x, types.FunctionType)]
            return
        self._functions[id(function)] = function
        self._todo += [function.__defaults__, function.__kwdefaults__, *cells]
        names, _ = names_in(function.__code__)
        for name in names:
            self._name(function.__globals__, name, names)

    def _name(self, scope: dict[str, Any], name: str, names: frozenset[str], versioned: bool = False) -> None:
        """Record a global or a module attribute; of a module, those of ``names`` that it has."""
        self._names[id(scope), name] = scope, name
        value = scope.get(name, _ABSENT)
        if type(value) is not types.ModuleType:
            # Registries of torch and Python grow with imports.
            self._todo += [] if versioned and isinstance(value, (*_MAPPINGS, *_SEQUENCES)) else [value]
        elif (id(value), names) not in self._seen:
            self._seen[id(value), names] = value
            for attribute in names & vars(value).keys():
                self._name(vars(value), attribute, names, is_told_module(value))


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT


def _same(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    if len(before) == len(now) and all(map(is_, before, now)):
        return True
    return len(before) == len(now) and all(
        x is y or (type(x) is type(y) and is_plain(x) and x == y) for x, y in zip(before, now, strict=True)
    )


_states: list[tuple[Any, ...]] = []
