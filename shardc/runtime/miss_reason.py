"""Why a call finds no program in the cache of its module, as text for the log ``shardc.cache``."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, NamedTuple

from torch import nn

from shardc.ir.deferred import Deferred
from shardc.logs import CACHE, timed
from shardc.runtime.signature import CacheKey, Signature
from shardc.validate import torch_name

_SHOWN = 3  # differences in a message
# Field of `Mode` -> what it holds for each module, parameter or tensor.
_MODES = {
    "training": "train or eval mode of {} modules",
    "grads": "requires_grad of {} parameters",
    "dtypes": "the dtype of {} tensors",
}


class Wanted(NamedTuple):
    """A call for which there is no program, with all that selects one: signature, parameters whose gradients stay
    unreduced, model and loss.
    """

    call: Signature
    deferred: Deferred
    model: nn.Module
    loss: object


@contextmanager
def compiling(programs: Collection[CacheKey], wanted: Wanted) -> Iterator[None]:
    """Context manager around the compilation of a program for the call ``wanted``. Logs why none of ``programs`` fits
    that call, and at exit the seconds that the compilation took.

    Args:
        programs: the keys of the programs that there are, the latest last.
        wanted: the call.
    """
    if CACHE.isEnabledFor(logging.INFO):
        CACHE.info("miss: %s", reason(tuple(programs), wanted))
    with timed("program"):
        yield


def reason(programs: Sequence[CacheKey], wanted: Wanted) -> str:
    """Return, as text, why none of ``programs`` fits the call ``wanted``: how the nearest call that has a program
    differs, or which value that a capture read has changed.
    """
    if not programs:
        return "the first call"
    call, deferred = wanted.call, wanted.deferred
    for key in reversed(programs):
        if key.call == call and key.deferred == deferred:
            values = key.guards.reads.values(wanted.model, wanted.loss)
            was = dict(key.guards.values)
            changed = [f"{name} is {value} and was {was.get(name)}" for name, value in values if was.get(name) != value]
            return _listed(changed) if changed else "the graphs of each pass are needed, which a stored program lacks"
    for key in reversed(programs):
        if key.call == call:
            return f"{len(deferred.names)} gradients stay unreduced and {len(key.deferred.names)} did (no_sync)"
    nearest = min((differences(call, key.call) for key in reversed(programs)), key=len)
    return _listed(nearest)


def differences(call: Signature, other: Signature) -> list[str]:
    """Return a text for each difference of ``call`` from ``other``."""
    if call.spec != other.spec or call.names != other.names:
        return [f"the arguments are {', '.join(call.names)} and were {', '.join(other.names)}"]
    pairs = zip(call.names, call.leaves, other.leaves, strict=True)
    out = [f"{name} is {_shown(x)} and was {_shown(y)}" for name, x, y in pairs if x != y]
    for what, now, then in zip(call.surroundings._fields, call.surroundings, other.surroundings, strict=True):
        if now != then:
            out.append(f"{what} is {now} and was {then}")
    for field, what in _MODES.items():
        flags = zip_longest(getattr(call.mode, field), getattr(other.mode, field))
        if changed := sum(now != then for now, then in flags):
            out.append(f"{what.format(changed)} changed")
    return out


def _shown(leaf: Any) -> str:
    """Return the description of an argument (`Like` for a tensor, `Constant` for others) as text: "float32[8, 4],
    requires_grad".
    """
    if not hasattr(leaf, "shape"):
        return repr(leaf.value)
    grad = ", requires_grad" if leaf.requires_grad else ""
    return f"{torch_name(leaf.dtype)}{list(leaf.shape)}{grad}"


def _listed(texts: list[str]) -> str:
    """Join the first few of ``texts`` to one text. It ends with the number of texts that are left out."""
    more = f", and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return "; ".join(texts[:_SHOWN]) + more
