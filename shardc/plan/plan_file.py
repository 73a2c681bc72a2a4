"""Encodes a plan's constructor calls as JSON, and decodes them.

    {"shardc_plan": 1, "calls": [
      {"fsdp": {"axis": "dp", "level": 3}},
      {"Plan": {"params": {"head.weight": ["tp", null]}, "inputs": {"tokens": "@dp, _"}}}]}

A spec is a list (axes for each dim), a string (a layout), ``{"placements": ["Shard(0)", "Replicate()"]}``,
``{"placements": {"tp": "Shard(0)"}}`` (for some axes only), or ``{"per_rank": {"dim": 1, "relative_to": "x"}}``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from inspect import signature
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from shardc._compat import StridedShard
from shardc.errors import PlanError
from shardc.plan.entries.entry import SPECS, Call
from shardc.plan.entries.mixed_precision import DTYPE_FIELDS
from shardc.plan.layout_spec import Form, OnAxes, PerRank, is_placements, per_rank, show_placement
from shardc.validate import DTYPES, did_you_mean, torch_name

VERSION = 1
K = TypeVar("K")


def encode(calls: Iterable[Call]) -> str:
    """Return the constructor calls of a plan (``fsdp("dp")``) as JSON text."""
    items = [{name: {key: _encode_argument(key, value) for key, value in args.items()}} for name, args in calls]
    return json.dumps({"shardc_plan": VERSION, "calls": items}, indent=2) + "\n"


def _encode_argument(key: str, value: Any) -> Any:
    """Return the value of a constructor's argument ``key`` as JSON data. Specs are encoded by `_encode_form`, a dtype
    becomes its name, other values stay.
    """
    if key in SPECS:
        return {at: _encode_form(form) for at, form in value.items()}
    return torch_name(value) if isinstance(value, torch.dtype) else value


def _encode_form(form: Form) -> object:
    """Return a spec as JSON data: a dict with "placements" or "per_rank"; a string or tuple of axes unchanged."""
    if isinstance(form, OnAxes):
        return {"placements": {axis: show_placement(item) for axis, item in form.placements}}
    if isinstance(form, PerRank):
        return {"per_rank": vars(form)}
    if is_placements(form):
        return {"placements": [show_placement(item) for item in form]}
    return form


def decode(text: str, path: str, constructors: Mapping[str, Callable[..., Any]]) -> Iterator[Call]:
    """Yield the calls of ``constructors`` in a text that `encode` wrote.

    Args:
        text: the JSON text.
        path: its file, for errors.
        constructors: name -> function that returns a plan.

    Raises:
        PlanError: the text is not a plan, or has an unknown key (the message suggests similar ones).
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path} is not JSON: {error}", source=f"{path}:{getattr(error, 'lineno', 1)}") from None
    if not isinstance(data, dict) or "shardc_plan" not in data:
        raise PlanError(f"{path} is not a plan file", fix="write it with plan.save(path)")
    _check_keys(data, ("shardc_plan", "calls"), path, "a plan file")
    if data["shardc_plan"] != VERSION:
        raise PlanError(
            f"{path} is a plan of version {data['shardc_plan']!r}; this shardc reads {VERSION}",
            fix="save the plan again with this shardc",
        )
    for item in _of(list, data.get("calls", []), path, "calls"):
        for name, arguments in _of(dict, item, path, "a call").items():
            _check_keys({name: None}, tuple(constructors), path, "a plan")
            _check_keys(_of(dict, arguments, path, name), tuple(signature(constructors[name]).parameters), path, name)
            yield name, {key: _decode_argument(key, value, path) for key, value in arguments.items()}


def _of(kind: type[K], value: object, path: str, what: str) -> K:
    """Return ``value`` if it is a ``kind``, else raise PlanError. The error says that ``value`` is ``what`` in the file
    ``path``.
    """
    if not isinstance(value, kind):
        raise PlanError(f"{path}: {what} is {value!r}, not a {kind.__name__}")
    return value


def _check_keys(table: Iterable[str], allowed: tuple[str, ...], path: str, what: str) -> None:
    """Raise PlanError if ``table`` has a key that is not ``allowed``. ``what`` names the table in the file ``path``."""
    for key in table:
        if key not in allowed:
            fix = did_you_mean(get_close_matches(key, allowed), f"use one of {list(allowed)}")
            raise PlanError(f"unknown key {key!r} in {what}", source=path, fix=fix)


def _decode_argument(key: str, value: object, path: str) -> object:
    """Return the value of argument ``key`` from JSON data ``value``: the inverse of `_encode_argument`."""
    if key in SPECS:
        return {at: _decode_form(form, path) for at, form in _of(dict, value, path, key).items()}
    if key in DTYPE_FIELDS and isinstance(value, str):
        return DTYPES.get(value, value)
    return tuple(value) if key in ("axis", "shard", "replicate") and isinstance(value, list) else value


def _decode_form(form: object, path: str) -> object:
    """Return a spec from JSON data ``form``: the inverse of `_encode_form`."""
    if isinstance(form, dict) and "per_rank" in form:
        arguments = _of(dict, form["per_rank"], path, "per_rank")
        _check_keys(arguments, ("dim", "relative_to"), path, "per_rank")
        return per_rank(**arguments)
    if isinstance(form, dict):
        _check_keys(form, ("placements",), path, "a spec")
        if isinstance(form.get("placements"), dict):
            return {axis: _decode_placement(item, path) for axis, item in form["placements"].items()}
        return tuple(_decode_placement(item, path) for item in _of(list, form.get("placements"), path, "placements"))
    if isinstance(form, list):
        return tuple(tuple(item) if isinstance(item, list) else item for item in form)
    return form


def _decode_placement(text: object, path: str) -> Placement:
    """Return the DTensor placement that prints as ``text``, such as ``Shard(0)``. Raises PlanError if ``text``
    is none.
    """
    for pattern, make in _PLACEMENTS.items():
        if match := re.fullmatch(pattern, str(text)):
            return make(*match.groups())
    raise PlanError(f"{text!r} is not a placement", source=path, fix='write Shard(0), Replicate() or Partial("sum")')


_PLACEMENTS: dict[str, Callable[..., Placement]] = {
    r"Shard\((-?\d+)\)": lambda dim: Shard(int(dim)),
    r"Replicate\(\)": Replicate,
    r'Partial\((?:"(\w+)")?\)': lambda op: Partial(op or "sum"),
    r"_StridedShard\((-?\d+), split_factor=(\d+)\)": lambda dim, by: StridedShard(int(dim), split_factor=int(by)),
}
