"""What is the same in each step of a scan: given as the rest, and computed once, before the scan.

torch's scan saves for backward whatever its steps compute of weights, such as their transposes, once for each step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


def hoist(outer: fx.Graph, scan: fx.Node, step: fx.Graph, operands: list[fx.Node], counts: tuple[int, int]) -> int:
    """Changes the graph ``step`` and the ``operands`` of ``scan``, and the uses of its results; returns the number of
    sequences that are left.

    Args:
        outer: the graph of ``scan``, whose results are tensors.
        counts: numbers of carries and of sequences.
    """
    carries, sequences = counts
    arguments = list(step.find_nodes(op="placeholder"))
    steps = operands[carries].meta["val"].shape[0] if sequences else 0
    for at in reversed(range(carries + 1, carries + sequences)):  # the first one says how many steps there are
        if (same := _repeated(operands[at])) is not None:
            operands[:] = [*operands[:at], *operands[at + 1 :], same]
            argument = arguments.pop(at)
            arguments[-1].append(argument)
            arguments.append(argument)
            sequences -= 1
    env = dict(zip(arguments[carries + sequences :], operands[carries + sequences :], strict=True))
    results: list[Any] = list(next(iter(reversed(step.nodes))).args[0])
    for node in step.nodes:
        if node.op == "call_function" and all(x in env for x in node.all_input_nodes) and node.all_input_nodes:
            env[node] = node  # until it is needed outside
    kept = [at for at, x in enumerate(results) if at < carries or x not in env]
    for user in list(scan.users):
        if user.args[1] in kept:
            user.args = (scan, kept.index(user.args[1]))
            continue
        with outer.inserting_before(scan):
            value = _outside(outer, scan, results[user.args[1]], env)
            shape = [steps, *value.meta["val"].shape]
            every = _call(outer, scan, aten.expand.default, _call(outer, scan, aten.unsqueeze.default, value, 0), shape)
        user.replace_all_uses_with(every)
        outer.erase_node(user)
    next(iter(reversed(step.nodes))).args = (tuple(results[at] for at in kept),)
    step.eliminate_dead_code()
    scan.meta["val"] = [scan.meta["val"][at] for at in kept]
    return sequences


def _repeated(node: fx.Node) -> fx.Node | None:
    """Return what ``node`` repeats along dim 0, also backwards, if it does."""
    while node.target is aten.flip.default and node.args[1] == [0]:
        (node, _) = node.args
    source: Any = node.args[0] if node.target is aten.expand.default else None
    if source is None or source.target is not aten.unsqueeze.default or source.args[1] != 0:
        return None
    return source.args[0] if node.meta["val"].shape[1:] == source.meta["val"].shape[1:] else None


def _outside(outer: fx.Graph, scan: fx.Node, node: fx.Node, env: dict[fx.Node, fx.Node]) -> fx.Node:
    """Return a copy of ``node``, of a step, and of what it is computed from, in ``outer``."""
    if env[node] is node:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: _outside(outer, scan, x, env))
        env[node] = _call(outer, scan, node.target, *args, **kwargs)
    return env[node]


def _call(outer: fx.Graph, scan: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    node = outer.call_function(target, args, kwargs)
    args, kwargs = fx.map_arg((args, kwargs), lambda x: x.meta["val"])
    with scan.meta["val"][0].fake_mode:
        node.meta = {**scan.meta, "val": target(*args, **kwargs)}
    return node
