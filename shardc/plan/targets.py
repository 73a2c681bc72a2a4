"""What inputs, outputs and activations of a plan are about: targets, and pytrees of specs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from shardc.errors import PlanError
from shardc.plan.forms import is_one


@dataclass(frozen=True)
class Target:
    """Which tensor of which modules an activation entry is about.

    Args:
        glob: over module names.
        where: "input", "output", or None where the entry does not say.
        index: position among the inputs or outputs, or the keyword that passes an input.
        explicit: whether ``where`` cannot be part of a module's name.
    """

    glob: str
    where: str | None = None
    index: int | str = 0
    explicit: bool = False


def split_target(target: str) -> Target:
    """``layers.*.attn`` is the first output of those modules; ``layers.*.attn.input`` and ``layers.*.attn:input``
    the first input; ``layers.*.attn:input[1]`` the second, ``:input[mask]`` the one passed by that keyword.

    Only ``:`` or an index makes it explicit: with a dot, the module could itself be called ``input`` or ``output``.
    """
    match = re.fullmatch(r"(.*?)([.:]|^)(input|output)(?:\[(\w+)\])?", target)
    if not match:
        return Target(target)
    glob, separator, where, index = match.groups()
    position: int | str = int(index) if index and index.isdigit() else index or 0
    return Target(glob, where, position, separator == ":" or index is not None)


def flatten(value: Any, entry: str, path: str = "") -> list[tuple[str, Any]]:
    """(dotted path, spec of one tensor) for each spec in a pytree of specs; None says nothing."""
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
