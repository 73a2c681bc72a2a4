"""A plan's entries as calls of its constructors, for its text, its file and its table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shardc.plan.entries import (
    STYLES,
    Activation,
    Ddp,
    Entry,
    Fsdp,
    Offload,
    Param,
    Port,
    Precision,
    Setting,
    Tp,
    show_axes,
    show_sizes,
)
from shardc.plan.forms import Form, quote, show

Call = tuple[str, dict[str, Any]]
_RAW_ORDER = ("params", "inputs", "outputs", "activations", *Setting.DEFAULTS)


def runs(entries: Iterable[Entry]) -> list[list[Entry]]:
    """``entries`` cut into runs that one constructor call makes, in their order."""
    out: list[list[Entry]] = []
    for entry in entries:
        group, order = _place(entry)
        if out and group is not None:
            last_group, last_order = _place(out[-1][-1])
            if group == last_group and order >= last_order:
                out[-1].append(entry)
                continue
        out.append([entry])
    return out


def in_order(entries: Iterable[Entry]) -> list[Entry]:
    """TP entries and then raw ones, each in the order of their call's arguments, so that few calls say them all."""
    return sorted(entries, key=lambda entry: (not isinstance(entry, Tp), _place(entry)[1]))


def _place(entry: Entry) -> tuple[tuple[str, ...] | None, int]:
    """(what must agree within one call, where the entry stands among its arguments); None stands alone."""
    if isinstance(entry, Ddp | Fsdp | Precision):
        return None, 0
    if isinstance(entry, Tp):
        return ("tp", entry.axis), STYLES.index(entry.style)
    if isinstance(entry, Offload):
        return ("offload", entry.to, str(entry.pin_memory)), 0
    return ("Plan",), _RAW_ORDER.index(_argument(entry))


def _argument(entry: Param | Port | Activation | Setting) -> str:
    if isinstance(entry, Port):
        return entry.kind
    if isinstance(entry, Setting):
        return entry.name
    return "params" if isinstance(entry, Param) else "activations"


def to_call(run: list[Entry]) -> Call:
    """The call that makes ``run``; inputs and outputs as a dict of dotted paths."""
    first = run[0]
    if isinstance(first, Ddp):
        return "ddp", {"axis": first.axis}
    if isinstance(first, Fsdp):
        options = {"level": first.level} | first.options
        if first.replicate:
            return "hsdp", {"shard": _one(first.shard), "replicate": _one(first.replicate), **options}
        return "fsdp", {"axis": _one(first.shard), **options}
    if isinstance(first, Precision):
        return "precision", first.said
    if isinstance(first, Offload):
        return "offload", {"names": _one(tuple(e.glob for e in run if isinstance(e, Offload)))} | first.options
    if isinstance(first, Tp):
        styles = {style: [e.glob for e in run if isinstance(e, Tp) and e.style == style] for style in STYLES}
        return "tp", {"axis": first.axis} | {style: globs for style, globs in styles.items() if globs}
    arguments: dict[str, Any] = {}
    for entry in run:
        if isinstance(entry, Setting):
            arguments[entry.name] = entry.value
        elif isinstance(entry, Param | Port | Activation):
            at = entry.glob if isinstance(entry, Param) else entry.path if isinstance(entry, Port) else entry.target
            arguments.setdefault(_argument(entry), {})[at] = entry.spec
    return "Plan", arguments


def _one(axes: tuple[str, ...]) -> str | tuple[str, ...]:
    return axes[0] if len(axes) == 1 else axes


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """The call as Python source that evaluates to the plan."""
    parts = []
    for key, value in arguments.items():
        positional = key == "axis" or (name, key) == ("offload", "names")
        parts.append(_argument_text(key, value) if positional else f"{key}={_argument_text(key, value)}")
    return f"{name}({', '.join(parts)})"


def _argument_text(key: str, value: Any) -> str:
    if key == "overrides":
        return show_sizes(value)
    if isinstance(value, dict):
        return _specs_text(key, value)
    if isinstance(value, list):
        return f"[{', '.join(map(quote, value))}]"
    if isinstance(value, tuple):
        return show_axes(value)
    return quote(value) if isinstance(value, str) else repr(value)


def _specs_text(key: str, specs: dict[str, Form]) -> str:
    if key in ("inputs", "outputs"):
        if list(specs) == [""]:
            return show(specs[""])
        if list(specs) == [str(index) for index in range(len(specs))]:
            return f"[{', '.join(map(show, specs.values()))}]"
    return "{" + ", ".join(f"{quote(at)}: {show(spec)}" for at, spec in specs.items()) + "}"


def to_row(entry: Entry) -> tuple[str, str, str]:
    """(what, of, where) of one entry for a table."""
    if isinstance(entry, Ddp):
        return "data parallel", "inputs", f"dim 0 over {entry.axis}"
    if isinstance(entry, Fsdp):
        kept = f", whole over {', '.join(entry.replicate)}" if entry.replicate else ""
        small = f", under {entry.threshold} B whole" if entry.threshold else ""
        over = f"{entry.shard_size} ranks of " if entry.shard_size != -1 else ""
        other = f", {show_sizes(dict(entry.overrides))}" if entry.overrides else ""
        where = f"storage over {over}{', '.join(entry.shard)}{kept}{small}{other}"
        return f"fsdp level {entry.level}", "inputs, params", where
    if isinstance(entry, Tp):
        return f"tp {entry.style}", entry.glob, f"over {entry.axis}"
    if isinstance(entry, Param):
        return "param", entry.glob, show(entry.spec)
    if isinstance(entry, Port):
        return entry.kind.removesuffix("s"), entry.path or "all", show(entry.spec)
    if isinstance(entry, Activation):
        return "activation", entry.target, show(entry.spec)
    if isinstance(entry, Offload):
        pinned = "" if entry.pin_memory or entry.to != "host" else ", not pinned"
        return "offload", entry.glob, f"on the {entry.to}{pinned}"
    if isinstance(entry, Precision):
        return "precision", "all", ", ".join(f"{name} {value}" for name, value in entry.said.items())
    return "setting", entry.name, str(entry.value)
