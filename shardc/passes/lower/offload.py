"""Offload: moves parameters that the plan keeps on the host to the device, and their gradients back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from shardc.ir import graph as ir
from shardc.ir.comm import HOST, WAIT
from shardc.ir.rewriter import GraphRewriter

TO_DEVICE, TO_HOST = torch.ops.shardc.to_device.default, torch.ops.shardc.to_host.default


@dataclass(frozen=True)
class Offload:
    """Moves each parameter that is kept on the host to the device before its first use, and its gradient back to the
    host.

        %w (host)                               %w.device = wait(to_device(%w))
        %f = all_gather(%w)                 ->  %f = all_gather(%w.device)
        return %g                               return wait(to_host(%g))

    A parameter's shard moves in the dtype that it is stored in: its cast to a smaller dtype runs on the device, before
    the gather, and a gradient's cast runs after its reduction, before the move.

    *Requires:* a local joint graph, or one that reduces accumulated gradients. *Ensures:* the parameters in ``entries``
    and their gradients are on the host (`Value.host`); every other value is on the device.

    Args:
        entries: parameter -> the plan entry that keeps it on the host.
        device: the device that the program runs on.
        pending: parameters whose gradients stay on the device, to be reduced later.
    """

    entries: Mapping[str, str] = field(default_factory=dict)
    device: torch.device = HOST
    pending: frozenset[str] = frozenset()
    name = "offload"
    requires = ("localize",)

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        rewriter, output = GraphRewriter(gm.graph), ir.output_node(gm.graph)
        for param in ir.placeholders(gm.graph, "param"):
            if (entry := self.entries.get(ir.info(param).name)) is None:
                continue
            if param.users:
                first_use = next(node for node in gm.graph.nodes if node in param.users)
                copy = insert_move(
                    rewriter, first_use, param, TO_DEVICE, self.device.type, device=self.device, phase="forward",
                    cause=entry,
                )  # fmt: skip
                rewriter.redirect(param, copy)
            place_on_host(rewriter, param, ir.value(param))

        def moved(role: ir.Role, grad: fx.Node) -> fx.Node:
            # Other outputs stay; a gradient whose reduction is deferred is accumulated on the device.
            if role.kind != "grad" or role.name not in self.entries or role.name in self.pending:
                return grad
            entry = self.entries[role.name]
            return insert_move(rewriter, output, grad, TO_HOST, device=HOST, phase="backward", cause=entry)

        ir.change_outputs(gm.graph, moved)
        gm.graph.lint()
        return gm


def insert_move(
    rewriter: GraphRewriter, before: fx.Node, x: fx.Node, op: Any, *args: Any, device: torch.device,
    like: fx.Node | None = None, **provenance: Any,
) -> fx.Node:  # fmt: skip
    """Inserts before node ``before`` the op ``op`` (`TO_DEVICE` or `TO_HOST`), which moves ``x`` to ``device``, and its
    wait; returns the wait.

    Args:
        args: further arguments of ``op``.
        like: node whose record the new nodes inherit; by default ``x``.
        provenance: fields of `ir.Origin` that differ.
    """
    value = replace(ir.value(x), host=op is TO_HOST)  # the same type, in the other memory
    name = "host" if value.host else "device"
    start = rewriter.before(before, like or x, f"to_{name}", **provenance).typed(value, op, x, *args)
    wait = rewriter.before(before, like or x, name, **provenance).typed(value, WAIT, start)
    start.meta["val"] = wait.meta["val"] = _fake_tensor(rewriter, value, device)  # `typed` gives no fake value
    return wait


def place_on_host(rewriter: GraphRewriter, placeholder: fx.Node, value: ir.Value) -> None:
    """Makes an input of the graph a value of type ``value`` that is in host memory."""
    ir.update(placeholder, value=replace(value, host=True))
    placeholder.meta["val"] = _fake_tensor(rewriter, value, HOST)


def _fake_tensor(rewriter: GraphRewriter, value: ir.Value, device: torch.device) -> torch.Tensor:
    """Returns a fake tensor of type ``value`` on ``device``."""
    with rewriter.fake_mode:
        return torch.empty(value.shape, dtype=value.dtype, device=device)
