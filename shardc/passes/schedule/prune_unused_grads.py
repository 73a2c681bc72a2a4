"""Prune unused grads: prunes the backward graph for a loss that uses only some of the outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx

from shardc.ir import graph as ir
from shardc.ir.comm_volume import collective_kind
from shardc.ir.rewriter import GraphRewriter

_ADD = torch.ops.aten.add.Tensor


@dataclass(frozen=True)
class PruneUnusedGrads:
    """Prunes gradients that depend only on outputs which the loss does not use; they are None, not zero, as in torch.

        %s = add(%g0, %g1)              %r = relu_backward(%g0, %x)
        %r = relu_backward(%s, %x)  ->
                                        (``used`` = {0}: the tangent %g1 is absent)

    An op whose gradient operands are all absent is absent, and so is an output that it feeds. If only some are absent,
    a sum becomes its other term, a coalesced collective drops the absent inputs, and any other op reads zeros. Unread
    ops, collectives and saved values are erased.

    *Requires:* a backward half of a local graph. *Ensures:* the gradients of ``used`` outputs are as before.

    Args:
        used: indices of the outputs that have a gradient.
    """

    used: frozenset[int]
    name = "prune_unused_grads"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        absent = self._drop_absent(GraphRewriter(gm.graph))
        output = ir.output_node(gm.graph)
        output.args = (tuple(None if x in absent else x for x in output.args[0]),)  # torch's word for no gradient
        # Users come before their operands, so all that only erased nodes read is erased, placeholders included.
        for node in reversed(list(gm.graph.nodes)):
            if node is not output and not node.users:
                gm.graph.erase_node(node)
            elif _is_coalesced(node):  # it keeps the inputs whose results are still read
                _keep_positions(sorted({item.args[1] for item in node.users}), node)
        gm.recompile()
        return gm

    def _drop_absent(self, rewriter: GraphRewriter) -> set[fx.Node]:
        """Rewrites each op of which some gradient operands are absent, so that it computes with the others only.
        Returns the absent nodes: tangents of unused outputs, and what depends on no other tangents. The caller erases
        them.
        """
        graph = rewriter.graph
        gradients = set(ir.placeholders(graph, "tangent"))  # and what depends on them
        absent = {node for node in gradients if ir.role(node).index not in self.used}
        for node in list(graph.nodes):
            if _is_coalesced(node):  # each result depends on its own input alone
                gradients.update(item for item in node.users if _input_of(item) in gradients)
                absent.update(item for item in node.users if _input_of(item) in absent)
                present = [at for at, x in enumerate(node.args[0]) if x not in absent]
                if present:  # else the whole collective goes, unread
                    _keep_positions(present, node)
                continue
            # Saved values are operands, too, but only gradients can be absent.
            operands = [x for x in node.all_input_nodes if x in gradients] if node.op == "call_function" else []
            if not operands:
                continue
            gradients.add(node)
            missing = [x for x in operands if x in absent]
            if len(missing) == len(operands):
                absent.add(node)
            elif not missing:
                continue
            # A sum is its other term; other ops read zeros in place of what is absent.
            elif (other := _other_term(node, missing)) is not None:
                node.replace_all_uses_with(other)
            else:
                for x in missing:
                    node.replace_input_with(x, _zeros(rewriter, node, x))
        return absent


def _is_coalesced(node: fx.Node) -> bool:
    """Returns whether ``node`` is a coalesced collective, which takes a list of tensors and has a result for each."""
    return collective_kind(node) is not None and isinstance(ir.info(node).value, tuple)


def _input_of(item: fx.Node) -> object:
    """Returns the input of a coalesced collective from which its result ``item``, a getitem, is computed."""
    collective: Any = item.args[0]
    inputs, number = collective.args[0], item.args[1]
    return inputs[number]


def _keep_positions(numbers: list[int], node: fx.Node) -> None:
    """Removes inputs and results of the coalesced collective ``node``; only those at the positions ``numbers``
    remain.
    """
    tensors: Any = node.args[0]
    if len(numbers) == len(tensors):
        return
    # Inputs, example values and types; then the numbers by which results are read.
    record, val = ir.info(node), node.meta["val"]
    assert isinstance(record.value, tuple)
    node.args = ([tensors[at] for at in numbers], *node.args[1:])
    node.meta["val"] = [val[at] for at in numbers]
    ir.update(node, value=tuple(record.value[at] for at in numbers))
    for item in list(node.users):
        assert item.target is getitem, f"{item} reads all results of {node}"
        at: Any = item.args[1]
        if at in numbers:  # another item is absent, and erased later
            item.args = (node, numbers.index(at))


def _other_term(node: fx.Node, missing: Sequence[fx.Node]) -> fx.Node | None:
    """Returns the term of a sum of two tensors that is not in ``missing``; None if ``node`` is not such a sum, or if
    the sum broadcasts or casts that term.
    """
    others = [x for x in node.args if x not in missing]
    if node.target is not _ADD or node.kwargs or len(node.args) != 2 or len(others) != 1:  # kwargs: a factor alpha
        return None
    (other,) = others
    return other if isinstance(other, fx.Node) and ir.value(other) == ir.value(node) else None


def _zeros(rewriter: GraphRewriter, before: fx.Node, like: fx.Node) -> fx.Node:
    """Inserts a tensor of zeros of the type of ``like`` before node ``before``; returns it."""
    val = like.meta["val"]
    at = rewriter.before(before, like=like, suffix="absent")
    options = {"dtype": val.dtype, "device": val.device, "pin_memory": False}
    return at.call(torch.ops.aten.full.default, list(val.shape), 0, **options)
