"""What runs again in backward instead of being kept: checkpoint regions of the model, and keys of a split sequence."""

from __future__ import annotations

import torch
from torch import fx

from shardc.ir import graph as ir
from shardc.ir.attention import CALL
from shardc.ir.comm import WAIT
from shardc.ir.host import move_kind
from shardc.ir.tally import arguments_of, collective_kind

CHOICES = ("auto", "keep", "recompute")
# What keeps more bytes on a rank than it sends: (n-1)/n of them. Reductions send as much as they keep, or more.
_LARGE = ("all_gather", "all_to_all")
_PACKS = (torch.ops.aten.clone.default, torch.ops.aten.cat.default)  # what makes a message


def runs_again(graph: fx.Graph, collectives: str) -> set[fx.Node]:
    """The forward nodes that backward computes again: of checkpoint regions, and what brings keys to a rank's queries.

    Kept, the keys and values of all ranks would take the memory that splitting the sequence saves. Not among them are
    what is used behind its region, as by eager checkpoints, kernels that draw random numbers of their own, which would
    be others, and moves between host and device.

    Args:
        graph: a localized joint graph.
        collectives: of which "recompute" runs all again, "keep" none, and "auto" those whose result is larger than
            what they send.
    """
    again: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or not (region := _region(node)) or move_kind(node) is not None:
            continue
        if node.target is WAIT:
            repeated = node.args[0] in again
        elif (kind := collective_kind(node)) is not None:
            chosen = collectives == "recompute" or (collectives == "auto" and kind in _LARGE)
            repeated = chosen and not any(_leaves(wait, region) for wait in node.users)
        else:
            repeated = not _leaves(node, region) and not _draws(node)
        if repeated:
            again.add(node)
    return again | (_bringing_keys(graph) if collectives != "keep" else set())


def _bringing_keys(graph: fx.Graph) -> set[fx.Node]:
    """What stands between a rank's own keys and values and an attention, if it sends them."""
    found: set[fx.Node] = set()
    for call in graph.find_nodes(op="call_function", target=CALL):
        for node in call.args[1:3]:
            chain = []
            while isinstance(node, fx.Node) and len(node.all_input_nodes) == 1:
                chain.append(node)
                if collective_kind(node) in ("all_gather", "permute_ranks"):
                    packed = node.args[0]
                    found.update(chain + ([packed] if packed.target in _PACKS else []))
                    break
                node = node.args[0]
    return found


def _region(node: fx.Node) -> int:
    origin = ir.info(node).origin
    return origin.region if origin.phase == "forward" else 0


def _leaves(node: fx.Node, region: int) -> bool:
    """Whether what is behind its region in forward uses ``node``."""
    return any(
        user.op == "output" or (ir.info(user).origin.phase == "forward" and _region(user) != region)
        for user in node.users
    )


def _draws(node: fx.Node) -> bool:
    """Whether a kernel draws from the device's generator; attention does so only where it drops out."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    given = arguments_of(node)
    return given.get("dropout_p", 0) != 0 or all(a.name != "dropout_p" for a in node.target._schema.arguments)
