"""Selects the forward ops that backward recomputes: checkpointed regions, and exchanges of keys under ``cp``."""

from __future__ import annotations

import torch
from torch import fx

from shardc.custom_ops.attention_ops import CALL
from shardc.ir import graph as ir
from shardc.ir.comm import WAIT, move_kind
from shardc.ir.comm_volume import arguments_of, collective_kind
from shardc.ir.op_traits import draws

CHOICES = ("auto", "keep", "recompute")
# Kinds of which a rank sends less than their result, (n-1)/n of it. Reductions send at least as much as their result.
_LARGE = ("all_gather", "all_to_all")
_PACKS = (torch.ops.aten.clone.default, torch.ops.aten.cat.default)  # ops that copy values into a message


def runs_again(graph: fx.Graph, collectives: str) -> set[fx.Node]:
    """Return the forward nodes that backward recomputes.

    These are the nodes of checkpointed regions, and the nodes that receive keys and values of other ranks: to save them
    would cost the memory that splitting the sequence saves. Excluded are values used after their region (as in eager
    checkpointing), kernels with random numbers of their own (a second run would draw others), and host copies.

    Args:
        graph: a localized joint graph.
        collectives: "recompute" repeats all collectives of these regions, "keep" none, and "auto" those whose result is
            larger than the data that a rank sends.
    """
    recomputed: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or not (region := _region(node)) or move_kind(node) is not None:
            continue
        if node.target is WAIT:
            repeated = node.args[0] in recomputed
        elif (kind := collective_kind(node)) is not None:
            chosen = collectives == "recompute" or (collectives == "auto" and kind in _LARGE)
            repeated = chosen and not any(_leaves(wait, region) for wait in node.users)
        else:
            repeated = not _leaves(node, region) and not _draws(node)
        if repeated:
            recomputed.add(node)
    return recomputed | (_bringing_keys(graph) if collectives != "keep" else set())


def _bringing_keys(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes between a rank's own keys and values and an attention, if they include a collective."""
    nodes: set[fx.Node] = set()
    for call in graph.find_nodes(op="call_function", target=CALL):
        for node in call.args[1:3]:
            chain = []
            while isinstance(node, fx.Node) and len(node.all_input_nodes) == 1:
                chain.append(node)
                if collective_kind(node) in ("all_gather", "permute_ranks"):
                    packed = node.args[0]
                    nodes.update(chain + ([packed] if packed.target in _PACKS else []))
                    break
                node = node.args[0]
    return nodes


def _region(node: fx.Node) -> int:
    origin = ir.info(node).origin
    return origin.region if origin.phase == "forward" else 0


def _leaves(node: fx.Node, region: int) -> bool:
    """Return whether a forward node outside ``region``, or the output, uses ``node``."""
    return any(
        user.op == "output" or (ir.info(user).origin.phase == "forward" and _region(user) != region)
        for user in node.users
    )


def _draws(node: fx.Node) -> bool:
    """Return whether a kernel draws from the device's generator; attention does so only with dropout."""
    if not draws(node.target):
        return False
    arguments = arguments_of(node)
    return arguments.get("dropout_p", 0) != 0 or all(a.name != "dropout_p" for a in node.target._schema.arguments)
