"""``--option NAME=VALUE``: the fields of `shardc.Options` on the command line."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Protocol

import shardc
from shardc.cost import hardware
from shardc.cost.hardware import Hardware
from shardc.cost.model import CostModel
from shardc.errors import InputError
from shardc.validate import near

NAMES = tuple(field.name for field in fields(shardc.Options))
_OBJECTS = ("capture", "pipeline", "hooks")  # options whose values are objects of the target's file
_WORDS = {"true": True, "false": False, "none": None}


class Target(Protocol):
    """The target of a command (`shardc.cli.target.Target`): it finds objects of its file by name."""

    def named(self, name: str, what: str) -> Any: ...


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add the argument for options of `shardc.compile`."""
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE",
        help="an option of shardc.Options, as 'bucket_size=450 MiB' or decompose=1; may be given several times",
    )  # fmt: skip


def parsed(texts: Sequence[str], target: Target) -> dict[str, Any]:
    """Return name -> value of the options in ``texts``, each ``NAME=VALUE``.

    Values are Python literals, or text. ``cost`` and ``bucket_size`` may name a hardware, or the file that
    ``calibrate`` wrote; ``capture``, ``pipeline`` and ``hooks`` name objects of the target's file.

    Raises:
        InputError: no such option, or no such object in the target's file.
    """
    out: dict[str, Any] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals:
            raise InputError(f"--option {text}: there is no value", fix="write it as bucket_size=450MiB")
        if name not in NAMES:
            raise InputError(f"--option {text}: there is no option {name!r}", fix=near(name, NAMES))
        out[name] = _value(name, value, target)
    return out


def options_of(target: Target, texts: Sequence[str], described: Hardware | None = None, **defaults: Any) -> Any:
    """Return the `shardc.Options` of a command: ``defaults``, then the options in ``texts``.

    Args:
        described: the hardware of a prediction: a program gets the options that it has by default there.

    Raises:
        InputError: as `parsed`; a value of another type, or out of range.
    """
    if described is not None:
        buckets = None if described.is_host else described
        defaults = {"p2p_collectives": described.sends or None, "bucket_size": buckets, **defaults}
    return shardc.Options(**{**defaults, **parsed(texts, target)})


def _value(name: str, text: str, target: Target) -> Any:
    """Return the value of option ``name`` that ``text`` has."""
    if name in _OBJECTS:
        objects = [target.named(part.strip(), name) for part in text.split(",")]
        return tuple(hook() if isinstance(hook, type) else hook for hook in objects) if name == "hooks" else objects[0]
    if name == "cost" and text.endswith(".json"):
        return CostModel.load(text)
    if name == "cost" or (name == "bucket_size" and (text.lower() in hardware.KNOWN or text.endswith(".json"))):
        return hardware.find(text)
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return tuple(text.split(",")) if name == "skip_comm" else text
