"""OffloadSaved: keeps values that forward saves on the host until backward needs them, where the plan says so."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from shardc.ir import graph as ir
from shardc.ir.comm import HOST
from shardc.ir.rewriter import GraphRewriter
from shardc.passes.lower.offload import TO_DEVICE, TO_HOST, insert_move, place_on_host

aten = torch.ops.aten


@dataclass(frozen=True)
class OffloadSaved:
    """Moves saved values to the host in forward and back to the device in backward, where the plan says so.

        %a = relu(%x)              forward:   %a.host = wait(to_host(%a, False))
        saved %a               ->             saved %a.host
        %g = mul(%gy, %a)          backward:  %a.device = wait(to_device(%a))
                                              %g = mul(%gy, %a.device)

    A value moves with its dims in the order of its strides, so that a view of it in backward is one as before.

    *Requires:* one half of a local graph, from `Partition`. *Ensures:* saved values whose origins name a plan entry
    that keeps them on the host (`Origin.host`) are there between the halves (`Value.host`); nothing else changes.

    Args:
        device: the device that the program runs on.
    """

    device: torch.device = HOST
    name = "offload_saved"
    requires = ("partition",)

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        rewriter = GraphRewriter(gm.graph)
        placed: dict[fx.Node, fx.Node] = {}  # a value that is saved twice moves once

        def stored(role: ir.Role, x: fx.Node) -> fx.Node:
            # Inputs that are saved stay: they are in memory anyway.
            if role.kind == "saved" and x.op == "call_function" and _goes_to_host(x) and x not in placed:
                placed[x] = self._store(rewriter, x)
            return placed.get(x, x) if role.kind == "saved" else x

        ir.change_outputs(gm.graph, stored)
        for node in ir.placeholders(gm.graph, "saved"):
            if node.users and _goes_to_host(node):
                self._load(rewriter, node)
        if placed:
            gm.graph.lint()
        return gm

    def _store(self, rewriter: GraphRewriter, x: fx.Node) -> fx.Node:
        """Inserts, behind ``x``, the move of ``x`` to the host and the wait for the move; returns the wait."""
        order, cause = _by_stride(x), ir.info(x).origin.host  # ``cause``: the plan entry
        at = rewriter.after(x, suffix="packed", phase="forward", cause=cause)
        # Dims by stride: the copy on the host is contiguous, and `_load` restores the order of dims.
        last = x if order is None else at.call(aten.permute.default, x, order)
        # ``to_host(x, False)``: the host itself does not read the copy.
        return insert_move(rewriter, last.next, last, TO_HOST, False, device=HOST, like=x, phase="forward", cause=cause)

    def _load(self, rewriter: GraphRewriter, saved: fx.Node) -> None:
        """Turns ``saved``, a placeholder of backward, into a value on the host, and moves it to the device before its
        first use.
        """
        order, whole, cause = _by_stride(saved), ir.value(saved), ir.info(saved).origin.host
        first_use = next(node for node in saved.graph.nodes if node in saved.users)
        # Dims are in the order of their strides on the host, where copies are contiguous (`_store`).
        shape = whole.shape if order is None else tuple(whole.shape[dim] for dim in order)
        place_on_host(rewriter, saved, replace(whole, shape=shape))
        last = insert_move(
            rewriter, first_use, saved, TO_DEVICE, self.device.type, device=self.device, phase="backward", cause=cause
        )
        if order is not None:
            back = [order.index(dim) for dim in range(len(order))]  # the inverse permutation
            at = rewriter.before(first_use, saved, "unpacked", phase="backward", cause=cause)
            last = at.call(aten.permute.default, last, back)
        rewriter.redirect(saved, last)


def _goes_to_host(node: fx.Node) -> bool:
    """Returns whether the plan keeps ``node``, a value that backward reads, on the host.

    A value that repeats elements in memory (``expand``) stays on the device: a copy would be larger.
    """
    origin, val = ir.info(node).origin, node.meta["val"]
    if not origin.host or origin.phase != "forward" or not isinstance(val, torch.Tensor):
        return False
    # Stride 0 of a dim of size 1 repeats nothing.
    return val.numel() > 0 and all(stride or size == 1 for size, stride in zip(val.shape, val.stride(), strict=True))


def _by_stride(node: fx.Node) -> list[int] | None:
    """Returns the dims of ``node`` in the order of their strides, the largest first. None if the dims are in this order
    already.
    """
    strides = node.meta["val"].stride()
    order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
    return None if order == list(range(len(strides))) else order
