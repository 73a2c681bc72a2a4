"""Offload: parameters that the plan keeps on the host are moved to the device, and their gradients back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from shardc.ir import graph as ir
from shardc.ir.comm import WAIT
from shardc.ir.graph import Info, NameScope
from shardc.ir.host import HOST

_TO_DEVICE, _TO_HOST = torch.ops.shardc.to_device.default, torch.ops.shardc.to_host.default


@dataclass(frozen=True)
class Offload:
    """Moves each parameter on the host to the device before its first use, and its gradient back.

    Takes: a local joint graph, or one that reduces what was summed up. Guarantees: the parameters in ``entries``, and
    their gradients, lie on the host (`Value.host`); all that computes or communicates lies on the device. What moves
    is a parameter's shard in the dtype that it is stored in: a cast to a smaller dtype runs on the device, in front of
    the gather, and that of a gradient behind its reduction, in front of the move.

    Args:
        entries: parameter -> the plan entry that keeps it on the host.
        fake_mode: mode of the graph's fake values.
        device: where the program runs.
        pending: parameters whose gradients stay on the device as they are, to be reduced later.
    """

    entries: Mapping[str, str] = field(default_factory=dict)
    fake_mode: Any = None
    device: torch.device = HOST
    pending: frozenset[str] = frozenset()
    name = "offload"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        graph, names = gm.graph, NameScope.of(gm.graph)
        for param in ir.placeholders(graph, "param"):
            if ir.info(param).name in self.entries:
                self._fetch(param, names)
        output = ir.output_node(graph)

        def moved(role: ir.Role, grad: fx.Node) -> fx.Node:
            if role.kind != "grad" or role.name not in self.entries or role.name in self.pending:
                return grad
            return self._move(grad, output, _TO_HOST, (grad,), self.entries[role.name], names)

        ir.change_outputs(graph, moved)
        graph.lint()
        return gm

    def _fetch(self, param: fx.Node, names: NameScope) -> None:
        """Marks ``param`` as lying on the host; what used it uses a copy on the device."""
        record, val, users = ir.info(param), param.meta["val"], list(param.users)
        ir.set_info(param, replace(record, value=replace(ir.value(param), host=True)))
        with self.fake_mode:
            param.meta["val"] = torch.empty(val.shape, dtype=val.dtype, device=HOST)
        if users:
            first = next(node for node in param.graph.nodes if node in param.users)
            there = self._move(param, first, _TO_DEVICE, (param, self.device.type), self.entries[record.name], names)
            for user in users:
                user.replace_input_with(param, there)

    def _move(
        self, x: fx.Node, before: fx.Node, op: Any, args: tuple[Any, ...], entry: str, names: NameScope
    ) -> fx.Node:
        """The result of moving ``x``, waited for, in front of ``before``."""
        record, to_host = ir.info(x), op is _TO_HOST
        origin = replace(record.origin, phase="backward" if to_host else "forward", cause=entry)
        value = replace(ir.value(x), host=to_host)
        kind, there = ("to_host", "host") if to_host else ("to_device", "device")
        with x.graph.inserting_before(before):
            start = x.graph.call_function(op, args)
            wait = x.graph.call_function(WAIT, (start,))
        with self.fake_mode:
            start.meta["val"] = wait.meta["val"] = torch.empty(
                value.shape, dtype=value.dtype, device=HOST if to_host else self.device
            )
        for node, name in ((start, kind), (wait, there)):
            ir.set_info(node, Info(names.fresh(f"{record.name}.{name}"), value, origin))
        return wait
