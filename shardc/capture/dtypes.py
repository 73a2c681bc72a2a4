"""Dtypes of a model's modules in its trace: casts of parameters, buffers, arguments and results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from shardc._compat import PyTree
from shardc.ir.inner import InnerTensors
from shardc.ir.module_paths import name_in
from shardc.ir.repeat import Repeats
from shardc.validate import torch_name

# Modules whose children are layers, the units that FSDP2 wraps one by one.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True)
class ModuleDtypes:
    """Dtypes of a module's floating-point parameters, buffers, arguments and results; None leaves them unchanged.

    Args:
        takes: dtype of the arguments.
        gives: dtype of the results.
        scaled: scaling of float8 products, as in `Precision`; "" for products in the dtypes of their operands.
    """

    param: torch.dtype | None = None
    buffers: torch.dtype | None = None
    takes: torch.dtype | None = None
    gives: torch.dtype | None = None
    scaled: str = ""


class ModulePolicy(Protocol):
    """Protocol of the dtypes that a plan gives a module, as `shardc.plan.entries.Precision` has them. That class cannot
    be imported here.
    """

    @property
    def param(self) -> torch.dtype | None: ...
    @property
    def buffers(self) -> torch.dtype | None: ...
    @property
    def output(self) -> torch.dtype | None: ...
    @property
    def cast_forward_inputs(self) -> bool | str: ...


@dataclass(frozen=True)
class Dtypes:
    """The compute dtypes of a model's modules: (path, `ModuleDtypes`) pairs. Modules that are not listed are
    unchanged.
    """

    modules: tuple[tuple[str, ModuleDtypes], ...] = ()

    @classmethod
    def of(cls, model: nn.Module, policy: Callable[[str], ModulePolicy], scaled: Callable[[str], str]) -> Dtypes:
        """Collect the dtypes of the modules of ``model`` from two functions of a module's path: ``policy`` returns the
        plan's precision of the module, ``scaled`` the scaling of its float8 products.

        Arguments are cast if the policy says so: at the outermost modules of the policy, and at its layers (children of
        containers). Results are cast at the outermost modules.

        Args:
            policy: the `shardc.plan.entries.Precision` of a module, by its path.
            scaled: the scaling of a module's float8 products, by its path.
        """
        module_dtypes: dict[str, ModuleDtypes] = {}
        for path, module in model.named_modules():
            if isinstance(module, InnerTensors):  # its wrapper subclass casts it
                continue
            module_policy, outer = policy(path), path.rpartition(".")[0]
            outermost = not path or policy(outer) != module_policy  # the module around it has another policy
            in_container = bool(path) and isinstance(model.get_submodule(outer), _CONTAINERS)
            layer = in_container and any(True for _ in module.parameters())
            casts = module_policy.cast_forward_inputs  # False, True, or "model": at the outermost modules only
            takes = module_policy.param if casts and (outermost or (layer and casts != "model")) else None
            gives = module_policy.output if outermost else None
            module_dtypes[path] = ModuleDtypes(module_policy.param, module_policy.buffers, takes, gives, scaled(path))
        return cls(tuple((path, dtypes) for path, dtypes in module_dtypes.items() if dtypes != ModuleDtypes()))

    def shortened(self, repeats: Repeats) -> Dtypes:
        """Return the same dtypes for a shortened model, which has only the first blocks of each run of ``repeats``."""
        named = [(repeats.short(path), dtypes) for path, dtypes in self.modules]
        return Dtypes(tuple((path, dtypes) for path, dtypes in named if path is not None))

    def within(self, block: str) -> dict[str, ModuleDtypes]:
        """Return the dtypes of the modules in the module ``block``: path relative to ``block`` -> dtypes."""
        named = [(name_in(path, block), dtypes) for path, dtypes in self.modules]
        return {name: dtypes for name, dtypes in named if name is not None}

    def uncast(self, model: nn.Module) -> tuple[str, str]:
        """Explain a possible mix of dtypes: return (error text, fix) about a buffer that keeps a dtype to which no
        parameter is cast. ("", "") if there is no such buffer.
        """
        by_path = dict(self.modules)
        params = [dtypes.param for dtypes in by_path.values() if dtypes.param is not None]
        buffers = [
            (name, x.dtype)
            for name, x in (model.named_buffers() if params else ())
            if x.is_floating_point() and x.dtype not in params  # else a product with a parameter mixes no dtypes
            and by_path.get(name.rpartition(".")[0], ModuleDtypes()).buffers is None
        ]  # fmt: skip
        if not buffers:
            return "", ""
        name, dtype = buffers[0]
        more = f", as are {len(buffers) - 1} more" if len(buffers) > 1 else ""
        return (
            f"buffer {name!r} is {torch_name(dtype)}{more}: precision(...) casts no buffers by itself",
            f"cast where the model uses it, or write precision(..., buffers={params[0]})",
        )

    @contextlib.contextmanager
    def cast(self, model: nn.Module) -> Iterator[None]:
        """Context manager in which hooks on the modules of ``model`` cast their arguments and results to these
        dtypes.
        """
        with contextlib.ExitStack() as stack:
            for path, dtypes in self.modules:
                module = model.get_submodule(path)
                if dtypes.takes is not None:
                    hook = _cast_arguments(dtypes.takes)
                    stack.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
                if dtypes.gives is not None:
                    stack.enter_context(module.register_forward_hook(_cast_results(dtypes.gives)))
            yield


UNCHANGED = Dtypes()


def _cast_arguments(dtype: torch.dtype) -> Callable[..., tuple[PyTree, PyTree]]:
    """Return a forward pre-hook that casts floating-point arguments to ``dtype``."""
    return lambda _module, args, kwargs: (_floats_to(dtype, args), _floats_to(dtype, kwargs))


def _cast_results(dtype: torch.dtype) -> Callable[..., PyTree]:
    """Return a forward hook that casts floating-point results to ``dtype``."""
    return lambda _module, _args, output: _floats_to(dtype, output)


def _floats_to(dtype: torch.dtype, tree: PyTree) -> PyTree:
    """Return ``tree`` (a pytree) with its floating-point tensors cast to ``dtype``. A container in which nothing
    changes is returned as it is.
    """
    if isinstance(tree, Tensor):
        return tree.to(dtype) if tree.is_floating_point() and tree.dtype != dtype else tree
    if isinstance(tree, dict):
        values = {key: _floats_to(dtype, x) for key, x in tree.items()}
        if all(values[key] is tree[key] for key in tree):
            return tree
        return values if type(tree) is dict else type(tree)(**values)  # an output class of ``transformers``, say
    if isinstance(tree, (tuple, list)):
        items = [_floats_to(dtype, x) for x in tree]
        if all(x is y for x, y in zip(items, tree, strict=True)):
            return tree
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)  # `_fields`: a namedtuple
    return tree
