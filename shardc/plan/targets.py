"""Parses the targets of a plan's inputs, outputs and activations, and flattens pytrees of specs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from shardc.errors import PlanError
from shardc.plan.spec_forms import is_one


@dataclass(frozen=True)
class Target:
    """What an activation entry applies to: an input or output of the modules that a glob matches.

    Args:
        glob: glob of module names.
        where: "input", "output", or None if the entry does not say.
        index: position among the inputs or outputs, or the keyword that passes an input.
        explicit: whether ``where`` cannot be part of a module's name.
    """

    glob: str
    where: str | None = None
    index: int | str = 0
    explicit: bool = False


def split_target(target: str) -> Target:
    """Parse the target of an activation entry: glob of modules, "input" or "output", and which of several.

        layers.*.attn                                   the first output of these modules
        layers.*.attn.input, layers.*.attn:input        the first input
        layers.*.attn:input[1], layers.*.attn:input[mask]    the second input, the one passed by keyword ``mask``

    Only ``:`` or an index makes it explicit: with a dot, a module could itself be called ``input`` or ``output``.
    """
    match = re.fullmatch(r"(.*?)([.:]|^)(input|output)(?:\[(\w+)\])?", target)
    if not match:
        return Target(target)
    glob, separator, where, index = match.groups()
    position: int | str = int(index) if index and index.isdigit() else index or 0
    return Target(glob, where, position, separator == ":" or index is not None)


def flatten(value: Any, entry: str, path: str = "") -> list[tuple[str, Any]]:
    """Return (dotted path, spec of one tensor) for each spec in a pytree of specs; None is skipped."""
    if value is None:
        return []
    if is_one(value):
        return [(path, value)]
    if isinstance(value, dict):
        items = [(str(name), item) for name, item in value.items()]
    elif isinstance(value, list | tuple):
        items = [(str(index), item) for index, item in enumerate(value)]
    else:
        raise PlanError(
            f"{value!r} is neither a spec nor a list or dict of specs",
            plan_entry=entry,
            fix='write ("dp", None), (Shard(0), Replicate()) or "@dp, _"',
        )
    return [leaf for name, item in items for leaf in flatten(item, entry, f"{path}.{name}" if path else name)]
