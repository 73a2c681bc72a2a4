"""Finds the code that a capture of a model can reach (`Reach`): a walk follows the names that the code uses to the
objects that they are bound to.

The walk begins at the classes and attributes of the model's modules, and at the loss. From a traced function it goes on
to its defaults, cells and the globals that it names; from a class, module or object to the attributes that traced code
names. Of other functions it records the code only. If a walk in another process finds the same, its trace would be the
same.

Code of torch, shardc and Python is identified by file and line, because their versions are compared elsewhere. The walk
includes the names in torch's layers and functions, because a user may have bound them to other objects.
"""

from __future__ import annotations

import os
import sys
import types
from collections import defaultdict, deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter, is_
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardc._compat import REGISTRY_KEY, STATE_KEY, custom_op, is_called_by_trace
from shardc.ir.code import (
    code_hash,
    codes_in,
    digest,
    imports,
    is_plain,
    is_versioned,
    is_versioned_class,
    is_versioned_module,
    module_name,
    names_in,
    plain_text,
    qualified_name,
    text_of,
    versioned_path,
    wrapped_in,
)
from shardc.ir.inner import InnerCode
from shardc.ir.module_paths import is_in

# Files of torch with code that calls functions that a user may have replaced.
_LAYERS = ("torch/nn/", "torch/functional.py", "torch/utils/checkpoint.py", "torch/distributions/")
# Attributes that do not change what code does, or that no forward calls.
_INERT = {
    "__module__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__abstractmethods__", "__firstlineno__",
    "__orig_bases__", "__parameters__", "__qualname__", "__static_attributes__", "__dataclass_fields__",
    "__annotations_cache__", "__annotate_func__", "__dir__", "__reduce__", "__reduce_ex__", "__getstate__",
    "__setstate__", "__del__", "__init_subclass__", "__class_getitem__", "__subclasshook__",
    # Caches: of `copyreg` (since an object was copied or pickled), and of `typing` (since `isinstance` of a protocol).
    "__slotnames__", "__protocol_attrs__", "__non_callable_proto_members__", "__callable_proto_members_only__",
    "___needs_generation_tag_patch",  # on `nn.Module`, since Dynamo patched ``__init__`` and ``__setstate__``
}  # fmt: skip
# Attributes of functions that Dynamo has set when they were first called, as torch.utils.checkpoint's.
_DYNAMO = ("_torchdynamo", "__dynamo_disable")
MODULE_ATTRIBUTES = frozenset({*vars(nn.Module()), "shardc", "_compiled_call_impl", STATE_KEY, REGISTRY_KEY})
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_CONTAINERS = (dict, list, tuple, set, frozenset, deque, types.MappingProxyType)
_OPEN = (types.SimpleNamespace,)  # classes of Python whose objects have attributes set by the user
_SLOTS = (
    types.MethodDescriptorType, types.WrapperDescriptorType, types.MemberDescriptorType, types.GetSetDescriptorType,
    types.ClassMethodDescriptorType,
)  # fmt: skip
_RANK = {"get_rank", "get_local_rank", "get_node_local_rank", "get_coordinate", "get_group_rank", "rank", "local_rank"}
_RANKS = {"get_world_size", "world_size", "size"}
_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE: the attributes of other classes cannot be set


@dataclass
class _Namespace:
    """A class, module or object whose attributes can be looked up by the names that traced code uses.

    Args:
        label: its name in the keys of `Reach`.
        attributes: its attributes.
        done: the names that were looked up.
        cls: the class, if it is one.
    """

    label: str
    attributes: Mapping[str, object]
    done: set[str] = field(default_factory=set)
    cls: type | None = None


class Walk:
    """Walk over the objects that code can reach, starting at the modules of ``model``. It records each object as text,
    under its name.

    Args:
        traced: see `reach`.

    Attributes:
        code, values, code_hashes, constants: see `Reach`.
        functions: functions that may have been traced.
        ops: name of a user's op (`torch.library.custom_op`) -> its functions by kind.
    """

    def __init__(self, model: nn.Module, traced: Container[str]) -> None:
        self.code: dict[str, str] = {}
        self.values: dict[str, str] = {}
        self.code_hashes: set[str] = set()
        self.constants: list[str] = []
        self.functions: list[types.FunctionType] = []
        self.ops: dict[str, Mapping[str, object]] = {}
        self._bound: dict[type, set[str]] = defaultdict(set)
        self.tree = list(model.named_modules(remove_duplicate=False))
        self._traced = traced
        self._paths: dict[int, str] = {}
        for path, module in self.tree:
            self._paths.setdefault(id(vars(module)), path)
        self._names: set[str] = {"forward"}
        self._new: set[str] = set()
        self._namespaces: list[_Namespace] = []
        self._queue: deque[tuple[types.FunctionType, str]] = deque()
        self._refs: dict[int, str] = {}
        self._alive: list[object] = []  # objects whose ids are keys of ``_refs``
        self._counts: dict[str, int] = {}
        self._inside: set[int] = set()
        self._native: set[int] = set()  # functions that are called, not traced
        self._distributed = False

    def root(self, path: str, module: nn.Module) -> None:
        """Record (`bind`) the class and the attributes of ``module``, which lies at ``path`` in the model."""
        self._attributes_of(f"module {path!r}", module, [])

    def _attributes_of(self, label: str, module: nn.Module, more: Iterable[str]) -> None:
        """Record (`bind`), under ``label``, the class, hooks and attributes of a module, but no constants and tensors.
        Attributes that every `nn.Module` has are left out, except those in ``more``.
        """
        self.bind(label, "class", type(module))
        for key, value in sorted(vars(module).items()):
            if key in _HOOKS and value:
                self.bind(label, key, list(value.values()))
            elif is_plain(value) or isinstance(value, Tensor):
                continue
            elif key in more or key not in MODULE_ATTRIBUTES:
                self.bind(label, key, value)

    def run(self) -> None:
        """Walk all objects that can be reached from those that were recorded so far."""
        self.ref(Tensor)  # whose methods any code may call
        while self._queue or self._new:
            while self._queue:
                self._expand(*self._queue.popleft())
            new, self._new = self._new - self._names, set()
            self._names |= new
            for namespace in self._namespaces:  # grows during the loop
                self._look_up(namespace, new)
        for what, names, now in (
            ("the rank", _RANK, dist.get_rank),
            ("ranks of the world", _RANKS, dist.get_world_size),
        ):
            if self._distributed and self._names & names:
                self.values[what] = str(now()) if dist.is_available() and dist.is_initialized() else "none"

    def bind(self, label: str, name: str, value: object) -> None:
        """Record, as text, the object ``value`` that ``label.name`` is bound to, such as attribute ``name`` of module
        ``label``. Queue the code that ``value`` refers to for the walk.
        """
        key = f"{label}.{name}"
        if key in self.code or key in self.values:
            return
        if isinstance(value, types.CellType):
            value = _contents(value)
        text = self.ref(value)
        (self.values if is_plain(value) or isinstance(value, _CONTAINERS) else self.code)[key] = text

    def ref(self, value: object) -> str:
        """Return a text for ``value`` that is the same in every process. Record the functions and classes that
        ``value`` refers to.
        """
        if is_plain(value):
            return plain_text(value)
        if id(value) in self._refs:
            return self._refs[id(value)]
        if isinstance(value, Tensor):
            return "a tensor" if is_versioned_class(type(value)) else f"a tensor of {self.ref(type(value))}"
        if isinstance(value, _CONTAINERS):
            return self._container(value)
        if (parts := wrapped_in(value)) is not None:
            return f"{type(value).__name__} {' '.join(map(self.ref, parts))}"
        if isinstance(value, types.CodeType):
            return code_hash(value)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, types.ModuleType):
            return self._module(value)
        if isinstance(value, nn.Module) and id(vars(value)) in self._paths:
            return f"module {self._paths[id(vars(value))]!r}"
        if isinstance(value, (types.BuiltinFunctionType, types.MethodWrapperType)):
            owner = value.__self__
            of = "" if owner is None or isinstance(owner, types.ModuleType) else f" of {self.ref(owner)}"
            return f"builtin {value.__qualname__}{of}"
        if isinstance(value, _SLOTS):
            return f"builtin {qualified_name(value.__objclass__)}.{value.__name__}"
        return self._object(value)

    def _named(self, value: object, name: str) -> str:
        """Return a unique name for ``value``: ``name`` or, if another object has that name, ``name #2`` and so on."""
        number = self._counts[name] = self._counts.get(name, 0) + 1
        self._alive.append(value)
        text = self._refs[id(value)] = name if number == 1 else f"{name} #{number}"
        return text

    def _container(self, value: Any) -> str:
        """Return a dict, list, tuple or set as text. Functions and classes in a dict or list are included only if their
        code was traced, and of a set only plain constants.
        """
        if id(value) in self._inside:
            return "..."
        self._inside.add(id(value))
        # Imports register functions in global tables; an entry counts only if its code was traced.
        if isinstance(value, (dict, types.MappingProxyType)):
            items = [(text_of(key), key, item) for key, item in list(value.items()) if self._counts_in(item)]
            ordered = sorted(items, key=lambda item: item[0])
            inside = [f"{self.ref(key)}: {self.ref(item)}" for _, key, item in ordered]
        elif isinstance(value, (set, frozenset)):
            inside = list(map(self.ref, sorted(filter(is_plain, value), key=text_of)))
        else:
            inside = [self.ref(item) for item in list(value) if isinstance(value, tuple) or self._counts_in(item)]
        self._inside.discard(id(value))
        factory = value.default_factory if isinstance(value, defaultdict) else None
        kind = type(value).__name__ if is_versioned_class(type(value)) else self.ref(type(value))
        return f"{kind}({', '.join(inside)})" + (f" or {self.ref(factory)}" if factory is not None else "")

    def _counts_in(self, item: object) -> bool:
        """Return whether `_container` puts ``item``, a value of a dict or list, into its text. It leaves out functions
        and classes whose code was not traced.
        """
        if isinstance(item, type):
            return any(self._was_traced(value) for value in vars(item).values())
        return not isinstance(item, types.FunctionType) or self._was_traced(item)

    def _was_traced(self, value: object) -> bool:
        """Return whether ``value`` is a user's function (or a property or method of one) whose code was traced."""
        function = value.fget if isinstance(value, property) else value
        if isinstance(function, (staticmethod, classmethod, types.MethodType)):
            function = function.__func__
        while isinstance(function, types.FunctionType) and is_versioned(function.__code__):
            if (inside := getattr(function, "__wrapped__", None)) is None:
                return False
            function = inside  # as that of once_differentiable or custom_bwd
        if not isinstance(function, types.FunctionType):
            return False
        return code_hash(function.__code__) in self._traced

    def _function(self, function: types.FunctionType) -> str:
        """Record the code of a function and return its name. If the function may have been traced, also record its
        defaults, closure cells and attributes, and queue it.
        """
        code = function.__code__
        location, does = versioned_path(code.co_filename), code_hash(code)
        place = f"{location}:{code.co_firstlineno}:{code.co_name}" if location else qualified_name(function)
        name = self._named(function, place)
        runs = location is not None or does in self._traced or id(function) in self._native or _is_native(function)
        if location is None:
            self.code[f"code of {name}"] = f"sha256 {does}"
            self.code_hashes.update(map(code_hash, codes_in(code)))
            if getattr(function, "_dynamo_marked_constant", False):
                self.constants.append(name)
        if not runs:
            return name
        self.functions.append(function)
        parts = [
            (f"cell {name}", cell) for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True)
        ]
        if location is None:
            parts += [(f"default {at}", value) for at, value in enumerate(function.__defaults__ or ())]
            parts += [(f"default {key}", value) for key, value in (function.__kwdefaults__ or {}).items()]
        parts += [(key, value) for key, value in sorted(vars(function).items()) if not key.startswith(_DYNAMO)]
        for part, value in parts:
            self.bind(name, part, value)
        if location is None or location.startswith(_LAYERS):
            self._queue.append((function, name))
        return name

    def _class(self, cls: type) -> str:
        """Record the bases of a class and those of its attributes that traced code names; return the class's name."""
        if not cls.__flags__ & _HEAP:
            return qualified_name(cls)
        name = self._named(cls, qualified_name(cls))
        self.code[f"bases of {name}"] = ", ".join(self.ref(base) for base in cls.__mro__[1:])
        if type(cls) is not type:
            self.bind(name, "class", type(cls))
        self._add(_Namespace(name, vars(cls), cls=cls))
        return name

    def _module(self, module: types.ModuleType) -> str:
        """Record those attributes of a Python module that traced code names; return the name of the module."""
        name = self._refs[id(module)] = f"module {module_name(module.__name__)}"
        self._alive.append(module)
        self._distributed |= is_in(module.__name__, "torch.distributed")
        self._add(_Namespace(name, vars(module)))
        return name

    def _object(self, value: object) -> str:
        """Record the class of an object for which `ref` has no other case, and its attributes that traced code names;
        return the name of the object.
        """
        cls = type(value)
        if (op := custom_op(value)) is not None:
            return self._custom_op(value, *op)
        if isinstance(value, (torch.jit.ScriptFunction, torch.jit.ScriptModule)):
            return f"script {digest(str(value.code))}"
        self._distributed |= is_in(cls.__module__, "torch") and "distributed" in cls.__module__
        if isinstance(value, nn.Module):
            name = self._named(value, f"an object of {qualified_name(cls)}")
            self._attributes_of(name, value, ("_modules",))
            return name
        if is_versioned_class(cls) and not isinstance(value, _OPEN):
            return f"an object of {qualified_name(cls)}"
        name = self._named(value, f"an object of {qualified_name(cls)}")
        self.bind(name, "class", cls)
        self._add(_Namespace(name, _attributes(value)))
        return name

    def _custom_op(self, value: object, op: str, parts: Mapping[str, object]) -> str:
        """Record a user's custom op and its functions, which Dynamo calls without tracing them; return the op's name.

        Args:
            value: the op.
            op: its qualified name.
            parts: its functions by kind.
        """
        name = self._refs[id(value)] = f"op {op}"
        self._alive.append(value)
        if op not in self.ops:
            self.ops[op] = parts
            self._native.update(id(part) for part in parts.values() if isinstance(part, types.FunctionType))
            for key, part in parts.items():
                self.bind(name, key, part)
        return name

    def _add(self, namespace: _Namespace) -> None:
        """Add a namespace to the walk. Its attributes are looked up by all names that traced code uses: those known
        now, and those found later.
        """
        self._namespaces.append(namespace)
        self._look_up(namespace, self._names)

    def _look_up(self, namespace: _Namespace, names: set[str]) -> None:
        """Record (`bind`) the attributes of ``namespace`` whose names are in ``names``. Of a class, also record the
        methods that run without being named, such as ``__add__``.
        """
        names_here = {name for name in namespace.attributes.keys() & names if name not in _INERT}
        if namespace.cls is not None and not namespace.done:
            namespace.done.add("")
            names_here |= {name for name, value in namespace.attributes.items() if self._without_name(name, value)}
        if namespace.cls is not None and issubclass(namespace.cls, nn.Module):
            names_here -= {"__init__", "__new__"}  # the modules exist already
        for name in sorted(names_here - namespace.done):
            namespace.done.add(name)
            self.bind(namespace.label, name, namespace.attributes[name])
            if namespace.cls is not None:
                self._bound[namespace.cls].add(name)

    def bound(self, classes: Iterable[type]) -> Iterator[tuple[type, str, object]]:
        """Yield (class, attribute name, value) of the methods and properties of ``classes`` that may have been
        traced.
        """
        for cls in dict.fromkeys(classes):
            for name in sorted(set().union(*(self._bound.get(base, ()) for base in cls.__mro__))):
                value = getattr(cls, name, None)
                function = value.fget if isinstance(value, property) else value
                if isinstance(function, types.FunctionType) and (
                    name == "forward" or code_hash(function.__code__) in self._traced
                ):
                    yield cls, name, value

    def _without_name(self, name: str, value: object) -> bool:
        """Return whether traced code may use the class attribute ``name`` without naming it: Python calls it
        (``__add__``), or it was looked up by a name computed at run time.
        """
        if name.startswith("__"):
            versioned = isinstance(value, types.FunctionType) and is_versioned(value.__code__)
            return name not in _INERT and (not versioned or name == "__call__")
        return self._was_traced(value)

    def _expand(self, function: types.FunctionType, name: str) -> None:
        """Record (`bind`) the globals that the code of ``function`` names. ``name`` is the function's name in the walk.

        The attributes that it names of torch's and Python's modules are recorded too.
        """
        names, texts = names_in(function.__code__)
        if versioned_path(function.__code__.co_filename) is None:
            self._new |= names
        scope, native = function.__globals__, id(function) in self._native or _is_native(function)
        module = f"module {module_name(str(scope.get('__name__')))}"
        for name in sorted(names):
            if name in scope:
                value = scope[name]
                if isinstance(value, types.ModuleType) and is_versioned_module(value):
                    self._attributes(value, names, set())
                else:
                    if native and isinstance(value, types.FunctionType):
                        self._native.add(id(value))
                    self.bind(module, name, value)
            elif isinstance(built := vars(_builtins).get(name), types.FunctionType):  # added by the user
                self.bind("module builtins", name, built)
            elif imports(function.__code__):
                for path in (name, f"{scope.get('__package__')}.{name}"):
                    if path in sys.modules:
                        self._attributes(sys.modules[path], names, set())
        if "environ" in names:  # a trace may read these variables
            for text in sorted(texts):
                self.values[f"environment {text}"] = repr(os.environ.get(text))

    def _attributes(self, module: types.ModuleType, names: frozenset[str], seen: set[int]) -> None:
        """Record (`bind`) the attributes of a Python module whose names are in ``names``, the names in a function's
        code. Modules of torch, shardc and Python among the attributes are searched the same way.
        """
        if id(module) in seen:
            return
        seen.add(id(module))
        label = f"module {module_name(module.__name__)}"
        self._distributed |= is_in(module.__name__, "torch.distributed")
        for name in sorted(vars(module).keys() & names):
            value = vars(module)[name]
            if isinstance(value, types.ModuleType) and is_versioned_module(value):
                self._attributes(value, names, seen)
            else:
                self.bind(label, name, value)


def _contents(cell: types.CellType) -> object:
    """Return the content of a closure cell; "nothing" for an empty one."""
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return "nothing"


def _is_native(function: types.FunctionType) -> bool:
    """Return whether a trace calls the user's function ``function`` without tracing its code."""
    return is_called_by_trace(function) or function.__module__ == "transformers.utils.output_capturing"


_builtins = sys.modules["builtins"]


def _attributes(value: object) -> Mapping[str, object]:
    """Return name -> value of an object's attributes, both in its ``__dict__`` and in ``__slots__``."""
    out = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        for name, slot in vars(cls).items():
            if isinstance(slot, types.MemberDescriptorType):
                try:
                    out.setdefault(name, slot.__get__(value))
                except AttributeError:
                    continue
    return out


_code = attrgetter("__code__")


@dataclass(frozen=True)
class Reach:
    """The user's code and plain values that a capture of a model and a loss can reach: as text, to compare processes,
    and as objects, to notice changes.

    Args:
        code: name -> text of the function, or other object than a plain value, that it is bound to.
        values: name -> text of the plain value that it is bound to (globals, class attributes, defaults, cells).
        code_hashes: hashes of all user code that the walk found.
        constants: functions that a trace calls instead of tracing them, and whose results it stores.
        bound: (class, name, object) of class attributes that may have been traced.
        functions: (function, its code) of functions that may have been traced.
        ops: name of a user's op (`torch.library.custom_op`) -> its functions by kind.
        inner: the code that the model's wrapper subclasses run; None if there are none.
    """

    code: Mapping[str, str]
    values: Mapping[str, str]
    code_hashes: frozenset[str]
    constants: tuple[str, ...]
    bound: tuple[tuple[type, str, object], ...]
    functions: tuple[tuple[types.FunctionType, types.CodeType], ...]
    ops: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    inner: InnerCode | None = None

    @cached_property
    def digest(self) -> str:
        """Return a hash of the text of ``code``."""
        return digest("\n".join(f"{name}: {text}" for name, text in sorted(self.code.items())))

    @cached_property
    def _getters(self) -> tuple[list[Any], ...]:
        """Return five lists for `holds`: the classes, names and values in ``bound``, then the functions and code
        objects in ``functions``.
        """
        classes, names, values = map(list, zip(*self.bound, strict=True)) if self.bound else ([], [], [])
        functions, codes = map(list, zip(*self.functions, strict=True)) if self.functions else ([], [])
        return classes, names, values, functions, codes

    @staticmethod
    def of_all(several: Sequence[Reach]) -> Reach:
        """Return one `Reach` whose `holds` checks all of ``several``. Its ``code`` and ``values`` are empty."""
        bound = {(cls, name): value for reach in several for cls, name, value in reach.bound}
        functions = {id(function): (function, code) for reach in several for function, code in reach.functions}
        places = tuple((cls, name, value) for (cls, name), value in bound.items())
        ops = {op: parts for reach in several for op, parts in reach.ops.items()}
        inner = several[-1].inner if several else None  # they are of one model
        return Reach({}, {}, frozenset(), (), places, tuple(functions.values()), ops, inner)

    def holds(self) -> bool:
        """Return whether the reached code is unchanged: methods, functions, custom ops and the code of wrapper
        subclasses. Takes some microseconds.
        """
        classes, names, values, functions, codes = self._getters
        return (
            all(map(is_, map(getattr, classes, names), values))
            and all(map(is_, map(_code, functions), codes))
            and all(custom_op(op) == (op, parts) for op, parts in self.ops.items())
            and (self.inner is None or self.inner.holds())
        )


def reach(model: nn.Module, loss: object, traced: Iterable[str] = ()) -> Reach:
    """Return the `Reach`, the code that a capture of ``model`` and ``loss`` can reach. The last result is reused as
    long as it holds, else a new walk is made.

    Args:
        traced: `code_hash` of the user's code that was traced.
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
    functions = tuple(
        (function, function.__code__) for function in walk.functions if not is_versioned(function.__code__)
    )
    bound = tuple(walk.bound(modules))
    inner = InnerCode(model) or None
    if inner is not None:
        walk.code["the classes of wrapper subclasses"] = inner.text
    hashes, constants = frozenset(walk.code_hashes), tuple(walk.constants)
    reached = Reach(walk.code, walk.values, hashes, constants, bound, functions, walk.ops, inner)
    _last[model] = key, reached
    return reached


_last: WeakKeyDictionary[nn.Module, tuple[object, Reach]] = WeakKeyDictionary()
