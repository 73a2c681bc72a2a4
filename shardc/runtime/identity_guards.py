"""Identity guards: tell in some 10 microseconds, in front of each step, that no guard of a program can have changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from operator import contains, is_, itemgetter
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from shardc.ir.reach import Reach
from shardc.ir.reads import GONE, Lookup, Path, Read, Reads, parse
from shardc.ir.states import GRAD_MODE, STATES

_HELD = ("_modules", "_parameters", "_buffers")  # checked by `ModuleSnapshot`
_MISSING = (AttributeError, KeyError, IndexError, TypeError)


class IdentityGuards:
    """Guards by identity: the objects of a model (attributes, globals) that captures have read.

    They compare objects, so `holds` may be False although all values are equal. It is never wrongly True, except for
    changes inside objects that do not expose their attributes.
    """

    def __init__(self, reads: Iterable[Reads], model: nn.Module, loss: Any) -> None:
        self._items: dict[int, tuple[Any, dict[Any, Any]]] = {}  # mapping -> key -> value
        self._own: dict[tuple[int, Any], tuple[Any, Any]] = {}  # names and keys that are absent from a dict
        self._rows: dict[int, tuple[Any, tuple[Any, ...]]] = {}  # container -> its elements
        self._tensors: list[tuple[Tensor, int]] = []
        self._rest: list[tuple[Any, str, Any]] = []  # object, attribute, value
        self._states: list[tuple[Any, list[Any], Any]] = []  # function of torch, arguments, result
        reached: list[Reach] = []
        for capture in {id(one): one for one in reads}.values():
            reached.append(capture.reach(model, loss))
            lookup = Lookup(model, loss, capture.scopes)
            seen: set[Path] = set()
            for read in capture.entries:
                if read.what != "hooks" and read.expression != GRAD_MODE:  # checked elsewhere
                    self._note(read, lookup, seen)
        self._reached = Reach.of_all(reached)
        # One itemgetter per mapping is the fastest read. The first key twice: for one key it returns no tuple.
        self._getters = [(itemgetter(*found, next(iter(found))), held) for held, found in self._items.values()]
        self._values = [value for get, held in self._getters for value in get(held)]
        self._absent = [held for held, _ in self._own.values()], [name for _, name in self._own.values()]

    def holds(self) -> bool:
        """Whether all objects are the same, and all tensor versions."""
        try:
            now = [get(held) for get, held in self._getters]
        except KeyError:
            return False
        return (
            all(map(is_, chain.from_iterable(now), self._values))
            and not any(map(contains, *self._absent))
            and all(len(row) == len(held) and all(map(is_, row, held)) for held, row in self._rows.values())
            and all(tensor._version == version for tensor, version in self._tensors)
            and all(_same(getattr(held, name, GONE), value) for held, name, value in self._rest)
            and all(asked(*args) == said for asked, args, said in self._states)
            and self._reached.holds()
        )

    def _note(self, read: Read, lookup: Lookup, seen: set[Path]) -> None:
        """Adds the guards for one read of a capture."""
        path = parse(read.expression)
        try:
            self._path(path, lookup, seen)
            value = lookup(path)
        except _MISSING:
            return
        if read.what in ("length", "keys") or read.what == "has" and isinstance(value, (dict, set, frozenset)):
            self._row(value)
        elif read.what == "has":
            self._rest.append((value, str(read.key), getattr(value, str(read.key), GONE)))
        elif read.what == "own":
            self._attribute(value, str(read.key))
        elif isinstance(value, Tensor) and not value.is_inference():
            self._tensors.append((value, value._version))

    def _path(self, path: Path, lookup: Lookup, seen: set[Path]) -> None:
        """Adds a guard for each step of the expression ``path``."""
        if path in seen:
            return
        seen.add(path)
        kind, *more = path
        if kind not in ("attribute", "item", "call"):
            return
        for part in more:
            if isinstance(part, tuple):
                self._path(part, lookup, seen)
        if kind == "call" and more[0] in STATES:
            self._states.append((STATES[more[0]], list(map(lookup, more[1:])), lookup(path)))
        if kind == "attribute":
            self._attribute(lookup(more[0]), more[1])
        elif kind == "item" and not (more[0][0] == "attribute" and more[0][2] in _HELD):
            container, key = lookup(more[0]), lookup(more[1])
            if isinstance(container, (dict, MappingProxyType)) and key not in container:
                self._own[id(container), key] = container, key
            elif isinstance(container, (dict, MappingProxyType)):
                self._items.setdefault(id(container), (container, {}))[1][key] = container[key]
            else:
                self._row(container)

    def _row(self, container: Any) -> None:
        if hasattr(container, "__iter__") and not isinstance(container, (tuple, str)):  # these are immutable
            self._rows[id(container)] = container, tuple(container)

    def _attribute(self, owner: Any, name: str) -> None:
        attributes: Mapping[str, Any] = getattr(owner, "__dict__", {})
        if name in attributes:
            self._items.setdefault(id(attributes), (attributes, {}))[1][name] = attributes[name]
            return
        self._own[id(owner), name] = attributes, name
        if name not in ("__dict__", "__mro__") and not isinstance(owner, nn.Module):
            self._rest.append((owner, name, getattr(owner, name, GONE)))


def _same(left: Any, right: Any) -> bool:
    return left is right or (callable(left) and left == right)
