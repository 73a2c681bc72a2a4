"""Gradients of while loops as ops of the graph, which run a loop again and then its steps' gradients backwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from shardc.capture.functions import graph_of_function
from shardc.custom_ops.flops import of_function
from shardc.custom_ops.function_ops import NO_GRADIENT, OPS, Function, function_of, register


def loop_gradients(gm: fx.GraphModule, decompositions: Mapping[Any, Callable[..., object]]) -> None:
    """Replaces the marks of loops' gradients in a traced graph, except those of loops whose steps have loops or
    branches.
    """
    for node in gm.graph.find_nodes(op="call_function", target=NO_GRADIENT):
        grads, _, results = node.args
        loop: Any = results[0]
        while loop.target is not OPS["while_loop"]:
            loop = loop.args[0]
        operands, name = loop.args
        function = function_of(name)
        condition, step = function.graphs
        if any(inner.target in OPS.values() for inner in step.nodes):
            continue
        carries = function.counts[0]
        graphs = condition, step, _gradient(step, carries, loop, decompositions)
        gradient = Function("loop_gradient", graphs, (len(grads), carries), of_function("loop_gradient", graphs))
        node.target, node.args = OPS["loop_gradient"], ([*grads, *operands], register(gradient).name)


def _gradient(
    step: fx.Graph, carries: int, loop: fx.Node, decompositions: Mapping[Any, Callable[..., object]]
) -> fx.Graph:
    """Return the graph of (gradients of what a step carries on, sums of the gradients of the rest so far, what it
    carries, the rest) -> these gradients before the step, and these sums with its terms.
    """
    vals: list[Tensor] = [node.meta["val"] for node in step.nodes if node.op == "placeholder"]
    floating = [x.is_floating_point() for x in vals]
    count, run = sum(floating[:carries]), fx.GraphModule({}, step)

    def back(*flat: Tensor) -> tuple[Tensor, ...]:
        grads, totals, given = flat[:count], flat[count : sum(floating)], flat[sum(floating) :]

        def of_floating(*inputs: Tensor) -> tuple[Tensor, ...]:
            left = iter(inputs)
            results = run(*(next(left) if is_one else x for x, is_one in zip(given, floating, strict=True)))
            return tuple(x for x in results if x.is_floating_point())

        pull: Any = torch.func.vjp(of_floating, *(x for x, is_one in zip(given, floating, strict=True) if is_one))[1]
        terms = pull(grads)
        return (*terms[:count], *map(torch.add, totals, terms[count:]))

    mode: Any = getattr(vals[0], "fake_mode")  # noqa: B009
    with mode:
        like = [torch.empty_like(x) for x, is_one in zip(vals, floating, strict=True) if is_one]
        traced = make_fx(back, decomposition_table=dict(decompositions))(*like, *map(torch.empty_like, vals))
    return graph_of_function(traced, loop, "while_loop")
