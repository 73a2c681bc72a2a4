"""A ``forward`` that the user sets on a compiled module: a wrapper of the compiled one, or a replacement."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from shardc.errors import InputError

_MOST = 10_000  # objects that a search visits
_CONTAINERS = (list, tuple, set, frozenset)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Forward:
    """Descriptor of ``forward`` in a compiled module's class: setting it wraps or replaces the compiled forward.

    A function that reaches the compiled forward, as in ``module.forward = wrap(module.forward)``, is stored in
    ``module.shardc.around``; calls run it eagerly. Any other function replaces the model's forward and is compiled into
    the program; ``module.forward`` remains the compiled one.
    """

    def __init__(self, compiled: Callable[..., Any]) -> None:
        self.compiled = compiled

    def __get__(self, module: Any, cls: Any = None) -> Any:
        if module is None:
            return self.compiled
        state = vars(module).get("shardc")
        if state is not None and state.around is not None:
            return state.around
        return MethodType(self.compiled, module)

    def __set__(self, module: Any, value: Any) -> None:
        state = vars(module).get("shardc")
        if state is not None and self._reached(module, value):
            state.around = value
            return
        vars(module)["forward"] = value
        if state is not None:
            state.around = None

    def __delete__(self, module: Any) -> None:
        state = vars(module).get("shardc")
        if state is not None and state.around is not None:
            state.around = None
        elif vars(module).pop("forward", None) is None:
            raise AttributeError("forward")

    def _reached(self, module: nn.Module, value: Any) -> bool:
        """Whether ``value`` refers to the compiled forward: in closures, defaults, arguments, attributes or globals."""
        functions = self.compiled, inspect.unwrap(self.compiled)
        seen: dict[int, Any] = {}
        todo = [value]
        while todo and len(seen) < _MOST:
            x = todo.pop()
            if x is self.compiled or isinstance(x, MethodType) and x.__self__ is module and x.__func__ in functions:
                return True
            if id(x) not in seen:
                seen[id(x)] = x
                todo += _within(x)
        return False


def call_around(module: nn.Module, around: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls ``around``, a wrapper of the compiled forward; InputError if hooks of the module would run inside it."""
    if any(vars(module).get(kind) for kind in _HOOKS):
        raise InputError(
            "the module has hooks, and a forward that was wrapped after compile: the hooks would run inside of it",
            fix="wrap the model's forward before shardc.compile, or call the hook's function in the wrapper",
        )
    return around(*args, **kwargs)


def _within(x: Any) -> Iterable[Any]:
    """Returns the objects that ``x`` refers to, without modules and classes."""
    if isinstance(x, nn.Module | ModuleType | type | CodeType | str | bytes):
        return ()
    if isinstance(x, MethodType):
        return x.__func__, x.__self__
    if isinstance(x, partial):
        return x.func, *x.args, *x.keywords.values()
    if isinstance(x, dict):
        return x.values()
    if isinstance(x, _CONTAINERS):
        return x
    if not isinstance(x, FunctionType):
        return vars(x).values() if hasattr(x, "__dict__") else ()
    cells = []
    for cell in x.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # empty
            continue
    named = (x.__globals__[name] for name in _names(x.__code__) if name in x.__globals__)
    return *cells, *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values(), *vars(x).values(), *named


def _names(code: CodeType) -> set[str]:
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*map(_names, inner))
