"""Skip communication: replaces collectives by local copies, to time a step without its communication."""

from __future__ import annotations

from dataclasses import dataclass
from operator import getitem

import torch
from torch import Tensor, fx

from shardc.ir.comm import WAIT
from shardc.ir.comm_volume import collective_kind
from shardc.ir.rewriter import GraphRewriter, Inserter

aten = torch.ops.aten


@dataclass(frozen=True)
class SkipCommunication:
    """Replaces each collective by a copy of its input, repeated or sliced to the result's shape.

        %a = all_gather(%w, 2)      ->  %a = clone(cat([%w, %w]))
        %f = wait(%a)                   (no wait)

    *Requires:* a scheduled half. *Ensures:* shapes and dtypes only: the values are wrong, and serve for timing.

    Args:
        kinds: kinds of collectives; None for all.
    """

    kinds: frozenset[str] | None = None
    name = "skip_communication"
    requires = ("partition",)

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        rewriter = GraphRewriter(gm.graph)
        for node in list(gm.graph.nodes):
            # In order of the graph, so what a wait waits for was replaced before, if at all.
            if node.target is WAIT and not _started(node.args[0]):
                rewriter.replace(node, node.args[0])
            elif (kind := collective_kind(node)) is not None and (self.kinds is None or kind in self.kinds):
                _replace(node, rewriter)
        gm.recompile()
        return gm


def _started(node: fx.Node) -> bool:
    """Returns whether ``node`` is the result of a collective that was not replaced: a collective, or a getitem of a
    coalesced one.
    """
    return collective_kind(node.args[0] if node.target is getitem else node) is not None


def _replace(node: fx.Node, rewriter: GraphRewriter) -> None:
    """Replaces a collective, or a coalesced one with a result for each input, by copies of its inputs in the shapes of
    the results.
    """
    source, result, at = node.args[0], node.meta["val"], rewriter.before(node, suffix="silent")
    if isinstance(result, Tensor):
        rewriter.replace(node, _copy(source, result, at))
        return
    # Coalesced: ``source`` and ``result`` are lists, and each user selects one result.
    copies = [_copy(x, val, at) for x, val in zip(source, result, strict=True)]
    for user in list(node.users):
        assert user.target is getitem
        rewriter.replace(user, copies[user.args[1]])
    rewriter.graph.erase_node(node)


def _copy(x: fx.Node, like: Tensor, at: Inserter) -> fx.Node:
    """Inserts, at ``at``, a copy of ``x`` in the shape of ``like``, repeated (as for an all-gather) or cut (as for a
    reduce-scatter); returns it.
    """
    have, want = x.meta["val"].numel(), like.numel()
    flat = at.call(aten.reshape.default, x, [have])
    if want > have:
        flat = at.call(aten.cat.default, [flat] * (want // have))
    elif want < have:
        flat = at.call(aten.slice.Tensor, flat, 0, 0, want)
    # A clone, since a collective's result shares no memory with its input.
    return at.call(aten.clone.default, at.call(aten.reshape.default, flat, list(like.shape)))
