"""Stages: cuts the joint graph of one microbatch into the joint graphs of pipeline stages.

Each op gets a stage: that of the module that calls it, if all parameters of the module belong to one stage, else that
of its operands. What is computed from inputs alone, and what only moves a parameter, is computed in each stage that
reads it. Other values that a stage reads of another one are sent from stage to stage: up, with the forward, or down,
with the backward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from shardc._compat import LazyGraphModule
from shardc.errors import PlanError
from shardc.ir import graph as ir
from shardc.ir.executable import KEPT, KNOWN, SUM, TRANSFER
from shardc.ir.graph import Role
from shardc.ir.op_traits import CAST, communicates, is_view, moves_data
from shardc.ir.phases import Phases, Staged, StagedLoop
from shardc.ir.rewriter import GraphRewriter, Inserter
from shardc.passes.lower.microbatch import Outputs, cut_out, needs_tangent, with_roles
from shardc.passes.lower.partition import moved_alone
from shardc.plan.pipeline_stages import PipelineStages


@dataclass(frozen=True)
class Stages:
    """Cuts a step in microbatches into pipeline stages.

        %h = add(%x, %y)    layers.3         stage 0:  %h                             (transfer)
        %q = mm(%h, %w)     layers.4    ->   stage 1:  %q = mm(%h, %w)
        %dh = mm(%dq, %w)                              %dh                            (grad)
        %dx = mul(%dh, %a)  layers.3         stage 0:  %dx = mul(%dh, %a)

    Loops before the forward that run layers are cut like the forward. All ranks compute what follows from their sums.

    *Requires:* a joint graph that is cut in time. *Ensures:* a stage reads forward values of itself and earlier stages
    only; backward reads any forward value, and backward values of itself and later stages.

    Args:
        stages: the stages of the plan's pipeline, and the stage of each parameter and module.

    Raises:
        PlanError: parameters are read between the loops before the forward, or one of these needs gradients of layers.
    """

    stages: PipelineStages
    name = "stages"
    requires = ("microbatch",)

    def __call__(self, parts: Phases) -> Staged:
        parts = _gathers_by_stage(parts)
        gathered = _gathered(parts)
        openings = self._openings(parts, gathered)
        graph = ir.copied(parts.body.graph)  # which splitting gradients changes
        cut = _Assignment(graph, self.stages, gathered)
        parts = replace(parts, body=LazyGraphModule(parts.body, graph))
        parts, graph, cut = self._split_shared_gradients(parts, cut, gathered)
        bodies, up, down = self._bodies(parts.body, cut)
        # Term -> the stage that computes it. Each stage then gets the part of the closing graph with its results.
        terms = {role.name: cut.of_result(role, x) for role, x in ir.outputs(graph) if role.name in parts.reduce}
        closing, closings = parts.closing.graph, []
        at_stage = _stages_of_results(closing, terms, self.stages)
        for at in range(self.stages.count):
            chosen = [x for x, stage in zip(ir.outputs(closing), at_stage, strict=True) if stage == at]
            closings.append(LazyGraphModule(parts.closing, cut_out(closing, chosen, {})))
        # Each stage gathers only the parameters that one of its graphs reads.
        staged_loops = [loop.bodies for loop in openings if loop is not None]
        read = [
            {ir.role(node).name for gm in graphs for node in ir.placeholders(gm.graph, KNOWN)}
            for graphs in zip(bodies, closings, *staged_loops, strict=True)  # the graphs of each stage
        ]
        gathers = tuple(_part_with_results(parts.gathers, names) for names in read)
        return Staged(parts, openings, bodies, tuple(closings), gathers, up, down, terms)

    def _openings(self, parts: Phases, gathered: Mapping[str, frozenset[str]]) -> tuple[StagedLoop | None, ...]:
        """Cuts the loops that run before the forward into stages; returns a `StagedLoop` for each, or None for a loop
        that every rank runs as a whole, since it needs no values of a stage.
        """
        out: list[StagedLoop | None] = []
        places: dict[str, int] = {}  # value that later loops take -> its stage
        for loop in parts.openings:
            # What runs once runs on all ranks, and each has the parameters of its stages only.
            if (reader := _first_use_of_params(loop.once.graph, gathered)) is not None:
                raise self._refused(reader, "computes, from parameters, what all microbatches need before the forward")
            # It reads neither values of a loop in stages nor, except to move them, parameters: all ranks can run it.
            if loop.body is None or not places and _first_use_of_params(loop.body.graph, gathered) is None:
                out.append(None)
                continue
            gm = LazyGraphModule(loop.body, ir.copied(loop.body.graph))
            cut = _Assignment(gm.graph, self.stages, gathered, places)
            bodies, up, down = self._bodies(gm, cut)
            # A loop passes through the stages once, upwards: it has no backward.
            if (sent_back := next((x for crossing in down for x in crossing), None)) is not None:
                raise self._refused(sent_back, "is a gradient that all microbatches need before the forward")
            places |= {role.name: cut.of_result(role, x) for role, x in ir.outputs(gm.graph) if role.kind == KEPT}
            out.append(StagedLoop(bodies, up))
        return tuple(out)

    def _refused(self, node: fx.Node, why: str) -> PlanError:
        """Returns the error for a model that cannot be cut into stages, for the reason ``why``, because of ``node``."""
        record = ir.info(node)
        return PlanError(
            f"the model cannot be cut into stages: %{record.name} of module {record.origin.module!r} {why}",
            plan_entry=str(self.stages.entry),
            source=record.origin.source or None,
            fix="use modules that treat each sample by itself (GroupNorm or LayerNorm for BatchNorm), and a loss that "
            "does not depend on values of the whole batch; or leave pp out",
        )

    def _bodies(
        self, gm: fx.GraphModule, cut: _Assignment
    ) -> tuple[tuple[fx.GraphModule, ...], tuple[tuple[fx.Node, ...], ...], tuple[tuple[fx.Node, ...], ...]]:
        """Cuts the graph of one microbatch into stages. Returns (graph of each stage, values that cross each boundary
        to the next stage, values that cross each boundary back).

        A stage computes its own results, and the values that it sends to the next stage and to the one before.
        """
        count = self.stages.count
        results = [(role, x, cut.of_result(role, x)) for role, x in ir.outputs(gm.graph)]
        up = tuple(cut.crossing(at, up=True) for at in range(count - 1))
        down = tuple(cut.crossing(at, up=False) for at in range(count - 1))
        bodies = []
        for at in range(count):
            # Results of forward before those of backward (role "grad"), as in any joint graph. What crosses a boundary
            # may be of an earlier stage, and only pass through this one: a stage returns what it computes itself.
            outputs: Outputs = [(role, x) for role, x, stage in results if stage == at and role.kind != "grad"]
            grads: Outputs = [(role, x) for role, x, stage in results if stage == at and role.kind == "grad"]
            sent_up = [x for x in up[at] if cut.stage[x] == at] if at < len(up) else []
            sent_down = [x for x in down[at - 1] if cut.stage[x] == at] if at else []
            outputs = [*outputs, *with_roles(TRANSFER, sent_up, len(outputs))]
            grads = [*grads, *with_roles("grad", sent_down, len(grads))]
            # Of these, `cut_out` makes arguments of what the results depend on.
            received = {x: Role(TRANSFER, ir.info(x).name) for x, stage in cut.stage.items() if stage != at}
            # What comes from the stage behind are gradients, which only backward reads.
            late = {x for boundary in down[at : at + 1] for x in boundary}  # none behind the last stage
            part = cut_out(gm.graph, [*outputs, *grads], received, late)
            bodies.append(LazyGraphModule(gm, part))
        return tuple(bodies), up, down

    def _split_shared_gradients(
        self, parts: Phases, cut: _Assignment, gathered: Mapping[str, frozenset[str]]
    ) -> tuple[Phases, fx.Graph, _Assignment]:
        """Splits each gradient that adds up values of several stages: each stage returns its own summand, and the
        closing graph adds them. Returns the changed (phases, graph of a microbatch, stages of its ops), or the
        arguments if there is no such gradient.

        This is the case for a parameter that several stages use. No stage then needs the others' summands.

        %g = add(%a, %b)    %a of stage 3, %b of stage 0   ->   terms %a and %b; closing: %g = add(%a, %b)
        """
        graph, closing = parts.body.graph, LazyGraphModule(parts.closing, ir.copied(parts.closing.graph))
        results, reduce, changed = [], dict(parts.reduce), False
        for role, x in ir.outputs(graph):
            # Sums only: summands of stages, as those of microbatches, may be added in any order.
            terms = cut.summands(x) if role.kind == "grad" and reduce.get(role.name) == "sum" else []
            if len({cut.stage.get(term, -1) for term in terms}) < 2:  # of one stage
                results.append((role, x))
                continue
            changed = True
            names = [f"{role.name}.{k}" for k in range(len(terms))]
            results += [(Role("grad", name), term) for name, term in zip(names, terms, strict=True)]
            del reduce[role.name]
            reduce |= dict.fromkeys(names, "sum")
            _replace_by_sum(closing.graph, role.name, names)
        if not changed:
            return parts, graph, cut
        numbered = [(replace(role, index=at) if role.kind == "grad" else role) for at, (role, _) in enumerate(results)]
        body = cut_out(graph, [(role, x) for role, (_, x) in zip(numbered, results, strict=True)], {})
        # The stages again: `body` has other nodes, and no longer those that added the summands.
        parts = replace(parts, body=LazyGraphModule(parts.body, body), closing=closing, reduce=reduce)
        return parts, body, _Assignment(body, self.stages, gathered)


@dataclass
class _Assignment:
    """The stage of each op of a joint graph.

    Args:
        graph: joint graph of one microbatch.
        stages: stages of parameters and modules.
        gathered: name of an argument that is a gathered parameter -> the parameters that it is computed from.
        places: value of an earlier loop that the graph takes -> its stage.

    Attributes:
        stage: op -> its stage. Ops that every stage computes for itself are not in it.
    """

    graph: fx.Graph
    stages: PipelineStages
    gathered: Mapping[str, frozenset[str]]
    places: Mapping[str, int] = field(default_factory=dict)
    stage: dict[fx.Node, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.needs_tangent = needs_tangent(self.graph)
        self._params: dict[fx.Node, frozenset[str]] = {}  # node that is, or only moves, parameters -> their names
        for node in ir.placeholders(self.graph):
            role = ir.role(node)
            self._params[node] = (
                frozenset([role.name]) if role.kind == "param" else self.gathered.get(role.name, frozenset())
            )
            if role.kind == KEPT:
                self.stage[node] = self.places[role.name]
        inputs = [x for x in ir.placeholders(self.graph) if ir.role(x).kind in ("input", "buffer", "key", "tangent")]
        self._of_inputs = set(inputs)  # and, as they are met, nodes that every stage computes from these
        for node in self.graph.nodes:
            if node.op == "call_function" and not self._is_computed_anywhere(node):
                self.stage[node] = self._stage_of(node)

    def readers(self, node: fx.Node) -> list[int]:
        """Returns the stages of the ops that read ``node``; ops that every stage computes have none."""
        return [self.stage[user] for user in node.users if user in self.stage]

    def crossing(self, at: int, up: bool) -> tuple[fx.Node, ...]:
        """Returns the values that cross the boundary between stage ``at`` and the next one: forward across it if
        ``up``, back across it if not.
        """
        out = []
        for node, stage in self.stage.items():
            readers = self.readers(node)
            if up:
                crosses = stage <= at and any(reader > at for reader in readers)
            else:
                crosses = stage > at and any(reader <= at for reader in readers)
            if crosses:
                out.append(node)
        return tuple(out)

    def of_result(self, role: Role, x: object) -> int:
        """Returns the stage that computes the output ``x`` of ``role``; the last stage if nothing decides it.

        An output that only moves parameters is computed where these are stored.
        """
        if isinstance(x, fx.Node) and x in self.stage:
            return self.stage[x]
        params = self._params.get(x, frozenset()) if isinstance(x, fx.Node) else frozenset()
        return self._last_owner(params) if params else self.stages.count - 1

    def summands(self, x: object) -> list[fx.Node]:
        """Returns the summands of ``x`` if it adds values of several stages, else [``x``]. Returns [] if ``x`` belongs
        to no stage.

        A cast or view of such a sum is inserted for each summand instead.
        """
        if not isinstance(x, fx.Node) or x not in self.stage:
            return []
        between: list[fx.Node] = []  # casts and views between ``x`` and the sum, those next to ``x`` first
        top = x
        while (top.target is CAST or is_view(top.target)) and len(top.all_input_nodes[0].users) == 1:
            between.append(top)
            top = top.all_input_nodes[0]
        terms = self._addends(top)
        if len({self.stage.get(term) for term in terms}) < 2:
            return [x]
        out = []
        for term in terms:
            for node in reversed(between):  # from the sum on
                with self.graph.inserting_before(x):
                    copy = self.graph.node_copy(node, lambda _, term=term: term)
                ir.update(copy, name=f"{ir.info(node).name}.of_{ir.info(term).name}")
                self.stage[copy] = self.stage[term]
                term = copy
            out.append(term)
        return out

    def _addends(self, x: fx.Node) -> list[fx.Node]:
        """Returns the terms of ``x`` if it is a sum of two values of its shape and dtype that nothing else reads, with
        such sums among them taken apart in turn; else [``x``].
        """
        operands = x.all_input_nodes
        # Of two different nodes, without ``alpha``, and without broadcasting or promotion: each is a term as it is.
        is_sum = x.target is torch.ops.aten.add.Tensor and len(operands) == len(x.args) == 2 and not x.kwargs
        like = [(y.meta["val"].shape, y.meta["val"].dtype) for y in (x, *operands)] if is_sum else []
        if not is_sum or len(set(like)) > 1 or len(x.users) > 1:
            return [x]
        return [term for operand in operands for term in self._addends(operand)]

    def _is_computed_anywhere(self, node: fx.Node) -> bool:
        """Returns whether ``node`` needs no stage of its own, since every stage that reads it can compute it: it
        depends on inputs only, or only moves a parameter. Records which of the two it is, for the nodes behind it.
        """
        operands = node.all_input_nodes
        if any(x in self.stage for x in operands):
            return False  # it reads what one stage computes
        params = self._params_read(node)
        moves = communicates(node.target) or moves_data(node.target) or is_view(node.target) or node.target is CAST
        reads_inputs = any(x in self._of_inputs for x in operands)
        if params and (reads_inputs or not moves):
            return False
        self._params[node] = params
        if reads_inputs:
            self._of_inputs.add(node)
        return True

    def _stage_of(self, node: fx.Node) -> int:
        """Returns the stage of an op: in the forward no earlier than those of its operands and of its module, in the
        backward no later than those of the gradients that it reads and of its module.

        The op reads what a stage computes, or parameters: others are computed anywhere.
        """
        operands = [x for x in node.all_input_nodes if x in self.stage]
        stage = self.stages.of_module(ir.info(node).origin.module)
        of_module = [] if stage is None else [stage]
        # Gradients go down through the stages.
        if gradients := [self.stage[x] for x in operands if x in self.needs_tangent]:
            return min([*gradients, *of_module])
        # Other values go up. A module that several stages share, and no operand of a stage: the parameters decide.
        earliest = [*(self.stage[x] for x in operands), *of_module]
        return max(earliest) if earliest else self._last_owner(self._params_read(node))

    def _params_read(self, node: fx.Node) -> frozenset[str]:
        """Returns the parameters that the operands of ``node`` are moved from."""
        return frozenset[str]().union(*(self._params.get(x, frozenset()) for x in node.all_input_nodes))

    def _last_owner(self, params: Iterable[str]) -> int:
        """Returns the last of the stages that store the parameters ``params``."""
        return max(self.stages.first[name] for name in params)


def _gathers_by_stage(parts: Phases) -> Phases:
    """Moves the gathers that run once for all microbatches from the loops of ``parts`` to its field ``gathers``, so
    that each stage can run its own part of them. Returns the changed parts.
    """
    alone = [loop for loop in parts.openings if loop.body is None]  # at most one, the first (see `Microbatch`)
    return replace(parts, openings=parts.openings[1:], gathers=alone[0].once) if alone else parts


def _first_use_of_params(graph: fx.Graph, gathered: Collection[str] = ()) -> fx.Node | None:
    """Returns the first op of ``graph`` that computes with a parameter instead of only moving it; None if there is
    none. ``gathered``: names of arguments that are gathered parameters.

    Parameters without dims do not count: all ranks have them.
    """
    moved: set[fx.Node] = set()  # parameters, and what only moves them
    for node in ir.placeholders(graph):
        role = ir.role(node)
        is_gathered = role.kind == KNOWN and role.name in gathered
        if is_gathered or (role.kind == "param" and node.meta["val"].dim()):
            moved.update((node, *moved_alone(node)))
    return next((x for x in graph.nodes if x.op != "output" and x not in moved and moved & {*x.all_input_nodes}), None)


def _gathered(parts: Phases) -> dict[str, frozenset[str]]:
    """Returns name of a gathered parameter -> names of the parameters that it is computed from, for all gathers that
    run once for all microbatches. Later graphs take the gathered parameters as arguments (role `KNOWN`).
    """
    out: dict[str, frozenset[str]] = {}
    for gm in (parts.gathers, *(loop.once for loop in parts.openings)):
        if gm is None:
            continue
        params = {node: frozenset([ir.role(node).name]) for node in ir.placeholders(gm.graph, "param")}
        for node in gm.graph.nodes:
            if node not in params:
                params[node] = frozenset[str]().union(*(params.get(x, frozenset()) for x in node.all_input_nodes))
        out |= {
            role.name: params[x] for role, x in ir.outputs(gm.graph) if isinstance(x, fx.Node) and role.kind == KNOWN
        }
    return {name: params for name, params in out.items() if params}


def _part_with_results(gm: fx.GraphModule | None, names: set[str]) -> fx.GraphModule | None:
    """Returns a graph with the part of ``gm`` that computes the results called ``names``; None if it computes none of
    them.
    """
    results = [] if gm is None else [(role, x) for role, x in ir.outputs(gm.graph) if role.name in names]
    return LazyGraphModule(gm, cut_out(gm.graph, results, {})) if gm is not None and results else None


def _replace_by_sum(closing: fx.Graph, name: str, terms: list[str]) -> None:
    """Replaces, in the graph ``closing`` (which runs once, after all microbatches), the argument for the sum ``name``
    by arguments for the sums of its ``terms``, one for each stage that has a summand. They are then added.
    """
    total = next(node for node in ir.placeholders(closing, SUM) if ir.role(node).name == name)
    rewriter, record = GraphRewriter(closing), ir.info(total)
    sums: list[fx.Node] = []  # the new arguments
    for term in terms:
        with closing.inserting_before(total):
            argument = closing.placeholder(f"{total.name}_{len(sums)}")
        argument.meta.update(total.meta)
        ir.set_info(argument, replace(record, name=f"{record.name}.term_{len(sums)}", role=Role(SUM, term)))
        sums.append(argument)
    first = next(node for node in closing.nodes if node.op != "placeholder")
    at, joined = Inserter(rewriter, first, replace(record, role=None), "stages"), sums[0]
    for other in sums[1:]:
        joined = at.call(torch.ops.aten.add.Tensor, joined, other)
    total.replace_all_uses_with(joined)
    closing.erase_node(total)


def _stages_of_results(closing: fx.Graph, terms: Mapping[str, int], stages: PipelineStages) -> list[int]:
    """Returns the stage that computes each result of the closing graph.

    That is the parameter's stage for its gradient; for others the last stage of the terms that the result depends on.
    """
    last: dict[fx.Node, int] = {}  # node -> the last stage that a term it depends on comes from; 0 if there is none
    for node in closing.nodes:
        from_operands = [last[x] for x in node.all_input_nodes]
        role = ir.role(node) if node.op == "placeholder" else None
        from_term = [terms[role.name]] if role is not None and role.kind == SUM else []
        last[node] = max([*from_operands, *from_term], default=0)
    return [
        stages.first[role.name] if role.kind == "grad" and role.name in stages.first
        else last[x] if isinstance(x, fx.Node) else 0
        for role, x in ir.outputs(closing)
    ]  # fmt: skip
