"""Collectives and moves in a local graph: what starts one, what waits for it, how large its results are."""

from __future__ import annotations

from math import prod

import torch
from torch import fx

from shardc.ir import graph as ir

c10d = torch.ops._c10d_functional


def is_start(node: fx.Node) -> bool:
    """Whether ``node`` starts a collective, or a move between host and device."""
    return (
        node.op == "call_function"
        and getattr(node.target, "namespace", "") in ("_c10d_functional", "shardc")
        and node.target is not c10d.wait_tensor.default
    )


def waits_of(node: fx.Node) -> list[fx.Node]:
    """The waits on what ``node`` starts, through the items of a coalesced collective."""
    out = []
    for user in node.users:
        out += [user] if user.target is c10d.wait_tensor.default else waits_of(user)
    return out


def result_bytes(node: fx.Node) -> int:
    """Bytes of what the collective or move ``node`` makes."""
    made = ir.info(node).value
    values = made if isinstance(made, tuple) else (made,)
    return sum(prod(v.shape) * v.itemsize for v in values if v is not None)
