"""Structural copies of module trees: the user's modules stay as they are, the copy has its own tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

TensorFn = Callable[[str, torch.Tensor], torch.Tensor]


def clone_tree(module: nn.Module, tensor_fn: TensorFn) -> nn.Module:
    """A copy of the tree under ``module`` whose parameters and buffers are ``tensor_fn(name, tensor)``.

    ``name`` is the qualified name under which a tensor is first met. What is shared in the original (a module
    or a tensor at several places) is shared in the copy; ``None`` entries stay None. Hooks, training flags
    and other attributes are copied shallowly; an attribute that is itself a module or a parameter of the
    tree (or a list, tuple or dict of them) outside ``_modules`` still refers to the original.
    """
    return _Cloner(tensor_fn).module(module, "")


def subclass(module: nn.Module, mixin: type) -> None:
    """Gives ``module`` the class ``Sharded<its class>``, a subclass of ``mixin`` and of its own class.

    ``mixin`` comes first, so that its methods win; ``isinstance(module, UserClass)`` still holds.
    """
    cls = type(module)
    module.__class__ = type(f"Sharded{cls.__name__}", (mixin, cls), {"__module__": cls.__module__})


class _Cloner:
    def __init__(self, tensor_fn: TensorFn) -> None:
        self._tensor_fn = tensor_fn
        self._modules: dict[nn.Module, nn.Module] = {}
        self._tensors: dict[int, torch.Tensor] = {}

    def module(self, module: nn.Module, prefix: str) -> nn.Module:
        if module in self._modules:
            return self._modules[module]
        clone = self._modules[module] = module.__new__(type(module))
        clone.__dict__.update({key: _own(value) for key, value in module.__dict__.items()})
        for kind in ("_parameters", "_buffers"):
            entries = getattr(module, kind).items()
            clone.__dict__[kind] = {name: self._tensor(tensor, prefix + name) for name, tensor in entries}
        clone.__dict__["_modules"] = {
            name: None if child is None else self.module(child, f"{prefix}{name}.")
            for name, child in module._modules.items()
        }
        return clone

    def _tensor(self, tensor: torch.Tensor | None, name: str) -> torch.Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in self._tensors:
            self._tensors[id(tensor)] = self._tensor_fn(name, tensor)
        return self._tensors[id(tensor)]


def _own(value: object) -> object:
    """A shallow copy of the containers that a module changes in place (hooks, sets of names); all else as it is."""
    return value.copy() if isinstance(value, dict | set | list) else value
