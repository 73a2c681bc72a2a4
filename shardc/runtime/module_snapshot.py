"""A snapshot of a model's modules, parameters and buffers, from one walk; each step needs them several times."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_, itemgetter, methodcaller
from typing import Any

import torch
from torch import Tensor, nn

from shardc.ir.reads import HOOKS, global_hooks

_KINDS = ("_modules", "_parameters", "_buffers", *HOOKS)
_values: Any = methodcaller("values")
_training, _requires_grad, _dtype = itemgetter("training"), attrgetter("requires_grad"), attrgetter("dtype")


@dataclass(frozen=True)
class Mode:
    """Mode flags of a model that select its program, besides inputs and guards.

    A snapshot has one object for each state.

    Args:
        training: train or eval mode of each module.
        grads: ``requires_grad`` of each parameter.
        dtypes: dtype of each parameter, then of each buffer.
    """

    training: tuple[bool, ...]
    grads: tuple[bool, ...]
    dtypes: tuple[torch.dtype, ...]


class ModuleSnapshot:
    """The modules (each once), parameters and buffers (by each of their names) of a model at one time."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = list(model.modules())
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.buffers = dict(model.named_buffers(remove_duplicate=False))
        self._parameters = _once(self.parameters)
        self._tensors = [*self._parameters, *_once(self.buffers)]
        self._attributes = list(map(vars, self.modules))
        places = [(held, kind) for held in self._attributes for kind in _KINDS]
        self._places = [(held, kind) for held, kind in places if held[kind]]
        self._full = [held[kind] for held, kind in self._places]
        # Most are empty: one check per module.
        empty = [(held, [kind for kind in _KINDS if not held[kind]]) for held in self._attributes]
        self._empty = [(itemgetter(*kinds, kinds[0]), held) for held, kinds in empty if kinds]
        self._sizes = list(map(len, self._full))
        self._names = list(chain.from_iterable(self._full))
        self._things = list(chain.from_iterable(map(_values, self._full)))
        self._global = list(map(dict, global_hooks()))
        self._mode: Mode | None = None
        self._modes: dict[tuple[Any, ...], Mode] = {}

    def holds(self) -> bool:
        """Whether the model still has the same modules, parameters, buffers and hooks under the same names."""
        if any(map(any, [get(held) for get, held in self._empty])):
            return False
        if not all(map(is_, [held[kind] for held, kind in self._places], self._full)):
            return False
        return (
            list(chain.from_iterable(self._full)) == self._names
            and all(map(is_, chain.from_iterable(map(_values, self._full)), self._things))
            and list(map(len, self._full)) == self._sizes
            and global_hooks() == self._global
        )

    def mode(self) -> Mode:
        """Returns the current mode; equal modes are one object, so that they compare by identity."""
        now = (
            tuple(map(_training, self._attributes)),
            tuple(map(_requires_grad, self._parameters)),
            tuple(map(_dtype, self._tensors)),
        )
        last = self._mode
        if last is None or now != (last.training, last.grads, last.dtypes):
            last = self._mode = self._modes.setdefault(now, Mode(*now))
        return last


def _once(named: dict[str, Any]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in named.values()}.values())
