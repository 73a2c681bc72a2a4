"""Copies of module trees with other tensors; the user's modules stay unchanged."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial, update_wrapper
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from shardc._compat import WrappedHook
from shardc.ir.kinds import note_attributes

TensorFn = Callable[[str, torch.Tensor], torch.Tensor]
_HELD = ("_parameters", "_buffers", "_modules")
_CONTAINERS = (dict, list, set, tuple)
_PLAIN = frozenset({bool, int, float, str, bytes, type(None)})
# Their own `copy` is quicker than `copy.copy`.
_COPIED = frozenset({dict, OrderedDict, defaultdict, list, set})


def clone_tree(module: nn.Module, tensor_fn: TensorFn) -> nn.Module:
    """Return a copy of the module tree in which ``tensor_fn(first qualified name, tensor)`` replaces each parameter and
    buffer.

    Sharing stays: a module or tensor with several names is one object in the copy; ``None`` entries stay None. Other
    attributes are copied shallowly, except that references to the tree (modules, tensors, bound methods) in lists,
    tuples, dicts, closures, defaults and `functools.partial` become those of the copy. Objects of other classes, and a
    tensor's own attributes, are shared with the original.
    """
    return _Cloner(tensor_fn, in_place=False).clone(module)


def replace_tensors(module: nn.Module, tensor_fn: TensorFn) -> nn.Module:
    """Replace each parameter and buffer of ``module`` by ``tensor_fn(first qualified name, tensor)``, in place; return
    ``module``. References to the tensors are replaced as in `clone_tree`.

    If ``tensor_fn`` raises, nothing is changed.
    """
    return _Cloner(tensor_fn, in_place=True).clone(module)


def subclass(module: nn.Module, front: type, behind: type, methods: Mapping[str, object]) -> None:
    """Set the class of ``module`` to a new class ``Sharded<its class>``, with bases ``front``, the user's class and
    ``behind``. ``methods`` (name -> function) are added to the new class.

    Names are looked up in ``methods``, ``front``, the user's class, ``behind``, `nn.Module`. The module is still an
    instance of the user's class. Class and module have the signature of the user's ``forward``, by which some libraries
    choose arguments.
    """
    cls = type(module)
    shown = inspect.signature(cls.forward)
    calls = {name: _shown_as(getattr(front, name), shown) for name in ("forward", "__call__")}
    module.__class__ = type(
        f"Sharded{cls.__name__}", (front, cls, behind), {"__module__": cls.__module__, **methods, **calls}
    )


def _shown_as(function: FunctionType, signature: inspect.Signature) -> FunctionType:
    """Return a copy of ``function`` whose ``__signature__`` is ``signature``."""
    copy = _remade(function, function.__closure__, function.__defaults__, function.__kwdefaults__, vars(function))
    vars(copy)["__signature__"] = signature
    return copy


def _remade(
    function: FunctionType,
    closure: tuple[CellType, ...] | None,
    defaults: Any,
    keywords: Any,
    attributes: Mapping[str, object],
) -> FunctionType:
    """Return a copy of ``function`` with other closure cells, defaults, defaults of keyword-only arguments
    (``keywords``) and attributes.
    """
    copy = FunctionType(function.__code__, function.__globals__, function.__name__, defaults, closure)
    update_wrapper(copy, function, updated=())
    del vars(copy)["__wrapped__"]
    copy.__dict__.update(attributes)
    copy.__kwdefaults__ = keywords
    return copy


def unsharded(module: nn.Module) -> nn.Module:
    """Return a view of ``module`` as a module of the user's class, without the class that `subclass` gave it. Both
    share one dict of attributes.
    """
    cls = type(module).__bases__[1]
    view: nn.Module = object.__new__(cls)
    object.__setattr__(view, "__dict__", vars(module))
    return view


class _Cloner:
    """Copies one module tree, or replaces its tensors in place. Remembers the copy of each original, so that a shared
    object is copied once.
    """

    def __init__(self, tensor_fn: TensorFn, in_place: bool) -> None:
        self._tensor_fn, self._in_place = tensor_fn, in_place
        self._attributes: list[tuple[nn.Module, dict[str, object]]] = []  # of the copies; set when all are there
        self._clones: dict[int, Any] = {}  # by the id of a module, a tensor or a container
        self._originals: list[nn.Module] = []

    def clone(self, module: nn.Module) -> nn.Module:
        """Return the copy of a module tree, given its root."""
        root = self._module(module, "")
        copied = self._copy_content if self._in_place else self._copy
        for original in self._originals:
            attributes = {key: copied(value) for key, value in vars(original).items() if key not in _HELD}
            self._attributes.append((self._clones[id(vars(original))], attributes))
        for clone, attributes in self._attributes:
            vars(clone).update(attributes)
        return root

    def _module(self, module: nn.Module, prefix: str) -> nn.Module:
        """Copy a module, the modules in it and their tensors; return the copy. Other attributes are copied later, by
        `clone`.

        ``prefix`` is the module's qualified name with a dot, or "" for the root.
        """
        # By its attributes: an `unsharded` module is the one that it is a view of.
        if id(vars(module)) in self._clones:
            present: nn.Module = self._clones[id(vars(module))]
            return present
        # `object`'s: that of a GraphModule makes another class.
        clone: nn.Module = module if self._in_place else object.__new__(type(module))
        self._clones[id(vars(module))] = clone
        self._originals.append(module)
        attributes: dict[str, object] = {}
        for kind in ("_parameters", "_buffers"):
            entries = getattr(module, kind).items()
            attributes[kind] = {name: self._tensor(tensor, prefix + name) for name, tensor in entries}
        attributes["_modules"] = {
            name: None if child is None else self._module(child, f"{prefix}{name}.")
            for name, child in module._modules.items()
        }
        self._attributes.append((clone, attributes))
        return clone

    def _tensor(self, tensor: torch.Tensor | None, name: str) -> torch.Tensor | None:
        """Return the replacement of a tensor. It is made once, by ``tensor_fn`` with the tensor's first qualified
        ``name``; None for None.
        """
        if tensor is None:
            return None
        if id(tensor) not in self._clones:
            self._clones[id(tensor)] = self._tensor_fn(name, tensor)
            if self._clones[id(tensor)] is not tensor:
                note_attributes(self._clones[id(tensor)], tensor)
        replacement: torch.Tensor = self._clones[id(tensor)]
        return replacement

    def _copy(self, value: Any) -> Any:
        """Return an attribute's value in which references to the copied tree replace those to the original tree."""
        if type(value) in _PLAIN:
            return value
        if isinstance(value, nn.Module):
            return self._clones.get(id(vars(value)), value)
        if isinstance(value, torch.Tensor):
            return self._clones.get(id(value), value)
        if isinstance(value, MethodType):
            owner = self._copy(value.__self__)
            return value if owner is value.__self__ else MethodType(value.__func__, owner)
        if type(value) is FunctionType:
            return self._function(value)
        if type(value) is partial:
            return self._partial(value)
        if type(value) is WrappedHook:
            return self._hook(value)
        if type(value) is tuple:
            items = tuple(map(self._copy, value))
            return value if _same(items, value) else items
        if not isinstance(value, (dict, set, list)):
            return value
        if id(value) not in self._clones:
            copied: Any = value.copy() if type(value) in _COPIED else copy.copy(value)
            self._clones[id(value)] = copied
            if type(value) is list:
                copied[:] = map(self._copy, value)
            elif type(value) in (dict, OrderedDict, defaultdict):
                copied.update([(key, self._copy(item)) for key, item in copied.items()])
        return self._clones[id(value)]

    def _function(self, function: FunctionType) -> object:
        """Return a copy of ``function`` whose closure cells and defaults refer to the copied tree. A function without
        references to the tree is returned as it is.
        """
        if id(function) not in self._clones:
            self._clones[id(function)] = function  # it may hold itself
            cells = function.__closure__ and tuple(map(self._cell, function.__closure__))
            parts = function.__defaults__, function.__kwdefaults__, vars(function)
            copies = tuple(map(self._copy_content, parts))
            if not _same((*(cells or ()), *copies), (*(function.__closure__ or ()), *parts)):
                self._clones[id(function)] = _remade(function, cells, *copies)
        return self._clones[id(function)]

    def _partial(self, value: partial[object]) -> partial[object]:
        """Return a copy of a `functools.partial` that refers to the copied tree. A partial without references to the
        tree is returned as it is.
        """
        parts = value.func, value.args, value.keywords, vars(value)
        func, args, keywords, attributes = copies = tuple(map(self._copy_content, parts))
        if _same(copies, parts):
            return value
        copied = partial(func, *args, **keywords)
        vars(copied).update(attributes)
        return copied

    def _hook(self, value: WrappedHook) -> WrappedHook:
        """Return a state-dict hook bound to the copied module (such hooks hold it by weak reference)."""
        hook, of = self._copy(value.hook), value.module() if value.with_module else None
        module = self._copy(of)
        return value if hook is value.hook and module is of else WrappedHook(hook, module)

    def _cell(self, cell: CellType) -> CellType:
        """Return a closure cell with the copied value. A cell without references to the tree is returned as it is,
        since other functions may assign to it.
        """
        try:
            content = cell.cell_contents
        except ValueError:  # it is empty
            return cell
        if id(cell) not in self._clones:
            copied = self._copy_content(content)
            self._clones[id(cell)] = cell if copied is content else CellType(copied)
        twin: CellType = self._clones[id(cell)]
        return twin

    def _copy_content(self, value: Any) -> Any:
        """Return a closure value or a default of a function, with references to the tree replaced by references to the
        copy. Containers without such references are not copied.
        """
        items = value.values() if isinstance(value, dict) else value if isinstance(value, _CONTAINERS) else None
        if items is not None and all(isinstance(x, _CONTAINERS) or self._copy(x) is x for x in items):
            return value
        return self._copy(value)


def _same(some: Sequence[object], others: Sequence[object]) -> bool:
    """Return whether two sequences have the same objects, compared by identity."""
    return all(one is other for one, other in zip(some, others, strict=True))
