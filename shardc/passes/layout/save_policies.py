"""`mark_saves`: writes on each forward op whether its result is saved for backward, moved to the host until then, or
recomputed, as the plan says (`shardc.save`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from torch import fx

from shardc.errors import PlanError
from shardc.ir import graph as ir
from shardc.ir.graph import Origin
from shardc.ir.module_paths import is_in
from shardc.ir.op_traits import moves_data
from shardc.plan.match import shorten
from shardc.plan.placed import SavePolicy, is_named
from shardc.validate import near


def mark_saves(graph: fx.Graph, saves: Sequence[SavePolicy]) -> None:
    """Write on each forward op what the plan's policies say about its result: saved, on the host, or recomputed
    (``region``, ``policy`` and ``host`` of its `Origin`).

    Checkpoint regions of the plan are numbered after those of the model; ops in a region of the model keep its number.

    Args:
        graph: a graph at global shapes.
        saves: the policies; of several about one op the last one counts.

    Raises:
        PlanError: an op that an entry names is in none of its modules.
    """
    if not saves:
        return
    calls = [node for node in graph.nodes if node.op == "call_function" and ir.info(node).origin.phase == "forward"]
    _check_ops(calls, saves)
    first = 1 + max((ir.info(node).origin.region for node in calls), default=0)  # the first number that is free
    # A whole module that is recomputed is a checkpoint region; one inside of another belongs to the outer one.
    regions = [x.module for x in saves if x.where == "recompute" and not x.ops]
    outermost = [name for name in dict.fromkeys(regions) if not any(is_in(name, x) and name != x for x in regions)]
    numbers = {name: first + at for at, name in enumerate(outermost)}

    @cache
    def policies_of(module: str) -> list[SavePolicy]:
        """Returns the policies that apply to ``module``, in order."""
        return [policy for policy in saves if not policy.module or is_in(module, policy.module)]

    @cache
    def region_of(module: str) -> int:
        """Returns the number of the plan's checkpoint region that ``module`` is in; 0 for none."""
        return next((number for name, number in numbers.items() if not name or is_in(module, name)), 0)

    in_memory_anyway = _in_memory(graph)
    for node in calls:
        model_origin = origin = ir.info(node).origin  # ``model_origin``: before any policy, by the model's own code
        for policy in policies_of(origin.module):
            if policy.names(node.target):
                region = region_of(origin.module)
                origin = _with_policy(policy, origin, model_origin, region, node in in_memory_anyway)
        ir.update(node, origin=replace(origin, region=model_origin.region or origin.region))


def _with_policy(policy: SavePolicy, origin: Origin, model_origin: Origin, region: int, in_memory: bool) -> Origin:
    """Return ``origin`` (of an op, with earlier policies applied) after ``policy`` is applied, too. If policies
    conflict, the later one holds.

    Args:
        policy: the policy.
        origin: the origin with earlier policies applied.
        model_origin: the origin by the model's own code.
        region: number of the plan's checkpoint region around the op.
        in_memory: the value is a parameter, a buffer or an input, which is in memory anyway.

    A policy for single ops (``policy.ops``) marks these; one for whole modules decides their region, and takes back
    what earlier policies marked.
    """
    if policy.where == "recompute":
        # For a whole module: the plan's region decides, beside the model's own mark; earlier marks of the plan go. An
        # earlier ``host`` stays: what is still saved, such as what goes into a region, then lies on the host.
        return (
            replace(origin, policy="must_recompute")
            if policy.ops
            else replace(origin, region=region, policy=model_origin.policy)
        )
    # The host keeps nothing that is in memory anyway: it would be copied for no saving.
    host = policy.entry if policy.where == "host" and not in_memory else ""
    if policy.ops:
        return replace(origin, policy="must_save", host=host)
    return replace(origin, region=0, policy=model_origin.policy, host=host)  # 0: out of any region of the plan


def _in_memory(graph: fx.Graph) -> set[fx.Node]:
    """Return the values that are in memory anyway: arguments of ``graph`` and their views, and what is computed from
    parameters, buffers and constants alone.
    """
    alone: set[fx.Node] = set()  # computed from parameters, buffers and constants alone
    in_memory: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            in_memory.add(node)
            if node.op == "get_attr" or ir.role(node).kind in ("param", "buffer"):
                alone.add(node)
        elif node.op == "call_function" and alone.issuperset(node.all_input_nodes):
            alone.add(node)
        elif node.op == "call_function" and moves_data(node.target) and in_memory.issuperset(node.all_input_nodes):
            in_memory.add(node)
    return in_memory | alone


def _check_ops(calls: Sequence[fx.Node], saves: Sequence[SavePolicy]) -> None:
    """Raise PlanError if an entry of ``saves`` names an op that is never called in the modules of the entry. ``calls``:
    all forward ops of the graph.
    """
    # An entry is one policy for each of its modules, all with the same ops.
    by_entry: dict[str, list[SavePolicy]] = {}
    for policy in saves:
        if policy.ops:
            by_entry.setdefault(policy.entry, []).append(policy)
    for entry, policies in by_entry.items():
        inside = [x for x in calls if any(not p.module or is_in(ir.info(x).origin.module, p.module) for p in policies)]
        ops = sorted({str(node.target) for node in inside if hasattr(node.target, "_schema")})
        for name in policies[0].ops:
            if not any(is_named(op, name) for op in ops):
                raise PlanError(
                    f"there is no op {name!r} in the forward of {shorten([p.module for p in policies], 3)}",
                    plan_entry=entry,
                    # Names with and without the overload: "aten.mm.default", "aten.mm".
                    fix=near(name, [*ops, *(op.rpartition(".")[0] for op in ops)], f"there are {shorten(ops)}"),
                )
