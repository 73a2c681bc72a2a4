"""SplitBackward: cuts the backward of a pipeline stage in two, so that earlier stages need not wait for all of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from shardc._compat import LazyGraphModule
from shardc.ir import graph as ir
from shardc.ir.executable import TRANSFER
from shardc.ir.graph import Role
from shardc.passes.lower.microbatch import cut_out


@dataclass(frozen=True)
class SplitBackward:
    """Cuts a stage's backward in two, for zero-bubble schedules: one graph for the gradients of the stage's inputs,
    which earlier stages wait for, and one for the gradients of its weights.

        %da = mm(%dy, %w)                          inputs:   %da = mm(%dy, %w); %dx = mul(%da, %a)
        %dw = mm(%x, %da)                    ->              saves %da
        %dx = mul(%da, %a)    (transfer)           weights:  %dw = mm(%x, %da)

    The first computes what earlier stages need, and saves its values, recomputed ones included, that the second reads.
    A value that the plan keeps on the host is moved to the device by both parts. Otherwise it would occupy the device
    for each microbatch whose second part has not run yet.

    *Requires:* the backward of a stage. *Ensures:* each op is in one of the graphs; the second takes what the first
    saves. One of them is None if it has no results.
    """

    name = "split_backward"
    requires = ("partition",)

    def __call__(self, gm: fx.GraphModule) -> tuple[fx.GraphModule | None, fx.GraphModule | None]:
        results = list(ir.outputs(gm.graph))
        sent = [(role, x) for role, x in results if role.kind == TRANSFER]  # gradients that earlier stages wait for
        rest = [(role, x) for role, x in results if role.kind != TRANSFER]  # gradients of weights, and the like
        if not sent or not rest:
            return (gm, None) if sent else (None, gm)
        for_inputs = ir.ancestors(x for _, x in sent)
        for_weights = ir.ancestors(x for _, x in rest) - for_inputs
        # What crosses from the first graph to the second: ops of the first that the second reads or returns.
        computed = {x for x in for_inputs if x.op == "call_function"}
        read = {x for node in for_weights for x in node.all_input_nodes} | {
            x for _, x in rest if isinstance(x, fx.Node)
        }
        crossing = [x for x in gm.graph.nodes if x in computed and x in read]
        # In both graphs a crossing value has role "saved": a result of the first, an argument of the second.
        weights = cut_out(gm.graph, rest, {x: Role("saved", ir.info(x).name) for x in crossing})
        arguments = {ir.info(node).name: node for node in ir.placeholders(weights)}
        saved = []
        # The role's name is that of the placeholder which reads it, as between forward and backward.
        for at, x in enumerate(crossing):
            argument = arguments[ir.info(x).name]
            ir.update(argument, role=Role("saved", argument.name))
            saved.append((Role("saved", argument.name, at), x))
        inputs = cut_out(gm.graph, [*sent, *saved], {})
        return LazyGraphModule(gm, inputs), LazyGraphModule(gm, weights)
