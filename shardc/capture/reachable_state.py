"""`ReachableState`: the Python values that a model's code can read, for guards, and which of them a run of the code has
changed.
"""

from __future__ import annotations

import dis
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor, nn

from shardc.ir.code import is_of_library, is_plain, is_versioned_class, is_versioned_module, module_name, names_in
from shardc.ir.guards import Read
from shardc.ir.inner import with_inner
from shardc.ir.reach import MODULE_ATTRIBUTES

_LITERALS = (bool, int, float, str, type(None))
_MISSING: Any = object()


@dataclass(frozen=True)
class _Container:
    """A mutable container, and a copy of its content from the time when it was added.

    Args:
        expression: its expression, as in `Read`; for the attributes of an object, the expression of the object.
        value: a dict, list, set or deque.
        before: a copy of its content; of the globals of a module, one entry only.
        kind: "items", "attributes" or "globals".
    """

    expression: str
    value: Any
    before: Any
    kind: str

    def changes(self) -> Iterator[tuple[str, object]]:
        """Yields (expression, new value) for each entry of a dict that differs from the copy: the entry's expression,
        or the dict's if it holds items. A list, set or deque that differs is yielded once, as a whole.
        """
        if not isinstance(self.value, dict):
            content, copied = list(self.value), list(self.before)
            if len(content) != len(copied) or any(x is not y for x, y in zip(content, copied, strict=True)):
                yield self.expression, self.value
            return
        # Of globals, only the entry that was copied counts; else entries of both, as one may be new or gone.
        for key in self.before if self.kind == "globals" else {**self.before, **self.value}:
            value = self.value.get(key)
            if value is not self.before.get(key) or (key in self.value) != (key in self.before):
                yield self.expression if self.kind == "items" else f"{self.expression}.{key}", value

    def restore(self) -> None:
        """Gives the container the content that it had when it was added."""
        if next(self.changes(), None) is None:
            return
        # By the methods of the builtin class: a subclass may have others of these names.
        kind: Any = next(kind for kind in (dict, list, set, deque) if isinstance(self.value, kind))
        if self.kind != "globals":
            kind.clear(self.value)
        (kind.update if kind in (dict, set) else kind.extend)(self.value, self.before)


class ReachableState:
    """The Python values that a model's code can read: attributes of its modules, of objects in them and of arguments,
    and the globals that code names.

    Values are read at any depth: items of containers, attributes of objects, variables around functions. Left out are
    the model's parameters and buffers, and what torch and Python define.

    Args:
        objects: arguments of the call, by `argument_scope`.

    Attributes:
        reads: guards that compare all of these values.
        scopes: see `Reads`.
    """

    def __init__(self, model: nn.Module, loss: object, objects: Mapping[str, object]) -> None:
        self.reads: set[Read] = set()
        self.scopes: dict[str, Any] = dict(objects)
        self._tensors = {id(inner) for x in (*model.parameters(), *model.buffers()) for inner in with_inner(x)}
        self._first: dict[int, tuple[str, object]] = {}  # id -> (first expression, the object)
        self._containers: list[_Container] = []
        self._open: list[tuple[str, object]] = []  # objects of the user's classes, which may get further attributes
        self._queried: set[str] = set()  # strings in code that calls `getattr` or `hasattr`
        modules = {
            "model" + "".join(f"._modules[{name!r}]" for name in path.split(".") if name): module
            for path, module in model.named_modules()
        }
        self._first |= {id(module): (expression, module) for expression, module in modules.items()}
        for expression, module in modules.items():
            self._attributes(expression, module, MODULE_ATTRIBUTES)
        self._add("loss", loss)
        for name, value in objects.items():
            self._add(f"scope({name!r})", value)

    def add_globals(self, code: CodeType, scope: dict[str, Any]) -> None:
        """Adds the globals in ``scope`` that ``code`` names. Of modules and classes among them, also adds the
        attributes that ``code`` names.

        Of the globals of libraries, which may be caches, it adds constants only.
        """
        # What `getattr` reads is named by a string.
        self._queried |= names_in(code)[1] if {"getattr", "hasattr"} & {*code.co_names} else set()
        base = self._scope(scope)  # the expression of these globals
        of_library = is_of_library(str(scope.get("__name__")))
        for name, *attributes in _global_names(code):
            value = scope.get(name, _MISSING)
            if of_library and not is_plain(value):
                continue
            # Of the globals, only those that code names are compared and restored.
            self._containers.append(_Container(base, scope, {} if value is _MISSING else {name: value}, "globals"))
            expression = f"{base}.{name}" if base.startswith("module") else f"{base}[{name!r}]"
            while attributes and isinstance(value, ModuleType | type) and not _is_versioned(value):
                value, expression = getattr(value, attributes[0], _MISSING), f"{expression}.{attributes.pop(0)}"
            if value is not _MISSING and not _is_versioned(value):
                self._add(expression, value)

    def changes(self) -> Iterator[tuple[str, str, object]]:
        """Yields, for each changed value, (its expression, expression of the object that has it, new value).

        Changes are those since the objects were added.
        """
        for container in self._containers:
            for expression, value in container.changes():
                yield expression, container.expression, value

    def restore(self) -> None:
        """Gives all changed values back the values that they had when they were added."""
        for container in self._containers:
            container.restore()

    def absent(self) -> set[Read]:
        """Return a guard for each attribute that an object of a user's class lacks and that code may ask for by
        ``getattr`` or ``hasattr``.
        """
        return {Read(at, "own", name) for at, x in self._open for name in self._queried if not hasattr(x, name)}

    def _scope(self, scope: dict[str, Any]) -> str:
        """Return the expression for ``scope``, the globals of a Python module, in guards: ``module('mine')``, or
        ``scope('globals0')`` if the module cannot be imported.
        """
        name = str(scope.get("__name__"))
        if vars(sys.modules.get(name, sys)) is scope:
            return f"module({module_name(name)!r})"
        key = next((key for key, globals_ in self.scopes.items() if globals_ is scope), f"globals{len(self.scopes)}")
        self.scopes[key] = scope
        return f"scope({key!r})"

    def _add(self, expression: str, value: Any) -> None:
        """Adds guards on ``value``, which ``expression`` names, and on all values inside of it.

        Plain values and classes are compared. Values inside another object are added at the first expression that gives
        it; for later expressions, the guard is that they give the same object.
        """
        if is_plain(value) or isinstance(value, type | ModuleType) or (type(value) is tuple and not value):
            self.reads.add(Read(expression))
        elif isinstance(value, Tensor):  # parameters and buffers are inputs of the program, not constants
            self.reads |= set() if id(value) in self._tensors else {Read(expression)}
        elif id(value) in self._first:
            self.reads.add(Read(f"same({expression}, {self._first[id(value)][0]})"))
        else:
            self._first[id(value)] = expression, value
            self._inside(expression, value)

    def _inside(self, expression: str, value: Any) -> None:
        """Adds guards on what is inside of the object ``value``, which ``expression`` names: items of a container,
        attributes of an object, variables of a function.
        """
        # A guard on the keys, length or type, then guards on each part.
        if isinstance(value, dict):
            self._add_container(expression, value, "keys")
            for key, item in list(value.items()):
                if type(key) in _LITERALS:
                    self._add(f"{expression}[{key!r}]", item)
        elif isinstance(value, list | tuple | deque):
            self._add_container(expression, value, "length")
            for at, item in enumerate(value):
                self._add(f"{expression}[{at}]", item)
        elif isinstance(value, set | frozenset):
            self._add_container(expression, value, "value")
        elif isinstance(value, MethodType):
            self._add(f"{expression}.__func__", value.__func__)
            self._add(f"{expression}.__self__", value.__self__)
        elif isinstance(value, FunctionType):
            self.reads.add(Read(expression))  # what it computes also depends on closure and defaults
            for at, cell in enumerate(value.__closure__ or ()):
                try:
                    self._add(f"{expression}.__closure__[{at}].cell_contents", cell.cell_contents)
                except ValueError:  # it is empty
                    continue
            self._add(f"{expression}.__defaults__", value.__defaults__)
            self._add(f"{expression}.__kwdefaults__", value.__kwdefaults__)
        elif isinstance(value, partial):
            for part in ("func", "args", "keywords"):
                self._add(f"{expression}.{part}", getattr(value, part))
        else:
            self.reads.add(Read(expression, "type" if hasattr(value, "__dict__") else "value"))
            if not is_versioned_class(type(value)) or isinstance(value, SimpleNamespace | nn.Module):
                self._attributes(expression, value)

    def _attributes(self, expression: str, value: object, without: frozenset[str] = frozenset()) -> None:
        """Adds guards on the attributes of an object, except those in ``without``, and on attributes of its classes
        that have plain values.
        """
        attributes = getattr(value, "__dict__", {})
        # The user's classes; those of torch and Python do not change.
        of_classes = [cls for cls in type(value).__mro__ if not is_versioned_class(cls)]
        if of_classes:
            self._open.append((expression, value))
        # Plain values of its classes that no attribute of its own hides.
        for name, item in ((name, item) for cls in of_classes for name, item in vars(cls).items()):
            if is_plain(item) and name not in attributes and not name.startswith("__"):
                self.reads.add(Read(f"{expression}.{name}"))
        self._containers.append(_Container(expression, attributes, dict(attributes), "attributes"))
        for key, item in sorted(attributes.items()):
            if key not in without and key.isidentifier():
                self._add(f"{expression}.{key}", item)

    def _add_container(self, expression: str, value: Any, what: Any) -> None:
        """Adds the container ``value``, which ``expression`` names: a guard on its ``what`` ("keys", "length" or
        "value"), and if it is mutable, a copy of its content, by which `changes` and `restore` find what a run changed.
        """
        self.reads.add(Read(expression, what))
        if not isinstance(value, tuple | frozenset):
            self._containers.append(_Container(expression, value, before=value.copy(), kind="items"))


def _is_versioned(value: object) -> bool:
    """Return whether a module, class or function is torch's, shardc's or Python's."""
    if isinstance(value, ModuleType):
        return is_versioned_module(value)
    module = sys.modules.get(getattr(value, "__module__", None) or "builtins")
    return isinstance(value, type | FunctionType) and module is not None and is_versioned_module(module)


@cache
def _global_names(code: CodeType) -> list[list[str]]:
    """Return a list for each global that ``code`` names: the global's name, then the names of attributes taken of it in
    turn. ``a.b.c`` gives ["a", "b", "c"].
    """
    chains: list[list[str]] = []
    last = None  # the chain that the next instruction may extend
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL"):
            last = [step.argval]
            chains.append(last)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and last is not None:
            last.append(step.argval)
        elif step.opname not in ("CACHE", "NOP"):
            last = None
    return chains
