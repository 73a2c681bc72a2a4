"""`ModuleSnapshot` and `IdentityGuards`: quick checks before each step that a model is as it was captured.

A snapshot has the modules, parameters and buffers of a model, which each step needs several times, from one traversal.
Identity guards compare the other objects that captures read. Both take some 10 microseconds, and only if they fail are
the guards of programs compared by value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, contains, is_, itemgetter, methodcaller
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from shardc.ir.guards import GONE, GRAD_MODE, HOOKS, STATES, Lookup, Path, Read, Reads, global_hooks, parse
from shardc.ir.reach import Reach

_KINDS = ("_modules", "_parameters", "_buffers", *HOOKS)
_values = methodcaller("values")
_training, _requires_grad, _dtype = itemgetter("training"), attrgetter("requires_grad"), attrgetter("dtype")


@dataclass(frozen=True)
class Mode:
    """Flags of a model by which its program is chosen: train or eval mode, ``requires_grad``, dtypes. They compare by
    value; a snapshot of the module keeps one object for equal flags.

    Args:
        training: train or eval mode of each module.
        grads: ``requires_grad`` of each parameter.
        dtypes: dtype of each parameter, then of each buffer.
    """

    training: tuple[bool, ...]
    grads: tuple[bool, ...]
    dtypes: tuple[torch.dtype, ...]


class ModuleSnapshot:
    """Remembers the modules, parameters, buffers and hooks that a model has when this is made, to tell later whether
    they are the same objects.

    Attributes:
        modules: the modules, each once.
        parameters, buffers: by name; tied ones under each of their names.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = list(model.modules())
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.buffers = dict(model.named_buffers(remove_duplicate=False))
        # Without duplicates, in the order of `Mode`.
        self._parameters = list(dict.fromkeys(self.parameters.values()))
        self._tensors = [*self._parameters, *dict.fromkeys(self.buffers.values())]
        # In its attributes, a module has a dict per kind: of submodules, parameters, buffers and each kind of hooks.
        self._attributes = list(map(vars, self.modules))
        places = [(attributes, kind) for attributes in self._attributes for kind in _KINDS]
        # `holds` looks at the dicts with entries: whether each is the same dict, with the same names and values.
        self._places = [(attributes, kind) for attributes, kind in places if attributes[kind]]
        self._full = [attributes[kind] for attributes, kind in self._places]
        # Most are empty: one check per module. The first kind twice: for one key, an itemgetter returns no tuple.
        empty = [(attributes, [kind for kind in _KINDS if not attributes[kind]]) for attributes in self._attributes]
        self._empty = [(itemgetter(*kinds, kinds[0]), attributes) for attributes, kinds in empty if kinds]
        # Names and values of all dicts are in one list each, the fastest to compare; sizes tell them apart.
        self._sizes = list(map(len, self._full))
        self._names = list(chain.from_iterable(self._full))
        self._values = list(chain.from_iterable(map(_values, self._full)))
        self._global = list(map(dict, global_hooks()))  # copies, as torch changes these dicts in place
        self._mode: Mode | None = None  # result of the last call of `mode`
        self._modes: dict[tuple[tuple[bool, ...], tuple[bool, ...], tuple[torch.dtype, ...]], Mode] = {}

    def holds(self) -> bool:
        """Whether the model still has the same modules, parameters, buffers and hooks under the same names."""
        # `get_empty` returns the dicts of a module that were empty then: does one have an entry now?
        if any(map(any, [get_empty(attributes) for get_empty, attributes in self._empty])):
            return False
        # The dicts are the same objects; then what is in them.
        if not all(map(is_, [attributes[kind] for attributes, kind in self._places], self._full)):
            return False
        return (
            list(chain.from_iterable(self._full)) == self._names
            and all(map(is_, chain.from_iterable(map(_values, self._full)), self._values))
            and list(map(len, self._full)) == self._sizes
            and global_hooks() == self._global
        )

    def mode(self) -> Mode:
        """Returns the model's current `Mode` (train or eval, ``requires_grad``, dtypes). Equal modes are one object,
        so they can be compared by identity.
        """
        flags = (
            tuple(map(_training, self._attributes)),
            tuple(map(_requires_grad, self._parameters)),
            tuple(map(_dtype, self._tensors)),
        )
        last = self._mode
        if last is None or flags != (last.training, last.grads, last.dtypes):
            last = self._mode = self._modes.setdefault(flags, Mode(*flags))
        return last


_CHECKED_TABLES = ("_modules", "_parameters", "_buffers")  # checked by `ModuleSnapshot`
_MISSING = (AttributeError, KeyError, IndexError, TypeError)


class IdentityGuards:
    """Guards that compare by identity the objects (attributes, globals) that captures of a model have read.

    They compare objects, so `holds` may be False although all values are equal. It is never wrongly True, except for
    changes inside objects that do not expose their attributes.
    """

    def __init__(self, reads: Iterable[Reads], model: nn.Module, loss: object) -> None:
        self._items: dict[int, tuple[Mapping[Any, object], dict[object, object]]] = {}  # id -> (mapping, key -> value)
        # (id of a mapping, key that it lacks) -> the mapping and the key.
        self._missing_keys: dict[tuple[int, object], tuple[Mapping[Any, object], object]] = {}
        self._rows: dict[int, tuple[Any, tuple[object, ...]]] = {}  # id of a container -> it, its elements
        self._tensors: list[tuple[Tensor, int]] = []  # with their version counters
        self._memories: list[tuple[Any, bytes]] = []  # objects that can be written in place, with their memory
        self._rest: list[tuple[object, str, object]] = []  # object, attribute, value
        # Functions of torch that return its state, with arguments and result.
        self._states: list[tuple[Callable[..., object], list[object], object]] = []
        reached: list[Reach] = []  # of each capture, the code that its trace could reach
        for capture in {id(x): x for x in reads}.values():
            reached.append(capture.reach(model, loss))
            lookup = Lookup(model, loss, capture.scopes)
            seen: set[Path] = set()
            for read in capture.entries:
                if read.what != "hooks" and read.expression != GRAD_MODE:  # checked elsewhere
                    self._guard_read(read, lookup, seen)
        self._reached = Reach.of_all(reached)
        # In the form that `holds` compares fastest: getters of the items of each mapping, with all values in one list.
        # One itemgetter per mapping is the fastest read. The first key twice: for one key it returns no tuple.
        self._getters = [(itemgetter(*items, next(iter(items))), mapping) for mapping, items in self._items.values()]
        self._values = [value for get, mapping in self._getters for value in get(mapping)]
        missing = self._missing_keys.values()
        self._absent = [mapping for mapping, _ in missing], [key for _, key in missing]

    def holds(self) -> bool:
        """Whether all objects that captures read are still the same objects, and the tensors among them have the same
        version counters.
        """
        try:
            now = [get(mapping) for get, mapping in self._getters]
        except KeyError:
            return False
        return (
            all(map(is_, chain.from_iterable(now), self._values))  # attributes and items
            and not any(map(contains, *self._absent))  # attributes and items that were not there
            and all(  # elements of containers, in order
                len(row) == len(container) and all(map(is_, row, container)) for container, row in self._rows.values()
            )
            and all(tensor._version == version for tensor, version in self._tensors)
            and all(_memory(value) == memory for value, memory in self._memories)
            # Attributes that only `getattr` finds, such as those of a class.
            and all(_same(getattr(owner, name, GONE), value) for owner, name, value in self._rest)
            and all(state(*args) == before for state, args, before in self._states)
            and self._reached.holds()  # code
        )

    def _guard_read(self, read: Read, lookup: Lookup, seen: set[Path]) -> None:
        """Adds guards for something that a capture has read: ``read`` is an attribute, an item, a length or the like.
        ``lookup`` returns its value; ``seen`` has the expressions with guards.
        """
        path = parse(read.expression)
        try:
            self._guard_path(path, lookup, seen)
            value = lookup(path)
        except _MISSING:
            # What is read is not there; what leads to it has its guards by now.
            return
        # The guards of the path compare the object itself; what was read of it needs a guard of its own.
        if read.what in ("length", "keys") or read.what == "has" and isinstance(value, (dict, set, frozenset)):
            self._guard_elements(value)
        elif read.what == "has":  # whether the object has an attribute
            self._rest.append((value, str(read.key), getattr(value, str(read.key), GONE)))
        elif read.what == "own":  # an attribute of the object, and not of its class
            self._guard_attribute(value, str(read.key))
        elif isinstance(value, Tensor) and not value.is_inference():  # its values, which a write in place changes
            self._tensors.append((value, value._version))
        elif (memory := _memory(value)) is not None:
            self._memories.append((value, memory))

    def _guard_path(self, path: Path, lookup: Lookup, seen: set[Path]) -> None:
        """Adds a guard for each attribute, item and call in the expression ``path``, then adds ``path`` to ``seen``.
        Does nothing if ``path`` is in ``seen``. ``lookup`` returns the value of an expression.
        """
        if path in seen:
            return
        seen.add(path)
        kind, *operands = path  # ("attribute", path, name), ("item", path, path of the key), ("call", name, *paths)
        if kind not in ("attribute", "item", "call"):
            return
        for part in operands:
            if isinstance(part, tuple):
                self._guard_path(part, lookup, seen)
        if kind == "attribute":
            self._guard_attribute(lookup(operands[0]), operands[1])
        elif kind == "call" and operands[0] in STATES:
            self._states.append((STATES[operands[0]], list(map(lookup, operands[1:])), lookup(path)))
        # Items of a module's tables (`_parameters`) are compared by the `ModuleSnapshot`.
        elif kind == "item" and not (operands[0][0] == "attribute" and operands[0][2] in _CHECKED_TABLES):
            container = lookup(operands[0])
            if isinstance(container, (dict, MappingProxyType)):
                self._guard_item(container, lookup(operands[1]))
            else:
                self._guard_elements(container)

    def _guard_item(self, mapping: Mapping[Any, object], key: object) -> None:
        """Adds a guard for the item ``key`` of ``mapping``, or that it lacks the item."""
        if key in mapping:
            self._items.setdefault(id(mapping), (mapping, {}))[1][key] = mapping[key]
        else:
            self._missing_keys[id(mapping), key] = mapping, key

    def _guard_elements(self, container: object) -> None:
        """Adds a guard that ``container`` has the same elements, unless it is immutable or cannot be iterated."""
        if hasattr(container, "__iter__") and not isinstance(container, (tuple, str)):  # these are immutable
            self._rows[id(container)] = container, tuple(container)

    def _guard_attribute(self, owner: object, name: str) -> None:
        """Adds a guard for the attribute ``name`` of ``owner``. If the instance lacks the attribute, guards that it
        still does, and, unless ``owner`` is a module, the attribute of the class.
        """
        attributes: Mapping[str, object] = getattr(owner, "__dict__", {})
        self._guard_item(attributes, name)
        of_class = name not in attributes and name not in ("__dict__", "__mro__")
        # Of a module, `Reach` compares the class, and the snapshot what else `getattr` searches (parameters, ...).
        if of_class and not isinstance(owner, nn.Module):
            self._rest.append((owner, name, getattr(owner, name, GONE)))


def _memory(value: object) -> bytes | None:
    """Return the content of a NumPy array, a bytearray or the like; None for an object whose memory cannot be written
    through Python's buffer protocol.
    """
    try:
        with memoryview(value) as view:  # type: ignore[arg-type]
            return None if view.readonly else view.tobytes()
    except TypeError:
        return None
    except (ValueError, BufferError):  # NumPy exports no buffer of dates; a buffer that was released has no content
        return value.tobytes() if type(value).__module__ == "numpy" else None  # type: ignore[attr-defined]


def _same(left: object, right: object) -> bool:
    """Whether two objects are the same object. Callables may also be equal, since a bound method is a new object at
    each access.
    """
    return left is right or (callable(left) and left == right)
