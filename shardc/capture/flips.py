"""Removes the flips around a scan that begins at the end of its sequences, by running the scan in reverse order.

A flip moves each element of a sequence to another place, so to another rank if the sequence is split.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


def remove_flips(outer: fx.Graph, scan: fx.Node, operands: list[fx.Node], counts: tuple[int, int]) -> bool:
    """Remove, in place, flips of the sequences and of the results of ``scan``. Return whether the scan now has to run
    in reverse: it has to if most sequences were flipped.

    Args:
        outer: the graph of ``scan``, whose results are tensors.
        scan: the scan. The uses of its results are changed in place.
        operands: its operands: carries, sequences and the rest. The list is changed in place.
        counts: numbers of carries and of sequences.
    """
    carries, end = counts[0], sum(counts)
    sources = list(map(_unflipped, operands[carries:end]))
    reverse = 2 * sum(flipped for _, flipped in sources) > len(sources)
    for at, (source, flipped) in enumerate(sources, carries):
        with outer.inserting_before(scan):
            operands[at] = source if flipped == reverse else _flip(outer, source)
    for result in list(scan.users):
        if reverse and result.args[1] >= carries:
            with outer.inserting_after(result):
                flipped_result = _flip(outer, result)
            result.replace_all_uses_with(
                flipped_result, delete_user_cb=lambda user, inserted=flipped_result: user is not inserted
            )
        for flip in filter(_flips, list(result.users)):  # a flip of a flip is the value itself
            for user in filter(_flips, list(flip.users)):
                user.replace_all_uses_with(result)
                outer.erase_node(user)
            if not flip.users:
                outer.erase_node(flip)
    return reverse


def _flips(node: fx.Node) -> bool:
    """Return whether ``node`` is a flip along dim 0."""
    return node.target is aten.flip.default and node.args[1] == [0]


def _unflipped(node: fx.Node) -> tuple[fx.Node, bool]:
    """Return (the source of ``node`` before any flips along dim 0, whether ``node`` is the source flipped)."""
    flipped = False
    while _flips(node):
        source: Any = node.args[0]
        node, flipped = source, not flipped
    return node, flipped


def _flip(outer: fx.Graph, x: fx.Node) -> fx.Node:
    """Insert a flip of ``x`` along dim 0 at the graph's insertion point; return it."""
    node = outer.call_function(aten.flip.default, (x, [0]))
    with x.meta["val"].fake_mode:
        node.meta = {**x.meta, "val": x.meta["val"].flip([0])}
    return node
