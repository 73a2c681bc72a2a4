"""The structure of arguments and results as JSON, and back; nothing that a file names is imported or called.

    "*"                                              a leaf
    {"dict": [["a", "*"], ["b", {"list": ["*"]}]]}   also tuple, OrderedDict, Size
    {"node": "models.Output", "context": [...], "children": ["*"]}

A ``node`` is of a class that the program has registered with pytree (`torch.utils._pytree`), and is found among those
by its name; or it is a named tuple at the top of a module that the program has imported. torch's own `treespec_loads`
imports what a file names.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, namedtuple
from typing import Any

import torch

from shardc._compat import pytree, spec_children
from shardc.capture import register_caches
from shardc.errors import PrecompiledError

LEAF = "*"
_LISTS: dict[str, Any] = {"list": list, "tuple": tuple, "Size": torch.Size}
_DICTS: dict[str, Any] = {"dict": dict, "OrderedDict": OrderedDict}
_PLAIN = (bool, int, float, str, type(None))
_FIX = (
    "use lists, tuples, dicts, named tuples at the top of a module, and dataclasses that are registered with "
    "torch.utils._pytree"
)
_DEEPEST = 100


def spec_to_json(spec: pytree.TreeSpec, what: str) -> Any:
    """A structure of values as JSON.

    Raises:
        PrecompiledError: it has a container of a class that has no form on disk, or a key that has none.
    """
    kind, children = spec.type, [spec_to_json(child, what) for child in spec_children(spec)]
    if spec.is_leaf():
        return LEAF
    for name, container in _LISTS.items():
        if kind is container:
            return {name: children}
    for name, container in _DICTS.items():
        if kind is container:
            if all(type(key) in _PLAIN for key in spec.context):
                return {name: [list(pair) for pair in zip(spec.context, children, strict=True)]}
            raise PrecompiledError(f"{what} have a {name} with the keys {spec.context!r}", fix="use strings for keys")
    owner, context = (spec.context, None) if kind is namedtuple else (kind, spec.context)
    name = _name(owner)
    if _class_of(name) is not owner or plain(context) != context:
        raise PrecompiledError(f"the structure of {what} cannot be saved: it has a {name}", fix=_FIX)
    return {"node": name, "context": plain(context), "children": children}


def spec_from_json(data: Any, what: str, depth: int = 0) -> pytree.TreeSpec:
    """Reads a structure that `spec_to_json` wrote.

    Raises:
        PrecompiledError: it is no structure, or has a class that this program has not registered.
    """
    if data == LEAF:
        return pytree.tree_flatten(0)[1]
    if depth > _DEEPEST or not isinstance(data, dict):
        raise PrecompiledError(f"{what} are no structure of values")

    def below(items: Any) -> list[pytree.TreeSpec]:
        if not isinstance(items, list):
            raise PrecompiledError(f"{what} are no structure of values")
        return [spec_from_json(item, what, depth + 1) for item in items]

    if len(data) == 1:
        ((name, items),) = data.items()
        if name in _LISTS:
            return pytree.TreeSpec(_LISTS[name], None, below(items))
        if name in _DICTS and isinstance(items, list) and all(_is_pair(item) for item in items):
            keys = [key for key, _ in items]
            if len({(type(key), key) for key in keys}) == len(keys):
                return pytree.TreeSpec(_DICTS[name], keys, below([item for _, item in items]))
    elif set(data) == {"node", "context", "children"} and isinstance(data["node"], str):
        cls = _class_of(data["node"])
        if cls is None:
            raise PrecompiledError(
                f"{what} have a {data['node']}, which this program has not registered with pytree",
                fix="import what registers it before the program is loaded",
            )
        if data["context"] != plain(data["context"]):
            raise PrecompiledError(f"{what} have a {data['node']} with a context that is not plain")
        if issubclass(cls, tuple) and hasattr(cls, "_fields"):
            return pytree.TreeSpec(namedtuple, cls, below(data["children"]))
        return pytree.TreeSpec(cls, data["context"], below(data["children"]))
    raise PrecompiledError(f"{what} are no structure of values")


def _class_of(name: str) -> type | None:
    """The class of this name that pytree knows, or the named tuple; None where there is none."""
    if (cls := registered().get(name)) is not None:
        return cls
    module, _, attribute = name.rpartition(".")
    candidate: Any = vars(sys.modules[module]).get(attribute) if module in sys.modules else None
    if not isinstance(candidate, type) or not issubclass(candidate, tuple) or _name(candidate) != name:
        return None
    scope = getattr(candidate.__new__, "__globals__", {})  # that of what `namedtuple` makes, and of no other code
    return candidate if str(scope.get("__name__")).startswith("namedtuple_") and hasattr(candidate, "_fields") else None


def registered() -> dict[str, type]:
    """The classes outside of torch's own machinery that pytree knows, by module and name; no two of one name."""
    register_caches()
    kinds = [kind for kind in (*pytree.SUPPORTED_NODES, *pytree.SUPPORTED_SERIALIZED_TYPES) if isinstance(kind, type)]
    out: dict[str, type] = {}
    for kind in dict.fromkeys(kinds):
        if kind.__module__ not in ("builtins", "collections") and not kind.__module__.startswith("torch._"):
            out[_name(kind)] = kind if _name(kind) not in out else type(None)
    return {name: kind for name, kind in out.items() if kind is not type(None)}


def plain(context: Any) -> Any:
    """``context`` with lists for what is no list, dict or plain value; equal to it where it is plain."""
    if isinstance(context, dict):
        return {key: plain(value) for key, value in context.items() if isinstance(key, str)}
    if isinstance(context, list):
        return [plain(value) for value in context]
    return context if type(context) in _PLAIN else []


def _name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_pair(item: Any) -> bool:
    return isinstance(item, list) and len(item) == 2 and type(item[0]) in _PLAIN
