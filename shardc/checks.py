"""Checks of the arguments of `shardc.compile`: types, wrapped models, lazy models."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from shardc._compat import FakeTensor, is_wrapper, pytree
from shardc.capture.dynamo_reads import OF_LOSS
from shardc.errors import InputError, PrecompiledError, ShardcWarning
from shardc.ir.code import calling_line
from shardc.ir.inner import flattened
from shardc.ir.kinds import why_refused
from shardc.ir.mesh import Mesh
from shardc.ir.module_paths import is_public
from shardc.lower import BACKENDS
from shardc.passes.options import Options
from shardc.plan.value import Plan
from shardc.precompiled import Precompiled
from shardc.runtime.memory_ranges import range_of
from shardc.runtime.module import ShardedModule
from shardc.search.request import Auto
from shardc.validate import checked


@dataclass(frozen=True)
class Arguments:
    """The arguments of `shardc.compile` and `shardc.shard`."""

    model: nn.Module | Callable[..., Any]
    mesh: DeviceMesh | Mesh
    plan: Plan | Auto | None
    loss: Callable[..., Any] | None
    backend: str
    options: Options | None
    precompiled: str | Path | Precompiled | Sequence[str | Path | Precompiled]
    dynamic: Mapping[str, Mapping[int, str]] | None
    init_sync: bool

    def check(self, in_place: bool) -> None:
        """Raises InputError if an argument is of the wrong kind, or the model cannot be sharded ``in_place``.

        Raises PrecompiledError if saved programs are given and the model has tensors of wrapper subclasses.
        """
        _check_model(self.model, self.loss)
        if not isinstance(self.plan, Plan | Auto | None):
            fix = 'pass shardc.fsdp("dp"), shardc.Plan(...), or several with |'
            if isinstance(self.plan, Mapping):  # of `parallelize_module`
                fix += "; styles of parallelize_module go through shardc.Plan.from_styles"
            raise InputError(f"{self.plan!r} is not a plan", fix=fix)
        checked(self.backend, Literal[BACKENDS], "backend")
        checked(self.options, Options | None, "options", fix="pass shardc.Options(...)")
        checked(self.loss, Callable[..., Any] | None, "loss", fix="pass a function of the output and the targets")
        checked(self.init_sync, bool, "init_sync")
        kinds = str | Path | Precompiled | tuple[str | Path | Precompiled, ...]
        fix = "pass the folder of a saved program, or what shardc.load returned"
        checked(self.precompiled, kinds, "precompiled", fix=fix)
        if in_place:
            _check_in_place(self.model)
        if self.precompiled not in ((), []) and isinstance(self.model, nn.Module) and _has_inner_tensors(self.model):
            name = type(self.model).__name__
            raise PrecompiledError(
                f"{name} has tensors of wrapper subclasses, whose ops may be code that no key names",
                fix="compile without precompiled=",
            )


def _check_model(model: object, loss: object) -> None:
    """Raises InputError if ``model`` cannot be compiled (it is no callable, or already compiled or wrapped), or if
    model or loss is a class.
    """
    if not callable(model):
        raise InputError(f"{model!r} is not a model", fix="pass an nn.Module or a function of tensors")
    for what, value in (("model", model), ("loss", loss)):
        if isinstance(value, type):
            raise InputError(f"the {what} {value.__name__} is a class", fix=f"make one first: {value.__name__}(...)")
    if isinstance(model, ShardedModule):
        raise InputError(f"the model {type(model).__name__} is compiled already", fix="pass the original model")
    if (original := getattr(model, "_orig_mod", None)) is not None:
        raise InputError(
            f"the model {type(original).__name__} is wrapped by torch.compile; shardc uses Inductor itself",
            fix="pass the model that torch.compile was given",
        )
    if isinstance(loss, nn.Module) and (trained := [name for name, x in loss.named_parameters() if x.requires_grad]):
        raise InputError(f"the loss {type(loss).__name__} has parameters that are trained: {trained[0]!r}", fix=OF_LOSS)
    if isinstance(model, nn.Module) and _has_own(model, "shardc"):
        raise InputError(
            f"the model {type(model).__name__} has an attribute 'shardc', which a compiled module has",
            fix="give that attribute of the model another name",
        )
    if isinstance(model, nn.Module):
        _check_wrappers(model)
        _check_tensors(model)
        _check_memory(model)


def _check_in_place(model: object) -> None:
    """Raises InputError if ``model`` cannot be sharded in place: it is a function, has wrapper tensors, or has
    gradients.
    """
    instead = "use module = shardc.compile(...)"
    if not isinstance(model, nn.Module):
        raise InputError(f"{model!r} is a function, which has nothing to shard", fix=instead)
    if _has_inner_tensors(model):
        raise InputError(f"{type(model).__name__} has tensors of wrapper subclasses, which stay in it", fix=instead)
    for name, param in model.named_parameters():
        if param.grad is not None:
            raise InputError(
                f"parameter {name!r} has a gradient, which its shards would not have", fix="call model.zero_grad()"
            )


def _has_inner_tensors(model: nn.Module) -> bool:
    """Return whether ``model`` has tensors of wrapper subclasses, which are compiled as their inner tensors."""
    return flattened(model) is not model


def _has_own(model: nn.Module, name: str) -> bool:
    """Return whether ``model`` itself has an attribute ``name``. Its ``__getattr__`` is not called."""
    tables = (model._parameters, model._buffers, model._modules)
    return any(name in kind for kind in tables) or inspect.getattr_static(model, name, model) is not model


def _check_wrappers(model: nn.Module) -> None:
    """Raises InputError if a submodule is wrapped (by DDP, FSDP, DataParallel or torch.compile), already compiled by
    shardc, or TorchScript.
    """
    for name, module in model.named_modules():
        what = f"module {name!r}" if name else "the model"
        if isinstance(module, ShardedModule):
            fix = "compile the whole model once, of original parts"
            raise InputError(f"{what}, {type(module).__name__}, is compiled already", fix=fix)
        if "_orig_mod" in module._modules:
            raise InputError(
                f"{what} is wrapped by torch.compile; shardc uses Inductor itself",
                fix=f"leave torch.compile out: put model.{name}._orig_mod in its place",
            )
        if isinstance(module, DataParallel | DistributedDataParallel | FullyShardedDataParallel):
            kind = type(module).__name__
            raise InputError(
                f"{what} is wrapped by {kind}, and a compiled module sends gradients itself",
                fix=f"pass the model that {kind} was given: {f'model.{name}'.rstrip('.')}.module",
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                f"{what} is a script of torch.jit, which cannot be traced", fix="pass the model that it was made of"
            )


def _check_tensors(model: nn.Module) -> None:
    """Raises InputError for a parameter or buffer that cannot be sharded: lazy (without a shape yet), sparse,
    quantised, or of an unsupported class.
    """
    attributes = (
        (f"{path}.{key}".lstrip("."), x)
        for path, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, Tensor | list | tuple | dict) and is_public(key)
        for x in pytree.tree_leaves(value)
        if isinstance(x, Tensor)
    )
    named_tensors = model.named_parameters(), model.named_buffers(), attributes
    for kind, named in zip(("parameter", "buffer", "attribute"), named_tensors, strict=True):
        for name, x in named:
            if isinstance(x, UninitializedParameter | UninitializedBuffer):
                raise InputError(
                    f"{kind} {name!r} is of a lazy module and has no shape yet",
                    source=calling_line(),
                    fix="call the model once, then compile it",
                )
            if refused := why_refused(x, stored=kind != "attribute"):
                what, instead = refused
                raise InputError(
                    f"{kind} {name!r} is {what}", fix=f"put in its place {instead.format(f'model.{name}')}"
                )


def _check_memory(model: nn.Module) -> None:
    """Raises InputError if a trained parameter shares memory with another parameter or buffer: one device changes both,
    and in a compiled module each has memory of its own. Warns if others share memory.

    Tensors with gaps between their elements are left out.
    """
    ranges: list[tuple[str, int, int, str, bool]] = []  # device, addresses, name, whether it is trained
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, x in named:
            if x.is_meta or is_wrapper(x) or isinstance(x, FakeTensor | DTensor):
                continue  # it has no memory of its own
            start, end = range_of(x)
            if start < end and end - start == x.numel() * x.itemsize:
                ranges.append((str(x.device), start, end, f"{kind} {name!r}", x.requires_grad))
    before: list[tuple[str, int, int, str, bool]] = []  # ranges that reach to the present one
    for entry in sorted(ranges, key=lambda x: (x[0], x[1], -x[2])):  # the longer of two first
        device, start, _, name, trained = entry
        before = [other for other in before if other[0] == device and other[2] > start]
        for *_, other, other_trained in before:
            what = f"{other} and {name} share memory and are two tensors, which a compiled module has apart"
            if trained or other_trained:
                fix = "tie them by giving both modules one nn.Parameter, or clone() one; transpose it in forward"
                raise InputError(what, source=calling_line(), fix=fix)
            warnings.warn(ShardcWarning(f"{what}: a change of one does not reach the other"), stacklevel=7)
        before.append(entry)
