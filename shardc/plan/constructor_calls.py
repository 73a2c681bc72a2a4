"""Constructor calls, such as ``fsdp("dp")``, that create the entries of a plan: for the plan's text and its file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeVar

from shardc.plan.layout_spec import Form, quote, show, show_sizes

Call = tuple[str, dict[str, Any]]
SPECS = ("params", "inputs", "outputs", "activations")  # arguments that take specs
BY_GLOB = ("overrides", "levels", "thresholds", "reshard_after_forward")  # arguments that map globs to numbers


class Called(Protocol):
    """Interface of a plan entry for the functions of this module: the two properties of `Entry` that describe its
    constructor call.

    Attributes:
        group: key of the constructor call and the entry's position in its arguments; None for a call of its own.
        call: name of the constructor, and its arguments that are not defaults.
    """

    @property
    def group(self) -> tuple[tuple[str, ...], int] | None: ...

    @property
    def call(self) -> Call: ...


E = TypeVar("E", bound=Called)


def runs(entries: Iterable[E]) -> list[list[E]]:
    """Split ``entries`` into runs of consecutive entries that one constructor call creates; return the runs."""
    out: list[list[E]] = []
    for entry in entries:
        group, before = entry.group, out[-1][-1].group if out else None
        if group and before and group[0] == before[0] and group[1] >= before[1]:
            out[-1].append(entry)
        else:
            out.append([entry])
    return out


def in_order(entries: Iterable[E]) -> list[E]:
    """Return ``entries`` sorted by their constructor calls: first entries with a constructor of their own (``fsdp``),
    then arguments of ``Plan``.

    Entries of one call are sorted by their positions in its arguments.
    """

    def order(entry: E) -> tuple[bool, int]:
        """Return the sort key of an entry within a plan's text: arguments of ``Plan(...)`` go last."""
        group, place = entry.group or ((), 0)
        return group == ("Plan",), place

    return sorted(entries, key=order)


def to_call(run: Sequence[Called]) -> Call:
    """Return the call that creates all entries of ``run`` (consecutive entries of one call), as (constructor,
    arguments).

    Lists, tuples and dicts that several entries give for one argument are joined. A tuple of one item becomes the item.
    Inputs and outputs are dicts by dotted path.
    """
    arguments: dict[str, Any] = {}
    for entry in run:
        for key, value in entry.call[1].items():
            before = arguments.get(key)
            if isinstance(before, list | tuple):
                value = before + value
            arguments[key] = {**before, **value} if isinstance(before, dict) else value
    unpacked = {key: value[0] for key, value in arguments.items() if isinstance(value, tuple) and len(value) == 1}
    return run[0].call[0], arguments | unpacked


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """Return the call of constructor ``name`` as Python source that evaluates to the plan.

    The arguments ``axis``, ``names`` and ``count`` are positional.
    """
    texts = {key: _argument_text(key, value) for key, value in arguments.items()}
    return f"{name}({', '.join(x if key in ('axis', 'names', 'count') else f'{key}={x}' for key, x in texts.items())})"


def _argument_text(key: str, value: Any) -> str:
    """Return the value of a constructor's argument ``key`` as Python source."""
    if key in BY_GLOB and isinstance(value, dict):
        return show_sizes(value)
    if key == "prefetch":
        return "{" + ", ".join(f"{quote(at)}: {_argument_text('', names)}" for at, names in value.items()) + "}"
    if isinstance(value, dict) and key in SPECS:
        return _specs_text(key, value)
    if isinstance(value, list | tuple) and not all(isinstance(item, str) for item in value):
        return repr(value)
    if isinstance(value, list):
        return f"[{', '.join(map(quote, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(quote, value))})"
    return quote(value) if isinstance(value, str) else repr(value)


def _specs_text(key: str, specs: dict[str, Form]) -> str:
    """Return the plan specs of argument ``key`` as Python source. ``specs`` maps a parameter glob or the path of an
    input or output to its spec.
    """
    if key in ("inputs", "outputs"):
        if list(specs) == [""]:
            return show(specs[""])
        if list(specs) == [str(index) for index in range(len(specs))]:
            return f"[{', '.join(map(show, specs.values()))}]"
    return "{" + ", ".join(f"{quote(at)}: {show(spec)}" for at, spec in specs.items()) + "}"
