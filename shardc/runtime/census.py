"""The modules, parameters and buffers of a model, from one walk that is kept until something comes or goes.

A model is asked for them several times a step, and torch walks all modules each time.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Mode:
    """What of a model decides which program it runs, but for its inputs.

    Args:
        training: train or eval, of each module.
        grads: whether each parameter needs a gradient.
        dtypes: of each parameter, then of each buffer.
    """

    training: tuple[bool, ...]
    grads: tuple[bool, ...]
    dtypes: tuple[torch.dtype, ...]


class Census:
    """What a model holds, in the orders of ``modules()``, ``parameters()`` and ``buffers()``.

    Attributes:
        modules: once each.
        parameters, buffers: by each of their names, those of tied ones too.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = list(model.modules())
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.buffers = dict(model.named_buffers(remove_duplicate=False))
        self._parameters, self._buffers = _once(self.parameters), _once(self.buffers)
        self._held = [_held(module) for module in self.modules]

    def holds(self) -> bool:
        """Whether each module still has the same things under the same names."""
        return all(map(_same, self._held, map(_held, self.modules)))

    def mode(self) -> Mode:
        return Mode(
            tuple([module.training for module in self.modules]),
            tuple([param.requires_grad for param in self._parameters]),
            tuple([tensor.dtype for tensor in (*self._parameters, *self._buffers)]),
        )

    def set_mode(self, mode: Mode) -> None:
        """Gives the same mode to another model of the same structure, whose parameters are on ``meta``."""
        for module, training in zip(self.modules, mode.training, strict=True):
            module.training = training
        for param, needs in zip(self._parameters, mode.grads, strict=True):
            param.requires_grad_(needs)
        for tensor, dtype in zip((*self._parameters, *self._buffers), mode.dtypes, strict=True):
            if tensor.dtype != dtype:
                tensor.data = tensor.data.to(dtype)


def _held(module: nn.Module) -> tuple[Any, ...]:
    children, parameters, buffers = module._modules, module._parameters, module._buffers
    return (*children, *children.values(), *parameters, *parameters.values(), *buffers, *buffers.values())


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))


def _once(named: dict[str, Any]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in named.values()}.values())
