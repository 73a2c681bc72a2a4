"""Names in a plan: matches globs against a model's names, suggests similar names, and parses the names of
activations.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import SequenceMatcher
from fnmatch import fnmatchcase

from shardc.errors import PlanError
from shardc.plan.layout_spec import is_one
from shardc.validate import did_you_mean


def matching(glob: str, names: Iterable[str]) -> list[str]:
    """Return the names that ``glob`` matches: ``*`` matches any text with dots, ``?`` one character, ``[01]`` a set.

    A glob that starts with ``./`` matches part by part: its ``*`` does not match dots.
    """
    return [name for name in names if name == glob or (name and _matches(glob, name))]


def _matches(glob: str, name: str) -> bool:
    """Return whether ``glob`` matches ``name``. A glob that starts with ``./`` is matched between the dots, so that
    ``*`` matches no dot.
    """
    if not glob.startswith("./"):
        return fnmatchcase(name, glob)
    parts, globs = name.split("."), glob[2:].split(".")
    return len(parts) == len(globs) and all(map(fnmatchcase, parts, globs))


def by_part(path: str) -> str:
    """Return ``path`` as a glob of the plan in which each star stands for one part of a name, without dots."""
    return f"./{path}" if any(char in path for char in "*?[") else path


def must_match(glob: str, names: Iterable[str], kind: str, entry: str) -> list[str]:
    """Return the names that ``glob`` matches; raise PlanError, with similar names, if there are none.

    Args:
        kind: the kind of names, for the error.
        entry: the plan entry, for the error.

    Raises:
        PlanError: there are none; the message suggests similar names.
    """
    names = list(names)
    matches = matching(glob, names)
    if matches:
        return matches
    owner, _, last = glob.rpartition(".")  # of a parameter's glob, where modules are meant
    near = [owner] if last in ("weight", "bias") and matching(owner, names) else near_names(glob, names)
    fix = did_you_mean(near, f"there are {shorten(names)}")
    raise PlanError(f"{glob!r} matches no {kind}", plan_entry=entry, fix=fix)


def near_names(glob: str, names: list[str]) -> list[str]:
    """Return up to three names similar to ``glob`` to suggest in an error, the most similar first. Differing numbers
    and stars do not count.
    """
    wanted = _plain(glob).removeprefix("./").removeprefix("*.")
    depth = wanted.count(".") + 1
    scores = {}
    for name in names:
        spelled = _plain(name)
        tail = ".".join(spelled.split(".")[-depth:])
        scores[name] = max(SequenceMatcher(None, wanted, text).ratio() for text in (spelled, tail))
    near = sorted((name for name in names if scores[name] >= 0.6), key=lambda name: -scores[name])
    return near[:3]


def _plain(name: str) -> str:
    """Return ``name`` with ``*`` in place of each dotted part that is a number."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def shorten(names: list[str], limit: int = 8) -> str:
    """Return the first ``limit`` of ``names`` as text, followed by the number of names left out."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(repr, names[:limit])) + more if names else "none"


@dataclass(frozen=True)
class Target:
    """The target of an activation entry: an input or output of the modules that a glob matches.

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
    """Parse ``target``, the text by which a plan entry names an activation. Return a `Target`: module glob, "input" or
    "output" (None if not said), and the position or keyword of the tensor.

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


def flatten(value: object, entry: str, path: str = "") -> list[tuple[str, object]]:
    """Return the specs in nested lists and dicts as pairs (dotted path, spec of one tensor). None, for a tensor without
    a spec, is skipped.

    Args:
        value: the specs.
        entry: the plan entry, for errors.
        path: dotted path of ``value``.
    """
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
