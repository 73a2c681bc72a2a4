"""Selects the program of a call by the attributes, containers, globals and hooks that its capture read (guards)."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from shardc.errors import ShardcWarning
from shardc.ir.executable import Executable
from shardc.ir.reads import Lookup, Reads, Values, parse
from shardc.runtime.signature import Signature

_MANY = 8  # programs per call signature before a warning; as Dynamo's limit


class GuardCache:
    """Per call signature, the guards of its programs: the places that captures read, and their values."""

    def __init__(self) -> None:
        self._fixed: dict[Signature, list[tuple[Reads, Values]]] = {}
        self._sized: dict[Signature, list[dict[Reads, Values]]] = {}

    def reads(self) -> Iterator[Reads]:
        """Yields, for each capture, the places (attributes, items, globals) that it read."""
        yield from (reads for each in self._fixed.values() for reads, _ in each)
        yield from (reads for each in self._sized.values() for one in each for reads in one)

    def find(self, call: Signature, model: nn.Module, loss: Any) -> Signature | None:
        """Returns the signature of a program whose guards hold for ``model`` and ``loss`` now; None if none do."""
        for reads, values in self._fixed.get(call, ()):
            if reads.values(model, loss) == values:
                return replace(call, reads=values)
        return None

    def add(self, signature: Signature, reads: Reads) -> None:
        """Adds the reads of the capture for ``signature``; warns if many programs differ in nothing else."""
        variants = self._fixed.setdefault(replace(signature, reads=()), [])
        if (reads, signature.reads) in variants:
            return
        variants.append((reads, signature.reads))
        if len(variants) >= _MANY and len(variants) & (len(variants) - 1) == 0:
            warnings.warn(ShardcWarning(_changing([values for _, values in variants])), stacklevel=2)

    def find_sized(self, call: Signature, model: nn.Module, loss: Any) -> Signature:
        """Returns the signature of a call without dynamic sizes whose guards hold; adds a new one if none do."""
        variants = self._sized.setdefault(call, [])
        for at, variant in enumerate(variants):
            if all(reads.values(model, loss) == values for reads, values in variant.items()):
                return replace(call, reads=(("variant", str(at)),))
        variants.append({})
        return replace(call, reads=(("variant", str(len(variants) - 1)),))

    def add_sized(self, signature: Signature, reads: Reads, model: nn.Module, loss: Any) -> bool:
        """Adds the reads of a capture to a signature that `find_sized` returned; returns whether they are new."""
        variant = self._sized[replace(signature, reads=())][int(signature.reads[0][1])]
        new = reads not in variant
        variant.setdefault(reads, reads.values(model, loss))
        return new


def settled(program: Executable, model: nn.Module, loss: Any) -> Signature:
    """Sets the attributes that the model's first call sets, and returns the signature of the calls after it."""
    reads = program.reads
    at = Lookup(model, loss, reads.scopes)
    for expression, value in reads.sets:
        _, owner, name = parse(expression)
        setattr(at(owner), name, value)
    signature: Signature = replace(program.identity.signature, reads=reads.values(model, loss))
    return signature


def _changing(variants: list[Values]) -> str:
    values_by_name = [dict(values) for values in variants]
    differ = [name for name in values_by_name[-1] if len({values.get(name) for values in values_by_name}) > 1]
    shown = [
        f"{_shown(name)} is {values_by_name[-1][name]} and was {values_by_name[-2].get(name, 'not read')}"
        for name in differ[:3]
    ]
    return (
        f"the module was compiled {len(variants)} times for calls that differ only in what its code reads, last "
        f"because {' and '.join(shown)}; make a value that changes from step to step an input or a buffer (a "
        "tensor), or do not read it in forward"
    )


def _shown(name: str) -> str:
    return re.sub(r"\._modules\['([^']+)'\]", r".\1", name)
