"""Checks of the arguments of `shardc.compile`: types, wrapped models, lazy models."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from shardc._compat import pytree
from shardc.errors import InputError
from shardc.ir.code import calling_line
from shardc.ir.inner import flattened
from shardc.ir.kinds import why_refused
from shardc.lower import BACKENDS
from shardc.passes.options import Options
from shardc.plan.value import Plan
from shardc.precompiled import Precompiled
from shardc.runtime.module import ShardedModule
from shardc.search.request import Auto
from shardc.validate import checked


def check_arguments(
    model: object, plan: object, backend: object, options: object, loss: object, precompiled: object, init_sync: object
) -> None:
    """Raises InputError if an argument of `compile` is of the wrong kind."""
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
    if isinstance(model, nn.Module) and _has_own(model, "shardc"):
        raise InputError(
            f"the model {type(model).__name__} has an attribute 'shardc', which a compiled module has",
            fix="give that attribute of the model another name",
        )
    if isinstance(model, nn.Module):
        _check_wrappers(model)
        _check_tensors(model)
    if not isinstance(plan, Plan | Auto):
        raise InputError(f"{plan!r} is not a plan", fix='pass shardc.fsdp("dp"), shardc.Plan(...), or several with |')
    checked(backend, Literal[BACKENDS], "backend")
    checked(options, Options | None, "options", fix="pass shardc.Options(...)")
    checked(loss, Callable[..., Any] | None, "loss", fix="pass a function of the output and the targets")
    kinds = str | Path | Precompiled | tuple[str | Path | Precompiled, ...]
    checked(init_sync, bool, "init_sync")
    checked(precompiled, kinds, "precompiled", fix="pass the folder of a saved program, or what shardc.load returned")


def check_in_place(model: object) -> None:
    """Raises InputError if ``model`` cannot be sharded in place."""
    instead = "use module = shardc.compile(...)"
    if not isinstance(model, nn.Module):
        raise InputError(f"{model!r} is a function, which has nothing to shard", fix=instead)
    if flattened(model) is not model:
        raise InputError(f"{type(model).__name__} has tensors of wrapper subclasses, which stay in it", fix=instead)
    for name, param in model.named_parameters():
        if param.grad is not None:
            raise InputError(
                f"parameter {name!r} has a gradient, which its shards would not have", fix="call model.zero_grad()"
            )


def _has_own(model: nn.Module, name: str) -> bool:
    """Return whether ``model`` has an attribute ``name``, without calling its ``__getattr__``."""
    tables = (model._parameters, model._buffers, model._modules)
    return any(name in kind for kind in tables) or inspect.getattr_static(model, name, model) is not model


def _check_wrappers(model: nn.Module) -> None:
    """Raises InputError if a submodule is wrapped by DDP, FSDP or DataParallel, or is a TorchScript module."""
    for name, module in model.named_modules():
        what = f"module {name!r}" if name else "the model"
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
    """Raises InputError if a parameter or buffer is lazy (no shape yet), sparse, quantised or of a refused class."""
    attributes = (
        (f"{path}.{key}".lstrip("."), x)
        for path, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, Tensor | list | tuple | dict) and not key.startswith("_")
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
