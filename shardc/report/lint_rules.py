"""Lint rules: communication and computation that a better plan would avoid, each with its cost and a remedy.

The rules read the global graph with its layouts (stage ``collectives``), the schedule of the joint local graph (stage
``localize``; a collective has the same name in both), and the schedule of the compiled step.

`copies` lists the copies that communication causes in a step: bytes moved within a rank only to be sent, or after they
arrive. An all-gather receives each shard at its place in the result, so its only copy is that of the rank's own shard.
More copies occur if a layout splits a dim other than the leading one: the split dim is moved to the front before
sending, and back after the wait. Small tensors that share a message (`shardc.ir.arena`) are copied into it and out of
it. Casts and arithmetic are not counted, nor copies inside a library's collective. The list is an upper bound: Inductor
may fuse a copy into the op that produces its value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from operator import getitem

from torch import Tensor, fx

from shardc.cost.compute import dense, layers_of, tensor_bytes
from shardc.cost.hardware import Route, price, route
from shardc.cost.step_sequence import aliased
from shardc.ir import graph as ir
from shardc.ir import ops
from shardc.ir.arena import Packing, rows_of
from shardc.ir.comm import ALL_REDUCE, GATHER, IN_MESSAGES, REDUCE_SCATTER, WAIT, is_ring
from shardc.ir.comm_volume import collective_kind, group_of
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh, split_part
from shardc.ir.op_traits import COPIES
from shardc.report.findings import SEVERITIES, Finding
from shardc.report.predicted_schedule import Schedule
from shardc.report.prediction import HOST, Collective, Run, grouped

# Values of `Copy.reason`.
OWN_SHARD = "own shard to its place in the gathered result"
TOGETHER = "terms of an all-reduce into one buffer"
INTO_MESSAGE = "small tensors into the message that they share"
OUT_OF_MESSAGE = "gathered small tensors out of the message that they share"
CONTIGUOUS = "made contiguous to be sent"
TO_SEND = "brought in the order in which it is sent"
RECEIVED = "brought in order after it came"


@dataclass(frozen=True)
class Copy:
    """A copy of data within one rank, which a collective makes necessary.

    Args:
        name: name of the value in the graph's text.
        reason: why it is made, as text.
        bytes: bytes written.
    """

    name: str
    reason: str
    bytes: int


def copies(graph: fx.Graph, mesh: Mesh) -> list[Copy]:
    """Return the copies within a rank that communication causes in a local forward or backward graph, in the order of
    its ops.
    """
    result: list[Copy] = []
    feeds_collective = _touching(reversed(graph.nodes), lambda n: n.users, lambda n: collective_kind(n) is not None)
    follows_wait = _touching(graph.nodes, lambda n: n.all_input_nodes, lambda n: n.target is WAIT)
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if collective_kind(node) is not None:
            result += _copies_of_collective(node, mesh)
        elif node.target in COPIES and not _is_view(node) and (node in feeds_collective or node in follows_wait):
            reason = RECEIVED if node in follows_wait else TO_SEND
            result.append(Copy(ir.info(node).name, reason, tensor_bytes(node.meta["val"])))
    return result


def table(copied: list[Copy]) -> str:
    """Return the copies as a text table: count and bytes for each reason, and in total."""
    by_reason = sorted(grouped(copied, lambda copy: copy.reason).items())
    rows = [*by_reason, ("copies", copied)]
    return "".join(f"{name}: x{len(of)} {sum(copy.bytes for copy in of)} B/rank\n" for name, of in rows)


def _copies_of_collective(node: fx.Node, mesh: Mesh) -> Iterator[Copy]:
    """Yield the copies within a rank that a collective makes: of non-contiguous inputs, of its own shard, and into and
    out of messages in shared memory.
    """
    kind, name, outputs = collective_kind(node), ir.info(node).name, _tensors(node.meta["val"])
    _, ranks = group_of(node, mesh)
    for read in node.all_input_nodes:
        val = read.meta["val"]
        if isinstance(val, Tensor) and not val.is_contiguous():
            yield Copy(ir.info(read).name, CONTIGUOUS, tensor_bytes(val))
    if kind == "all_gather":
        for user, x in _named_results(node, outputs):
            yield Copy(user, OWN_SHARD, tensor_bytes(x) // ranks)
    elif node.target is ALL_REDUCE and is_ring("all_reduce", ranks):
        yield Copy(name, TOGETHER, sum(map(tensor_bytes, outputs)))
        return
    if node.target not in IN_MESSAGES or ranks == 1:
        return
    if size := Packing.of(rows_of(node, ranks)).size:
        yield Copy(name, INTO_MESSAGE, size * (ranks - 1 if node.target is REDUCE_SCATTER else 1))
        if node.target is GATHER:
            yield Copy(name, OUT_OF_MESSAGE, size * (ranks - 1))


def _named_results(node: fx.Node, outputs: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, value) of each result of the collective ``node``. ``outputs`` are the values in order; a node with
    one result gives its own name.
    """
    items: dict[object, str] = {user.args[1]: ir.info(user).name for user in node.users if user.target is getitem}
    for at, x in enumerate(outputs):
        yield items.get(at, ir.info(node).name), x


def _touching(
    nodes: Iterable[fx.Node],
    neighbours: Callable[[fx.Node], Iterable[fx.Node]],
    communicates: Callable[[fx.Node], bool],
) -> set[fx.Node]:
    """Return the copies and views among ``nodes`` that have a neighbour which ``communicates``, directly or through
    other copies and views. ``nodes`` are in an order in which neighbours come first.
    """
    out: set[fx.Node] = set()
    for node in nodes:
        moves = node.op == "call_function" and (node.target in COPIES or aliased(node) is not None)
        if moves and any(neighbour in out or communicates(neighbour) for neighbour in neighbours(node)):
            out.add(node)
    return out


def _is_view(node: fx.Node) -> bool:
    """Return whether the example value of ``node`` shares memory with that of its operand. (The op alone does not tell:
    a reshape may copy.)
    """
    storages = [x.untyped_storage()._cdata for x in (node.meta["val"], node.all_input_nodes[0].meta["val"])]
    return storages[0] == storages[1]


def _tensors(val: object) -> list[Tensor]:
    """Return the tensors in ``val``, an example value or a list of them."""
    return [x for x in (val if isinstance(val, list | tuple) else [val]) if isinstance(x, Tensor)]


LARGE_PARAMETER = 1 << 20  # bytes from which a replicated parameter is reported
EXPOSED_SHARE = 0.2  # share of the step from which exposed communication of an axis is reported
REPLICATED_SHARE = 0.01  # share of a rank's operations from which replicated work is reported
HIGH, MEDIUM = 0.05, 0.005  # shares of the step's time from which a finding has that severity


def severity_of(share: float) -> str:
    """Return the severity ("high", "medium" or "low") of a cost, given its share of the step's time."""
    return "high" if share >= HIGH else "medium" if share >= MEDIUM else "low"


@dataclass(frozen=True)
class Subject:
    """The program that lint rules check: its global graph and predicted schedules.

    Args:
        graph: its global graph after ``collectives``.
        schedule: the schedule of the joint local graph.
        step: the schedule of the step that runs.
    """

    graph: fx.Graph
    schedule: Schedule
    step: Schedule

    @cached_property
    def runs(self) -> dict[str, Run]:
        """The kernels of the joint local graph with their predicted times: kernel name -> `Run`."""
        return {run.kernel.name: run for run in self.schedule.runs}

    def finding(
        self,
        rule: str,
        at: tuple[str, str, str],
        seconds: float,
        nbytes: int,
        message: str,
        change: str,
        count: int = 1,
    ) -> Finding:
        """Return a `Finding` about a tensor, ``at`` (name, module, source line). Its severity follows from its
        seconds.
        """
        share = seconds / self.step.seconds if self.step.seconds else 0.0
        return Finding(rule, severity_of(share), *at, seconds, nbytes, message, change, count)

    def wasted(self, rule: str, node: fx.Node, part: float, message: str, change: str) -> Iterator[Finding]:
        """Yield a `Finding` that the fraction ``part`` of the collective ``node``, a node of the global graph, is
        unnecessary; nothing if the schedule does not have the collective.
        """
        rows = self.schedule.by_node.get(ir.info(node).name)
        if rows is not None:
            cause, seconds, wire = rows[0].cause, sum(row.seconds for row in rows), sum(row.wire for row in rows)
            at = (cause.tensor, cause.module, cause.source)
            yield self.finding(rule, at, part * seconds, int(part * wire), message, change, len(rows))


def lint(graph: fx.Graph, schedule: Schedule, step: Schedule) -> list[Finding]:
    """Return the findings of all lint rules, the most severe first and then the most costly.

    Args:
        graph: the global graph after ``collectives``.
        schedule: the schedule of the local joint graph.
        step: the schedule of the compiled forward and backward; the same as ``schedule`` if these do not exist.
    """
    subject = Subject(graph, schedule, step)
    findings = [finding for rule in RULES for finding in rule(subject)]
    return sorted(findings, key=lambda f: (SEVERITIES.index(f.severity), -f.seconds, f.rule, f.subject))


def in_pieces(name: str, module: str, source: str, pieces: int, reason: str) -> Finding:
    """Return a `Finding` about a collective that the pass ``decompose`` cut into chunks (or did not), with its reason
    for their number.
    """
    message = f"cut in {pieces} pieces under its product: {reason}" if pieces > 1 else f"not cut in pieces: {reason}"
    return Finding(
        "product-in-pieces", "low", name, module, source, 0.0, 0, message, "say Options(decompose=) for another"
    )


# --- the rules


# Collectives whose result is then sliced: the rule, the unnecessary share, the message and the remedy.
_SLICED = {
    ops.all_gather: (
        "gather-then-slice", 1.0, "gathered over {}, then sliced again",
        "give its producer and its consumer the same layout, or move the split to the other dim",
    ),
    ops.all_reduce: (
        "reduce-then-slice", 0.5, "summed over {} everywhere, then sliced",
        "split the consumer's dim where the sum is made, for a reduce-scatter at half the bytes",
    ),
}  # fmt: skip


def then_sliced(subject: Subject) -> Iterator[Finding]:
    """Yield findings about all-gathers and all-reduces from whose result each rank uses only its own shard."""
    for node in subject.graph.nodes:
        if node.target in _SLICED and node.users and all(user.target is ops.shard for user in node.users):
            rule, part, message, change = _SLICED[node.target]
            yield from subject.wasted(rule, node, part, message.format(node.kwargs["axis"]), change)


def repeated_collective(subject: Subject) -> Iterator[Finding]:
    """Yield findings about collectives that repeat an earlier one of the same value in the same phase."""
    seen: dict[tuple[object, ...], fx.Node] = {}
    for node in subject.graph.nodes:
        if node.target in ops.COLLECTIVES:
            key = (node.target, node.args[0], *sorted(node.kwargs.items()), ir.layout(node), ir.info(node).origin.phase)
            first = seen.setdefault(key, node)
            if first is not node:
                kind, axis = node.target.__name__, node.kwargs["axis"]
                name = "repeated-gather" if kind == "all_gather" else "repeated-collective"
                verb = "gathered" if kind == "all_gather" else f"sent ({kind})"
                yield from subject.wasted(
                    name, node, 1.0, f"{verb} again over {axis}, as %{ir.info(first).name}",
                    "pin the value's layout where both consumers read it",
                )  # fmt: skip


def unread_collective(subject: Subject) -> Iterator[Finding]:
    """Yield findings about collectives whose result is not read."""
    step = subject.step.step
    live = {at for _, at in (*step.outputs, *step.passed_on)}
    for at in reversed(range(len(step.ops))):
        if at in live:
            live.update(step.ops[at].reads)
    unread = {ir.info(step.ops[at].node).name for at in step.starts if at not in live}
    for row in subject.step.collectives:
        if row.name in unread:
            yield subject.finding(
                "unread-collective", (row.cause.tensor, row.cause.module, row.cause.source), row.seconds, row.wire,
                f"{row.kind} over {row.axis} in {row.phase}, whose result nobody reads",
                "report it: the compiler should have left it out",
            )  # fmt: skip


def collective_run_again(subject: Subject) -> Iterator[Finding]:
    """Yield findings about collectives of a checkpointed region that run a second time in backward."""
    recomputed = {row.name: row for row in subject.schedule.collectives if row.phase == "backward"}
    gathers = {ir.info(op.node).name for op in subject.schedule.step.ops if op.gathered}
    for row in subject.schedule.collectives:
        second = recomputed.get(row.name) if row.phase == "forward" and row.name not in gathers else None
        if second is not None:
            yield subject.finding(
                "collective-run-again", (row.cause.tensor, row.cause.module, row.cause.source), second.seconds,
                second.wire, f"{row.kind} over {row.axis} of a checkpoint region runs again in backward",
                'Options(checkpoint_collectives="keep") keeps its result, where memory allows',
            )  # fmt: skip


def small_messages(subject: Subject) -> Iterator[Finding]:
    """Yield findings about groups of small collectives, each of which spends more time on latency than on its
    transfer.
    """
    groups: dict[tuple[str, str, str], list[tuple[Collective, float]]] = {}
    schedule = subject.step
    for row in schedule.collectives:
        at = route(subject.schedule.mesh, tuple(row.axis.split(",")), schedule.hardware.node)
        idle = price(schedule.hardware, row.kind, at, 0).seconds
        if row.ranks > 1 and idle > row.seconds - idle:
            groups.setdefault((row.kind, row.axis, row.phase), []).append((row, idle))
    for (kind, axis, phase), small in groups.items():
        if len(small) < 2:
            continue
        lost, wire = sum(idle for _, idle in small), sum(c.wire for c, _ in small)
        yield subject.finding(
            "small-messages", (f"{kind}({axis})", "", ""), lost, wire,
            f"in {phase}, each takes longer to start than to send",
            "larger buckets, Plan(bucket_size=...), or fewer ranks on the axis", len(small),
        )  # fmt: skip


def exposed_axis(subject: Subject) -> Iterator[Finding]:
    """Yield findings about axes whose exposed communication is a large share of the step."""
    schedule = subject.step
    for axis, total in schedule.totals("axis").items():
        if total.exposed > EXPOSED_SHARE * schedule.seconds:
            share = total.exposed / schedule.seconds
            waited = sum(1 for c in schedule.transfers if c.axis == axis and c.exposed > 0)
            change = f"make {axis} smaller, put it inside a node, or give each rank a larger batch"
            if axis == HOST:
                change = "keep fewer parameters on the host, or give each rank a larger batch"
            yield subject.finding(
                "exposed-axis", (axis, "", ""), total.exposed, total.wire,
                f"{share:.0%} of the step waits for {axis}", change, waited,
            )  # fmt: skip


def axis_across_nodes(subject: Subject) -> Iterator[Finding]:
    """Yield findings about axes that cross nodes although an axis inside a node has less than half of their traffic."""
    schedule = subject.schedule
    mesh, node = schedule.mesh, schedule.hardware.node
    totals = {axis: total for axis, total in schedule.totals("axis").items() if axis in mesh.axes}
    inside = {axis for axis in totals if route(mesh, (axis,), node).nodes == 1}
    for axis, total in totals.items():
        quieter = [other for other in inside if totals[other].wire * 2 < total.wire and mesh.size(axis) <= node]
        if axis not in inside and quieter:
            rows = [c for c in schedule.collectives if c.axis == axis]
            local = Route(mesh.size(axis), 1, mesh.size(axis))
            gain = sum(c.seconds - price(schedule.hardware, c.kind, local, c.wire).seconds for c in rows)
            yield subject.finding(
                "axis-across-nodes", (axis, "", ""), gain, total.wire,
                f"{axis} crosses nodes and moves more than {', '.join(quieter)}, which stays inside",
                f"put {axis} last in the mesh: the last axes vary fastest and stay inside a node", len(rows),
            )  # fmt: skip


def replicated_work(subject: Subject) -> Iterator[Finding]:
    """Yield findings about dense ops (matrix products, attention) that several ranks compute redundantly, at a large
    share of the step's operations.
    """
    weights = {ir.info(x).name: ir.layout(x) for x in ir.placeholders(subject.graph, "param")}
    for node, op in dense(subject.graph, subject.schedule.mesh):
        times = prod(op.times.values())
        run = subject.runs.get(op.name) if times > 1 else None
        if run is not None and run.kernel.flops * (1 - 1 / times) > REPLICATED_SHARE * subject.schedule.flops:
            yield subject.finding(
                "replicated-work", (op.name, op.module, ir.info(node).origin.source), run.seconds * (1 - 1 / times),
                0, f"done {times} times over {', '.join(op.times)}, alike on different ranks",
                _split_advice(weights, op.module, next(iter(op.times))),
            )  # fmt: skip


def _split_advice(weights: Mapping[str, Layout], module: str, axis: str) -> str:
    """Return advice, as text, on how to split the matrix products of ``module`` over ``axis``: a plan entry, or what to
    split. ``weights`` maps parameter -> storage layout.
    """
    weight = weights.get(f"{module}.weight")
    if weight is None or axis in {split_part(part)[0] for part in weight.axes}:
        return f"split its input over {axis}, or the weight that it multiplies by"
    name = layers_of(module)
    return f'shardc.tp("{axis}", colwise=["{name}"]), or rowwise, splits its weight; else split its input over {axis}'


def whole_parameter(subject: Subject) -> Iterator[Finding]:
    """Yield findings about large parameters that every rank stores completely."""
    for node in ir.placeholders(subject.graph, "param"):
        layout, value = ir.layout(node), ir.value(node)
        size = prod(value.shape) * value.itemsize
        axis, ranks = _batch_axis(subject)
        if subject.schedule.mesh.ranks > 1 and not layout.axes and size >= LARGE_PARAMETER:
            record = ir.info(node)
            why = f" ({record.origin.cause})" if record.origin.cause else ""
            split = _storing_plan(record.name, value.shape, axis, ranks)
            yield subject.finding(
                "whole-parameter", (record.name, record.name.rpartition(".")[0], record.origin.source), 0.0, size,
                f"every rank holds all {size} bytes of it{why}, and an optimizer's state besides",
                f"{split} stores {size - size // ranks} bytes less on a rank, and so does each state of the optimizer",
            )  # fmt: skip


def _storing_plan(name: str, shape: tuple[int, ...], axis: str, ranks: int) -> str:
    """Return, as text, the plan that stores parameter ``name`` split over ``axis``: at the first dim that ``ranks``
    divide, else at dim 0.
    """
    split = next((dim for dim, length in enumerate(shape) if length % ranks == 0), 0)
    dims = [f'"{axis}"' if dim == split else "None" for dim in range(len(shape))]
    return f'Plan(params={{"{layers_of(name)}": ({", ".join(dims)}{"," * (len(dims) == 1)})}})'


def _batch_axis(subject: Subject) -> tuple[str, int]:
    """Return (axis, ranks along it) of the first axis that splits the first input; of the mesh's first axis if none
    does.
    """
    mesh = subject.schedule.mesh
    split = (axis for x in ir.placeholders(subject.graph, "input") for axis in ir.layout(x).axes)
    axis = split_part(next(split, mesh.axes[0]))[0]
    return axis, mesh.size(axis)


def low_precision_sum(subject: Subject) -> Iterator[Finding]:
    """Yield findings about axes of many ranks (16 or more) over which gradients are summed in half precision."""
    rows = [c for c in subject.schedule.collectives if c.kind in ("all_reduce", "reduce_scatter") and c.ranks >= 16]
    low = [c for c in rows if c.dtype in ("bf16", "f16") and c.phase == "backward"]
    for axis, of in grouped(low, lambda c: c.axis).items():
        yield subject.finding(
            "low-precision-sum", (axis, "", ""), 0.0, sum(c.wire for c in of),
            f"gradients summed in {of[0].dtype} over {of[0].ranks} ranks lose low bits",
            "shardc.precision(reduce=torch.float32) sums them in float32, at twice the bytes", len(of),
        )  # fmt: skip


RULES: tuple[Callable[[Subject], Iterator[Finding]], ...] = (
    then_sliced, repeated_collective, unread_collective, collective_run_again, small_messages, exposed_axis,
    axis_across_nodes, replicated_work, whole_parameter, low_precision_sum,
)  # fmt: skip
