"""Paths of the leaves of a pytree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardc._compat import pytree


def leaf_paths(tree: Any) -> list[tuple[Any, ...]]:
    """Return the keys, positions and attributes that lead to each leaf of ``tree``, in order.

    A class registered without key paths gives its items (of a mapping) or attributes, if it flattens to these, and
    positions otherwise.
    """
    try:
        paths, _ = pytree.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
        children = [(_step(path[0]) if path else None, child) for path, child in paths]
    except ValueError:
        values = pytree.tree_leaves(tree, is_leaf=lambda x: x is not tree)
        items = tree.items() if isinstance(tree, Mapping) else getattr(tree, "__dict__", {}).items()
        same = [id(x) for _, x in items] == [id(x) for x in values]
        children = list(items) if same else list(enumerate(values))
    if len(children) == 1 and children[0][1] is tree:
        return [()]
    return [(key, *path) for key, child in children for path in leaf_paths(child)]


def _step(key: Any) -> Any:
    return getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))
