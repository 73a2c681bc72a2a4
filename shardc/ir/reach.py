"""The code that a capture of a model can reach, found by what names are bound to: classes, functions, and what they
name.

The walk begins at the classes and attributes of the model's modules, and at the loss. From a traced function it goes on
to its defaults, cells and the globals that it names; from a class, module or object to the attributes that traced code
names. Of other functions it records the code only. If another start finds the same, its trace would be the same.

Code of torch, shardc and Python is identified by file and line, as their versions are compared elsewhere. The names in
torch's layers and functions are walked, too, in case a user has replaced what they are bound to.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter, is_
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from shardc._compat import custom_op
from shardc.ir.code import digest
from shardc.ir.inner_code import InnerCode
from shardc.ir.told import is_told
from shardc.ir.walk import Walk

_code = attrgetter("__code__")


@dataclass(frozen=True)
class Reach:
    """The code that a model and a loss reach.

    Args:
        code: name -> text of a function, or of a bound object that is no plain value.
        values: the same for plain values: globals, class attributes, defaults, cells.
        code_hashes: hashes of all code met, except code identified by a version.
        constants: functions that a trace calls (instead of tracing them) and whose results it keeps.
        bound: (class, name, bound object) of class attributes that may have been traced.
        functions: (function, its code) of functions that may have been traced.
        ops: the user's ops of `torch.library.custom_op`, and their functions.
        inner: the code that the model's wrapper subclasses run; None if there are none.
    """

    code: Mapping[str, str]
    values: Mapping[str, str]
    code_hashes: frozenset[str]
    constants: tuple[str, ...]
    bound: tuple[tuple[type, str, Any], ...]
    functions: tuple[tuple[types.FunctionType, types.CodeType], ...]
    ops: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    inner: InnerCode | None = None

    @cached_property
    def digest(self) -> str:
        """Return a hash of ``code``."""
        return digest("\n".join(f"{thing}: {what}" for thing, what in sorted(self.code.items())))

    @cached_property
    def _getters(self) -> tuple[list[Any], ...]:
        classes, names, values = map(list, zip(*self.bound, strict=True)) if self.bound else ([], [], [])
        functions, codes = map(list, zip(*self.functions, strict=True)) if self.functions else ([], [])
        return classes, names, values, functions, codes

    @staticmethod
    def of_all(several: Sequence[Reach]) -> Reach:
        """Return the union of ``several``."""
        bound = {(cls, name): value for reach in several for cls, name, value in reach.bound}
        functions = {id(function): (function, code) for reach in several for function, code in reach.functions}
        places = tuple((cls, name, value) for (cls, name), value in bound.items())
        ops = {op: parts for reach in several for op, parts in reach.ops.items()}
        inner = several[-1].inner if several else None  # they are of one model
        return Reach({}, {}, frozenset(), (), places, tuple(functions.values()), ops, inner)

    def holds(self) -> bool:
        """Return whether classes still have the same methods and functions the same code; takes some microseconds."""
        classes, names, values, functions, codes = self._getters
        return (
            all(map(is_, map(getattr, classes, names), values))
            and all(map(is_, map(_code, functions), codes))
            and all(custom_op(op) == (op, parts) for op, parts in self.ops.items())
            and (self.inner is None or self.inner.holds())
        )


def reach(model: nn.Module, loss: Callable[..., Any] | None, traced: Iterable[str] = ()) -> Reach:
    """Return the code that a capture of ``model`` and ``loss`` can reach.

    Args:
        traced: `code_hash` of the traced code, except code identified by a version.
    """
    modules = [type(module) for module in model.modules()]
    key = frozenset(traced), loss, modules
    last = _last.get(model)
    if last is not None and last[0] == key and last[1].holds():
        return last[1]
    walk = Walk(model, key[0])
    for path, module in walk.tree:
        walk.root(path, module)
    walk.bind("the program", "loss", loss)
    walk.run()
    functions = tuple((function, function.__code__) for function in walk.functions if not is_told(function.__code__))
    bound = tuple(walk.bound(modules))
    inner = InnerCode(model) or None
    if inner is not None:
        walk.code["the classes of wrapper subclasses"] = inner.text
    hashes, constants = frozenset(walk.code_hashes), tuple(walk.constants)
    reached = Reach(walk.code, walk.values, hashes, constants, bound, functions, walk.ops, inner)
    _last[model] = key, reached
    return reached


_last: WeakKeyDictionary[nn.Module, tuple[Any, Reach]] = WeakKeyDictionary()
