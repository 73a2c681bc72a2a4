"""Microbatch: cuts the joint graph of a step into graphs that run for each microbatch and graphs that run once.

The mesh has an axis of microbatches (`Mesh.timed`), whose coordinates are the microbatches of a step. A reduction over
it is an addition in time, and a gather a concatenation: its operand is a *term* of each microbatch, and its result is
known when all microbatches have run.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter

import torch
from torch import fx
from torch.fx.node import Argument

from shardc._compat import LazyGraphModule
from shardc.cost.compute import flops_of
from shardc.custom_ops.float8_ops import BLOCK, is_scale
from shardc.errors import PlanError
from shardc.ir import graph as ir
from shardc.ir.comm import WAIT
from shardc.ir.comm_volume import arguments_of, collective_kind, named_axes
from shardc.ir.executable import GATHER, JOIN, KEPT, KNOWN, SUM, TERM
from shardc.ir.graph import NameScope, Role
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.ir.op_traits import CAST, communicates, is_view
from shardc.ir.phases import Loop, Phases
from shardc.ir.rewriter import GraphRewriter, Inserter
from shardc.passes.lower.partition import moved_alone, send_once
from shardc.plan.match import shorten

aten = torch.ops.aten

Outputs = Sequence[tuple[Role, Argument]]  # of a graph, with their roles


@dataclass(frozen=True)
class Microbatch:
    """Cuts the local joint graph at its reductions over microbatches: into graphs run for each one and graphs run once.

        %n = all_reduce(%count, "micro")       opening, each:  %count            once: %n
        %l = div(%s, %n)                   ->  body:           %l = div(%s, %n)
        %loss = all_reduce(%l, "micro")        closing:        %loss

    Scales of float8 products are those of each microbatch. Values that are the same in all microbatches and that depend
    on sums are computed once. Other such values (casts and gathers of parameters of level 3) are computed in each part
    that reads them.

    *Requires:* a local joint graph, in which only all-reduces and all-gathers communicate over the axis of
    microbatches. *Ensures:* no graph communicates over it.

    Args:
        mesh: the mesh, with its axis of microbatches.
        split: names of the inputs, and indices of the outputs, that are split over the microbatches.
        inputs: name -> layout of each input, at padded sizes.
        gathered_once: parameters that stay gathered for all microbatches.
        cause: the plan entry.

    Raises:
        PlanError: values of all microbatches are needed in the middle of a step so often that the loops which compute
            them would do more work than one forward.
    """

    mesh: Mesh
    split: frozenset[str | int]
    inputs: Mapping[str, Layout]
    gathered_once: frozenset[str]
    cause: str
    name = "microbatch"
    requires = ("localize",)

    def __call__(self, gm: fx.GraphModule) -> Phases:
        graph = ir.copied(gm.graph)
        self._check(graph)
        # Normal form: a reduction over microbatches comes before one over devices, and joins terms that differ.
        self._sum_over_microbatches_first(graph)
        self._scale_by_microbatch(graph)
        self._normalize(graph)
        send_once(graph)  # reductions that differed over time alone
        cut = _Cut(graph, self)
        sums = {cut.name(wait): cut.op(wait) for wait in cut.waits}
        gathered = with_roles(KNOWN, self._gathered(cut))
        shared: dict[fx.Node, Role] = {x: role for role, x in gathered}  # value of all microbatches -> its role
        gathers = LazyGraphModule(gm, cut_out(graph, gathered, {})) if gathered else None
        openings = self._openings(gm, cut, shared)
        # If a loop before the body reads gathered parameters, they are gathered before it; else by the first forward.
        if gathers is not None and any(loop.takes(shared[x] for _, x in gathered) for loop in openings):
            openings, gathers = [Loop(None, gathers), *openings], None
        own_results, rest = self._results(graph, cut)
        body = cut_out(graph, own_results, shared)
        self._check_work(openings, cut)
        closing = cut_out(graph, rest, {**shared, **{x: Role(SUM, cut.name(x)) for x in cut.closing}})
        return Phases(
            tuple(openings), LazyGraphModule(gm, body), LazyGraphModule(gm, closing), reduce=sums,
            joint=LazyGraphModule(gm, graph), gathers=gathers, backward=cut.reads_gradients,
        )  # fmt: skip

    def _openings(self, gm: fx.GraphModule, cut: _Cut, shared: dict[fx.Node, Role]) -> list[Loop]:
        """Returns the loops over microbatches before the body. Each makes sums known that terms of the next one need,
        and adds what follows from them to ``shared`` (value -> its role as an argument of later graphs), in place.

        Role `KEPT`: a microbatch's value, which the first loop stores and later loops take. Role `KNOWN`: a value that
        is the same for all microbatches.
        """
        openings: list[Loop] = []
        carried = with_roles(KEPT, cut.carried())
        for level in range(1, cut.levels + 1):
            waits = [wait for wait in cut.opening if cut.level[wait] == level]  # the sums that this loop computes
            terms = [(Role(TERM, cut.name(x), at), cut.term(x)) for at, x in enumerate(waits)]
            taken = {x: role for role, x in carried} if level > 1 else {}
            body = cut_out(cut.graph, [*terms, *(carried if level == 1 else [])], {**shared, **taken})
            results_once = with_roles(KNOWN, cut.frontier(level))
            once = cut_out(cut.graph, results_once, {**shared, **{x: Role(SUM, cut.name(x)) for x in waits}})
            openings.append(Loop(LazyGraphModule(gm, body), LazyGraphModule(gm, once)))
            shared |= {x: role for role, x in results_once}
        return openings

    def _check_work(self, openings: Sequence[Loop], cut: _Cut) -> None:
        """Raises PlanError if the loops that run before the forward (``openings``) cost more than one forward."""
        graphs = [loop.body.graph for loop in openings if loop.body is not None]
        work, forward = sum(map(cut.layer_flops, graphs)), cut.layer_flops(cut.graph, forward=True)
        if work > forward:
            first = next((wait for wait in cut.opening if cut.level[wait] > 1), cut.opening[0])
            raise self._refused(
                first,
                f"{cut.levels} values of all microbatches are needed, one after the other, before the step can go on; "
                f"to compute them first would take as long as {work / forward:.1f} forwards",
            )

    def _gathered(self, cut: _Cut) -> list[fx.Node]:
        """Returns the results of gathering parameters once for all microbatches (they then stay gathered)."""
        graph = cut.graph
        # Each chain: the casts, gathers and views of one parameter. Without a gather there is nothing to share.
        chains = [
            moved_alone(node) for node in ir.placeholders(graph, "param") if ir.info(node).name in self.gathered_once
        ]
        moved = {node for chain in chains if any(communicates(x.target) for x in chain) for node in chain}
        moved = {node for node in moved if not cut.varies[node]}
        # What runs once. Views at the end of a chain cost nothing: each microbatch computes them.
        inside: set[fx.Node] = set()
        for node in reversed(graph.nodes):  # users before operands
            if node in moved and (not is_view(node.target) or inside.intersection(node.users)):
                inside.add(node)
        return [node for node in graph.nodes if node in inside and any(user not in inside for user in node.users)]

    def _results(self, graph: fx.Graph, cut: _Cut) -> tuple[Outputs, Outputs]:
        """Returns (results of the graph for each microbatch, forward before backward; results of the closing graph)."""
        first: list[tuple[Role, Argument]] = []  # of forward
        grads: list[tuple[Role, Argument]] = []  # of backward
        rest: list[tuple[Role, Argument]] = []
        # A term that depends on a tangent comes from backward, any other from forward.
        for wait in cut.closing:
            of_backward = wait in cut.needs_tangent
            role = Role("grad" if of_backward else TERM, cut.name(wait), len(grads if of_backward else first))
            (grads if of_backward else first).append((role, cut.term(wait)))
        # An output that differs between microbatches is a result of each, any other of the step.
        for role, x in ir.outputs(graph):
            if not isinstance(x, fx.Node) or not cut.varies[x]:
                rest.append((role, x))
            elif role.kind == "buffer":
                raise self._refused(x, f"buffer {role.name!r} would get another value in each microbatch")
            else:
                (grads if role.kind == "grad" else first).append((role, x))
        return [*first, *grads], rest

    def _check(self, graph: fx.Graph) -> None:
        """Raises PlanError for a collective over microbatches that is no all-reduce or all-gather over them alone."""
        for node in graph.nodes:
            axes = _axes(node)
            if any(self.mesh.overlap(axis, self.mesh.time) for axis in axes) and not _is_over_time(node, self.mesh):
                kind = collective_kind(node)
                raise self._refused(node, f"it would exchange values between microbatches ({kind} over {axes})")

    def _sum_over_microbatches_first(self, graph: fx.Graph) -> None:
        """Lets a reduction over devices run once, after the reduction over microbatches that follows it in the graph
        with at most casts between them. Both have the same reduce op, so their order does not matter.

        %a = all_reduce(%x, "dp")              %s = all_reduce(%x, "micro")
        %c = _to_copy(%a)                 ->   %a = all_reduce(%s, "dp")
        %s = all_reduce(%c, "micro")           %c = _to_copy(%a)
        """
        rewriter = GraphRewriter(graph)
        for over_time in [node for node in graph.nodes if _is_over_time(node, self.mesh)]:
            op, node = arguments_of(over_time).get("reduce_op"), over_time.all_input_nodes[0]
            # Nothing else may read the sums over devices: these would become sums over microbatches, too.
            while node.target is CAST and len(node.users) == 1:
                node = node.all_input_nodes[0]
            devices = node.all_input_nodes[0] if node.target is WAIT and len(node.users) == 1 else None
            if devices is None or collective_kind(devices) != "all_reduce" or arguments_of(devices)["reduce_op"] != op:
                continue
            (wait,) = over_time.users
            source = devices.all_input_nodes[0]
            at = rewriter.before(devices, like=over_time, suffix="first")
            summed = at.call(WAIT, at.call(over_time.target, source, *over_time.args[1:]))
            devices.replace_input_with(source, summed)
            rewriter.replace(wait, over_time.all_input_nodes[0])
            graph.erase_node(over_time)

    def _scale_by_microbatch(self, graph: fx.Graph) -> None:
        """Scales float8 operands by the largest value of their own microbatch, instead of that of all microbatches.

        The largest value of all microbatches is known only behind their forwards.
        """
        for node in [node for node in graph.nodes if _is_over_time(node, self.mesh) and is_scale(node)]:
            if node.meta["val"].ndim == 3:
                raise PlanError(
                    f"{ir.info(node).name} are the scales of blocks of {BLOCK} tokens, which microbatches cut",
                    source=ir.info(node).origin.source or None,
                    fix=f"give each rank a multiple of {BLOCK} tokens in each microbatch",
                )
            (wait,) = node.users
            GraphRewriter(graph).replace(wait, node.all_input_nodes[0])
            graph.erase_node(node)

    def _normalize(self, graph: fx.Graph) -> None:
        """Rewrites averages over microbatches as sums; removes reductions of values that are equal in all of them.

        Sums that do not depend on gradients of outputs are computed in float32 or wider.
        """
        count, rewriter = self.mesh.microbatches, GraphRewriter(graph)
        varies: dict[fx.Node, bool] = {}  # filled in the graph's order
        after_tangent = needs_tangent(graph)
        erased: set[fx.Node] = set()  # waits, which follow their collectives in the list
        for node in list(graph.nodes):
            if node in erased:
                continue
            varies[node] = self._varies(node, varies)
            if not _is_over_time(node, self.mesh):
                continue
            op, (wait,) = arguments_of(node).get("reduce_op"), node.users
            source = node.all_input_nodes[0]
            if varies[source]:
                if op == "avg":
                    node.args = (source, "sum", *node.args[2:])
                    mean = rewriter.after(wait, suffix="mean").call(aten.mul.Tensor, wait, 1 / count)
                    rewriter.redirect(wait, mean)
                if op in ("sum", "avg") and node not in after_tangent:
                    self._widen(node, wait, rewriter)
            # Equal terms need no reduction: ``count`` of them add up to ``count`` times one; a maximum or mean is one.
            # An all-gather (without a reduce op) of equal rows stays.
            elif op is not None:
                at = rewriter.before(node, like=wait, suffix="times")
                if op == "sum":
                    source = at.call(aten.mul.Tensor, source, count)
                elif op == "product":
                    source = at.call(aten.pow.Tensor_Scalar, source, count)
                rewriter.replace(wait, source)
                graph.erase_node(node)
                erased.add(wait)

    def _widen(self, node: fx.Node, wait: fx.Node, rewriter: GraphRewriter) -> None:
        """Computes a sum in float32 if its operand is narrower (many terms lose digits), and casts it back."""
        source = node.all_input_nodes[0]
        dtype = source.meta["val"].dtype
        if dtype not in (torch.bfloat16, torch.float16):
            return
        wide = rewriter.before(node, like=wait, suffix="wide").call(CAST, source, dtype=torch.float32)
        node.replace_input_with(source, wide)
        for x in (node, wait):
            x.meta["val"] = wide.meta["val"]
            ir.update(x, value=ir.value(wide))
        narrow = rewriter.after(wait, suffix="narrow").call(CAST, wait, dtype=dtype)
        rewriter.redirect(wait, narrow)

    def _varies(self, node: fx.Node, varies: Mapping[fx.Node, bool]) -> bool:
        """Returns whether ``node`` differs between microbatches; ``varies`` has the answer for the nodes before it."""
        if node.op == "placeholder":
            role = ir.role(node)
            # A coordinate differs if it counts microbatches, an input if it is split over them, and a tangent if its
            # output is. All else (parameters, buffers, the key) is the same for all.
            axes = role.name.split(",") if role.kind == "coordinate" else ()
            if any(self.mesh.overlap(axis, self.mesh.time) for axis in axes):
                return True
            return {"input": role.name, "tangent": role.index}.get(role.kind) in self.split
        if node.target is WAIT and _is_over_time(node.all_input_nodes[0], self.mesh):
            return False
        return any(varies.get(x, False) for x in node.all_input_nodes)

    def _refused(self, node: fx.Node, why: str) -> PlanError:
        """Returns an error: the model cannot run in microbatches because of ``node``, for the reason ``why``."""
        record = ir.info(node)
        where = f" of module {record.origin.module!r}" if record.origin.module else ""
        dims: dict[int, list[str]] = {}  # dim that microbatches split -> names of the inputs
        axes: list[str] = []  # that split these dims
        for name, layout in self.inputs.items():
            if (dim := layout.dim_of(self.mesh.time)) is not None:
                dims.setdefault(dim, []).append(name)
                axes += layout.dim_axes(dim)
        split = " and ".join(f"dim {dim} of {shorten(names)}" for dim, names in dims.items())
        batch = [axis for axis in dict.fromkeys(axes) if axis != self.mesh.time]
        named = f"@{batch[0]}" if len(batch) == 1 else f"@({','.join(batch)})"
        first = next((name for names in dims.values() for name in names if self.inputs[name].ndim > 1), "")
        other = ""  # a fix that goes first: name another dim as the batch, in the words of a plan
        if batch and first:
            spec = ", ".join(["_", named, *["_"] * (self.inputs[first].ndim - 2)])
            plan = f"Plan(inputs={{{first!r}: {spec!r}}}), or '...' for an input without one, such as a mask"
            other = f"if that is not the batch, say which dim is, as by {plan}; or "
        return PlanError(
            f"the step cannot run in microbatches, which split {split}: %{record.name}{where}: {why}",
            plan_entry=self.cause,
            source=record.origin.source or None,
            fix=f"{other}use modules that treat each sample by itself (GroupNorm or LayerNorm for BatchNorm); or leave "
            "microbatches out, and recompute activations instead (shardc.recompute)",
        )


class _Cut:
    """Analysis of a joint graph: what varies over microbatches, and which sums are needed before others.

    Attributes:
        varies: node -> whether it has another value in each microbatch.
        waits: results of the reductions and gathers over time.
        opening, closing: those of ``waits`` that a node which varies over microbatches needs (loops before the body
            compute them), and the others (the body computes their terms).
        reads_gradients: whether a loop before the body reads gradients of outputs.
        level: node -> number of loops before the body that must have run before it is known.
        levels: number of loops before the body.
        needs_tangent: the nodes that depend on the gradient of an output.
    """

    def __init__(self, graph: fx.Graph, options: Microbatch) -> None:
        self.graph = graph
        self.varies: dict[fx.Node, bool] = {}
        self.needs_tangent = needs_tangent(graph)
        for node in graph.nodes:
            self.varies[node] = options._varies(node, self.varies)
        self.waits = [node for node in graph.nodes if node.target is WAIT and _is_over_time(node.args[0], options.mesh)]
        varying = [node for node in graph.nodes if self.varies[node] and node.op != "output"]
        read = ir.ancestors(x for node in varying for x in node.all_input_nodes)  # by something that varies
        self.opening = [wait for wait in self.waits if wait in read]
        self.closing = [wait for wait in self.waits if wait not in read]
        self.reads_gradients = not self.needs_tangent.isdisjoint(self.opening)
        opening = set(self.opening)
        self.level: dict[fx.Node, int] = {}
        for node in graph.nodes:
            of_operands = max((self.level[x] for x in node.all_input_nodes), default=0)
            self.level[node] = of_operands + (node in opening)  # a sum takes a loop more than its term
        self.levels = max((self.level[wait] for wait in self.opening), default=0)

    def carried(self) -> list[fx.Node]:
        """Returns the values that the first loop keeps of each microbatch; later loops then need not run layers.

        They are the values with which the layers (`_layers`) end: later loops compute terms from them, by other ops.
        """
        later_terms = {self.term(wait) for wait in self.opening if self.level[wait] > 1}
        needed = {node for node in ir.ancestors(later_terms, lambda node: not self.varies[node]) if self.varies[node]}
        in_layers: dict[fx.Node, bool] = {}  # whether it is a layer, or leads to one that is needed
        for node in reversed(self.graph.nodes):
            is_layer = node.op == "call_function" and ir.info(node).name in self._layers
            in_layers[node] = is_layer or any(user in needed and in_layers[user] for user in node.users)
        # The last of these: terms themselves, and values that needed ops behind the layers read.
        return [
            node
            for node in self.graph.nodes
            if node in needed
            and in_layers[node]
            and node.op == "call_function"
            and self.level[node] == 0  # the first loop can compute it
            and (node in later_terms or any(user in needed and not in_layers[user] for user in node.users))
        ]

    def frontier(self, level: int) -> list[fx.Node]:
        """Returns the values that loop number ``level`` makes known and later nodes read. They are equal in all
        microbatches.
        """
        after_closing = ir.dependents(self.graph, self.closing)  # known only at the end of the step
        # Whether the loops so far make it known, for all microbatches at once. What depends on gradients is left to
        # the closing graph, unless a loop before the body has them.
        is_shared = {
            node: 0 < self.level[node] <= level
            and not (self.varies[node] or node in after_closing)
            and (self.reads_gradients or node not in self.needs_tangent)
            for node in self.graph.nodes
        }
        return [
            node
            for node in self.graph.nodes
            if is_shared[node]
            and self.level[node] == level
            and any(not is_shared.get(user, False) for user in node.users)
        ]

    @cached_property
    def _layers(self) -> frozenset[str]:
        """Returns the names of the layers: matrix products of a parameter, gathered or not, and another value."""
        # A coordinate may take part in a parameter's slices, and does not make it an activation.
        params = {x for kind in ("param", "coordinate") for x in ir.placeholders(self.graph, kind)}
        sources = [node for node in self.graph.nodes if not node.all_input_nodes and node not in params]
        activations = ir.dependents(self.graph, sources)  # all others are parameters, or follow from these alone
        calls = (node for node in self.graph.nodes if node.op == "call_function")
        return frozenset(
            ir.info(node).name for node in calls if not activations.issuperset(node.all_input_nodes) and flops_of(node)
        )

    def layer_flops(self, graph: fx.Graph, forward: bool = False) -> int:
        """Returns the floating-point operations of the layers in ``graph``, a part of the joint graph; if ``forward``,
        of its forward part only.
        """
        calls = (node for node in graph.nodes if node.op == "call_function")
        layers = (node for node in calls if ir.info(node).name in self._layers)
        return sum(flops_of(node) for node in layers if not (forward and node in self.needs_tangent))

    def name(self, wait: fx.Node) -> str:
        """Returns the name of the sum that ``wait`` waits for."""
        return ir.info(wait.all_input_nodes[0]).name

    def term(self, wait: fx.Node) -> fx.Node:
        """Returns the operand of the reduction that ``wait`` waits for: a microbatch's term."""
        return wait.all_input_nodes[0].all_input_nodes[0]

    def op(self, wait: fx.Node) -> str:
        """Returns the reduce op of the reduction that ``wait`` waits for; `GATHER` for a gather."""
        return str(arguments_of(wait.all_input_nodes[0]).get("reduce_op", GATHER))


def closing_forward(closing: fx.GraphModule) -> fx.GraphModule:
    """Returns the graph that a call without gradients runs once after all microbatches: ``closing``, that graph of a
    training step, without the results that are gradients.
    """
    results = [(role, x) for role, x in ir.outputs(closing.graph) if role.kind != "grad"]
    return LazyGraphModule(closing, cut_out(closing.graph, results, {}))


def with_closing_last(
    backward: fx.GraphModule, closing: fx.GraphModule, reduce: Mapping[str, str], left: Container[str] = ()
) -> fx.GraphModule:
    """Returns the backward of the last microbatch, which adds its terms to the sums so far and then runs ``closing``.

        backward:  ... %g            ...  %g.sum = add(%g.sums, %g)
        closing:   %d = rs(%g.sum)   ->   %d = reduce_scatter(%g.sum)

    Args:
        backward: the backward of any microbatch; its results of role "term" are terms.
        closing: `Phases.closing`.
        reduce: `Phases.reduce`.
        left: terms that are results, too, since other graphs take their sums.
    """
    terms = {role.name: x for role, x in ir.outputs(backward.graph) if role.kind == TERM and isinstance(x, fx.Node)}
    chain = _Chain(backward, closing)
    for node in ir.placeholders(closing.graph, SUM):
        name = ir.role(node).name
        if (term := terms.get(name)) is not None:
            at = Inserter(chain.rewriter, None, replace(ir.info(chain.env[term]), name=name), "sum")
            others, last = chain.env[node], chain.env[term]  # the argument of ``closing``, and the last term
            if reduce[name] == GATHER:
                # The argument now has the rows of the earlier microbatches alone.
                _drop_last_rows(others, last)
                chain.env[node] = at.call(aten.cat.default, [others, last])
            else:
                chain.env[node] = at.call(JOIN[reduce[name]], others, last)
    # Terms are no results any more: they are in the sums that ``closing`` reads.
    results = [(role, x) for role, x in ir.outputs(backward.graph) if role.kind != TERM or role.name in left]
    return chain.end([*ir.outputs(closing.graph), *results])


def _drop_last_rows(others: fx.Node, last: fx.Node) -> None:
    """Makes the gathered rows ``others`` shorter by those of the last microbatch, ``last``, in the recorded type."""
    val, rows = others.meta["val"], last.meta["val"].shape[0]
    others.meta["val"] = val.new_empty((val.shape[0] - rows, *val.shape[1:]))
    ir.update(others, value=ir.value_of(others.meta["val"]))


def with_gathers_first(forward: fx.GraphModule, gathers: fx.GraphModule | None) -> fx.GraphModule | None:
    """Returns the forward of the first microbatch, preceded by ``gathers`` (gathers of parameters for all
    microbatches). None without gathers.
    """
    if gathers is None:
        return None
    gathered = {role.name: x for role, x in ir.outputs(gathers.graph) if isinstance(x, fx.Node)}
    chain = _Chain(gathers, forward, gathered)
    # The forward takes gathered parameters as arguments; in one graph with the gathers, it reads these instead.
    for node in ir.placeholders(forward.graph, KNOWN):
        if (x := gathered.get(ir.role(node).name)) is not None:
            chain.env[node] = chain.env[x]
    return chain.end([*ir.outputs(forward.graph), *ir.outputs(gathers.graph)])


class _Chain:
    """Builder of a graph that runs two graphs, one after the other. Arguments of equal names become one.

    Args:
        first, second: the graphs.
        replaced: values known by name that ``second`` gets from ``first``.

    Attributes:
        env: node of either graph -> its node in the new one. Arguments of ``second`` may be changed before `end`, to
            other nodes of the new graph.
    """

    def __init__(self, first: fx.GraphModule, second: fx.GraphModule, replaced: Container[str] = ()) -> None:
        self.first, self.second, self.graph = first, second, fx.Graph()
        self.rewriter, self.names = GraphRewriter(self.graph), NameScope.of(first.graph)
        self.env: dict[fx.Node, fx.Node] = {}
        arguments: dict[str, fx.Node] = {}
        for node in (*ir.placeholders(first.graph), *ir.placeholders(second.graph)):
            role = ir.role(node)
            if role.kind == KNOWN and role.name in replaced:
                continue  # no argument: the caller enters in ``env`` what ``second`` gets in its place
            # What both graphs take is one argument.
            if node.name not in arguments:
                arguments[node.name] = self._copied(node, renames=node.graph is second.graph)
            self.env[node] = arguments[node.name]
        for node in first.graph.nodes:
            if node.op not in ("placeholder", "output"):
                self.env[node] = self._copied(node, renames=False)

    def _copied(self, node: fx.Node, renames: bool) -> fx.Node:
        """Returns a copy of ``node`` in the new graph. ``renames``: the copy gets a fresh name if the name is taken."""
        copy = self.graph.node_copy(node, self.env.__getitem__)
        return ir.update(copy, name=self.names.fresh(ir.info(node).name)) if renames else copy

    def end(self, results: Outputs) -> fx.GraphModule:
        """Finishes and returns the new graph: appends the ops of ``second``, whose arguments are final now, and the
        outputs. ``results``: (role, value) of each output, given as a node of an old graph.
        """
        for node in self.second.graph.nodes:
            if node.op not in ("placeholder", "output"):
                self.env[node] = self._copied(node, renames=True)
        output = self.graph.output(tuple(self.env[x] if isinstance(x, fx.Node) else x for _, x in results))
        output.meta = dict(ir.output_node(self.second.graph).meta) | dict(ir.output_node(self.first.graph).meta)
        output.meta[ir.ROLES] = tuple(role for role, _ in results)
        send_once(self.graph)  # a collective that both graphs have
        constants = {  # the tensors that get_attr nodes read
            str(node.target): attrgetter(str(node.target))(gm)
            for gm in (self.second, self.first)
            for node in gm.graph.find_nodes(op="get_attr")
        }
        return LazyGraphModule(constants, self.graph)


def mark_terms(backward: fx.GraphModule, names: Iterable[str], kind: str = TERM) -> fx.GraphModule:
    """Gives the results ``names`` of ``backward`` the role ``kind`` (default: terms of a sum); returns it."""
    output, chosen = ir.output_node(backward.graph), set(names)
    roles = output.meta[ir.ROLES]
    output.meta[ir.ROLES] = tuple(replace(role, kind=kind) if role.name in chosen else role for role in roles)
    return backward


def needs_tangent(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes that depend on the gradient of an output."""
    return ir.dependents(graph, ir.placeholders(graph, "tangent"))


def with_roles(kind: str, nodes: Iterable[fx.Node], first: int = 0) -> list[tuple[Role, fx.Node]]:
    """Returns ``nodes`` as outputs of a graph, whose roles have this ``kind`` and the nodes' names. ``first``: index of
    the first one among the outputs of its kind.
    """
    return [(Role(kind, ir.info(node).name, first + at), node) for at, node in enumerate(nodes)]


def _axes(node: fx.Node) -> tuple[str, ...]:
    """Returns the mesh axes that a collective is over, which its group's name tells; () for other nodes."""
    if node.op != "call_function" or collective_kind(node) is None:
        return ()
    return named_axes(str(arguments_of(node).get("group_name", ""))) or ()


def _is_over_time(node: Argument, mesh: Mesh) -> bool:
    """Returns whether ``node`` is an all-reduce or an all-gather over the axis of microbatches."""
    in_time = isinstance(node, fx.Node) and _axes(node) == (mesh.time,)
    return isinstance(node, fx.Node) and in_time and collective_kind(node) in ("all_reduce", "all_gather")


def cut_out(graph: fx.Graph, results: Outputs, cuts: Mapping[fx.Node, Role], late: Iterable[fx.Node] = ()) -> fx.Graph:
    """Cuts a graph out of ``graph``: returns the one that computes ``results`` and takes the values ``cuts`` as
    arguments. ``late``: those of ``cuts`` that only backward reads, as it reads gradients of outputs.

    Args:
        results: (role, node or constant) of each output.
        cuts: value -> its role as an argument.
    """
    needed = ir.ancestors((x for _, x in results), cuts.__contains__)  # up to the cuts
    part, env = fx.Graph(), dict[fx.Node, fx.Node]()
    in_backward = needs_tangent(graph).union(late)
    inputs = [node for node in graph.nodes if node in needed and (node.op == "placeholder" or node in cuts)]
    # As the partitioner expects: first what forward takes, then what backward does.
    for node in sorted(inputs, key=lambda node: (node in in_backward, node in cuts)):
        if node in cuts:
            prefix = "tangents" if node in in_backward else "primals"  # the partitioner goes by names
            env[node] = part.placeholder(node.name if node.op == "placeholder" else f"{prefix}_{node.name}")
            env[node].meta["val"] = node.meta["val"]
            argument = replace(ir.info(node), role=cuts[node], needs=None, is_kept_part=False, regathers="")
            ir.set_info(env[node], argument)
        else:
            env[node] = part.node_copy(node)
    for node in graph.nodes:
        if node in needed and node not in env:
            env[node] = part.node_copy(node, env.__getitem__)
    output = part.output(tuple(env[x] if isinstance(x, fx.Node) else x for _, x in results))
    output.meta = dict(ir.output_node(graph).meta)
    output.meta[ir.ROLES] = tuple(role for role, _ in results)
    return part
