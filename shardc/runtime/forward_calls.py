"""Wraps the compiled forward for users who replace ``module.forward`` (`Forward`), as in ``module.forward =
wrap(module.forward)``. Code that would treat shards as parameters raises: direct calls of submodules, and wrappers
such as DDP and FSDP.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardc._compat import REGISTRY_KEY, STATE_KEY, PyTree
from shardc.errors import InputError

_MOST = 10_000  # objects that a search visits
_CONTAINERS = (list, tuple, set, frozenset)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Forward:
    """Descriptor of ``forward`` on a compiled module's class. Assigning to ``module.forward`` wraps the compiled
    forward or replaces the model's.

    A function that reaches the compiled forward, as in ``module.forward = wrap(module.forward)``, is stored in
    ``module.shardc.around``; calls run it eagerly. Any other function replaces the model's forward and is compiled into
    the program; ``module.forward`` remains the compiled one.
    """

    def __init__(self, compiled: Callable[..., PyTree]) -> None:
        self.compiled = compiled

    def __get__(self, module: nn.Module | None, cls: type | None = None) -> Callable[..., PyTree]:
        """Returns the user's wrapper of the compiled forward if there is one, else the compiled forward."""
        if module is None:
            return self.compiled
        state = vars(module).get("shardc")
        if state is not None and state.around is not None:
            return state.around
        return MethodType(self.compiled, module)

    def __set__(self, module: nn.Module, value: object) -> None:
        """Stores ``value`` as a wrapper of the compiled forward or, if it does not lead there, as the model's."""
        state = vars(module).get("shardc")
        if state is not None and self._leads_to_forward(module, value):
            state.around = value  # a wrapper of the compiled forward
            return
        vars(module)["forward"] = value  # the model's new forward, which the next capture reads
        if state is not None:
            state.around = None

    def __delete__(self, module: nn.Module) -> None:
        """Removes the wrapper or, if there is none, the model's forward that the user set."""
        state = vars(module).get("shardc")
        if state is not None and state.around is not None:
            state.around = None
        elif vars(module).pop("forward", None) is None:
            raise AttributeError("forward")

    def _leads_to_forward(self, module: nn.Module, value: object) -> bool:
        """Whether ``value`` leads to the compiled forward, through closures, defaults, arguments, attributes or
        globals.
        """
        functions = self.compiled, inspect.unwrap(self.compiled)
        seen: dict[int, object] = {}  # by id; it holds the objects, so that no id is used again
        todo: list[object] = [value]
        while todo and len(seen) < _MOST:
            x = todo.pop()
            if x is self.compiled or isinstance(x, MethodType) and x.__self__ is module and x.__func__ in functions:
                return True
            if id(x) not in seen:
                seen[id(x)] = x
                todo += _referenced_by(x)
        return False


def call_around(
    module: nn.Module, around: Callable[..., PyTree], args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
) -> PyTree:
    """Calls ``around``, a user's wrapper of the compiled forward. Raises InputError if the module has hooks, which
    would run inside the wrapper.
    """
    if any(vars(module).get(kind) for kind in _HOOKS):
        raise InputError(
            "the module has hooks, and a forward that was wrapped after compile: the hooks would run inside of it",
            fix="wrap the model's forward before shardc.compile, or call the hook's function in the wrapper",
        )
    return around(*args, **kwargs)


def _referenced_by(x: object) -> Iterable[object]:
    """Returns the objects that ``x`` refers to directly, for the search of `_leads_to_forward`. None for modules,
    classes and code: nearly everything can be reached from these, also what a wrapper does not call.
    """
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
    # Globals that the function or one inside of it names.
    named = (x.__globals__[name] for name in _names(x.__code__) if name in x.__globals__)
    return *cells, *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values(), *vars(x).values(), *named


def _names(code: CodeType) -> set[str]:
    """Returns the names of globals and attributes in ``code`` and in functions defined in it."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names, inner))


_CALL = "_compiled_call_impl"  # attribute of a module that torch calls instead of its forward, if not None
_OTHER = "replicate"  # ``fully_shard`` of an outer module skips modules with this


class Refuses(dict[object, object]):
    """Dict in place of a compiled module's record of the composable APIs of torch that wrap it. Raises InputError when
    ``fully_shard`` or ``replicate`` asks whether it is in the record.
    """

    def __contains__(self, function: object) -> bool:
        raise wrapped(getattr(function, "__name__", "fully_shard"))

    def __reduce__(self) -> tuple[type[Refuses], tuple[dict[object, object]]]:
        return Refuses, (dict(self),)


def wrapped(by: str) -> InputError:
    """Returns the error raised if a compiled module, or a submodule of it, is passed to the wrapper ``by`` ("DDP",
    "FSDP").
    """
    return InputError(
        f"{by} is given a compiled module, which shards its parameters and reduces its gradients itself",
        fix="train the module as it is: its plan says what is sharded; with accelerate or Trainer, use Accelerator or "
        "Trainer of shardc.integrations.accelerate",
    )


def check_export() -> None:
    """Raises InputError inside of `torch.export.export` and `torch.jit.trace`."""
    if torch.jit.is_tracing() or torch.compiler.is_exporting():
        raise InputError(
            "a compiled module is exported or traced, and its program holds this rank's part alone",
            fix="export a plain model that has loaded it: model.load_state_dict(module.full_state_dict())",
        )


def check_ddp(owner: nn.Module) -> None:
    """Raises InputError if the compiled module ``owner`` is called inside a DDP module, which would average its
    shards' gradients.
    """
    front = DistributedDataParallel._active_ddp_module  # the DDP module whose forward runs now
    if front is not None and not {*map(id, front._module_parameters)}.isdisjoint(map(id, owner.parameters())):
        raise wrapped("DistributedDataParallel")


def guard(owner: nn.Module) -> None:
    """Makes direct calls of submodules of ``owner`` raise, as well as ``fully_shard`` of it or of them. ``fully_shard``
    of an outer module skips them all.
    """
    for part in owner.modules():
        # Under these keys torch records which composable APIs wrap a module.
        vars(part)[STATE_KEY] = Refuses(vars(part).get(STATE_KEY, {}))
        vars(part)[REGISTRY_KEY] = vars(part).get(REGISTRY_KEY, {}) | {_OTHER: None}
        if part is not owner and vars(part).get(_CALL) is None:
            vars(part)[_CALL] = MethodType(_call, part)


def unguard(owner: nn.Module) -> None:
    """Undoes `guard`: submodules of ``owner`` can be called directly again, and an outer ``fully_shard`` no longer
    skips them.
    """
    for part in owner.modules():
        if isinstance(vars(part).get(STATE_KEY), Refuses):
            vars(part)[STATE_KEY] = dict(vars(part)[STATE_KEY])
            del vars(part)[REGISTRY_KEY][_OTHER]
        if getattr(vars(part).get(_CALL), "__func__", None) is _call:
            del vars(part)[_CALL]


def _call(part: nn.Module, *args: PyTree, **kwargs: PyTree) -> PyTree:
    """Replaces ``__call__`` of a submodule of a compiled module: calls ``part``, but raises InputError if its
    parameters are shards.
    """
    _check_unsharded(part, type(part))
    return part._call_impl(*args, **kwargs)


def call_slice(part: nn.Module, cls: type[nn.Module], args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> PyTree:
    """Calls ``part``, a slice of a compiled container, by the forward of ``cls``. Raises InputError if it has sharded
    parameters.
    """
    _check_unsharded(part, cls)
    return cls.forward(part, *args, **kwargs)


def _check_unsharded(part: nn.Module, cls: type) -> None:
    """Raises InputError if parameters of ``part``, a submodule of class ``cls`` of a compiled module, are shards."""
    if any(isinstance(param, DTensor) for param in part.parameters()):
        raise InputError(
            f"a part of a compiled module ({cls.__name__}) was called by itself; its parameters are shards",
            fix="call it inside of `with module.summon_full_params():`, or compile it as a module of its own; a method "
            "of the model may call it after shardc.register_forward_method(module, name of the method)",
        )
