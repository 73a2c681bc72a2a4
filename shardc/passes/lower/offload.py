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

_TO_DEVICE, _TO_HOST = torch.ops.shardc.to_device.default, torch.ops.shardc.to_host.default


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
        fake_mode: mode of the graph's fake values.
        device: the device that the program runs on.
        pending: parameters whose gradients stay on the device, to be reduced later.
    """

    entries: Mapping[str, str] = field(default_factory=dict)
    fake_mode: Any = None
    device: torch.device = HOST
    pending: frozenset[str] = frozenset()
    name = "offload"
    requires = ("localize",)

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        graph, rewriter = gm.graph, GraphRewriter(gm.graph)
        for param in ir.placeholders(graph, "param"):
            if ir.info(param).name in self.entries:
                self._fetch(param, rewriter)
        output = ir.output_node(graph)

        def moved(role: ir.Role, grad: fx.Node) -> fx.Node:
            # A gradient whose reduction is deferred is accumulated on the device.
            if role.kind != "grad" or role.name not in self.entries or role.name in self.pending:
                return grad
            return self._move(rewriter, grad, output, self.entries[role.name], _TO_HOST)

        ir.change_outputs(graph, moved)
        graph.lint()
        return gm

    def _fetch(self, param: fx.Node, rewriter: GraphRewriter) -> None:
        """Marks ``param`` as a value on the host; its users read a copy on the device."""
        val, users = param.meta["val"], list(param.users)
        ir.update(param, value=replace(ir.value(param), host=True))
        with self.fake_mode:
            param.meta["val"] = torch.empty(val.shape, dtype=val.dtype, device=HOST)
        if users:
            first = next(node for node in param.graph.nodes if node in param.users)
            entry = self.entries[ir.info(param).name]
            on_device = self._move(rewriter, param, first, entry, _TO_DEVICE, self.device.type)
            for user in users:
                user.replace_input_with(param, on_device)

    def _move(self, rewriter: GraphRewriter, x: fx.Node, before: fx.Node, entry: str, op: Any, *args: Any) -> fx.Node:
        """Inserts before node ``before`` the op ``op``, which moves ``x`` between host and device, and its wait;
        returns the wait.

        Args:
            entry: the plan entry that causes it.
            args: further arguments of ``op``.
        """
        to_host = op is _TO_HOST
        value, phase = replace(ir.value(x), host=to_host), "backward" if to_host else "forward"
        names = ("to_host", "host") if to_host else ("to_device", "device")
        start_at, wait_at = (rewriter.before(before, x, name, phase=phase, cause=entry) for name in names)
        start = start_at.typed(value, op, x, *args)
        wait = wait_at.typed(value, WAIT, start)
        with self.fake_mode:
            start.meta["val"] = wait.meta["val"] = torch.empty(
                value.shape, dtype=value.dtype, device=HOST if to_host else self.device
            )
        return wait
