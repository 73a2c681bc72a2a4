"""Partition: splits the joint graph into a forward and a backward graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import fx

from shardc._compat import LazyGraphModule
from shardc.cost.step_sequence import is_coordinate, runs_again
from shardc.custom_ops.float8_ops import QUANTISE, data_operands
from shardc.ir import graph as ir
from shardc.ir.executable import TRANSFER
from shardc.ir.graph import Role
from shardc.ir.op_traits import CAST, communicates, moves_data
from shardc.ir.rewriter import GraphRewriter

# (joint graph, number of forward outputs) -> (forward, backward).
Split = Callable[[fx.GraphModule, int], tuple[fx.GraphModule, fx.GraphModule]]
Mark = Callable[[fx.Node, int], None]  # (node, number of its checkpoint region)
Cut = tuple[Split, Mark, Mark]  # (split, mark as recomputed, mark as saved)

# Gathers get the last region number, since values that cross into a later region are saved.
_GATHERS = 1 << 30


@dataclass(frozen=True)
class Partition:
    """Splits the joint graph into forward and backward; values that both need are saved or recomputed.

        %f = all_gather(%w)                 forward:  %f = all_gather(%w);  %y = mm(%x, %f)
        %y = mm(%x, %f)                 ->  backward: %f = all_gather(%w);  %gx = mm(%gy, %f)
        %gx = mm(%gy, %f)                             (level 3; else %f is saved)

    At level 3 (ZeRO-3) backward gathers a parameter again, from the slice of `KeepPart` if there is one; at levels 1
    and 2 it stays gathered from forward to backward. Ops of a checkpoint region run again in backward, its collectives
    as ``collectives`` says. All other collectives run once. Policies of ops (`Origin.policy`) are followed.

    *Requires:* a local joint graph. *Ensures:* both halves have roles on inputs and outputs; a saved output's role has
    the name of the backward's placeholder that reads it. Without gradients there is one half, for inference.

    Args:
        levels: maps the joint graph to the FSDP level of each parameter that is gathered.
        split: splits a joint graph after the given number of forward outputs.
        recompute, save: mark a node as recomputed in backward, or as saved, for ``split``.
        collectives: policy for checkpoint regions; see `shardc.cost.step_sequence`.
    """

    levels: Callable[[fx.Graph], Mapping[str, int]]
    split: Split
    recompute: Mark
    save: Mark
    collectives: str = "auto"
    name = "partition"
    requires = ("localize",)

    def __call__(self, gm: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule | None]:
        graph = gm.graph
        self._mark_nodes(graph)
        roles = ir.output_node(graph).meta[ir.ROLES]
        count = sum(role.kind != "grad" for role in roles)  # of the forward's outputs, which come first
        if count == len(roles):
            return inference(gm), None
        # Before the split, after which backward has only the name of a saved slice or cast of a parameter.
        reads = _reads(graph)
        forward, backward = self.split(gm, count)
        for half in (forward, backward):
            send_once(half.graph)
        _restore(forward, roles[:count])
        _restore(backward, roles[count:])
        read = [node.name for node in ir.placeholders(backward.graph) if node.users]
        ir.output_node(backward.graph).meta[ir.READS] = {name: reads[name] for name in read if name in reads}
        return forward, backward

    def _mark_nodes(self, graph: fx.Graph) -> None:
        """Marks nodes as recomputed in backward, or as saved: gathers of parameters by level, other nodes by checkpoint
        region and policy. Nodes without a mark are left to the partitioner.
        """
        levels = self.levels(graph)
        for node in ir.placeholders(graph, "param"):
            if level := levels.get(ir.info(node).name, 0):
                self._mark_gathers(node, level)
        recomputed = runs_again(graph, self.collectives)
        for node in graph.nodes:
            # Gathers of parameters are marked already.
            if "recompute" in node.meta or node.op != "call_function":
                continue
            origin = ir.info(node).origin
            if node in recomputed:
                self.recompute(node, origin.region or _GATHERS)  # 0: of no region
            # Collectives, and the rest of a region or policy, which `runs_again` has left out: without a mark, the
            # partitioner may compute a node again.
            elif communicates(node.target) or (origin.phase == "forward" and (origin.region or origin.policy)):
                self.save(node, origin.region)

    def _mark_gathers(self, param: fx.Node, level: int) -> None:
        """Marks the gathers of a parameter as saved (levels 1 and 2) or recomputed (level 3). If a slice of the
        parameter is kept (`KeepPart`), the slice is saved, and only what is computed from it is marked by level.
        """
        chain = moved_alone(param)
        if not any(communicates(node.target) for node in chain):
            return  # it is not gathered
        parts = {node for node in chain if ir.info(node).is_kept_part}
        from_parts = set(parts)  # the slices, and what is computed from them
        for node in chain:  # in order
            if from_parts.intersection(node.all_input_nodes):
                from_parts.add(node)
        # Backward gathers from the kept part: only that, and what follows from it, is marked.
        for node in from_parts or chain:
            (self.recompute if level == 3 and node not in parts else self.save)(node, _GATHERS)


def moved_alone(param: fx.Node) -> list[fx.Node]:
    """Returns the nodes that move or cast ``param`` and depend on nothing else: gathers, views and casts (to float8,
    too), one after another. Coordinates of ranks, by which slices are taken, may be operands, too.
    """
    chain, work = [], list(param.users)
    seen = {param}
    while work:
        node = work.pop()
        if node in seen or not (communicates(node.target) or _moves_or_casts(node)):
            continue
        if any(x not in seen and not is_coordinate(x) for x in data_operands(node)):
            continue  # it reads something else; if that is of the chain, it is met again as a user of that
        seen.add(node)
        chain.append(node)
        work.extend(node.users)
    return chain


def _reads(graph: fx.Graph) -> dict[str, Role]:
    """Returns name of a node -> role of the parameter, buffer or input that the node is, moves or casts. Nodes that do
    anything else are not in it.
    """
    inputs = [node for node in ir.placeholders(graph) if ir.role(node).kind in ("param", "buffer", "input")]
    return {moved.name: ir.role(node) for node in inputs for moved in (node, *moved_alone(node))}


def inference(gm: fx.GraphModule) -> fx.GraphModule:
    """Returns the graph of the forward outputs, without gradients and ops that only gradients need."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    outputs = [(role, x) for role, x in ir.outputs(gm.graph) if role.kind != "grad"]
    needed = ir.ancestors(x for _, x in outputs)
    for node in gm.graph.nodes:
        # Inputs stay even if nothing reads them.
        if node in needed or (node.op == "placeholder" and ir.role(node).kind not in ("tangent", TRANSFER)):
            env[node] = graph.node_copy(node, lambda n: env[n])
    out = graph.output(tuple(env[x] if isinstance(x, fx.Node) else x for _, x in outputs))
    out.meta[ir.ROLES] = tuple(role for role, _ in outputs)
    return LazyGraphModule(gm, graph)


def send_once(graph: fx.Graph) -> None:
    """Merges equal collectives and waits of the same input in ``graph``, in place, and equal casts and views that are
    no outputs.

    The partitioner merges equal ops (such as the gradients of two biases of one sum), but neither their waits nor the
    ops that read these. Views and casts are merged, too, since equal collectives may read equal ones.
    """
    seen: dict[tuple[object, str, str], fx.Node] = {}
    rewriter = GraphRewriter(graph)
    for node in list(graph.nodes):
        moves = _moves_or_casts(node) and all(user.op != "output" for user in node.users)
        if not (moves or communicates(node.target)):
            continue
        # By repr: 0, 0.0, -0.0 and False are equal in Python, and are different arguments.
        first = seen.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
        if first is not node:
            rewriter.replace(node, first)


def _moves_or_casts(node: fx.Node) -> bool:
    """Returns whether ``node`` is a view or a cast, which may stand between a parameter and the ops that use it."""
    return moves_data(node.target) or node.target in (CAST, QUANTISE)


def _restore(gm: fx.GraphModule, roles: tuple[Role, ...]) -> None:
    """Restores the roles of a half's outputs and placeholders, which the partitioner drops. ``roles``: those of the
    first outputs; all further outputs are saved values.

    A saved output's role has the name of the backward's placeholder that reads it, which no later pass changes.
    """
    output = ir.output_node(gm.graph)
    saved = output.args[0][len(roles) :]  # in a backward, none
    output.meta[ir.ROLES] = (*roles, *(Role("saved", x.name, at) for at, x in enumerate(saved)))
    names = set()
    for node in ir.placeholders(gm.graph):
        record = ir.info(node)
        if record.role is None:  # of an op in forward, whose result backward takes
            record = replace(record, role=Role("saved", node.name))
        name = record.name if record.name not in names else f"{record.name}.saved"
        names.add(name)
        ir.set_info(node, replace(record, name=name))
