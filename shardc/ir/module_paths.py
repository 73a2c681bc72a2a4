"""Qualified names of modules, parameters and buffers (``layers.0.mlp.up.weight``): which module a name is in."""

from __future__ import annotations


def is_in(name: str, module: str) -> bool:
    """Return whether ``name`` is the name of ``module``, or of something in it.

    >>> [is_in(name, "layers.1") for name in ("layers.1", "layers.1.mlp", "layers.10", "layers")]
    [True, True, False, False]
    """
    return f"{name}.".startswith(f"{module}.")


def name_in(name: str, module: str) -> str | None:
    """Return ``name`` relative to ``module``: "" for the module itself, None for a name outside of it.

    >>> [name_in(name, "layers.1") for name in ("layers.1.mlp.up", "layers.1", "layers.10")]
    ['mlp.up', '', None]
    """
    return name[len(module) + 1 :] if is_in(name, module) else None
