"""Matches globs of a plan against a model's names, and suggests similar names."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher
from fnmatch import fnmatchcase

from shardc.errors import PlanError


def matching(glob: str, names: Iterable[str]) -> list[str]:
    """Return the names that ``glob`` matches: ``*`` matches any text with dots, ``?`` one character, ``[01]`` a set.

    A glob that starts with ``./`` matches part by part: its ``*`` does not match dots.
    """
    return [name for name in names if name == glob or (name and _matches(glob, name))]


def _matches(glob: str, name: str) -> bool:
    if not glob.startswith("./"):
        return fnmatchcase(name, glob)
    parts, globs = name.split("."), glob[2:].split(".")
    return len(parts) == len(globs) and all(map(fnmatchcase, parts, globs))


def by_part(path: str) -> str:
    """Return the path as a glob in which each star matches one part of a name, without dots."""
    return f"./{path}" if any(char in path for char in "*?[") else path


def must_match(glob: str, names: Iterable[str], kind: str, entry: str) -> list[str]:
    """Return the names that ``glob`` matches.

    Raises:
        PlanError: there are none; the message suggests similar names.
    """
    names = list(names)
    matches = matching(glob, names)
    if matches:
        return matches
    near = near_names(glob, names)
    raise PlanError(
        f"{glob!r} matches no {kind}",
        plan_entry=entry,
        fix=f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {shorten(names)}",
    )


def near_names(glob: str, names: list[str]) -> list[str]:
    """Return up to three names similar to ``glob``, the most similar first; numbers and stars count as equal."""
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
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def shorten(names: list[str], limit: int = 8) -> str:
    """Return the first ``limit`` names as text, with the number of the others."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(repr, names[:limit])) + more if names else "none"
