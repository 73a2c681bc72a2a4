"""`explain`: the layouts of a tensor, the plan entries and rules that decided them, and the cost of its uses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches

from torch import fx

from shardc.cost.hardware import Hardware
from shardc.errors import InputError
from shardc.ir import graph as ir
from shardc.ir import ops
from shardc.ir.layout import Layout
from shardc.ir.module_paths import forward_name, value_name
from shardc.passes.op_calls import Work, call_of, operands_of, priced
from shardc.report.inspected import InspectedProgram as Program
from shardc.report.prediction import Collective
from shardc.report.schedule_text import aligned
from shardc.report.units import duration, size
from shardc.rules import find_rule, spec_of
from shardc.rules.spec import Strategy
from shardc.validate import did_you_mean

_MOVES = (*ops.COLLECTIVES, *ops.LOCAL_MOVES, ops.pad, ops.unpad)


@dataclass(frozen=True)
class Decision:
    """One layout of the explained tensor, with the plan entry, rule or default that decided it.

    Args:
        what: "storage", "compute" or "gradient" for a parameter; "layout" for other values.
        type: dtype and layout, as in a dump.
        who: the plan entry, rule or default.
    """

    what: str
    type: str
    who: str


@dataclass(frozen=True)
class Use:
    """An op that reads the tensor, or that computes its gradient, and the collectives between tensor and op.

    Args:
        op: name of the op.
        phase: "forward" or "backward".
        module, source: its module and source line.
        rule: its rule in notation; "" if it has none.
        takes: the layout at which it reads the tensor (or computes the gradient), as text.
        moves: the collectives between tensor and op, before bucketing and overlap; several uses may share one.
    """

    op: str
    phase: str
    module: str
    source: str
    rule: str
    takes: str
    moves: tuple[Collective, ...]

    @property
    def wire(self) -> int:
        """Return the bytes that each rank sends in the collectives ``moves``."""
        return sum(row.wire for row in self.moves)


@dataclass(frozen=True)
class Explanation:
    """The layouts of one tensor, the reasons for them, and its uses.

    Args:
        name: the tensor's name.
        kind: "parameter", "input", "buffer", "tangent" or "value".
        module, source: module and source line that compute it, or that first use a parameter.
        decisions: its layouts.
        alternatives: for the result of an op, (seconds, operand layouts, result layout) of each possible strategy:
            the chosen one first, then by cost.
        uses: its uses in graph order.
        represents: with folding, the repeated blocks that its block represents; "" otherwise.
    """

    name: str
    kind: str
    module: str
    source: str
    decisions: tuple[Decision, ...]
    alternatives: tuple[tuple[float, str, str], ...]
    uses: tuple[Use, ...]
    represents: str = ""

    @property
    def wire(self) -> int:
        """Return the bytes that each rank sends for the tensor in a step; each collective is counted once."""
        return sum(row.wire for row in self._moves())

    def _moves(self) -> list[Collective]:
        """Return the collectives of all uses, each once."""
        rows = [row for use in self.uses for row in use.moves]
        return list({(row.name, row.phase, row.start): row for row in rows}.values())

    def text(self) -> str:
        """Return the explanation as text: layouts, strategies, uses, collectives and totals."""
        parts = [f"{self.kind} {self.name}" + (f" of {self.module}" if self.module else "") + self._at()]
        parts[0] += f"\nthe same in each of {self.represents}" if self.represents else ""
        head: tuple[str, ...] = ("", "lies as", "because")
        parts.append(aligned([(d.what, d.type, d.who) for d in self.decisions], head, left=head, cut=head[:0:-1]))
        if self.alternatives:
            rows = [
                (mark, duration(seconds), operands, result)
                for mark, (seconds, operands, result) in zip(
                    ["chosen", *[""] * len(self.alternatives)], self.alternatives, strict=False
                )
            ]
            head = ("strategy", "time", "operands", "result")
            parts.append(aligned(rows, head, left=("strategy", *head[2:]), cut=head[2:]))
        uses = [(u.phase, u.op, u.takes, u.rule or "-", _short(u.source), size(u.wire)) for u in self.uses]
        head = ("phase", "used by", "taken as", "rule", "source", "a rank")
        parts.append(aligned(uses, head, left=head[:-1], cut=("rule", "used by", "taken as")))
        moves = [
            (m.kind, m.axis, m.phase, size(m.wire), duration(m.seconds),
             m.cause.entry or m.cause.reason or "-", _short(m.cause.source))
            for m in self._moves()
        ]  # fmt: skip
        total = f"{len(moves)} collectives, {size(self.wire)} a rank"
        if moves:
            head = ("kind", "axis", "phase", "a rank", "alone", "cause", "source")
            parts.append(aligned(moves, head, left=(*head[:3], *head[5:]), cut=("cause",)))
            alone = duration(sum(m.seconds for m in self._moves()))
            total += f"; {alone} if each ran alone, before they share buckets and run beside compute"
        parts.append(total)
        return "\n\n".join(parts) + "\n"

    def _at(self) -> str:
        """Return the source line as text, " at file:line", or "" if there is none."""
        return f" at {self.source}" if self.source else ""


def explain(program: Program, tensor: str, hardware: str | Hardware = "h100") -> Explanation:
    """Explain the layout of ``tensor`` and the cost of its uses.

    Args:
        program: the compiled program.
        tensor: qualified name of a parameter or buffer, or the name of an input or value in dumps.
        hardware: the hardware for predicted times; bytes do not depend on it.

    Raises:
        InputError: the program has no such tensor.
    """
    graph, folded = program.whole("collectives"), program.folded
    by_name = {ir.info(node).name: node for node in graph.nodes if node.op != "output"}
    node = by_name.get(value_name(tensor))
    if node is None or not ir.is_tensor(node):
        fix = did_you_mean(get_close_matches(tensor, by_name), "dump the stage collectives to see its names")
        raise InputError(f"the program has no tensor {tensor!r}", fix=fix)
    rows = program.schedule(hardware, stage="localize").by_node
    record = ir.info(node)
    represents = "" if folded is None else folded.block_run(forward_name(record.name))
    param = record.role is not None and record.role.kind == "param"
    uses = list(_uses(node, rows))
    decisions = [Decision("storage" if param else "layout", str(record.value), _deciding_entry(program, node))]
    if param:
        computed = dict.fromkeys(use.takes for use in uses)
        entries = program.causes.get(record.name) or "no entry splits it for compute: it is whole there"
        decisions += [Decision("compute", takes, entries) for takes in computed]
        grad = next((x for role, x in ir.outputs(graph) if role.kind == "grad" and role.name == record.name), None)
        if isinstance(grad, fx.Node):
            decisions.append(
                Decision("gradient", str(ir.info(grad).value), "as storage, so that the optimizer is local")
            )
            uses.append(_gradient_use(grad, rows))
    source = record.origin.source or next((use.source for use in uses if use.source), "")
    return Explanation(
        record.name, _kind(record), record.origin.module, source, tuple(decisions),
        tuple(_alternatives(program, node)), tuple(uses), represents,
    )  # fmt: skip


def _kind(record: ir.Info) -> str:
    """Return what a tensor is, as text: "parameter", "input", "buffer" or "tangent" by its role; "value" if it has
    none.
    """
    if record.role is None:
        return "value"
    return {"param": "parameter"}.get(record.role.kind, record.role.kind)


def _deciding_entry(program: Program, node: fx.Node) -> str:
    """Return, as text, the plan entry, rule or default that decided the layout of ``node``."""
    record = ir.info(node)
    origin = record.origin
    if record.role is not None:
        level = program.levels.get(record.name, 0)
        if record.role.kind == "param":
            entry = origin.cause or "no entry speaks of it: whole on every rank"
            return f"{entry}, level {level}" if level and "level" not in entry else entry
        if record.role.kind == "tangent":
            return "as the output whose gradient it is"
        return origin.cause or ("whole on every rank" if not ir.layout(node).axes else "the plan's batch axes")
    if node.target in _MOVES or node.target is ops.reshard:
        return f"{origin.reason or 'its uses'}, by {node.target.__name__}"
    if node.op == "get_attr":
        return "a constant: whole on every rank"
    text = _rule(node)
    if not text:
        return "its op has no rule: computed whole on every rank"
    return f"rule {text}, from its operands at {', '.join(str(w) for w in ir.info(node).needs or ()) or 'no layout'}"


def _rule(node: fx.Node) -> str:
    """Return the op of ``node`` and its rule in notation, "mm: ..."; "" if it has none."""
    op_rule = find_rule(node.target) if hasattr(node.target, "_schema") else None
    return "" if op_rule is None else f"{op_rule.op.removeprefix('aten.')}: {re.sub(r' {2,}', '; ', op_rule.text)}"


def _alternatives(program: Program, node: fx.Node) -> Iterator[tuple[float, str, str]]:
    """Yield each strategy by which the op of ``node`` could run on shards, as (predicted seconds, operand layouts,
    result layout). The chosen strategy comes first.
    """
    name = ir.info(node).name
    twin = next((x for x in program.whole("propagate").nodes if x.op != "output" and ir.info(x).name == name), None)
    needs = None if twin is None else ir.info(twin).needs
    if twin is None or needs is None or not hasattr(twin.target, "_schema"):
        return
    spec = spec_of(call := call_of(twin))
    operands = operands_of(twin)
    if spec is None or not operands:
        return
    pinned = tuple(x.op == "placeholder" and ir.role(x).kind == "param" for x in operands)
    wanted = tuple(frozenset(_wanted_by_others(x, twin)) for x in operands)
    have = tuple(ir.layout(x) for x in operands)
    chosen = Strategy(needs, (ir.layout(twin),))
    strategies = priced(spec, have, wanted, pinned, Work.of(call), None, program.options.cost)
    for seconds, strategy in sorted(strategies, key=lambda row: (row[1] != chosen, row[0])):
        yield seconds, ", ".join(map(str, strategy.operands)), str(strategy.results[0])


def _wanted_by_others(operand: fx.Node, but: fx.Node) -> Iterator[Layout]:
    """Yield the layouts in which the users of ``operand`` other than the op ``but`` need it."""
    for user in operand.users:
        needs = ir.info(user).needs if user.op == "call_function" and user is not but else None
        yield from (want for x, want in zip(operands_of(user), needs or (), strict=False) if x is operand)


def _uses(node: fx.Node, rows: dict[str, list[Collective]], way: tuple[fx.Node, ...] = ()) -> Iterator[Use]:
    """Yield the uses of ``node``: the ops that read it, directly or through collectives.

    Args:
        rows: node name -> its collectives in the predicted schedule.
        way: the collectives before ``node``.
    """
    for user in node.users:
        if user.op == "output":
            continue
        if user.target in _MOVES:
            yield from _uses(user, rows, (*way, user))
        else:
            yield _use(user, str(ir.info(node).value), way, rows)


def _gradient_use(grad: fx.Node, rows: dict[str, list[Collective]]) -> Use:
    """Return, as a `Use`, the op that computes a gradient, with the collectives that reduce it."""
    way: tuple[fx.Node, ...] = ()
    while grad.target in _MOVES:
        way, (grad,) = (grad, *way), grad.all_input_nodes
    return _use(grad, str(ir.info(grad).value), way, rows)


def _use(op: fx.Node, takes: str, way: tuple[fx.Node, ...], rows: dict[str, list[Collective]]) -> Use:
    """Return the record (`Use`) of how ``op`` uses the explained tensor: its layout there, and the collectives before
    it.

    Args:
        takes: the layout at which the op reads it, as text.
        way: the collectives between tensor and op.
        rows: node name -> its collectives in the predicted schedule.
    """
    record = ir.info(op)
    origin = record.origin
    moves: list[Collective] = []
    for node in way:
        collectives = rows.get(ir.info(node).name, [])
        # A level-3 gather runs in both phases, once for the uses of each.
        moves += [row for row in collectives if row.phase == origin.phase] or collectives
    return Use(record.name, origin.phase, origin.module, origin.source, _rule(op), takes, tuple(moves))


def _short(source: str) -> str:
    """Return ``source``, a ``file:line``, without folders."""
    return source.rpartition("/")[2] or "-"
