"""The code that a capture of a model can reach, by what is bound where: classes, functions, and what these name.

A capture says which code it traced. The walk begins at the classes and attributes of the model's modules, and at the
loss. Of a function that was traced it goes on to its defaults, its cells and the globals that it names; of a class, a
module or an object to the attributes that traced code names. Of another function it notes the code alone: a trace that
finds all of this as it was goes the same way, and does not get into it.

Code of torch, shardc and Python is told by its file and line, as their versions are compared elsewhere. Of torch's
layers and functions the walk looks at what they name, too, where somebody may have put another function.
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
        code: thing -> what it is: functions, and what is bound to names, but for plain values.
        values: the same for plain values: globals, attributes of classes, defaults, cells.
        code_hashes: the hashes of all code that was met and is not told by a version.
        constants: functions that a trace calls instead of tracing them, to keep what they return.
        bound: (class, name, what it has there) of what may have been traced.
        functions: (function, its code) of what may have been traced.
        ops: the user's ops of `torch.library.custom_op`, and their functions.
        inner: what the classes of the model's wrapper subclasses run; None where there are none.
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
        """A hash of ``code``."""
        return digest("\n".join(f"{thing}: {what}" for thing, what in sorted(self.code.items())))

    @cached_property
    def _getters(self) -> tuple[list[Any], ...]:
        classes, names, values = map(list, zip(*self.bound, strict=True)) if self.bound else ([], [], [])
        functions, codes = map(list, zip(*self.functions, strict=True)) if self.functions else ([], [])
        return classes, names, values, functions, codes

    @staticmethod
    def of_all(several: Sequence[Reach]) -> Reach:
        """One that holds where all of ``several`` do."""
        bound = {(cls, name): value for reach in several for cls, name, value in reach.bound}
        functions = {id(function): (function, code) for reach in several for function, code in reach.functions}
        places = tuple((cls, name, value) for (cls, name), value in bound.items())
        ops = {op: parts for reach in several for op, parts in reach.ops.items()}
        inner = several[-1].inner if several else None  # they are of one model
        return Reach({}, {}, frozenset(), (), places, tuple(functions.values()), ops, inner)

    def holds(self) -> bool:
        """Return whether classes still have the same methods, and functions the same code: some microseconds."""
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
        traced: `code_hash` of the code that a capture went through, but for code that is told by a version.
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
