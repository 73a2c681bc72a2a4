"""Unfold: a graph of a few repeated blocks becomes the graph of all of them.

A model whose blocks repeat is captured with a few of them (`shardc.capture.repeats`). In its local graphs (the joint
one, or its halves) the nodes of the middle blocks repeat with a period. A period that equals, node by node, the one
before it shifted by one block is copied once for each missing block. A graph that does not repeat so is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from torch import Tensor, fx

from shardc.cost.step_sequence import ALIASED, aliased
from shardc.ir import graph as ir
from shardc.ir.graph import Info, Origin, Role
from shardc.ir.repeat import Repeat
from shardc.passes.unfold_body import Body, Place, calls, phases
from shardc.passes.unfold_names import Names, NotPeriodic


class Unfold:
    """Builds graphs of ``run.count`` blocks from graphs of ``keep`` blocks.

    *Ensures:* nodes, names and order are those of the graph of the whole model. One exception: if a forward also
    computes ops of backward, these stand after its own, and their saved outputs may come in another order.

    Args:
        joint: the localized joint graph.
        run: the repeated blocks of the whole model.
        keep: number of blocks that were captured.

    Raises:
        NotPeriodic: the blocks' nodes do not repeat.
    """

    def __init__(self, joint: fx.Graph, run: Repeat, keep: int) -> None:
        self.run, self.keep, self.missing = run, keep, run.count - keep
        self.names = Names(run, keep)
        self.regions = 0  # how many checkpoint regions a block has
        scan = _Unfolding(self, joint, phases(joint), {})
        both = sorted(set.intersection(*(set(body.whole) for body in scan.bodies if body.nodes)))
        if not both:
            raise NotPeriodic("no block equals the one before it in both forward and backward")
        # The block that is copied should be far from both ends: in the halves, the first and last blocks may differ
        # from the others more than in the joint graph.
        middle = run.first + (keep - 1) // 2
        self.names.last = min(both, key=lambda block: abs(block - middle))
        at = {place: node for node, place in scan.places.items() if node.op != "placeholder"}
        regions: set[int] = set()
        for body in scan.bodies:
            inner = [(scan.places[node], node) for node in body.nodes[body.start : body.end]]
            pairs = [(p, node, at.get(Place(p.role, p.block + body.step))) for p, node in inner]
            self.names.learn([(_name(x), _name(y), p.block) for p, x, y in pairs if y is not None], body.step)
            both_of = [
                (ir.info(x).origin.region, ir.info(y).origin.region)
                for _, x, y in pairs
                if y is not None and body.step > 0
            ]
            regions |= {y - x for x, y in both_of if x or y}
        if len(regions) > 1:
            raise NotPeriodic("checkpoint regions do not repeat as blocks do")
        self.regions = max(regions, default=0)
        self.block_names = frozenset(_name(n) for p, n in at.items() if p.block == self.names.last)

    def repeats(self, name: str) -> bool:
        """Tells whether the node ``name``, of the localized graph or an earlier one, is in the block that is copied."""
        return name in self.block_names or self.names.block_of(name) == self.names.last

    def joint(self, graph: fx.Graph) -> fx.Graph:
        """Returns the joint graph of all blocks, given that of the captured ones."""
        return _Unfolding(self, graph, phases(graph), {}).graph()

    def halves(self, forward: fx.Graph, backward: fx.Graph | None) -> tuple[fx.Graph, fx.Graph | None]:
        """Returns the forward (or inference) graph of all blocks, and the backward of the same partition."""
        first = _Unfolding(self, forward, phases(forward), {})
        whole_forward = first.graph()
        if backward is None:
            return whole_forward, None
        saved = {node.name: place for node, place in first.places.items()}
        second = _Unfolding(self, backward, [Body(calls(backward), "backward", -1)], saved)
        second.twins = {place: node.name for place, node in first.copied.items()}
        return whole_forward, second.graph()


class _Unfolding:
    """State of the unfolding of one graph.

    Args:
        saved: name of a saved value's placeholder -> the place of the forward's node that it comes from.

    Attributes:
        places: node -> its place in a period (or among a block's parameters).
        copied: place -> the node of a block that was not captured.
        env: captured node -> its node in the new graph.
        twins: place of a saved value in a new block -> the name that the forward gave it.
    """

    def __init__(self, unfold: Unfold, graph: fx.Graph, bodies: list[Body], saved: Mapping[str, Place]) -> None:
        self.names, self.missing, self.source, self.bodies = unfold.names, unfold.missing, graph, bodies
        self.regions = unfold.regions
        self.places: dict[fx.Node, Place] = {}
        self.twins: dict[Place, str] = {}
        for node in ir.placeholders(graph):
            role, block = ir.role(node), self.names.block_of(ir.info(node).name)
            if role.kind == "saved":
                if node.name in saved:
                    self.places[node] = saved[node.name]
            elif role.kind in ("param", "buffer") and block is not None:
                self.places[node] = Place(self.names.module(role.name, unfold.run.first - block), block)
        self.position: dict[fx.Node, tuple[Body, int]] = {
            node: (body, at) for body in bodies for at, node in enumerate(body.nodes)
        }
        for body in bodies:
            self._locate_periods(body)
        self.at = {place: node for node, place in self.places.items()}
        self.copied: dict[Place, fx.Node] = {}
        self.env: dict[fx.Node, fx.Node] = {}
        self.meta: dict[fx.Node, dict[str, Any]] = {}
        self.new = fx.Graph()

    # --- what repeats

    def _locate_periods(self, body: Body) -> None:
        """Finds the longest stretch of equal periods; gives places to its nodes and to equal ones next to it."""
        first_of: dict[int, int] = {}
        for at, node in enumerate(body.nodes):
            if (block := self.names.block_of(ir.info(node).name)) is not None:
                first_of.setdefault(block, at)
        if not set(first_of) - self.names.ends:
            return  # only the first or the last block has ops here: nothing repeats
        start = 0
        for block, at in first_of.items():
            if (after := first_of.get(block + body.step)) is None or after <= at:
                continue
            whole, period = [block], after - at
            while self._like(body, at + period * (len(whole) - 1), period):
                whole.append(whole[-1] + body.step)
            if len(whole) > max(1, len(body.whole)):
                body.whole, body.period, start = whole, period, at
        if not body.whole:
            raise NotPeriodic("no two blocks are equal, node by node")
        body.start, body.end = start, start + body.period * len(body.whole)
        while body.end < len(body.nodes) and self._matches(body, body.end - body.period, body.period):
            body.end += 1
        while body.start > 0 and self._matches(body, body.start - 1, body.period):
            body.start -= 1
        for at in range(body.start, body.end):
            turn, role = divmod(at - start, body.period)
            self.places[body.nodes[at]] = Place((body.name, role), body.whole[0] + turn * body.step)

    def _like(self, body: Body, start: int, period: int) -> bool:
        """Tells whether the period after the one at ``start`` equals it."""
        inside = start + 2 * period <= len(body.nodes)
        return inside and all(self._matches(body, at, period) for at in range(start, start + period))

    def _matches(self, body: Body, at: int, period: int) -> bool:
        """Tells whether the node at ``at`` and the one a period later apply the same op to operands one block apart."""
        node, later = body.nodes[at], body.nodes[at + period]
        if node.target != later.target or _value_kind(node) != _value_kind(later):
            return False
        ours, theirs = ir.info(node).origin, ir.info(later).origin
        if (ours.phase, ours.source) != (theirs.phase, theirs.source):
            return False
        first, second = _leaves((node.args, node.kwargs)), _leaves((later.args, later.kwargs))
        return len(first) == len(second) and all(
            self._block_apart(body, x, y, period)
            if isinstance(x, fx.Node) and isinstance(y, fx.Node)
            else type(x) is type(y) and bool(x == y)
            for x, y in zip(first, second, strict=True)
        )

    def _block_apart(self, body: Body, x: fx.Node, y: fx.Node, period: int) -> bool:
        """Tells whether ``y`` is ``x`` shifted by one block, or both are the same node."""
        if x is y:
            return True
        ours, theirs = self.places.get(x), self.places.get(y)
        if ours is not None or theirs is not None:
            return ours is not None and theirs == Place(ours.role, ours.block + body.step)
        x_position, y_position = self.position.get(x), self.position.get(y)
        if x_position is None or y_position is None or x_position[0] is not body or y_position[0] is not body:
            return False
        return y_position[1] - x_position[1] == period

    # --- the graph of all blocks

    def graph(self) -> fx.Graph:
        """Returns the graph of all blocks."""
        self.copies = range(self.names.last + 1, self.names.last + 1 + self.missing)
        group: list[fx.Node] = []
        for node in [*ir.placeholders(self.source), None]:
            mine = node is not None and (p := self.places.get(node)) is not None and p.block == self.names.last
            if not mine:
                for block in self.copies:
                    for template in group:
                        self._copy_placeholder(template, block)
                group.clear()
            if node is not None:
                self._keep(node)
                group += [node] if mine else []
        for body in self.bodies:
            for node, copy_of in self._order(body):
                if copy_of is None:
                    self._keep(node)
                else:
                    self._copy(node, copy_of)
        self._output()
        return self.new

    def _order(self, body: Body) -> list[tuple[fx.Node, int | None]]:
        """Returns (node, block of its copy or None) for each node of ``body`` in the graph of all blocks, in order."""
        if not body.whole:
            return [(node, None) for node in body.nodes]
        template, all_new = body.whole[-1], body.period * self.missing
        order: list[tuple[int, fx.Node, int | None]] = []
        for at, node in enumerate(body.nodes):
            moved = (self._shift(node) > 0) == (body.step > 0)
            order.append((at + all_new * moved, node, None))
            place = self.places.get(node)
            if place is not None and place.block == template:
                for block in self.copies:
                    turn = block - template if body.step > 0 else self.missing + template - block
                    order.append((at + turn * body.period, node, block))
        order.sort(key=lambda item: item[0])
        if [at for at, _, _ in order] != list(range(len(order))):
            raise NotPeriodic("the new blocks do not fit between those that are there")
        return [(node, block) for _, node, block in order]

    def _shift(self, node: fx.Node) -> int:
        """Returns the number of blocks by which ``node`` is shifted: those after the new blocks, in both phases."""
        if (place := self.places.get(node)) is not None:
            return self.missing if place.block > self.names.last else 0
        body, at = self.position.get(node, (None, 0))
        if body is not None and body.whole:
            return self.missing if (at >= body.end) == (body.step > 0) else 0
        block = self.names.block_of(ir.info(node).name)
        if block is None and any(x in self.places for x in node.all_input_nodes):
            raise NotPeriodic(f"{ir.info(node).name} belongs to no block and reads a block's result")
        return self.missing if block is not None and block > self.names.last else 0

    def _counterpart(self, node: fx.Node, shift: int) -> fx.Node:
        """Returns the node that a user of ``node`` reads if that user is shifted by ``shift`` blocks."""
        if (place := self.places.get(node)) is None:
            return self.env[node]
        block = place.block + shift
        if block in self.copies:
            counterpart = self.copied.get(Place(place.role, block))
        else:
            before = self.at.get(Place(place.role, block if block <= self.names.last else block - self.missing))
            counterpart = None if before is None else self.env.get(before)
        if counterpart is None:
            raise NotPeriodic(f"{ir.info(node).name} has no counterpart in block {block}")
        return counterpart

    def _keep(self, node: fx.Node) -> None:
        """Adds a node that was captured."""
        self.env[node] = self._node(node, self._shift(node), node.name)

    def _copy(self, node: fx.Node, block: int) -> None:
        """Adds the counterpart of ``node`` in a block that was not captured."""
        place = self.places[node]
        copy = self._node(node, block - place.block, f"{node.name}_block_{block}")
        self.copied[Place(place.role, block)] = copy

    def _copy_placeholder(self, node: fx.Node, block: int) -> None:
        place = Place(self.places[node].role, block)
        name = self.twins.get(place, f"{node.name}_block_{block}")
        copy = self._node(node, block - self.places[node].block, name)
        if copy.name != name:
            raise NotPeriodic(f"a node is called {name} already")
        self.copied[place] = copy

    def _node(self, node: fx.Node, shift: int, name: str) -> fx.Node:
        moved = partial(self._counterpart, shift=shift)
        args, kwargs = fx.node.map_arg(node.args, moved), fx.node.map_arg(node.kwargs, moved)
        target = name if node.op == "placeholder" else node.target
        node_copy = self.new.create_node(node.op, target, kwargs=kwargs, name=name)
        node_copy.args = args  # not at once: torch would search them for symbols, leaf by leaf
        if node not in self.meta:
            self.meta[node] = _meta(node)
        node_copy.meta.update(self.meta[node])
        record = self._renamed(
            ir.info(node), partial(self.names.node, moved_by=shift, placed=node in self.places), shift
        )
        if record.role is not None and record.role.kind == "saved":
            record = replace(record, role=replace(record.role, name=node_copy.name))
        return ir.set_info(node_copy, record)

    def _renamed(self, record: Info, rename: Callable[[str], str], shift: int) -> Info:
        origin = record.origin
        module = self.names.module(origin.module, shift)
        region = origin.region and origin.region + shift * self.regions
        consumer = rename(origin.consumer) if origin.consumer else ""
        origin = Origin(module, origin.source, origin.phase, origin.cause, region, consumer)
        role = record.role and replace(record.role, name=self.names.module(record.role.name, shift))
        regathers = rename(record.regathers) if record.regathers else ""
        return Info(
            rename(record.name), record.value, origin, role, record.needs, record.kept, regathers, record.true_sizes,
            record.piece,
        )  # fmt: skip

    def _output(self) -> None:
        """Adds the outputs of the captured blocks, and their counterparts in the copies."""
        results: list[tuple[Role, Any]] = []
        group: list[tuple[Role, Any]] = []
        for role, node in [*ir.outputs(self.source), (None, None)]:
            block = self._block_of(role, node) if role is not None else None
            if block != self.names.last:
                results += self._outputs(group, self.copies)
                group.clear()
            if role is not None:
                shift = self.missing if block is not None and block > self.names.last else 0
                if block is None and isinstance(node, fx.Node):
                    shift = self._shift(node)
                results.append(self._one_output(role, node, shift))
                group += [(role, node)] if block == self.names.last else []
        output = self.new.output(tuple(node for _, node in results))
        output.meta = dict(ir.output_node(self.source).meta)
        index = count()
        output.meta[ir.ROLES] = tuple(
            replace(role, index=next(index)) if role.kind == "saved" else role for role, _ in results
        )
        if (reads := output.meta.get(ir.READS)) is not None:
            output.meta[ir.READS] = dict(self._reads(reads))

    def _reads(self, reads: Mapping[str, Role]) -> Iterator[tuple[str, Role]]:
        """Yields (name, role of the forward's input that it depends on) for each placeholder, now of all blocks."""
        for node in (each for each in ir.placeholders(self.source) if each.name in reads):
            role, place = reads[node.name], self.places.get(node)
            moved = {self._shift(node): self.env[node]}
            if place is not None and place.block == self.names.last:
                moved |= {block - place.block: self.copied[Place(place.role, block)] for block in self.copies}
            for shift, counterpart in moved.items():
                yield counterpart.name, replace(role, name=self.names.module(role.name, shift))

    def _outputs(self, group: list[tuple[Role, Any]], blocks: Iterable[int]) -> list[tuple[Role, Any]]:
        return [self._one_output(role, node, block - self.names.last) for block in blocks for role, node in group]

    def _one_output(self, role: Role, node: Any, shift: int) -> tuple[Role, Any]:
        copied = shift and self.names.block_of(role.name) == self.names.last
        if copied and isinstance(node, fx.Node) and node not in self.places:
            raise NotPeriodic(f"{ir.info(node).name}, which computes {role.name}, stands outside its block")
        counterpart = self._counterpart(node, shift) if isinstance(node, fx.Node) else node
        if role.kind == "saved":
            return replace(role, name=counterpart.name), counterpart
        return replace(role, name=self.names.module(role.name, shift)), counterpart

    def _block_of(self, role: Role, node: Any) -> int | None:
        """Returns the number of the repeated block that an output belongs to; None for none."""
        if role.kind == "saved":
            place = self.places.get(node)
            return None if place is None else place.block
        return self.names.block_of(role.name) if role.kind == "grad" else None


def _name(node: fx.Node) -> str:
    return ir.info(node).name


def _leaves(tree: Any) -> list[Any]:
    leaves: list[Any] = []
    fx.node.map_aggregate(tree, leaves.append)
    return leaves


def _value_kind(node: fx.Node) -> Any:
    """Returns dtype, shape and strides of each result, which have to be equal in corresponding nodes."""
    value = node.meta.get("val")
    parts = value if isinstance(value, list | tuple) else [value]
    return [(x.dtype, x.shape, x.stride()) if isinstance(x, Tensor) else type(x) for x in parts]


def _meta(node: fx.Node) -> dict[str, Any]:
    """Returns the meta of a node, and records whose memory its value shares: copies have the same fake values."""
    meta = dict(node.meta)
    if node.op == "call_function":
        owner = aliased(node)
        meta[ALIASED] = -1 if owner is None else node.all_input_nodes.index(owner)
    return meta
