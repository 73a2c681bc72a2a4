"""Simplify: merges reshards that repeat, undo or contain each other."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from shardc.cost import redistribute
from shardc.cost.model import Pricing
from shardc.ir import graph as ir
from shardc.ir import ops
from shardc.ir.layout import Layout
from shardc.ir.rewriter import GraphRewriter, Inserter, erase_dead_code
from shardc.passes.op_calls import move_of
from shardc.rules.spec import from_results


@dataclass(frozen=True)
class Simplify:
    """Merges chains of reshards, drops reshards that change nothing, and starts a reshard from the result of another
    one if that is cheaper.

        %b = reshard(%a)                    %c = reshard(%a)
        %c = reshard(%b)                ->

    - reshards of views of one value that need the same layout of it become one reshard before the views;
    - a reshard of a reshard starts from the first value, if nothing else reads the middle one and it costs no more;
    - a reshard that is cheaper from an earlier reshard of the same value (all-reduce, then a slice of that) starts from
      there;
    - dead nodes are erased.

    *Requires:* layouts agree at every use (`Reshard`). *Ensures:* they still do, and the predicted cost is no higher.

    Args:
        cost: the cost model, which predicts the seconds of reshards.
    """

    cost: Pricing
    name = "simplify"
    requires = ("reshard",)

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        _share_before_moves(gm.graph)
        reshards: dict[fx.Node, list[fx.Node]] = {}  # value -> its reshards so far
        rewriter = GraphRewriter(gm.graph)
        for node in list(gm.graph.nodes):
            if node.target is ops.reshard:
                self._shorten(rewriter, node, reshards)
        erase_dead_code(gm.graph)
        return gm

    def _shorten(self, rewriter: GraphRewriter, node: fx.Node, reshards: dict[fx.Node, list[fx.Node]]) -> None:
        """Makes the reshard ``node`` start from a value with which it is cheaper: an earlier value of its chain of
        reshards, or another reshard of the same value.

        Args:
            reshards: value -> its reshards so far, updated.
        """
        source = node.args[0]
        # Skip the reshards before it, except one that others read and that therefore remains, or one to partial sums.
        while source.target is ops.reshard and len(source.users) == 1 and not ir.layout(source).partial:
            two_steps = self._seconds(source.args[0], source) + self._seconds(source, node)
            if self._seconds(source.args[0], node) > two_steps:
                break
            source = source.args[0]
        node.args = (source,)
        if ir.layout(source) == ir.layout(node):
            rewriter.replace(node, source)
            return
        earlier = min(reshards.get(source, ()), key=lambda other: self._seconds(other, node), default=None)
        if earlier is not None and self._seconds(earlier, node) < self._seconds(source, node):
            node.args = (earlier,)
        reshards.setdefault(source, []).append(node)

    def _seconds(self, source: fx.Node, target: fx.Node) -> float:
        """Returns the seconds to reshard ``source`` to the layout of ``target``; inf if that would add partial sums."""
        src, dst = ir.layout(source), ir.layout(target)
        if dst.partial and src.partial != dst.partial:
            return float("inf")
        return redistribute.seconds(src, dst, ir.value(target).itemsize, self.cost)


def _share_before_moves(graph: fx.Graph) -> None:
    """Replaces equal reshards of several views of one value by a single reshard of the value. The views then read that
    reshard.
    """
    # (source of the views, its layout that a reshard needs) -> (reshard, the views before it with their new layouts).
    groups: dict[tuple[fx.Node, Layout], list[tuple[fx.Node, list[tuple[fx.Node, Layout]]]]] = {}
    for node in graph.nodes:
        if node.target is ops.reshard:
            root, layout, moves = _root(node)
            groups.setdefault((root, layout), []).append((node, moves))
    rewriter = GraphRewriter(graph)
    replaced: dict[fx.Node, fx.Node] = {}
    for (root, layout), members in groups.items():
        if len(members) < 2:  # nothing to share
            continue
        first = members[0][0]  # in graph order: the shared reshard stands before all that read it
        root = replaced.get(root, root)  # this group may start from a reshard of another group
        record = replace(ir.info(root), origin=ir.info(first).origin)
        place = Inserter(rewriter, first, record, suffix="at")
        shared = place.typed(replace(ir.value(root), layout=layout), ops.reshard, root)
        for node, moves in members:
            # Copies of the views, on the resharded value; the old views stay for their other users.
            last = shared
            for move, moved_layout in moves:
                last = rewriter.before(node, like=move).copy(move, {move.args[0]: last})
                ir.update(last, value=replace(ir.value(move), layout=moved_layout))
            rewriter.replace(node, last)
            replaced[node] = last


def _root(node: fx.Node) -> tuple[fx.Node, Layout, list[tuple[fx.Node, Layout]]]:
    """Follows the views before the reshard ``node`` back to their source. Returns (source, layout of the source that
    gives the reshard's result, (view, its layout that gives that result) of each view in order).
    """
    source, layout = node.args[0], ir.layout(node)
    moves: list[tuple[fx.Node, Layout]] = []
    while (spec := move_of(source)) is not None and (back := from_results(spec, layout)) is not None:
        moves.insert(0, (source, layout))
        layout, source = back.operands[0], source.args[0]
    return source, layout, moves
