"""Unfolding: builds the graph of a whole model from the graph of a few of its repeated blocks.

A model of repeated blocks is captured with a few of them (`shardc.capture.repeats`). In its local graphs (the joint
graph, or its halves) the nodes of the middle blocks repeat with a period. A period that equals, node by node, the
previous one shifted by one block is copied once for each missing block. A graph that does not repeat is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, groupby
from typing import Any, NamedTuple, TypeVar

from torch import fx
from torch.fx.node import Argument

from shardc._compat import LazyGraphModule
from shardc.cost.step_sequence import ALIASED, aliased
from shardc.errors import PlanError, ShardcError
from shardc.ir import graph as ir
from shardc.ir.graph import Info, Role
from shardc.ir.guards import Reads
from shardc.ir.module_paths import forward_name
from shardc.ir.repeat import Marks, Repeat, Repeats
from shardc.passes.lower.hoist_grad_epilogue import HoistGradEpilogue
from shardc.plan.resolve import BoundPlan

T = TypeVar("T", bound=fx.Node | tuple[Role, Argument])


class NotPeriodic(ShardcError):
    """Raised for a graph in which blocks do not repeat node by node."""


@dataclass(frozen=True)
class Folded:
    """A program of a few captured blocks, and how it extends to all blocks of the model.

    Args:
        repeats: the runs of repeated blocks in the whole model, and the number of blocks captured of each.
        captured: the localized joint graph of the captured blocks.
        bound: the plan, resolved against the whole model.
        reads: the guards that a capture of all blocks would have.

    Raises:
        NotPeriodic: the blocks' nodes do not repeat.
    """

    repeats: Repeats
    captured: fx.Graph = field(repr=False)
    bound: BoundPlan
    reads: Reads
    unfolds: list[Unfold] = field(default_factory=list, repr=False)  # one for each run, applied in order
    graphs: dict[str, fx.Graph] = field(default_factory=dict, repr=False)  # of all blocks, by stage

    def __post_init__(self) -> None:
        graph = self.captured
        for number, run in enumerate(self.repeats):
            if number:
                graph = self.unfolds[-1].joint(graph)  # with all blocks of the runs before this one
            self.unfolds.append(Unfold(graph, run, self.repeats.keep))

    @property
    def notes(self) -> tuple[str, ...]:
        """Returns one sentence for reports per run of folded blocks."""
        return tuple(f"{run}: {run.count} blocks alike, analysed on {self.repeats.keep}" for run in self.repeats)

    def levels(self, few: Mapping[str, int]) -> dict[str, int]:
        """Returns parameter -> FSDP level of the whole model; ``few``: the same of the captured blocks."""
        return {name: few[self.repeats.counterpart(name)] for name in self.bound.params}

    def whole(self, stage: str, graph: fx.Graph) -> fx.Graph:
        """Returns the graph of all blocks after ``stage``, given the ``graph`` of the captured blocks; it is cached.

        Gradient epilogues are hoisted first, since they have to stand in their blocks.

        Raises:
            PlanError: the blocks do not repeat node by node.
        """
        if stage not in self.graphs:
            graph = HoistGradEpilogue()(LazyGraphModule({}, ir.copied(graph))).graph
            try:
                for run in self.repeats:
                    graph = Unfold(graph, run, self.repeats.keep).joint(graph)
            except NotPeriodic as error:
                raise PlanError(
                    f"after {stage}, {self.repeats.runs[0]} do not repeat node by node ({error.what}), so that there "
                    "is no graph of all blocks",
                    fix="lower it without fold",
                ) from error
            self.graphs[stage] = graph
        return self.graphs[stage]

    def block_run(self, name: str) -> str:
        """Returns a description of the run of equal blocks that the node ``name`` is in; "" if it is in none."""
        runs = [run for run in self.repeats if (place := run.split(name)) and place[0] < run.count]
        return f"{runs[-1].count} blocks alike, {runs[-1]}" if runs else ""

    def joint(self, gm: fx.GraphModule) -> fx.GraphModule:
        """Returns the localized joint graph of the whole model; ``gm`` is that of the captured blocks."""
        graph = gm.graph
        for unfold in self.unfolds:
            graph = unfold.joint(graph)
        return LazyGraphModule(gm, graph)

    def halves(
        self, first: fx.GraphModule, second: fx.GraphModule | None
    ) -> tuple[fx.GraphModule, fx.GraphModule | None]:
        """Returns (forward or inference, backward) of the whole model; ``first``, ``second``: of captured blocks."""
        forward, backward = first.graph, second and second.graph
        for unfold in self.unfolds:
            forward, backward = unfold.halves(forward, backward)
        return LazyGraphModule(first, forward), None if backward is None else LazyGraphModule(second, backward)

    def times(self, name: str) -> int:
        """Returns the number of nodes of the whole model that the captured node ``name`` represents."""
        for unfold in self.unfolds:
            if unfold.repeats(name):
                return 1 + unfold.names.missing
            name = unfold.names.node(name)  # its name in the graph that the next run is unfolded in
        return 1


class Unfold:
    """Builds graphs of ``run.count`` blocks from graphs of ``keep`` blocks.

    *Ensures:* nodes, names and order are those of the graph of the whole model. One exception: if a forward graph also
    computes ops of backward, these follow its own ops, and their saved outputs may come in another order.

    Args:
        joint: the localized joint graph of the captured blocks.
        run: the repeated blocks of the whole model.
        keep: number of captured blocks.

    Raises:
        NotPeriodic: the blocks' nodes do not repeat.
    """

    def __init__(self, joint: fx.Graph, run: Repeat, keep: int) -> None:
        self.names = Names(run, keep)
        scan = _Unfolding(self.names, joint, _phases(joint))  # locates what repeats
        by_phase = [{x for x in body.whole if scan.copyable(body, x)} for body in scan.bodies if body.nodes]
        copyable_blocks = set.intersection(*by_phase)
        if not copyable_blocks:
            raise NotPeriodic("no block equals the one before it in both forward and backward")
        # To copy, a block far from both ends: the first and last may differ more in the halves than in the joint graph.
        self.names.last = min(sorted(copyable_blocks), key=lambda block: abs(block - (keep - 1) // 2))
        ops = {place: node for node, place in scan.places.items() if node.op != "placeholder"}
        steps: set[int] = set()  # by how much numbers of checkpoint regions increase from block to block
        for body in scan.bodies:
            inner = [(node, scan.places[node]) for node in body.nodes[body.start : body.end]]
            # (op, its counterpart one period later, number of the op's block)
            pairs = [(op, twin, at.block) for op, at in inner if (twin := ops.get(Place(at.key, at.block + body.step)))]
            self.names.learn([(ir.info(op).name, ir.info(twin).name, block) for op, twin, block in pairs], body.step)
            if body.step > 0:
                inside = [(op, twin) for op, twin, block in pairs if 0 <= block < keep - 1]  # others: around the run
                of_pairs = ((ir.info(op).origin.region, ir.info(twin).origin.region) for op, twin in inside)
                steps |= {later - early for early, later in of_pairs if early or later}  # 0: in no region
        if len(steps) > 1:
            raise NotPeriodic("checkpoint regions do not repeat as blocks do")
        self.names.regions = max(steps, default=0)
        self.block_names = frozenset(ir.info(op).name for at, op in ops.items() if at.block == self.names.last)

    def repeats(self, name: str) -> bool:
        """Returns whether the node ``name``, of the localized graph or of an earlier stage, is in the block to copy."""
        return name in self.block_names or self.names.block_of(name) == self.names.last

    def joint(self, graph: fx.Graph) -> fx.Graph:
        """Returns the joint graph of all blocks, given that of the captured blocks."""
        return _Unfolding(self.names, graph, _phases(graph)).graph()

    def halves(self, forward: fx.Graph, backward: fx.Graph | None) -> tuple[fx.Graph, fx.Graph | None]:
        """Returns the forward (or inference) and backward graph of all blocks, given those of the captured blocks."""
        first = _Unfolding(self.names, forward, _phases(forward))
        whole_forward = first.graph()
        if backward is None:
            return whole_forward, None
        return whole_forward, _Unfolding(self.names, backward, [Body(_calls(backward), "backward", -1)], first).graph()


class Place(NamedTuple):
    """Position of a node in the repeated blocks.

    Args:
        key: (phase, offset in the period) of an op, or the name of a parameter in block 0.
        block: number of the block; 0 is the first of the run.
    """

    key: tuple[str, int] | str
    block: int


@dataclass
class Body:
    """Ops of one phase in a graph, and the range of them in which the blocks repeat op by op.

    Args:
        nodes: the ops in order.
        name: the phase.
        step: 1 if later periods belong to later blocks (forward), -1 if to earlier ones (backward).
        period: number of nodes of a block.
        whole: numbers of the blocks whose periods are complete and equal, in the order of the nodes.
        first: index of the first node of the first complete period.
        start, end: range of the nodes that have a `Place`.
    """

    nodes: list[fx.Node]
    name: str
    step: int
    period: int = 0
    whole: range = range(0)
    first: int = 0
    start: int = 0
    end: int = 0


def _calls(graph: fx.Graph) -> list[fx.Node]:
    """Returns the nodes of ``graph`` that are neither placeholders nor the output."""
    return [node for node in graph.nodes if node.op not in ("placeholder", "output")]


def _phases(graph: fx.Graph) -> list[Body]:
    """Returns the forward ops and the backward ops of ``graph``: a joint graph, or a forward with ops of backward."""
    ops = _calls(graph)
    of = {phase: [n for n in ops if ir.info(n).origin.phase == phase] for phase in ("forward", "backward")}
    return [Body(of["forward"], "forward", step=1), Body(of["backward"], "early", step=-1)]


class _Unfolding:
    """Builds the graph of all blocks from one graph of the captured blocks.

    A node of the new graph is identified by a captured node and a shift, the number of blocks by which it moves. Nodes
    of the copied block have all shifts from 0 to the number of missing blocks. Nodes behind it are shifted by that
    number.

    Args:
        names: maps names in the captured graph to names in the new one.
        graph: the graph of the captured blocks.
        bodies: its ops by phase.
        forward: for a backward graph, the builder of its forward, from which saved values take their places.

    Attributes:
        places: captured node -> its position in the repeated blocks.
        env: (captured node, shift) -> its node in the new graph.
    """

    def __init__(self, names: Names, graph: fx.Graph, bodies: list[Body], forward: _Unfolding | None = None) -> None:
        self.names, self.missing, self.source, self.bodies = names, names.missing, graph, bodies
        self.marks = Marks()
        self.places: dict[fx.Node, Place] = {}
        forward_places = {} if forward is None else {node.name: place for node, place in forward.places.items()}
        for node in ir.placeholders(graph):
            role, block = ir.role(node), names.block_of(ir.info(node).name)
            if role.kind == "saved" and node.name in forward_places:
                self.places[node] = forward_places[node.name]
            elif role.kind in ("param", "buffer") and block is not None:
                self.places[node] = Place(names.module(role.name, -block), block)
        self.position = {node: (body, at) for body in bodies for at, node in enumerate(body.nodes)}
        for body in bodies:
            self._locate_periods(body)
        self.node_at = {place: node for node, place in self.places.items()}
        self.env: dict[tuple[fx.Node, int], fx.Node] = {}
        self.meta: dict[fx.Node, dict[str, Any]] = {}  # captured node -> the meta of all its copies
        self.new = fx.Graph()
        # The names that the forward gave saved values of copied blocks.
        self.saved_as = {} if forward is None else {(x.name, s): new.name for (x, s), new in forward.env.items()}

    # --- what repeats

    def _locate_periods(self, body: Body) -> None:
        """Finds the longest range in which blocks repeat op by op, and records the place of each op in it.

        Raises:
            NotPeriodic: no two blocks are equal.
        """
        nodes, first_of = body.nodes, dict[int, int]()  # ``first_of``: block -> index of its first op
        for at, node in enumerate(nodes):
            if (block := self.names.block_of(ir.info(node).name)) is not None:
                first_of.setdefault(block, at)
        if not set(first_of) - {0, self.names.keep - 1}:
            return  # only the first or the last block has ops here: nothing repeats
        for block, at in first_of.items():
            period = first_of.get(block + body.step, at) - at  # 0 if no block follows
            if period <= 0:
                continue
            stop = len(nodes) - period
            different = next((i for i in range(at, stop) if not self._matches(body, i, period)), stop)
            periods = 1 + (different - at) // period  # the first, and those that repeat it
            if periods > max(1, len(body.whole)):  # at least two, and more than from the blocks tried before
                body.whole = range(block, block + periods * body.step, body.step)
                body.period, body.first, body.end = period, at, different + period
        if not body.whole:
            raise NotPeriodic("no two blocks are equal, node by node")
        body.start = body.first
        while body.start > 0 and self._extends(body, body.start - 1):
            body.start -= 1
        for at in range(body.start, body.end):
            block, offset = divmod(at - body.first, body.period)  # below 0 before the first complete period
            self.places[nodes[at]] = Place((body.name, offset), body.whole[0] + block * body.step)

    def copyable(self, body: Body, block: int) -> bool:
        """Returns whether ``block`` can be copied: operands of its ops repeat with the blocks or are equal in all."""
        at, period = body.first + body.period * body.whole.index(block), body.period
        other = at - period if block == body.whole[-1] else at + period  # a neighbour, to compare with
        for x, y in zip(body.nodes[at : at + period], body.nodes[other : other + period], strict=True):
            operands = zip(self.marks.operands(x), self.marks.operands(y), strict=True)
            if any((a in self.places) == (a is b) for a, b in operands):  # in a block and the same for both, or neither
                return False
        return True

    def _extends(self, body: Body, at: int) -> bool:
        """Returns whether the op at ``at`` is of a partial block before the first: only the next block reads it."""
        users = (self.position.get(user, (None, 0)) for user in body.nodes[at].users)
        near = all(user is not body or place < at + 2 * body.period for user, place in users)
        return near and self._matches(body, at, body.period)

    def _matches(self, body: Body, at: int, period: int) -> bool:
        """Returns whether the ops at ``at`` and one block (``period`` ops) later are equal, with equal operands."""
        node, later = body.nodes[at], body.nodes[at + period]
        ours, theirs = ir.info(node).origin, ir.info(later).origin
        return (
            self.marks.mark(node) == self.marks.mark(later)
            and (ours.phase, ours.source) == (theirs.phase, theirs.source)
            and all(
                self._block_apart(body, x, y, period)
                for x, y in zip(self.marks.operands(node), self.marks.operands(later), strict=True)
            )
        )

    def _block_apart(self, body: Body, x: fx.Node, y: fx.Node, period: int) -> bool:
        """Returns whether ``y`` corresponds to ``x`` one block (``period`` ops) later, or both are the same node."""
        if x is y:
            return True
        ours, theirs = self.places.get(x), self.places.get(y)
        if ours is not None or theirs is not None:
            return ours is not None and theirs == Place(ours.key, ours.block + body.step)
        (x_body, x_at), (y_body, y_at) = (self.position.get(node, (None, 0)) for node in (x, y))
        return x_body is body and y_body is body and y_at - x_at == period

    # --- building the graph of all blocks

    def graph(self) -> fx.Graph:
        """Returns the graph of all blocks; raises NotPeriodic if the copied block differs from its neighbours."""
        for node, shift in self._expanded(ir.placeholders(self.source), self._block):
            self._add(node, shift)
        for body in self.bodies:
            if body.whole and not (self.names.last in body.whole and self.copyable(body, self.names.last)):
                raise NotPeriodic(f"block {self.names.last} is not like its neighbours")
            for node, shift in self._expanded(body.nodes, self._block, body.step):
                self._add(node, shift)
        self._output()
        return self.new

    def _expanded(
        self, items: Iterable[T], block_of: Callable[[T], int | None], step: int = 1
    ) -> Iterator[tuple[T, int]]:
        """Yields (item, number of blocks by which it moves) for each item of the graph of all blocks. An item of the
        block to copy comes once per copy.

        Args:
            block_of: returns the block of an item; None for an item of no block.
            step: 1 if copies come in the order of their blocks, -1 if in reverse.
        """
        for block, group in groupby(items, block_of):
            members = list(group)
            if block == self.names.last:  # all its items for one copy, then all for the next
                yield from ((x, shift) for shift in range(self.missing + 1)[::step] for x in members)
            else:
                yield from ((x, self._shift(x, block)) for x in members)

    def _block(self, node: fx.Node) -> int | None:
        """Returns the number of the block that ``node`` has a place in; None for none."""
        place = self.places.get(node)
        return None if place is None else place.block

    def _shift(self, item: fx.Node | tuple[Role, Argument], block: int | None) -> int:
        """Returns by how many blocks an uncopied item moves: all inserted blocks if they stand before it, else 0."""
        node = item if isinstance(item, fx.Node) else item[1]  # an output is (role, node)
        if block is None and isinstance(node, fx.Node) and (block := self._block(node)) is None:
            body, at = self.position.get(node, (None, 0))
            if body is not None and body.whole:
                # Backward runs from the last block to the first: what precedes the blocks there belongs behind them.
                return self.missing if (at >= body.end) == (body.step > 0) else 0
            block = self.names.block_of(ir.info(node).name)
            if block is None and any(x in self.places for x in node.all_input_nodes):
                raise NotPeriodic(f"{ir.info(node).name} belongs to no block and reads a block's result")
        return self.missing if block is not None and block > self.names.last else 0

    def _counterpart(self, node: fx.Node, shift: int) -> fx.Node:
        """Returns the node that replaces operand ``node`` in a copy of its user, ``shift`` blocks later."""
        if (place := self.places.get(node)) is None:
            return self.env[node, self._shift(node, None)]
        block = place.block + shift  # in the whole model
        moved = min(max(block - self.names.last, 0), self.missing)  # by how much that block is shifted
        captured = self.node_at.get(Place(place.key, block - moved))
        counterpart = None if captured is None else self.env.get((captured, moved))
        if counterpart is None:
            raise NotPeriodic(f"{ir.info(node).name} has no counterpart in block {block}")
        return counterpart

    def _add(self, node: fx.Node, shift: int) -> None:
        """Copies ``node`` to the graph of all blocks, with the counterparts of its operands ``shift`` blocks later."""
        place, name = self.places.get(node), node.name
        if place is not None and place.block == self.names.last and shift:  # a copy: forward's name, or its block's
            name = self.saved_as.get((name, shift), f"{name}_block_{self.names.run.first + place.block + shift}")
        moved = partial(self._counterpart, shift=shift)
        args, kwargs = fx.node.map_arg(node.args, moved), fx.node.map_arg(node.kwargs, moved)
        target = name if node.op == "placeholder" else node.target
        new = self.env[node, shift] = self.new.create_node(node.op, target, kwargs=kwargs, name=name)
        if node.op == "placeholder" and new.name != name:
            raise NotPeriodic(f"a node is called {name} already")
        new.args = args  # not at once: torch would search them for symbols, leaf by leaf
        if node not in self.meta:
            self.meta[node] = _meta(node)
        new.meta.update(self.meta[node])
        record = self.names.renamed(ir.info(node), shift, place is not None)
        if record.role is not None and record.role.kind == "saved":
            record = replace(record, role=replace(record.role, name=new.name))  # forward's output has this name
        ir.set_info(new, record)

    def _output(self) -> None:
        """Adds the outputs: those of the captured blocks, and their counterparts in the copies."""
        results = [
            self._one_output(role, node, shift)
            for (role, node), shift in self._expanded(ir.outputs(self.source), self._block_of_output)
        ]
        output = self.new.output(tuple(node for _, node in results))
        output.meta = dict(ir.output_node(self.source).meta)
        index = count()  # saved values are numbered anew
        output.meta[ir.ROLES] = tuple(
            replace(role, index=next(index)) if role.kind == "saved" else role for role, _ in results
        )
        if (reads := output.meta.get(ir.READS)) is not None:
            output.meta[ir.READS] = {
                new.name: replace(reads[node.name], name=self.names.module(reads[node.name].name, shift))
                for (node, shift), new in self.env.items()
                if node.op == "placeholder" and node.name in reads
            }

    def _block_of_output(self, output: tuple[Role, Argument]) -> int | None:
        """Returns the number of the captured block that an output belongs to; None for none."""
        role, node = output
        if role.kind == "saved":
            return self._block(node)
        return self.names.block_of(role.name) if role.kind == "grad" else None

    def _one_output(self, role: Role, node: Argument, shift: int) -> tuple[Role, Argument]:
        """Returns (renamed role, node) of an output in a copied block, ``shift`` blocks after the output ``node``."""
        copied = shift and self.names.block_of(role.name) == self.names.last
        if copied and isinstance(node, fx.Node) and node not in self.places:
            raise NotPeriodic(f"{ir.info(node).name}, which computes {role.name}, stands outside its block")
        counterpart = self._counterpart(node, shift) if isinstance(node, fx.Node) else node
        if role.kind == "saved" and isinstance(counterpart, fx.Node):
            return replace(role, name=counterpart.name), counterpart
        return replace(role, name=self.names.module(role.name, shift)), counterpart


class Names:
    """Maps names in a graph of the captured blocks to names in the graph of all blocks.

    A name either has its block's number behind the container's path (``layers.3.up``), or it belongs to a family that
    is numbered through the graph (``d.add.7``). Such a number increases from block to block by the number of names that
    the family has in a block.

    Args:
        run: the repeated blocks of the whole model.
        keep: number of captured blocks.

    Attributes:
        last: number of the block to copy, the last one before the copies.
        regions: number of checkpoint regions of a block.
    """

    def __init__(self, run: Repeat, keep: int) -> None:
        self.run, self.keep, self.missing = run, keep, run.count - keep
        self.last = self.regions = 0
        self._moved: dict[tuple[str, int], str] = {}
        # Family (the parts before the number) -> (numbers in a block, the first captured number to move, direction).
        self._families: dict[tuple[str, ...], tuple[int, int, int]] = {}

    def block_of(self, name: str) -> int | None:
        """Returns the number of the captured block that ``name`` belongs to; None for none."""
        block, _ = self._split_block(name) or (None, "")
        return block if block is not None and block < self.keep else None

    def _split_block(self, name: str) -> tuple[int, str] | None:
        """Returns (block, name in the block) of the name of a module, parameter or op; None if it is in no block."""
        return self.run.split(name) or self.run.split(forward_name(name))

    def learn(self, pairs: Iterable[tuple[str, str, int]], step: int) -> None:
        """Learns how names are numbered, from ``pairs``: (name, name of its counterpart in the next block, block).

        Args:
            step: 1 if blocks follow in their order, -1 if in reverse.

        Raises:
            NotPeriodic: a family's numbers do not increase by the same amount from block to block.
        """
        for early, late, block in pairs:
            if self._split_block(early) or self._split_block(late) or early == late:
                continue  # a name with its block's number, or without any
            family, first, second = _numbers(early, late)
            stride = second - first
            # The first number behind the copies: of the next block, or in reverse of the copied block itself.
            first_after = first + stride * ((self.last + 1 - block) if step > 0 else (block - self.last))
            stride_before, least, _ = self._families.get(family, (stride, first_after, step))
            if stride <= 0 or stride_before != stride:
                raise NotPeriodic(f"{early} and {late} do not count on evenly")
            self._families[family] = (stride, min(least, first_after), step)

    def renamed(self, record: Info, shift: int, placed: bool) -> Info:
        """Returns the record of a node that is copied from the node of ``record``, ``shift`` blocks later; ``placed``:
        the node has a place in a period, so that it moves with its block.
        """
        rename, origin, role = partial(self.node, shift=shift, placed=placed), record.origin, record.role
        moved = replace(
            origin,
            module=self.module(origin.module, shift),
            region=origin.region and origin.region + shift * self.regions,
            consumer=origin.consumer and rename(origin.consumer),
        )
        return replace(
            record,
            name=rename(record.name),
            origin=moved,
            role=role and replace(role, name=self.module(role.name, shift)),
            regathers=record.regathers and rename(record.regathers),
        )

    def node(self, name: str, shift: int = 0, placed: bool = False) -> str:
        """Returns the new name of node ``name``, moved by ``shift`` blocks. ``placed``: whether the node has a place in
        a period, so that its number moves with its block; else the number grows by those of the copies before it.
        """
        if self._split_block(name) or (numbered := self._split_number(name)) is None:
            return self.module(name, shift)  # it has its block's number, or none
        family, at, value = numbered
        stride, first_after, step = self._families[family]
        copies_before = self.missing if value >= first_after else 0  # copies that are numbered before it
        if placed:
            copies_before = shift if step > 0 else self.missing - shift  # in reverse, later blocks are numbered first
        return _with_number(name, at, value + stride * copies_before)

    def module(self, name: str, shift: int) -> str:
        """Returns the name of a module or parameter, shifted by ``shift`` blocks.

        Modules after the captured blocks are shifted by the number of missing blocks.
        """
        if (cached := self._moved.get((name, shift))) is None:
            cached = name
            if place := self._split_block(name):
                block, rest = place
                moved = block + (shift if block < self.keep else self.missing)
                cached = name.removesuffix(self.run.name(block, rest)) + self.run.name(moved, rest)  # ``d.`` stays
            self._moved[name, shift] = cached  # many nodes share their module's name
        return cached

    def _split_number(self, name: str) -> tuple[tuple[str, ...], int, int] | None:
        """Splits a numbered name ``d.add.7`` into (``("d", "add")``, position of the number, 7); else None."""
        parts = name.split(".")
        for at in range(1, len(parts) + 1):
            if (family := tuple(parts[:at])) in self._families:
                numbered = at < len(parts) and parts[at].isdecimal()
                return family, at, int(parts[at]) if numbered else 0  # the first name of a family has no number
        return None


def _numbers(early: str, late: str) -> tuple[tuple[str, ...], int, int]:
    """Compares two names that differ in one number: returns (parts before it, number in ``early``, number in ``late``).

    >>> _numbers("d.add.scattered", "d.add.8.scattered")
    (('d', 'add'), 0, 8)
    """
    first, second = early.split("."), late.split(".")
    # Where they differ. The number may be missing in ``early``, which is 0, but not in ``late``.
    at = next((i for i, part in enumerate(second) if i >= len(first) or first[i] != part), len(second))
    if at < len(second) and second[at].isdecimal():
        if first[at:] == second[at + 1 :]:
            return tuple(second[:at]), 0, int(second[at])
        if at < len(first) and first[at].isdecimal() and first[at + 1 :] == second[at + 1 :]:
            return tuple(second[:at]), int(first[at]), int(second[at])
    raise NotPeriodic(f"{early} and {late} are not numbered alike")


def _with_number(name: str, at: int, value: int) -> str:
    """Returns ``name`` with the number ``value`` at its dot-separated part ``at``; for 0, without a number there."""
    parts = name.split(".")
    rest = parts[at + 1 :] if at < len(parts) and parts[at].isdecimal() else parts[at:]
    return ".".join([*parts[:at], *([str(value)] if value else []), *rest])


def _meta(node: fx.Node) -> dict[str, Any]:
    """Returns a copy of a node's meta that also says which operand shares memory with the node's value (-1: none)."""
    meta = dict(node.meta)
    if node.op == "call_function":
        owner = aliased(node)
        meta[ALIASED] = -1 if owner is None else node.all_input_nodes.index(owner)
    return meta
