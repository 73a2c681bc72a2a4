"""Qualified names of modules, parameters and values (``layers.0.mlp.up.weight``): which module a name is in."""

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


def forward_name(name: str) -> str:
    """Return ``name`` without the prefix ``d.``, which names of gradients and of backward's values have.

    >>> forward_name("d.layers.1.mlp.mm"), forward_name("layers.1.mlp.mm")
    ('layers.1.mlp.mm', 'layers.1.mlp.mm')
    """
    return name.removeprefix("d.")


def value_name(text: str) -> str:
    """Return the name of a value that a user may have copied from a dump, where names start with ``%``."""
    return text.removeprefix("%")


def is_public(name: str) -> bool:
    """Return whether a Python name is public: it does not start with an underscore."""
    return not name.startswith("_")
