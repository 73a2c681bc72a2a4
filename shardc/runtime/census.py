"""The modules, parameters and buffers of a model, from one walk that is kept until something comes or goes.

A model is asked for them several times a step, and torch walks all modules each time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from operator import is_, itemgetter, methodcaller
from typing import Any

import torch
from torch import Tensor, nn

from shardc.ir.reads import HOOKS, global_hooks

_HELD = itemgetter("_modules", "_parameters", "_buffers", *HOOKS)
_values: Any = methodcaller("values")


@dataclass(frozen=True)
class Mode:
    """What of a model decides which program it runs, but for its inputs and for what its code reads.

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
        self._attributes = list(map(vars, self.modules))
        own = list(chain.from_iterable(map(_HELD, self._attributes)))
        self._dicts = [*own, *global_hooks()]
        self._sizes = list(map(len, self._dicts))
        self._full = [held for held in self._dicts if held]
        self._names, self._things = list(chain.from_iterable(self._full)), self._present()

    def holds(self) -> bool:
        """Whether each module still has the same things, and the same hooks, under the same names."""
        return (
            all(map(is_, chain.from_iterable(map(_HELD, self._attributes)), self._dicts))
            and list(map(len, self._dicts)) == self._sizes
            and _same(chain.from_iterable(self._full), self._names)
            and _same(self._present(), self._things)
        )

    def _present(self) -> list[Any]:
        return list(chain.from_iterable(map(_values, self._full)))

    def mode(self) -> Mode:
        return Mode(
            tuple([attributes["training"] for attributes in self._attributes]),
            tuple([param.requires_grad for param in self._parameters]),
            tuple([tensor.dtype for tensor in (*self._parameters, *self._buffers)]),
        )


def _same(now: Iterable[Any], before: list[Any]) -> bool:
    """Whether ``now`` is, one by one, what was there before, of which there were as many."""
    return all(map(is_, now, before))


def _once(named: dict[str, Any]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in named.values()}.values())
