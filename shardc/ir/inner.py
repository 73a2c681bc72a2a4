"""Wrapper subclasses (quantised weights): their inner tensors in a compiled module, and the code that they run.

A class with ``__tensor_flatten__`` and ``__tensor_unflatten__`` keeps its values in plain tensors, and implements ops
on these in ``__torch_dispatch__``, which AOTAutograd traces. A program takes the inner tensors of frozen ones. They are
stored, sharded and saved as any other: ``layer.weight`` becomes ``layer.weight.qdata`` and ``layer.weight.scale``.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cached_property
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardc._compat import is_wrapper, pytree
from shardc.errors import CaptureError, InputError, LayoutError
from shardc.ir.clone import clone_tree
from shardc.ir.code import is_plain, is_versioned, is_versioned_class, is_versioned_module, names_in, wrapped_in
from shardc.ir.kinds import CLASS

_ABSENT = object()
_MAPPINGS = (dict, types.MappingProxyType)
_SEQUENCES = (list, tuple, set, frozenset)


class InnerCode:
    """Snapshot of the user's functions and tables that the wrapper subclasses in ``model`` may use when one of their
    ops runs.

    Tracing does not reach them. A snapshot is compared by identity, within one process; `shardc.ir.reach` names traced
    code for other processes.
    """

    def __init__(self, model: nn.Module) -> None:
        self._mappings: dict[int, object] = {}  # all of whose entries count
        self._names: dict[tuple[int, str], tuple[dict[str, object], str]] = {}  # globals, and attributes of modules
        self._functions: dict[int, types.FunctionType] = {}
        self._sequences: dict[int, Collection[object]] = {}
        self._tensors: dict[int, Tensor] = {}
        self._seen: dict[object, object] = {}
        self._todo: list[object] = []
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
        """Return whether the code, and the tensors that it names, are unchanged since the snapshot."""
        return _same(self._before, tuple(self._now()))

    @cached_property
    def text(self) -> str:
        """Return a name for the state of the code in this snapshot. Within one process, two snapshots have equal names
        if and only if their code is the same.
        """
        for at, state in enumerate(_states):
            if _same(state, self._before):
                return f"state {at}"
        _states.append(self._before)
        return f"state {len(_states) - 1}"

    def _now(self) -> Iterator[object]:
        """Yield all objects on which the wrapper subclasses' code depends, in their current state."""
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

    def _visit(self, x: object) -> None:
        """Record ``x`` in the snapshot if it can change, and queue the objects that ``x`` refers to for a visit."""
        if is_plain(x) or id(x) in self._seen:
            return
        self._seen[id(x)] = x  # keeps it alive, so that no other object gets its id
        if isinstance(x, types.FunctionType):
            self._function(x)
        elif isinstance(x, type):
            if not is_versioned_class(x):
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
        elif (parts := wrapped_in(x)) is not None:
            self._todo += parts
        elif not isinstance(x, types.ModuleType) and not is_versioned_class(type(x)):
            self._todo.append(type(x))
            if hasattr(x, "__dict__"):
                self._mappings[id(x)] = x
                self._todo += vars(x).values()

    def _function(self, function: types.FunctionType) -> None:
        """Record a user's function in the snapshot. Queue its defaults, its closure cells and the globals that it
        names.
        """
        cells = list(map(_contents, function.__closure__ or ()))
        if is_versioned(function.__code__):  # a decorator of torch or Python is around the user's functions
            self._todo += [x for x in cells if isinstance(x, types.FunctionType)]
            return
        self._functions[id(function)] = function
        self._todo += [function.__defaults__, function.__kwdefaults__, *cells]
        names, _ = names_in(function.__code__)
        for name in names:
            self._name(function.__globals__, name, names)

    def _name(self, scope: dict[str, object], name: str, names: frozenset[str], versioned: bool = False) -> None:
        """Record the object that ``name`` is bound to in ``scope`` (globals, or the attributes of a module). If the
        object is a module, also record its attributes in ``names``.

        Args:
            versioned: whether the scope is torch's, shardc's or Python's.
        """
        self._names[id(scope), name] = scope, name
        value = scope.get(name, _ABSENT)
        if type(value) is not types.ModuleType:
            # Registries of torch and Python grow with imports.
            self._todo += [] if versioned and isinstance(value, (*_MAPPINGS, *_SEQUENCES)) else [value]
        elif (id(value), names) not in self._seen:
            self._seen[id(value), names] = value
            for attribute in names & vars(value).keys():
                self._name(vars(value), attribute, names, is_versioned_module(value))


def _contents(cell: types.CellType) -> object:
    """Return the content of a closure cell; `_ABSENT` for an empty one."""
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT


def _same(before: tuple[object, ...], now: tuple[object, ...]) -> bool:
    """Return whether two tuples have the same objects. For plain values (numbers, strings) it is enough to be equal."""
    if len(before) == len(now) and all(map(is_, before, now)):
        return True
    return len(before) == len(now) and all(
        x is y or (type(x) is type(y) and is_plain(x) and x == y) for x, y in zip(before, now, strict=True)
    )


_states: list[tuple[object, ...]] = []


_DTYPE = "convert the model first, then compile it"


class InnerTensors(nn.Module):
    """The inner tensors of ``x``, a tensor of a wrapper subclass, as a submodule that replaces ``x``.

    Args:
        name: qualified name of ``x``, for errors.
        x: a frozen tensor. Its inner tensors become frozen parameters if it is a parameter, else buffers; inner tensors
            that are wrappers themselves become `InnerTensors` again.
        persistent: whether state dicts contain it.

    Raises:
        InputError: ``__tensor_unflatten__`` does not restore the class, shape and dtype of ``x``.
    """

    def __init__(self, name: str, x: Tensor, persistent: bool = True) -> None:
        super().__init__()
        self.cls: Any = type(x)
        self.is_param = isinstance(x, nn.Parameter)
        names, self.context = x.__tensor_flatten__()  # type: ignore[attr-defined]
        self.shape, self.stride, self.dtype, self.requires_grad = x.shape, x.stride(), x.dtype, False
        for key in names:
            inner = getattr(x, key).detach()
            if is_wrapper(inner):
                inner = nn.Parameter(inner, requires_grad=False) if self.is_param else inner
                self._modules[key] = InnerTensors(f"{name}.{key}", inner, persistent)
            elif self.is_param:
                self._parameters[key] = nn.Parameter(inner, requires_grad=False)
            else:
                self._buffers[key] = inner
                self._non_persistent_buffers_set |= set() if persistent else {key}
        self.names, self.attributes = tuple(names), {}
        restored = self.outer()
        self.attributes = {key: value for key, value in vars(x).items() if key not in {*vars(restored), CLASS}}
        if (type(restored), restored.shape, restored.dtype) != (type(x), x.shape, x.dtype):
            raise InputError(
                f"{name!r} is a {self.cls.__name__} whose __tensor_unflatten__ makes another tensor of what "
                "__tensor_flatten__ gave",
                fix="put in its place a plain tensor of its values",
            )

    def outer(self, of: Callable[[Tensor], Tensor] = lambda x: x, dtype: torch.dtype | None = None) -> Tensor:
        """Return the wrapper tensor, made again from ``of(inner tensor)`` for each of its inner tensors. If ``dtype``
        is given, the wrapper's class then converts it to this dtype.
        """
        inner = {key: x.outer(of) if isinstance(x, InnerTensors) else of(x) for key, x in self._entries.items()}
        tensor: Tensor = self.cls.__tensor_unflatten__(inner, self.context, self.shape, self.stride)
        for key, value in self.attributes.items():
            setattr(tensor, key, value)
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        return nn.Parameter(tensor, requires_grad=False) if self.is_param else tensor

    @property
    def _entries(self) -> dict[str, Any]:
        """Return name -> inner tensor. An inner tensor that is a wrapper subclass itself is there as its `InnerTensors`
        module.
        """
        entries = {**self._parameters, **self._buffers, **self._modules}
        return {key: entries[key] for key in self.names}

    def inner_tensors_of(self, x: Any, prefix: str) -> dict[str, Tensor]:
        """Return qualified name (``prefix`` + name) -> inner tensor of ``x``, a wrapper tensor like the one that this
        module replaces.

        Raises:
            ValueError: ``x`` is of another class than the replaced tensor, or has other metadata.
        """
        names, context = x.__tensor_flatten__() if type(x) is self.cls else ((), None)
        if type(x) is not self.cls or (tuple(names), repr(context)) != (self.names, repr(self.context)):
            kind = f"a {type(x).__name__} with {context}" if names else f"a {type(x).__name__}"
            raise ValueError(f"{prefix[:-1]} is {kind}, the module has a {self.cls.__name__} with {self.context}")
        out: dict[str, Tensor] = {}
        for key in names:
            mine, value = self._entries[key], getattr(x, key)
            if isinstance(mine, InnerTensors):
                out |= mine.inner_tensors_of(value, f"{prefix}{key}.")
            else:  # loading into a template reads shapes only
                shapes_only = mine.is_meta and not isinstance(mine, DTensor)
                out[prefix + key] = value.to("meta") if shapes_only else value
        return out

    def entries_in(self, module: nn.Module) -> Any:
        """Return the dict of ``module``, its parameters or its buffers, in which the wrapper tensor is."""
        return module._parameters if self.is_param else module._buffers

    @property
    def device(self) -> torch.device:
        """Return the device of the inner tensors."""
        inner: torch.device = next(iter(self._entries.values())).device
        return inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(
                f"a compiled module holds the inner tensors of a {self.cls.__name__}, which have no {name!r}: read the "
                "tensor itself inside of `with module.summon_full_params():`"
            ) from None

    def extra_repr(self) -> str:
        """Return the wrapper's class and metadata as text. A program depends on this text, as it does on the inner
        tensors.
        """
        return f"{self.cls.__module__}.{self.cls.__qualname__}, {self.context!r}, {list(self.shape)}, {self.attributes}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Apply ``fn`` to the inner tensors, as `nn.Module._apply` does, and return the module. InputError if ``fn``
        converts their dtype.
        """
        check_conversion(self, fn)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


class _Holder(nn.Module):
    """First base class of a module that has `InnerTensors` in place of wrapper tensors. Its state dicts show the
    wrapper tensors.
    """

    def __setattr__(self, name: str, value: Tensor | nn.Module) -> None:
        if isinstance(inner := self._modules.get(name), InnerTensors) and value is not inner:
            raise InputError(
                f"{name!r} of {type(self).__name__} is a {inner.cls.__name__}, of which the module holds the inner "
                "tensors: it cannot be replaced",
                fix="load values into it (load_state_dict), or change the model and compile it again",
            )
        super().__setattr__(name, value)

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        """Load a state dict that has wrapper tensors: replace each by its inner tensors, then load these."""
        for key, inner in _inner_tensors_in(self).items():
            if prefix + key in state_dict:
                try:
                    state_dict.update(inner.inner_tensors_of(state_dict.pop(prefix + key), f"{prefix}{key}."))
                except ValueError as error:
                    state_dict.update(inner.state_dict(prefix=f"{prefix}{key}.", keep_vars=True))
                    args[-1].append(str(error))
        super()._load_from_state_dict(state_dict, prefix, *args)


def _inner_tensors_in(module: nn.Module) -> dict[str, InnerTensors]:
    """Return name -> `InnerTensors` for the wrapper tensors of ``module`` itself, without those of its submodules."""
    return {key: inner for key, inner in module._modules.items() if isinstance(inner, InnerTensors)}


def flattened(model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` in which `InnerTensors` modules replace the parameters and buffers of wrapper
    subclasses. Without any, return ``model`` itself.

    The copy shares all tensors.
    """
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    wrappers = {name: x for name, x in named.items() if is_wrapper(x)}
    if not wrappers:
        return model
    volatile = {
        id(module._buffers[key]) for module in model.modules() for key in module._non_persistent_buffers_set
    }  # fmt: skip
    inner_of = {id(x): InnerTensors(name, x, id(x) not in volatile) for name, x in wrappers.items()}
    copy = clone_tree(model, lambda _, x: x)
    for module in list(copy.modules()):
        inner_tensors = {
            key: inner_of[id(x)] for kind in _KINDS for key, x in getattr(module, kind).items() if id(x) in inner_of
        }  # fmt: skip
        if not inner_tensors:
            continue
        for key, inner in inner_tensors.items():
            for kind in _KINDS:
                getattr(module, kind).pop(key, None)
            module._non_persistent_buffers_set.discard(key)
            module._modules[key] = inner
        cls = type(module)
        same = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        module.__class__ = type(cls.__name__, (_Holder, cls), same)
    return copy


_KINDS = ("_parameters", "_buffers")


def unflatten(model: nn.Module, of: Callable[[str, InnerTensors], Tensor]) -> None:
    """Undo `flattened` in place: replace each `InnerTensors` in ``model`` by the tensor that ``of`` returns, and give
    the modules their own classes again.

    Args:
        of: function of an `InnerTensors` and the path of its module that returns the tensor; called once for one that
            several modules share.

    Raises:
        CaptureError: an inner tensor requires a gradient.
    """
    tensors: dict[int, Tensor] = {}
    for path, module in list(model.named_modules()):
        inner_tensors = _inner_tensors_in(module)
        if not inner_tensors or isinstance(module, InnerTensors):
            continue
        module.__class__ = type(module).__mro__[2]
        for key, inner in inner_tensors.items():
            for name, x in inner.named_parameters():
                if x.requires_grad:
                    raise CaptureError(
                        f"parameter '{path}.{key}.{name}' is an inner tensor of a {inner.cls.__name__}, which is "
                        "trained as it is on no device",
                        fix="freeze it again: requires_grad_(False)",
                    )
            del module._modules[key]
            tensors.setdefault(id(inner), of(path, inner))
            inner.entries_in(module)[key] = tensors[id(inner)]


@contextmanager
def outer_tensors(module: nn.Module) -> Iterator[None]:
    """Context manager in which ``module`` has its wrapper tensors, made again from their inner tensors, which must be
    unsharded before.

    Raises:
        LayoutError: a wrapper tensor was replaced in the block.
    """
    holders = [part for part in module.modules() if isinstance(part, _Holder)]
    before = [(part, dict(part._modules), _inner_tensors_in(part)) for part in holders]  # the order of modules stays
    tensors: dict[int, Tensor] = {}
    for part, _, inner_tensors in before:
        for key, inner in inner_tensors.items():
            del part._modules[key]
            inner.entries_in(part)[key] = tensors.setdefault(id(inner), inner.outer())
    try:
        yield
    finally:
        replaced = []
        for part, modules, inner_tensors in before:
            for key, inner in inner_tensors.items():
                if inner.entries_in(part).pop(key, None) is not tensors[id(inner)]:
                    replaced.append(f"{key!r}, a {inner.cls.__name__}")
            part._modules.clear()
            part._modules.update(modules)
        if replaced:
            raise LayoutError(
                f"{replaced[0]}, was replaced inside of summon_full_params; the module has what it had",
                fix="change its inner tensors in place, or change the model and compile it again",
            )


def rebuilt(module: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a copy of the full state dict ``state`` in which wrapper tensors replace their inner tensors, as in the
    state dict of the user's model.
    """
    out = dict(state)
    for path, inner in _outermost(module):
        names = {id(x): f"{path}.{name}" for name, x in inner.state_dict(keep_vars=True).items()}
        if names and all(name in out for name in names.values()):
            value = inner.outer(lambda x, names=names: state[names[id(x)]])  # type: ignore[misc]
            at = list(out).index(next(iter(names.values())))
            rest = [(key, x) for key, x in out.items() if key not in names.values()]
            out = dict([*rest[:at], (path, value.detach()), *rest[at:]])
    return out


def first_places(module: nn.Module) -> dict[str, str]:
    """Return name of a wrapper tensor in ``module`` -> the first of its names. (A tied tensor has several qualified
    names.)
    """
    first: dict[int, str] = {}
    return {path: first.setdefault(id(inner), path) for path, inner in _outermost(module)}


def outer_names(module: nn.Module) -> dict[str, str]:
    """Return name of a wrapper parameter -> name of its inner tensor of the same shape, if it has one. Plan entries
    about the parameter apply to that inner tensor.
    """
    out: dict[str, str] = {}
    for path, inner in _outermost(module):
        shaped = [name for name, x in inner.named_parameters() if x.shape == inner.shape]
        out |= {path: f"{path}.{shaped[0]}"} if shaped else {}
    return out


def with_inner(x: Any) -> Iterator[Tensor]:
    """Yield ``x`` and, if it is of a wrapper subclass, its inner tensors. Inner tensors of inner tensors are yielded
    too.
    """
    yield x
    for key in x.__tensor_flatten__()[0] if is_wrapper(x) else ():
        yield from with_inner(getattr(x, key))


def metadata(x: Tensor) -> list[object]:
    """Return a list of the metadata of ``x`` and its inner tensors, for comparison: class, shape, strides, dtype,
    requires_grad and attributes.
    """
    out: list[object] = []
    for part in with_inner(x):
        out.append((type(part), part.shape, part.stride(), part.dtype, part.requires_grad))
        if is_wrapper(part):
            constants = {key: repr(value) for key, value in vars(part).items() if not isinstance(value, Tensor)}
            out.append((repr(part.__tensor_flatten__()[1]), constants))  # type: ignore[attr-defined]
    return out


def check_conversion(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    """Raise InputError if ``fn`` converts an inner tensor in ``module`` to another dtype. The wrapper's class could not
    adapt to that.
    """
    for path, inner in _outermost(module):
        for kind in {inner.dtype, *(x.dtype for x in (*inner.parameters(), *inner.buffers()))}:
            if (wanted := fn(torch.empty(0, dtype=kind)).dtype) != kind:
                raise InputError(
                    f"{path or 'a tensor'!r} is a {inner.cls.__name__} of {inner.dtype}, of which the module holds the "
                    f"inner tensors: it cannot be converted from {kind} to {wanted}",
                    fix=_DTYPE,
                )


def _outermost(module: nn.Module) -> Iterator[tuple[str, InnerTensors]]:
    """Yield (path, module) of each `InnerTensors` in ``module`` that is not inside another `InnerTensors`."""
    paths: set[str] = set()
    for path, part in module.named_modules(remove_duplicate=False):  # a module comes before those in it
        if isinstance(part, InnerTensors):
            paths.add(path)
            if not path or path.rpartition(".")[0] not in paths:
                yield path, part
