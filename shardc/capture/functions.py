"""Replaces torch's higher-order ops in a traced graph by ops of `shardc.custom_ops.function_ops`.

The gradient of a while loop becomes an op too. It runs the loop again, and then the gradients of its steps in reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _disable_current_modes

from shardc.capture.capture_errors import COLLECTIVES, error_at, line_of
from shardc.capture.decompositions import insert_call, numbers_as_tensors
from shardc.custom_ops.flops import function_flops
from shardc.custom_ops.function_ops import NO_GRADIENT, OPS, Function, function_of, named, register
from shardc.errors import CaptureError, VerifyError
from shardc.ir import graph as ir
from shardc.ir.op_traits import draws

aten = torch.ops.aten
_MARKS = torch.ops.shardc.tag.default


def functions_as_ops(gm: fx.GraphModule) -> None:
    """Replaces ``cond``, ``scan`` and ``while_loop`` in a traced graph, and inside of their functions, by ops of shardc
    that take the name of a registered `Function`.

    Raises:
        CaptureError: a function draws random numbers, has a collective or a constant tensor, or takes no tensors.
    """
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and isinstance(node.target, torch._ops.HigherOrderOperator):
            kind = node.target.name()
            if kind in OPS:
                _replace(gm, node, kind)
    # The functions are registered now: their graphs in ``gm`` have no users any more.
    for node in gm.graph.find_nodes(op="get_attr"):
        if not node.users and isinstance(getattr(gm, node.target, None), fx.GraphModule):
            gm.graph.erase_node(node)


def _replace(gm: fx.GraphModule, node: fx.Node, kind: str) -> None:
    """Replace one higher-order op (``kind`` is "cond", "scan" or "while_loop") by an op of shardc. The op refers to the
    functions by the name under which they are registered.
    """
    arguments: Sequence[Any] = node.args
    if kind == "cond":
        predicate, *modules, operands = arguments
        flat, counts = [predicate, *operands], (0, 0)  # counts: how many operands are carries, and sequences
    elif kind == "scan":
        *modules, carries, xs, rest = arguments
        flat, counts = [*carries, *xs, *rest], (len(carries), len(xs))
    else:
        *modules, carries, rest = arguments
        flat, counts = [*carries, *rest], (len(carries), 0)
    if not all(isinstance(x, fx.Node) for x in flat):
        raise _error(node, f"{kind} is given a number among its operands", "pass it as a tensor")
    graphs = tuple(graph_of_function(getattr(gm, module.target), node, kind) for module in modules)
    node.meta["val"] = list(node.meta["val"])
    # An op of shardc returns tensors only: results that are None are left out of the numbering.
    tensors = (at for at, x in enumerate(node.meta["val"]) if isinstance(x, Tensor))
    new_number = {old: new for new, old in enumerate(tensors)}
    for user in list(node.users):
        if user.target is getitem and user.args[1] in new_number:
            user.args = (node, new_number[user.args[1]])
    node.meta["val"] = [x for x in node.meta["val"] if isinstance(x, Tensor)]
    old_operands, reverse = list(flat), False  # `_hoist` and `_remove_flips` replace some of ``flat``
    if kind == "scan":
        with node.meta["val"][0].fake_mode:
            counts = counts[0], _hoist(gm.graph, node, graphs[0], flat, counts)
            reverse = _remove_flips(gm.graph, node, flat, counts)
        named(graphs[0])  # `_hoist` may have changed it
    function = register(Function(kind, graphs, counts, function_flops(kind, graphs)))
    node.target, node.args, node.kwargs = OPS[kind], (flat, function.name, *([True] if reverse else [])), {}
    for operand in old_operands:
        _erase_unused(gm.graph, operand)


def _erase_unused(graph: fx.Graph, node: fx.Node) -> None:
    """Erases ``node`` if nothing uses it, and then the nodes that it was computed from if nothing else uses these."""
    if node.op == "call_function" and not node.users:
        sources = node.all_input_nodes
        graph.erase_node(node)
        for source in sources:
            _erase_unused(graph, source)


def graph_of_function(gm: fx.GraphModule, node: fx.Node | None, kind: str) -> fx.Graph:
    """Return the graph of ``gm``, a function that a higher-order op runs, rewritten with only the ops that such a
    function may have.

    Args:
        node: the call of the higher-order op; None if there is none.
        kind: "cond", "scan" and so on, for errors.

    Raises:
        CaptureError: the function has other ops; the error has the line of ``node``.
    """
    functions_as_ops(gm)
    numbers_as_tensors(gm.graph)
    for inner in list(gm.graph.nodes):
        if inner.target is _MARKS:  # names a value for the plan, which cannot split what lies in a function
            inner.replace_all_uses_with(inner.args[0])
            gm.graph.erase_node(inner)
        elif inner.op == "get_attr":
            _number(gm, inner, node, kind)
        elif inner.op == "call_function":
            namespace = getattr(inner.target, "namespace", "")
            if namespace == "shardc_random" or draws(inner.target):
                raise _error(node, f"a function of {kind} draws random numbers", "draw them outside, and pass them")
            if getattr(inner.target, "__module__", "") == "_operator" and inner.target is not getitem:
                fix = "leave dynamic= out, or compute the size outside of the function"
                raise _error(node, f"a function of {kind} computes with a size that is a symbol", fix)
            if namespace in COLLECTIVES or isinstance(inner.target, torch._ops.HigherOrderOperator):
                raise _error(node, f"a function of {kind} calls {inner.target}", "call it outside")
    gm.graph.eliminate_dead_code()
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    results = graph.graph_copy(gm.graph, env)
    wanted = list(results) if isinstance(results, (list, tuple)) else [results]
    graph.output(tuple(x for x in wanted if x is not None))
    named(graph)
    # It must have a form as text, in which programs are stored: `to_json` raises if it has none.
    try:
        Function(kind, (graph,)).to_json()
    except VerifyError as error:
        raise _error(node, f"a function of {kind}: {error.what}", "write it with ops of torch on tensors") from error
    return graph


def _number(gm: fx.GraphModule, constant: fx.Node, node: fx.Node | None, kind: str) -> None:
    """Replaces ``constant``, a get_attr node of a tensor with one number, by an op that makes that tensor. CaptureError
    for any other tensor.

    ``node`` and ``kind`` are those of `graph_of_function`.
    """
    value = getattr(gm, str(constant.target))
    if not isinstance(value, Tensor) or value.ndim or value.is_complex():
        raise _error(node, f"a function of {kind} has a constant tensor", "make the tensor outside")
    with _disable_current_modes():
        number = value.item()
    with gm.graph.inserting_before(constant):
        kwargs = {"dtype": value.dtype, "device": value.device}
        tensor = gm.graph.call_function(aten.scalar_tensor.default, (number,), kwargs)
    constant.replace_all_uses_with(tensor)
    gm.graph.erase_node(constant)


def _error(node: fx.Node | None, what: str, fix: str) -> CaptureError:
    """Return a CaptureError with the text ``what``, the user's line that ``node`` comes from, and the ``fix``."""
    return error_at(line_of(node) if node else "", what, fix)


def _hoist(outer: fx.Graph, scan: fx.Node, step: fx.Graph, operands: list[fx.Node], counts: tuple[int, int]) -> int:
    """Moves results of a scan that are the same in all steps out of the loop, with the ops that compute them. Returns
    the number of sequences that the scan still reads: one that repeats a value becomes an operand of the rest.

    Changed in place are the graph ``step``, ``operands`` and the uses of the scan's results.

    torch's scan saves for backward whatever its steps compute of weights, such as their transposes, once for each step.

    Args:
        outer: the graph of ``scan``, whose results are tensors.
        scan: the scan.
        step: the graph of a step.
        operands: the operands of ``scan``: carries, sequences and the rest.
        counts: numbers of carries and of sequences.
    """
    carries, sequences = counts
    arguments = list(step.find_nodes(op="placeholder"))
    steps = operands[carries].meta["val"].shape[0] if sequences else 0
    for at in reversed(range(carries + 1, carries + sequences)):  # the first one says how many steps there are
        if (repeated := _repeated(operands[at])) is not None:
            operands[:] = [*operands[:at], *operands[at + 1 :], repeated]
            argument = arguments.pop(at)
            arguments[-1].append(argument)  # in the step's graph, moves this placeholder behind the last one
            arguments.append(argument)
            sequences -= 1
    # Values of the step that are the same in all steps -> their node in ``outer``, or the node of the step itself.
    env = dict(zip(arguments[carries + sequences :], operands[carries + sequences :], strict=True))
    results: list[Any] = list(next(iter(reversed(step.nodes))).args[0])
    for node in step.nodes:
        if node.op == "call_function" and all(x in env for x in node.all_input_nodes) and node.all_input_nodes:
            env[node] = node  # can move out of the loop; `_copy_to_outer` replaces it by its copy there
    # Results that the scan still computes: carries, and those that differ between steps.
    remaining = [at for at, x in enumerate(results) if at < carries or x not in env]
    for user in list(scan.users):
        if user.args[1] in remaining:
            user.args = (scan, remaining.index(user.args[1]))
            continue
        with outer.inserting_before(scan):
            value = _copy_to_outer(outer, scan, results[user.args[1]], env)
            # The scan returned it for each step; now it is computed once, and repeated.
            shape = [steps, *value.meta["val"].shape]
            one_step = insert_call(outer, scan, aten.unsqueeze.default, value, 0)
            every = insert_call(outer, scan, aten.expand.default, one_step, shape)
        user.replace_all_uses_with(every)
        outer.erase_node(user)
    next(iter(reversed(step.nodes))).args = (tuple(results[at] for at in remaining),)
    step.eliminate_dead_code()
    scan.meta["val"] = [scan.meta["val"][at] for at in remaining]
    return sequences


def _repeated(node: fx.Node) -> fx.Node | None:
    """Return the node whose value ``node`` repeats along a new dim 0, with or without flips of that dim. None if
    ``node`` does not repeat a value.
    """
    node, _ = _unflipped(node)
    source: Any = node.args[0] if node.target is aten.expand.default else None
    if source is None or source.target is not aten.unsqueeze.default or source.args[1] != 0:
        return None
    return source.args[0] if node.meta["val"].shape[1:] == source.meta["val"].shape[1:] else None


def _copy_to_outer(outer: fx.Graph, scan: fx.Node, node: fx.Node, env: dict[fx.Node, fx.Node]) -> fx.Node:
    """Copy ``node``, an op of a scan's step, into the graph ``outer`` around the scan, with the ops that it is computed
    from. Return the copy.

    Args:
        env: node of the step -> its node in ``outer``; extended.
    """
    if env[node] is node:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: _copy_to_outer(outer, scan, x, env))
        env[node] = insert_call(outer, scan, node.target, *args, **kwargs)
    return env[node]


def _remove_flips(outer: fx.Graph, scan: fx.Node, operands: list[fx.Node], counts: tuple[int, int]) -> bool:
    """Remove, in place, flips of the sequences and of the results of ``scan``. Return whether the scan now has to run
    in reverse: it has to if most sequences were flipped.

    torch writes a scan that begins at the end of its sequences by flips. A flip moves each element of a sequence to
    another place, so to another rank if the sequence is split.

    Args:
        outer: the graph of ``scan``, whose results are tensors.
        scan: the scan. The uses of its results are changed in place.
        operands: its operands: carries, sequences and the rest. The list is changed in place.
        counts: numbers of carries and of sequences.
    """
    carries, end = counts[0], sum(counts)
    sources = list(map(_unflipped, operands[carries:end]))  # (sequence before flips, whether it is flipped)
    reverse = 2 * sum(flipped for _, flipped in sources) > len(sources)
    for at, (source, flipped) in enumerate(sources, carries):
        with outer.inserting_before(scan):
            operands[at] = source if flipped == reverse else insert_call(outer, source, aten.flip.default, source, [0])
    for result in list(scan.users):
        # Stacked results of a reversed scan come in the other order: flip them, which may undo a flip of the user's.
        if reverse and result.args[1] >= carries:
            with outer.inserting_after(result):
                flipped_result = insert_call(outer, result, aten.flip.default, result, [0])
            result.replace_all_uses_with(
                flipped_result, delete_user_cb=lambda user, inserted=flipped_result: user is not inserted
            )
        for flip in filter(_flips, list(result.users)):  # a flip of a flip is the value itself
            for user in filter(_flips, list(flip.users)):
                user.replace_all_uses_with(result)
                outer.erase_node(user)
            if not flip.users:
                outer.erase_node(flip)
    return reverse


def _flips(node: fx.Node) -> bool:
    """Return whether ``node`` is a flip along dim 0."""
    return node.target is aten.flip.default and node.args[1] == [0]


def _unflipped(node: fx.Node) -> tuple[fx.Node, bool]:
    """Return (the source of ``node`` before any flips along dim 0, whether ``node`` is the source flipped)."""
    flipped = False
    while _flips(node):
        source: Any = node.args[0]
        node, flipped = source, not flipped
    return node, flipped


def loop_gradients(gm: fx.GraphModule, decompositions: Mapping[Any, Callable[..., object]]) -> None:
    """Replaces the gradients of while loops in a traced graph, where the trace has left a mark (the op NO_GRADIENT), by
    ops that compute them. Loops whose step has loops or branches keep the mark, which raises when it runs.
    """
    for node in gm.graph.find_nodes(op="call_function", target=NO_GRADIENT):
        grads, _, results = node.args  # gradients of the loop's results, and these results
        loop: Any = results[0]
        # The results are getitems of the loop's node.
        while loop.target is not OPS["while_loop"]:
            loop = loop.args[0]
        operands, name = loop.args
        function = function_of(name)
        condition, step = function.graphs
        if any(inner.target in OPS.values() for inner in step.nodes):
            continue
        carries = function.counts[0]
        # The op runs the loop again (condition, step), and then the gradient of each step.
        graphs = condition, step, _gradient(step, carries, loop, decompositions)
        flops = function_flops("loop_gradient", graphs)
        gradient = Function("loop_gradient", graphs, counts=(len(grads), carries), flops=flops)
        node.target, node.args = OPS["loop_gradient"], ([*grads, *operands], register(gradient).name)


def _copied(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Replaces ``aten.copy`` by an op that autograd can differentiate: return ``source`` in the dtype and shape of
    ``x``.
    """
    return source.to(x.dtype).expand_as(x)


def _gradient(
    step: fx.Graph, carries: int, loop: fx.Node, decompositions: Mapping[Any, Callable[..., object]]
) -> fx.Graph:
    """Trace the gradient of one step of the while loop ``loop``, given the graph ``step`` and its number of
    ``carries``; return the graph of the gradient.

    Its arguments are the gradients of the step's results, the sums of gradients of the rest so far, the carries before
    the step, and the rest. It returns the gradients of the carries before the step, and the sums with its terms added.
    """
    # The step's arguments: carries, then the rest. Only floating-point arguments have gradients.
    vals: list[Tensor] = [node.meta["val"] for node in step.nodes if node.op == "placeholder"]
    floating = [x.is_floating_point() for x in vals]
    floating_carries, run = sum(floating[:carries]), fx.GraphModule({}, ir.copied(step))
    for node in run.graph.find_nodes(op="call_function", target=aten.copy.default):
        node.target = _copied  # torch does not differentiate aten.copy
    run.recompile()

    def step_gradient(*flat: Tensor) -> tuple[Tensor, ...]:
        """Compute the gradients of one step: take and return what the traced graph does (see `_gradient`), as flat
        tuples.
        """
        grads, totals, arguments = (
            flat[:floating_carries],
            flat[floating_carries : sum(floating)],
            flat[sum(floating) :],
        )

        def of_floating(*inputs: Tensor) -> tuple[Tensor, ...]:  # the step as a function of these arguments only
            floating_inputs = iter(inputs)
            results = run(
                *(next(floating_inputs) if is_float else x for x, is_float in zip(arguments, floating, strict=True))
            )
            return tuple(x for x in results if x.is_floating_point())

        vjp: Any = torch.func.vjp(
            of_floating, *(x for x, is_float in zip(arguments, floating, strict=True) if is_float)
        )[1]
        terms = vjp(grads)
        return (*terms[:floating_carries], *map(torch.add, totals, terms[floating_carries:]))

    mode: Any = getattr(vals[0], "fake_mode")  # noqa: B009
    with mode:
        like = [torch.empty_like(x) for x, is_float in zip(vals, floating, strict=True) if is_float]
        traced = make_fx(step_gradient, decomposition_table=dict(decompositions))(*like, *map(torch.empty_like, vals))
    return graph_of_function(traced, loop, "while_loop")
