"""Stages: cuts the joint graph of one microbatch into the joint graphs of pipeline stages.

Each op gets a stage: that of the module that calls it, if all parameters of the module belong to one stage, else that
of its operands. What is computed from inputs alone, and what only moves a parameter, is computed in each stage that
reads it. Other values that a stage reads of another one are sent from stage to stage: up, with the forward, or down,
with the backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from shardc._compat import LazyGraphModule
from shardc.errors import PlanError
from shardc.ir import graph as ir
from shardc.ir.executable import KNOWN, SUM, TRANSFER
from shardc.ir.graph import Role
from shardc.ir.op_traits import CAST, communicates, is_view, moves_data
from shardc.ir.phases import Phases, Staged
from shardc.ir.rewriter import GraphRewriter, Inserter
from shardc.passes.lower.microbatch import Outputs, behind_tangent, part
from shardc.passes.lower.partition import moved_alone
from shardc.plan.stages import PipelineStages


@dataclass(frozen=True)
class Stages:
    """Cuts a step in microbatches into pipeline stages.

        %h = add(%x, %y)    layers.3         stage 0:  %h                             (transfer)
        %q = mm(%h, %w)     layers.4    ->   stage 1:  %q = mm(%h, %w)
        %dh = mm(%dq, %w)                              %dh                            (grad)
        %dx = mul(%dh, %a)  layers.3         stage 0:  %dx = mul(%dh, %a)

    *Requires:* a joint graph that is cut in time. *Ensures:* a stage reads forward values of itself and earlier stages
    only; backward reads any forward value, and backward values of itself and later stages.

    Args:
        stages: the stages, and those of the parameters.

    Raises:
        PlanError: a loop in front of the forward reads parameters.
    """

    stages: PipelineStages
    name = "stages"
    requires = ("microbatch",)

    def __call__(self, parts: Phases) -> Staged:
        for loop in parts.openings:
            self._check_opening(loop.each)
            self._check_opening(loop.once)
        graph = ir.copied(parts.body.graph)
        gathered = _gathered(parts)
        cut = _Assignment(graph, self.stages, gathered)
        parts = replace(parts, body=LazyGraphModule(parts.body, graph))
        parts, graph, cut = self._terms_apart(parts, cut, gathered)
        count = self.stages.count
        results = [(role, x, cut.of_result(role, x)) for role, x in ir.outputs(graph)]
        up = tuple(cut.crossing(at, True) for at in range(count - 1))
        down = tuple(cut.crossing(at, False) for at in range(count - 1))
        bodies = tuple(self._body(parts, graph, cut, results, up, down, at) for at in range(count))
        terms = {role.name: at for role, _, at in results if role.name in parts.reduce}
        closing, closings = parts.closing.graph, []
        at_stage = _stages_of_results(closing, terms, self.stages)
        for at in range(count):
            chosen = [x for x, stage in zip(ir.outputs(closing), at_stage, strict=True) if stage == at]
            closings.append(LazyGraphModule(parts.closing, part(closing, chosen, {})))
        read = [
            {ir.role(node).name for gm in graphs for node in ir.placeholders(gm.graph, KNOWN)}
            for graphs in zip(bodies, closings, strict=True)
        ]
        return Staged(
            parts, bodies, tuple(closings), tuple(_gathers(parts.gathers, names) for names in read), up, down, terms
        )

    def _check_opening(self, gm: fx.GraphModule | None) -> None:
        """Raises PlanError if a loop in front of the forward computes with parameters."""
        if gm is None:
            return
        for param in ir.placeholders(gm.graph, "param"):
            moved = {param, *moved_alone(param)}
            reader = next(
                (user for node in moved for user in node.users if user not in moved and user.op != "output"), None
            )
            if reader is not None:
                record = ir.info(reader)
                raise PlanError(
                    f"the model cannot be cut into stages: %{record.name} of module {record.origin.module!r} computes, "
                    "from parameters, what all microbatches need before the forward",
                    plan_entry=str(self.stages.entry),
                    source=record.origin.source or None,
                    fix="leave pp out, or let the loss not depend on values of the whole batch",
                )

    def _body(
        self, parts: Phases, graph: fx.Graph, cut: _Assignment, results: Iterable[tuple[Role, object, int]],
        up: tuple[tuple[fx.Node, ...], ...], down: tuple[tuple[fx.Node, ...], ...], at: int,
    ) -> fx.GraphModule:  # fmt: skip
        """Returns the joint graph of stage ``at``."""
        of_stage: Outputs = [(role, x) for role, x, stage in results if stage == at]
        sent_up = [x for x in up[at] if cut.stage[x] == at] if at < len(up) else []
        sent_down = [x for x in down[at - 1] if cut.stage[x] == at] if at else []
        first = [(role, x) for role, x in of_stage if role.kind != "grad"]
        grads = [(role, x) for role, x in of_stage if role.kind == "grad"]
        first += [(Role(TRANSFER, ir.info(x).name, len(first) + k), x) for k, x in enumerate(sent_up)]
        grads += [(Role("grad", ir.info(x).name, len(grads) + k), x) for k, x in enumerate(sent_down)]
        received = {x: Role(TRANSFER, ir.info(x).name) for x, stage in cut.stage.items() if stage != at}
        late = {x for boundary in down[at : at + 1] for x in boundary}
        return LazyGraphModule(parts.body, part(graph, [*first, *grads], received, late))

    def _terms_apart(
        self, parts: Phases, cut: _Assignment, gathered: Mapping[str, frozenset[str]]
    ) -> tuple[Phases, fx.Graph, _Assignment]:
        """Makes terms of one gradient that stages add up a term of each stage, which the closing graph adds up.

        %g = add(%a, %b)    %a of stage 3, %b of stage 0   ->   terms %a and %b; closing: %g = add(%a, %b)
        """
        graph, closing = parts.body.graph, LazyGraphModule(parts.closing, ir.copied(parts.closing.graph))
        results, reduce, changed = [], dict(parts.reduce), False
        for role, x in ir.outputs(graph):
            terms = cut.summands(x) if role.kind == "grad" and reduce.get(role.name) == "sum" else []
            if len({cut.stage.get(term, -1) for term in terms}) < 2:
                results.append((role, x))
                continue
            changed = True
            names = [f"{role.name}.{k}" for k in range(len(terms))]
            results += [(Role("grad", name), term) for name, term in zip(names, terms, strict=True)]
            del reduce[role.name]
            reduce |= dict.fromkeys(names, "sum")
            _add_up(closing.graph, role.name, names)
        if not changed:
            return parts, graph, cut
        body = part(graph, [(replace(role, index=at), x) for at, (role, x) in enumerate(results)], {})
        parts = replace(parts, body=LazyGraphModule(parts.body, body), closing=closing, reduce=reduce)
        return parts, body, _Assignment(body, self.stages, gathered)


@dataclass
class _Assignment:
    """The stage of each op of a joint graph.

    Args:
        graph: joint graph of one microbatch.
        stages: stages of parameters and modules.
        gathered: name of a gathered parameter that the graph takes -> the parameters that it is of.

    Attributes:
        stage: op -> its stage; without what each stage computes that reads it.
    """

    graph: fx.Graph
    stages: PipelineStages
    gathered: Mapping[str, frozenset[str]]
    stage: dict[fx.Node, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.behind = behind_tangent(self.graph)
        self._params: dict[fx.Node, frozenset[str]] = {}  # of what only moves parameters
        for node in ir.placeholders(self.graph):
            role = ir.role(node)
            self._params[node] = (
                frozenset([role.name]) if role.kind == "param" else self.gathered.get(role.name, frozenset())
            )
        inputs = [x for x in ir.placeholders(self.graph) if ir.role(x).kind in ("input", "buffer", "key", "tangent")]
        self._of_inputs = set(inputs)
        late: list[fx.Node] = []
        for node in self.graph.nodes:
            if node.op == "call_function" and not self._is_free(node):
                stage = self._backward(node) if self.behind[node] else self._forward(node)
                if stage is None:
                    late.append(node)
                self.stage[node] = 0 if stage is None else stage
        for node in reversed(late):  # at its earliest use
            if not self.behind[node] and (readers := self.readers(node)):
                self.stage[node] = min(readers)

    def readers(self, node: fx.Node) -> list[int]:
        """Returns the stages of the ops that read ``node``."""
        return [self.stage[user] for user in node.users if user in self.stage]

    def crossing(self, at: int, up: bool) -> tuple[fx.Node, ...]:
        """Returns the values that cross from stage ``at`` to the next (``up``), or from that to stage ``at``."""
        out = []
        for node, stage in self.stage.items():
            readers = self.readers(node)
            if (stage <= at and any(r > at for r in readers)) if up else (stage > at and any(r <= at for r in readers)):
                out.append(node)
        return tuple(out)

    def of_result(self, role: Role, x: object) -> int:
        """Returns the stage that gives a result."""
        if isinstance(x, fx.Node) and x in self.stage:
            return self.stage[x]
        params = self._params.get(x, frozenset()) if isinstance(x, fx.Node) else frozenset()
        return self._owner(params) if params else self.stages.count - 1

    def summands(self, x: object) -> list[fx.Node]:
        """Returns the terms that additions of other stages' values join to ``x``; ``x`` if there are none.

        Casts and views of a sum are those of each term, which are inserted.
        """
        if not isinstance(x, fx.Node) or x not in self.stage:
            return []
        between: list[fx.Node] = []
        top = x
        while (top.target is CAST or is_view(top.target)) and len(top.all_input_nodes[0].users) == 1:
            between.append(top)
            top = top.all_input_nodes[0]
        terms = self._addends(top)
        if len({self.stage.get(term) for term in terms}) < 2:
            return [x]
        out = []
        for term in terms:
            for node in reversed(between):
                with self.graph.inserting_before(x):
                    copy = self.graph.node_copy(node, lambda _, term=term: term)
                ir.update(copy, name=f"{ir.info(node).name}.of_{ir.info(term).name}")
                self.stage[copy] = self.stage[term]
                term = copy
            out.append(term)
        return out

    def _addends(self, x: fx.Node) -> list[fx.Node]:
        """Returns what ``x``, a sum of values of its own shape and dtype, adds up; ``x`` if it is no sum."""
        operands = x.all_input_nodes
        is_sum = x.target is torch.ops.aten.add.Tensor and len(operands) == len(x.args) == 2 and not x.kwargs
        like = [(y.meta["val"].shape, y.meta["val"].dtype) for y in (x, *operands)] if is_sum else []
        if not is_sum or len(set(like)) > 1 or len(x.users) > 1:
            return [x]
        return [term for operand in operands for term in self._addends(operand)]

    def _is_free(self, node: fx.Node) -> bool:
        """Returns whether each stage that reads ``node`` computes it: it is of inputs alone, or moves a parameter."""
        operands = node.all_input_nodes
        if any(x in self.stage for x in operands):
            return False
        params = frozenset[str]().union(*(self._params.get(x, frozenset()) for x in operands))
        moves = communicates(node.target) or moves_data(node.target) or is_view(node.target) or node.target is CAST
        reads_inputs = any(x in self._of_inputs for x in operands)
        if params and (reads_inputs or not moves):
            return False
        self._params[node] = params
        if reads_inputs:
            self._of_inputs.add(node)
        return True

    def _forward(self, node: fx.Node) -> int | None:
        """Returns the stage of an op of the forward; None if neither module nor operands decide it."""
        operands = [self.stage[x] for x in node.all_input_nodes if x in self.stage]
        module = self.stages.of_module(ir.info(node).origin.module)
        if module is None and not operands:
            params = frozenset[str]().union(*(self._params.get(x, frozenset()) for x in node.all_input_nodes))
            return self._owner(params) if params else None
        return max([*operands, *([] if module is None else [module])])

    def _backward(self, node: fx.Node) -> int:
        """Returns the stage of an op of the backward."""
        operands = [self.stage[x] for x in node.all_input_nodes if x in self.stage and self.behind[x]]
        forward = [self.stage[x] for x in node.all_input_nodes if x in self.stage and not self.behind[x]]
        module = self.stages.of_module(ir.info(node).origin.module)
        if not operands:
            params = frozenset[str]().union(*(self._params.get(x, frozenset()) for x in node.all_input_nodes))
            anchors = [*forward, *([] if module is None else [module])] or [self._owner(params)] * bool(params)
            return max(anchors, default=self.stages.count - 1)
        return min([*operands, *([] if module is None else [module])])

    def _owner(self, params: Iterable[str]) -> int:
        """Returns the last of the stages of parameters."""
        return max(self.stages.first[name] for name in params)


def _gathered(parts: Phases) -> dict[str, frozenset[str]]:
    """Returns name of a gathered parameter, shared by all microbatches -> the parameters that it is of."""
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


def _gathers(gm: fx.GraphModule | None, names: set[str]) -> fx.GraphModule | None:
    """Returns the part of ``gm`` that gives the values ``names``; None if it gives none of them."""
    results = [] if gm is None else [(role, x) for role, x in ir.outputs(gm.graph) if role.name in names]
    return LazyGraphModule(gm, part(gm.graph, results, {})) if gm is not None and results else None


def _add_up(closing: fx.Graph, name: str, terms: list[str]) -> None:
    """Makes ``closing`` take the sums of ``terms`` in place of the sum ``name``, and add them up."""
    total = next(node for node in ir.placeholders(closing, SUM) if ir.role(node).name == name)
    rewriter, record = GraphRewriter(closing), ir.info(total)
    sums: list[fx.Node] = []
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
    """Returns the stage that computes each result of the closing graph: that of the parameter, or of its last term."""
    last: dict[fx.Node, int] = {}
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
