"""Guards: the attributes, globals and torch states that a capture read (`Reads`), with the values that they had.

Attributes, container items, globals, cells and functions are named by expressions: ``model._modules['drop'].p``,
``module('mine').ALPHA``. `Lookup` evaluates them; they are never run as code.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from operator import attrgetter
from types import CodeType
from typing import Any, Literal
from weakref import ref

import torch
from torch import nn
from torch.nn.modules import module as _nn

from shardc.ir.code import MAIN, code_hash, is_versioned, qualified_name, text_of
from shardc.ir.reach import Reach, reach

GRAD_MODE = "torch.is_grad_enabled()"
INFERENCE_MODE = "torch.is_inference_mode_enabled()"
_LEFT = ContextVar("_LEFT", default=False)  # whether `tracing` left inference mode
_NAMES = """
    is_grad_enabled
    is_autocast_enabled is_autocast_cpu_enabled is_autocast_cache_enabled get_autocast_dtype get_autocast_gpu_dtype
    get_default_dtype _C._is_any_autocast_enabled
    _C._get_cublas_allow_tf32 _C._get_cublas_allow_fp16_reduced_precision_reduction
    _C._get_cublas_allow_bf16_reduced_precision_reduction
    _C._is_torch_function_enabled _C._is_torch_function_all_disabled _C._is_torch_function_mode_enabled
    _C._functorch.get_dynamic_layer_stack_depth autograd._is_checkpoint_valid
    cuda.current_device cuda.is_initialized xpu.current_device xpu.is_initialized
    accelerator.current_device_index accelerator.current_accelerator
    __future__.get_overwrite_module_params_on_conversion
"""


def _states() -> Iterator[tuple[str, Callable[..., object]]]:
    """Yield (qualified name, getter function) of torch's global states, such as the default dtype. States that this
    version of torch lacks are left out.
    """
    for name in _NAMES.split():
        try:
            yield f"torch.{name}", attrgetter(name)(torch)
        except AttributeError:  # this torch does not have it
            continue


def in_inference_mode() -> bool:
    """Return whether the user's call is in inference mode. True also inside of `tracing`, which leaves that mode for
    the time of a trace.
    """
    return torch.is_inference_mode_enabled() or _LEFT.get()


@contextmanager
def tracing(grad: bool) -> Iterator[None]:
    """Context manager for a trace: leaves inference mode, whose tensors cannot be traced, and turns recording of
    gradients on or off (``grad``).
    """
    token = _LEFT.set(in_inference_mode())
    try:
        with torch.inference_mode(False), torch.set_grad_enabled(grad):
            yield
    finally:
        _LEFT.reset(token)


STATES: dict[str, Callable[..., object]] = {
    **dict(_states()),
    INFERENCE_MODE.removesuffix("()"): in_inference_mode,
    "os.getenv": os.getenv,
    "sys.getrecursionlimit": sys.getrecursionlimit,
}


def state(name: str, *args: object) -> object:
    """Return the current value of the global state ``name`` of torch or of the process (`STATES`). KeyError if there is
    no value, as for a device that is absent.
    """
    try:
        return STATES[name](*args)
    except (RuntimeError, AssertionError) as error:
        raise KeyError(name) from error


Path = tuple[Any, ...]
Values = tuple[tuple[str, str], ...]
GONE = "nothing"
FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
BACKWARD_HOOKS = ("_backward_pre_hooks", "_backward_hooks")
HOOKS = (*FORWARD_HOOKS, *BACKWARD_HOOKS)
_GLOBAL = tuple(f"_global{kind}" for kind in HOOKS)
_MISSING = (AttributeError, KeyError, IndexError, TypeError)
_FUNCTIONS: dict[str, Callable[..., object]] = {
    "dict": lambda x: x,  # a copy would be looked up just the same
    "list": lambda x: _items(x),
    "tuple": lambda x: _items(x),
    "type": type,
    "dict.keys": lambda x: x.keys(),
    "getattr": getattr,
    "object.__getattribute__": getattr,
    "same": lambda x, y: x is y,
    "ref": lambda x: _referent(x),
    "___from_numpy": lambda x: x,  # Dynamo's: the tensor of an array or scalar of NumPy
    "dict.__getitem__": lambda x, key: x[key],
    "list.__getitem__": lambda x, key: x[key],
    **{name: partial(state, name) for name in STATES},
}


Constant = bool | int | float | str | None


@dataclass(frozen=True)
class Read:
    """One read that a capture made: an object, named by an expression (``model.training``), and the property of it that
    was read.

    Args:
        expression: expression of the object.
        what: the property of the object that was read: "value", "type", "length", "keys", "has" (an attribute or key),
            "own" (an attribute of the object itself, not of its class), or "hooks" (of all modules of a model).
        key: the attribute or key of "has" and "own".
    """

    expression: str
    what: Literal["value", "type", "length", "keys", "has", "own", "hooks"] = "value"
    key: Constant = None

    def __str__(self) -> str:
        return self.expression if self.what == "value" else f"{self.what} {self.key or ''} of {self.expression}"


@dataclass(frozen=True)
class Reads:
    """The reads of a capture (of the model, of globals and of torch's state), and the code that it traced.

    Args:
        entries: the reads.
        scopes: name in expressions -> globals of functions whose module cannot be imported; an argument of the call
            (`argument_scope`).
        traced: (hash, name and place) of the user's code that was traced.
        sets: (expression, constant) of attributes that the first call sets without effect on the capture.
        unseen: whether the capture may depend on values that are not among the reads: its program is not stored.
    """

    entries: tuple[Read, ...] = ()
    scopes: Mapping[str, object] = field(default_factory=dict, compare=False, repr=False)
    traced: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    sets: tuple[tuple[str, Constant], ...] = ()
    unseen: bool = False

    @classmethod
    def of(
        cls, reads: Iterable[Read], scopes: Mapping[str, object], codes: Iterable[CodeType], unseen: bool = False
    ) -> Reads:
        """Return the `Reads` of a capture that made ``reads`` and traced ``codes``. Only the user's code counts."""
        ordered = sorted(reads, key=lambda read: (read.expression, read.what, repr(read.key)))
        user_codes = [code for code in codes if not is_versioned(code)]
        traced = {code_hash(x): f"{x.co_name} ({x.co_filename}:{x.co_firstlineno})" for x in user_codes}
        return cls(tuple(ordered), scopes, tuple(sorted(traced.items())), unseen=unseen)

    @property
    def grad_mode(self) -> bool:
        """Return whether the capture read the grad mode, so that its program may be wrong in the other mode."""
        return Read(GRAD_MODE) in self.entries

    def values(self, model: nn.Module, loss: object = None) -> Values:
        """Return the current values of all reads as text, in pairs (read, value). The last pair is ("its code", hash of
        the code that a trace could reach).
        """
        at = Lookup(model, loss, self.scopes)
        return *((str(read), at.text(read)) for read in self.entries), ("its code", self.reach(model, loss).digest)

    def reach(self, model: nn.Module, loss: object = None) -> Reach:
        """Return the `Reach`, the code that a trace of ``model`` and ``loss`` would reach now."""
        return reach(model, loss, [does for does, _ in self.traced])

    def joined(self, other: Reads) -> Reads | None:
        """Return the union of these reads and ``other``. None if a scope name stands for different globals in the
        two.
        """
        if any(other.scopes.get(name, scope) is not scope for name, scope in self.scopes.items()):
            return None
        reads = sorted({*self.entries, *other.entries}, key=lambda read: (read.expression, read.what, repr(read.key)))
        traced = tuple(sorted({*self.traced, *other.traced}))
        return replace(self, entries=tuple(reads), scopes={**other.scopes, **self.scopes}, traced=traced)


@dataclass(frozen=True, eq=False)
class Guards:
    """The reads of a capture and the values that they had. The capture's program is valid for calls at which the values
    are the same.

    Args:
        reads: the reads.
        values: (read, value) as text, and a hash of the reachable code.
        reached: name -> text of the reachable code and plain values; compared if a program is loaded from a file.
    """

    reads: Reads
    values: Values
    reached: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, reads: Reads, model: nn.Module, loss: object = None) -> Guards:
        """Return the guards of a capture: its ``reads`` with their current values in ``model`` and ``loss``."""
        reach = reads.reach(model, loss)
        return cls(reads, reads.values(model, loss), {**reach.code, **reach.values})

    def hold(self, model: nn.Module, loss: object = None) -> bool:
        """Return whether all reads still have the values of the capture, given the current state of ``model`` and
        ``loss``.
        """
        return self.reads.values(model, loss) == self.values

    def equals(self, other: Guards) -> bool:
        """Return whether ``other`` has the same reads and values. (``==`` compares by identity, which is faster.)"""
        return self.values == other.values and self.reads == other.reads

    def unlike(self, model: nn.Module, loss: object = None) -> list[str]:
        """Return the names of the guards that fail now, for a capture that was made in another process.

        Guards here are reads, the reachable code, and the plain values that this code names.
        """
        now = Guards.of(self.reads, model, loss)
        pairs = zip(now.values, self.values, strict=True)
        reads = [name for (name, value), (_, before) in pairs if value != before]
        names = dict.fromkeys([*self.reached, *now.reached])
        return [*reads, *(name for name in names if now.reached.get(name) != self.reached.get(name))]


def argument_scope(at: int) -> str:
    """Return the name in `Reads.scopes` of the argument of a call that is leaf ``at`` of ``(args, kwargs)``."""
    return f"argument{at}"


class Lookup:
    """Evaluates the expressions of reads (``model.layer.scale``), each common prefix once.

    Args:
        model, loss: values of the names ``model`` and ``loss``.
        scopes: globals and arguments by name, as in `Reads`.
    """

    def __init__(self, model: nn.Module, loss: object = None, scopes: Mapping[str, object] | None = None) -> None:
        self._values: dict[Path, Any] = {("name", "model"): model, ("name", "loss"): loss}
        self._scopes = {} if scopes is None else scopes

    def __call__(self, path: Path) -> Any:
        """Return the object that a parsed expression (a `Path`, see `parse`) names. AttributeError, KeyError,
        IndexError or TypeError if there is none.
        """
        if path not in self._values:
            self._values[path] = self._resolve(*path)
        return self._values[path]

    def _resolve(self, kind: str, first: Any, *more: Any) -> Any:
        """Return the object that one level of a parsed expression names. ``kind`` is the first entry of the level's
        tuple (see `parse`), ``first`` and ``more`` are the other entries.
        """
        if kind == "constant":
            return first
        if kind == "module":
            return sys.modules["__main__" if first == MAIN else first]
        if kind == "scope":
            return self._scopes[first]
        if kind == "attribute":
            return getattr(self(first), more[0])
        if kind == "item":
            return self(first)[self(more[0])]
        if kind == "call":
            return _FUNCTIONS[first](*map(self, more))
        raise KeyError(first)

    def text(self, read: Read) -> str:
        """Return the current value of ``read`` as text."""
        try:
            value = self(parse(read.expression))
        except _MISSING:
            return GONE
        if read.what == "has":
            keys = isinstance(value, (dict, set, frozenset))
            return str(read.key in value if keys else hasattr(value, str(read.key)))
        if read.what == "own":
            return str(read.key in getattr(value, "__dict__", ()))
        if read.what == "hooks":
            return "; ".join(hooks_of(value))
        if read.what == "type":
            return qualified_name(type(value))
        if read.what in ("length", "keys"):
            if not hasattr(value, "__len__"):  # the container was replaced by another object
                return GONE
            return (
                f"{qualified_name(type(value))} of {len(value) if read.what == 'length' else list(map(text_of, value))}"
            )
        return text_of(value)


@lru_cache(maxsize=8192)
def parse(expression: str) -> Path:
    """Parse an expression to nested tuples, such as ("attribute", ("name", "model"), "training") for
    ``model.training``.

    Raises:
        KeyError: the text is no such expression.
    """
    try:
        return _path(ast.parse(expression, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise KeyError(expression) from error


def _path(node: ast.expr) -> Path:
    """Convert the syntax tree of an expression to nested tuples, as `parse` returns them: ("attribute", ("name",
    "model"), "training") for ``model.training``.
    """
    if isinstance(node, ast.Name):
        return "name", node.id
    if isinstance(node, ast.Attribute):
        return "attribute", _path(node.value), node.attr
    if isinstance(node, ast.Subscript):
        return "item", _path(node.value), _path(node.slice)
    if not isinstance(node, ast.Call):
        return "constant", ast.literal_eval(node)
    function = ast.unparse(node.func)
    if function in ("module", "scope"):
        return function, ast.literal_eval(node.args[0])
    if not node.args and function not in _FUNCTIONS:
        return "call", "ref", _path(node.func)
    args = [_path(arg) for arg in node.args]
    return ("attribute", args[0], args[1][1]) if function == "getattr" else ("call", function, *args)


def _items(x: object) -> list[object]:
    """Return the items of a container (the keys of a dict) as a list. TypeError for any other object."""
    if not isinstance(x, (dict, list, tuple, set, frozenset, KeysView)):
        raise TypeError(x)
    return list(x)


def _referent(x: object) -> object:
    """Return what a weak reference refers to. TypeError for any other object."""
    if not isinstance(x, ref):
        raise TypeError(x)
    return x()


def hooks_of(model: nn.Module) -> list[str]:
    """Return the hooks of all modules of ``model``, then torch's global module hooks, each as text."""
    of_modules = [
        f"{path}.{kind} {text_of(hook)}{' with kwargs' * (key in getattr(module, f'{kind}_with_kwargs', ()))}"
        for path, module in model.named_modules()
        for kind in HOOKS
        for key, hook in getattr(module, kind).items()
    ]
    return of_modules + [text_of(hook) for hooks in global_hooks() for hook in hooks.values()]


def global_hooks() -> list[dict[int, Callable[..., object]]]:
    """Return torch's global module hooks: a dict id -> hook for each kind of hook, in the order of `HOOKS`."""
    return [getattr(_nn, kind) for kind in _GLOBAL]
