"""`OnTheWire`: user functions around collectives of parameters and gradients, for compression or quantization."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from shardc.errors import InputError
from shardc.ir import graph as ir
from shardc.ir.comm import WAIT, waits_of
from shardc.ir.rewriter import GraphRewriter, Inserter, inline_graph
from shardc.passes.op_calls import leaving
from shardc.passes.schedule.prefetch import parameters
from shardc.plan.match import matching

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
GATHER = c10d.all_gather_into_tensor.default
REDUCE = (c10d.reduce_scatter_tensor.default, c10d.all_reduce.default)


@dataclass(frozen=True)
class OnTheWire:
    """Applies a user's function to a tensor before its collective, and another one to the result.

        %a = all_gather(%w)     ->  %b = all_gather(before(%w)),  %a = after(wait(%b))

    Insert it before ``bucket``: ``Options(pipeline=lambda passes: passes.before("bucket", OnTheWire(...)))``. Both
    functions are traced into the graph, so they are seen in its text, counted and fused. They may round; values then
    differ from those on one device.

    *Requires:* one half of a local graph, before `Bucket`. *Ensures:* shapes and dtypes of results are as before.

    Args:
        before: for gathers, takes a shard [d, ...] and returns one tensor or several, of any shapes. For reductions,
            takes a term and returns one tensor of its shape.
        after: for gathers, takes as many tensors as ``before`` returned, each [ranks, *its shape], and returns [ranks,
            d, ...] in the shard's dtype. For reductions, takes the reduced tensor and returns one of its shape in the
            term's dtype.
        parameters: glob of the names of the parameters concerned.
        of: "gather" (of parameters) or "reduce" (reduce-scatters and all-reduces of their gradients).
        name: the name of the pass.

    Raises:
        InputError: at compile time: a function returns another shape or dtype, or uses a tensor that is no argument.
    """

    before: Callable[..., Any]
    after: Callable[..., Tensor]
    parameters: str = "*"
    of: str = "gather"
    name: str = "on_the_wire"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        graph, rewriter = gm.graph, GraphRewriter(gm.graph)
        # Node -> names of the parameters that it gathers, or whose gradients it reduces.
        names_of = parameters(graph) if self.of == "gather" else _gradients(graph)
        kinds = (GATHER,) if self.of == "gather" else REDUCE
        for node in list(graph.nodes):
            if node.target in kinds and matching(self.parameters, names_of.get(node, ())):
                self._replace(node, rewriter)
        return gm

    def _replace(self, node: fx.Node, rewriter: GraphRewriter) -> None:
        """Inserts the user's functions around the collective ``node``: the ops of ``before`` on its input, and the ops
        of ``after`` on its result.
        """
        x, (wait,) = node.args[0], waits_of(node)
        ranks = node.args[1] if self.of == "gather" else None  # None: a reduction
        val, start, end = wait.meta["val"], rewriter.before(node), rewriter.before(wait)
        sent = self._traced(self.before, [x], start)
        if ranks is None and (len(sent) != 1 or sent[0].meta["val"].shape != x.meta["val"].shape):
            raise self._shape_error("before", node, [tensor.meta["val"] for tensor in sent], [x.meta["val"]])
        arrived = []
        for tensor in sent:
            shape = list(tensor.meta["val"].shape)
            # Gathered along a new first dim, with an entry for each rank, whatever the shape of what is sent.
            tensor = start.call(aten.reshape.default, tensor, [1, *shape]) if ranks is not None else tensor
            arrived.append(end.call(WAIT, start.call(node.target, tensor, *node.args[1:])))
        wanted = list(val.shape) if ranks is None else [ranks, *x.meta["val"].shape]
        results = self._traced(self.after, arrived, end)
        if (
            len(results) != 1
            or list(results[0].meta["val"].shape) != wanted
            or results[0].meta["val"].dtype != val.dtype
        ):
            raise self._shape_error("after", node, [tensor.meta["val"] for tensor in results], [val.new_empty(wanted)])
        rewriter.replace(wait, end.call(aten.reshape.default, results[0], list(val.shape)))
        rewriter.graph.erase_node(node)

    def _traced(self, function: Callable[..., Any], inputs: Sequence[fx.Node], at: Inserter) -> list[fx.Node]:
        """Traces ``function``, inserts its ops on ``inputs`` at ``at``, and returns its results."""
        fakes = [x.meta["val"] for x in inputs]

        def several(*tensors: Tensor) -> list[Tensor]:
            outputs = function(*tensors)
            return list(outputs) if isinstance(outputs, tuple | list) else [outputs]

        with fakes[0].fake_mode:
            traced = make_fx(several)(*fakes).graph
        if traced.find_nodes(op="get_attr"):  # a constant, which `inline_graph` does not copy
            raise InputError(
                f"{self.name}: {getattr(function, '__name__', function)} uses a tensor that is no argument of it",
                fix="make it inside of the function, of numbers",
            )
        return inline_graph(traced, inputs, lambda node, args, kwargs: at.call(node.target, *args, **kwargs))

    def _shape_error(
        self, which: str, node: fx.Node, results: Sequence[Tensor], wanted: Sequence[Tensor]
    ) -> InputError:
        """Returns the error for a user's function (named by ``which``) whose ``results`` do not have the shapes and
        dtypes of ``wanted``.
        """
        shown = [", ".join(f"{list(x.shape)} {x.dtype}" for x in some) for some in (results, wanted)]
        return InputError(
            f"{self.name}: {which} makes {shown[0]} for {ir.info(node).name!r}, where {shown[1]} is needed",
            fix="see shardc.passes.OnTheWire for the shapes",
        )


def _gradients(graph: fx.Graph) -> dict[fx.Node, frozenset[str]]:
    """Finds the reductions of gradients, and the nodes between them and the output. Returns node -> names of the
    parameters whose gradients it leads to.
    """
    carriers = leaving(graph)  # nodes that only carry results of collectives to the output
    names: dict[fx.Node, frozenset[str]] = {}
    for node in reversed(graph.nodes):  # names go from a gradient up to its operands
        if node.op == "output":
            for role, x in ir.outputs(graph):
                if role.kind == "grad" and isinstance(x, fx.Node):
                    names[x] = names.get(x, frozenset()) | {role.name}
        elif node in names and (node in carriers or node.target in REDUCE):
            for x in node.all_input_nodes:
                if x in carriers or x.target in REDUCE:
                    names[x] = names.get(x, frozenset()) | names[node]
    return names
