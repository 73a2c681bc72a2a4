"""Writes higher-order ops in Dynamo's graph out as plain ops, which have ordinary gradients and sharding rules.

- `flex_attention` whose functions do not broadcast (`shardc.capture.flex`), or whose largest scores are used: its
  score and mask functions, graphs of scalars, are mapped over all places, as in torch's reference.
- ``map``: all slices at once, by ``vmap``; one after the other if it calls what ``vmap`` may not take.
- ``scan`` over few steps (`_WRITTEN_STEPS`): one step after the other, unless the plan splits what it runs over.
- ``invoke_subgraph`` (of ``nested_compile_region``): the graph that it calls.

A ``while_loop`` stays one, traced without sizes that depend on values. `loop_gradients` makes an op of its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from operator import getitem
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch._higher_order_ops.flex_attention import flex_attention, math_attention
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph
from torch._higher_order_ops.map import map_impl
from torch._higher_order_ops.scan import scan_op
from torch._higher_order_ops.while_loop import while_loop_op
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention as api

from shardc.capture import flex
from shardc.capture.capture_errors import error_at, line_of
from shardc.custom_ops.function_ops import NO_GRADIENT


def write_out(gm: fx.GraphModule, lengths: Collection[int] = ()) -> None:
    """Replaces the higher-order ops in ``gm``, a graph of Dynamo's, and in the graphs inside of it, by functions that
    compute the same: by plain ops or, for long scans, while loops and flex_attention, by ops that have gradients and
    sharding rules.

    Args:
        lengths: lengths of the sequences that the plan splits; scans over all of one, or its pieces, stay scans.
    """

    def of_scan(step: fx.GraphModule, carries: Sequence[Any], xs: Sequence[Tensor], rest: Sequence[Any]) -> Any:
        # Lengths of the sequences that it may run over: by elements, or by pieces, whose size is a dim of a slice.
        sizes = {len(x) * size for x in xs for size in (1, *x.shape[1:])}
        # A scan over a split sequence stays an op, which passes its carries from rank to rank.
        return (_scan if sizes.isdisjoint(lengths) else scan)(step, carries, xs, rest)

    plain = {**_PLAIN, scan_op: of_scan}
    for graph_module in gm.modules():
        if isinstance(graph_module, fx.GraphModule):
            for node in graph_module.graph.nodes:
                if node.op == "call_function" and node.target is flex_attention and not _uses_maximum(node):
                    node.target = flex.attention
                node.target = plain.get(node.target, node.target) if node.op == "call_function" else node.target
            graph_module.recompile()


def _uses_maximum(call: fx.Node) -> bool:
    """Return whether the third result of ``call``, a ``flex_attention``, is used: the largest score of each query."""
    return any(user.target is not getitem or user.args[1] == 2 and user.users for user in call.users)


def _map(body: fx.GraphModule, xs: Sequence[Tensor], args: Sequence[Any]) -> Any:
    """Compute torch's ``map``: apply ``body`` to each slice of ``xs`` along dim 0, and return its results, stacked."""
    targets = [x.target for x in body.graph.nodes if x.op == "call_function"]
    # Autograd functions, and custom ops, may not work under ``vmap``: one slice after the other.
    if any(getattr(x, "__name__", "") == "autograd_function_apply" or _is_users_op(x) for x in targets):
        results = [_run(body, *slices, *args) for slices in zip(*(x.unbind(0) for x in xs), strict=True)]
        return tuple(map(torch.stack, zip(*results, strict=True)))
    return torch.vmap(lambda *slices: _run(body, *slices, *args), randomness="different")(*xs)


def _is_users_op(target: object) -> bool:
    """Return whether ``target`` is a custom op (of ``torch.library``). Such an op may not work under ``vmap``."""
    return isinstance(target, OpOverload | OpOverloadPacket) and str(target).partition(".")[0] not in ("aten", "prims")


_WRITTEN_STEPS = 1024  # most nodes that a scan becomes; a longer one stays an op


def _scan(step: fx.GraphModule, carries: Sequence[Any], xs: Sequence[Tensor], rest: Sequence[Any]) -> Any:
    """Compute torch's ``scan``. A scan of few ops in all is written out step by step; others are computed by `scan`."""
    steps = len(xs[0]) if xs else 0
    if not 0 < steps * len(step.graph.nodes) <= _WRITTEN_STEPS:
        return scan(step, carries, xs, rest)
    results, count = [], len(carries)  # a step returns the new carries, then a slice of each result
    for slices in zip(*(x.unbind(0) for x in xs), strict=True):
        carries, of_step = _split(_run(step, *carries, *slices, *rest), count)
        results.append(of_step)
    return (*carries, *map(torch.stack, zip(*results, strict=True)))


def scan(step: fx.GraphModule, carries: Sequence[Any], xs: Sequence[Tensor], rest: Sequence[Any]) -> Any:
    """Call torch's ``scan`` op and return its results, with gradients that are correct also where the op's own are
    wrong or raise.

    Before torch 2.13 they are wrong if a first carry requires no gradient. They raise if the gradients of two last
    carries share memory.
    """
    if torch.is_grad_enabled():
        carries = [x if x.requires_grad or not _has_gradient(x) else x.detach().requires_grad_() for x in carries]
    last, every = _split(scan_op(step, carries, xs, rest), len(carries))  # last carries, stacked results
    apply: Any = _OwnGradient.apply
    return (*map(apply, last), *every)


class _OwnGradient(torch.autograd.Function):
    """Autograd function that is the identity. The gradient that it passes on is a copy, which shares memory with no
    other gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clone()


def _has_gradient(x: Tensor) -> bool:
    """Return whether the dtype of ``x`` can have a gradient: it is floating-point or complex."""
    return x.is_floating_point() or x.is_complex()


def _split(results: Sequence[Any], count: int) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return ``results`` in two parts: the first ``count``, and the others."""
    return results[:count], results[count:]


def _run(body: fx.GraphModule, *operands: Any) -> Any:
    """Run the graph of ``body`` node by node and return its results. In a trace, the ops keep the source lines and
    modules of the nodes.
    """
    return fx.Interpreter(body).run(*operands)  # which keeps the lines and modules of the nodes, unlike a call


class _Loop(torch.autograd.Function):
    """Autograd function of a while loop. Its backward leaves a mark in the trace, which `loop_gradients` replaces by
    the gradient.
    """

    @staticmethod
    def forward(ctx: Any, condition: Any, step: Any, count: int, *operands: Any) -> Any:
        # On fake tensors, the op runs one step.
        fake_loop = patch.dict(while_loop_op.python_key_table, {FakeTensorMode: _one_step})
        with fake_loop, torch._C._AutoDispatchBelowAutograd():  # below autograd, which this function stands for
            results: Any = while_loop_op(condition, step, operands[:count], operands[count:])
        ctx.save_for_backward(*operands, *results)
        ctx.operands = len(operands)  # to tell them from the results among the saved tensors
        ctx.mark_non_differentiable(*(x for x in results if not x.is_floating_point()))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        operands, results = _split(ctx.saved_tensors, ctx.operands)
        wanted = [x for x in operands if x.is_floating_point()]  # only these have gradients
        values = iter(NO_GRADIENT([x for x in grads if x.is_floating_point()], wanted, list(results)))
        return (None, None, None, *(next(values) if x.is_floating_point() else None for x in operands))


# What a step of a while loop may call (by name) that is lost, since the loop keeps a trace of the step's plain ops
# alone; with the text for an error.
_LOST_ALWAYS = dict.fromkeys(
    ("_grad_increment_nesting", "_jvp_increment_nesting"), "a gradient that it takes by torch.func"
)
_LOST_IN_BACKWARD = {
    "autograd_function_apply": "the gradient of an autograd.Function",
    "_set_grad_enabled": "torch.no_grad() (x.detach() may stand there)",
}


def _refuse_lost_gradients(step: fx.GraphModule, has_backward: bool) -> None:
    """Raise CaptureError if ``step``, the step of a while loop, calls what would be lost in the loop: `_LOST_ALWAYS`
    and, if the loop ``has_backward``, `_LOST_IN_BACKWARD`.
    """
    lost = _LOST_ALWAYS | _LOST_IN_BACKWARD if has_backward else _LOST_ALWAYS
    bodies = (module for module in step.modules() if isinstance(module, fx.GraphModule))
    calls = [x for body in bodies for x in body.graph.nodes if x.op == "call_function"]
    for at, call in enumerate(calls):
        if (name := getattr(call.target, "__name__", "")) in lost:
            fix = "write a scan over a fixed number of steps"
            if name in _LOST_IN_BACKWARD:
                fix += ", or call the loop under torch.no_grad()"
            # The call itself may have no line of the user's: take that of the next call that has one.
            line = next(filter(None, map(line_of, calls[at:])), "")
            raise error_at(line, f"the step of a while_loop would lose {lost[name]}", fix)


def _while_loop(condition: Any, step: fx.GraphModule, carries: Sequence[Any], rest: Sequence[Any]) -> Any:
    """Compute torch's ``while_loop`` by the autograd function `_Loop`, and return its results.

    Raises:
        CaptureError: the step takes or changes a gradient in a way that would be lost.
    """
    has_backward = torch.is_grad_enabled() and any(x.requires_grad for x in (*carries, *rest))
    _refuse_lost_gradients(step, has_backward)
    apply: Any = _Loop.apply
    return apply(condition, step, len(carries), *carries, *rest)


def _one_step(mode: FakeTensorMode, _: object, step: Any, carries: Sequence[Any], rest: Sequence[Any]) -> Any:
    """Run one ``step`` of a while loop in the fake ``mode``, without its condition; return the new carries. Their types
    are those of the loop's results.

    It replaces torch's fake loop, which makes symbols of numbers.
    """
    with mode:
        return step(*carries, *rest)


_PLAIN: dict[object, Callable[..., Any]] = {
    flex_attention: math_attention,
    map_impl: _map,
    invoke_subgraph: lambda body, _, *operands: _run(body, *operands),
    while_loop_op: _while_loop,
}


def _any_device(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Replaces torch's check of devices in ``flex_attention``, which raises for gradients on CPUs, by one that never
    raises.
    """


# (owner, attribute name, replacement)
OTHER_FORMS: tuple[tuple[object, str, object], ...] = ((api, "_validate_device", _any_device),)
