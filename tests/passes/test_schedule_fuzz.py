"""Random graphs of collectives and compute: bucketing and scheduling change no value and keep their limits."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
import torch
from torch import fx

from shardc.ir import graph as ir
from shardc.ir.certificate import certify
from shardc.ir.comm import move_kind, waits_of
from shardc.ir.graph import Info, NameScope, Role, Value
from shardc.ir.mesh import Mesh
from shardc.ir.parse import parse
from shardc.ir.text import dump
from shardc.passes.check import check_waits
from shardc.passes.op_calls import is_start, result_bytes
from shardc.passes.schedule.bucket import Bucket
from shardc.passes.schedule.plan_memory import PlanMemory
from shardc.passes.schedule.prefetch import prefetchable
from shardc.passes.schedule.schedule import Schedule
from shardc.runtime.sim.lockstep import Lockstep, PerRank
from shardc.verify import halves, identity
from shardc.verify.subject import Subject, no_rules

aten, c10d, host = torch.ops.aten, torch.ops._c10d_functional, torch.ops.shardc
MESHES = [Mesh(dp=2, tp=2), Mesh(dp=3, tp=2), Mesh(a=2, b=2, c=2)]
GRAPHS = 2000


class Draft:
    """A random local graph: parameters gathered, values reduced and scattered, compute in between."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.mesh = self.draw.choice(MESHES)
        self.graph = fx.Graph()
        self.names = NameScope()
        self.values: list[fx.Node] = []
        self.outputs: list[fx.Node] = []
        for at in range(self.draw.randint(2, 6)):
            node = self.graph.placeholder(f"p{at}")
            shape = (12, self.draw.choice((1, 2)))
            self._record(node, f"p{at}", shape, Role("param", f"p{at}"))
            self.values.append(node)
        for node in self.values[:: self.draw.choice((1, 2, 8))]:  # some of them lie on the host
            self.values[self.values.index(node)] = self.moved(node, host.to_device.default, ("cpu",))
        for _ in range(self.draw.randint(4, 16)):
            self.draw.choice((self.gather, self.gather, self.reduce, self.scatter, self.compute))()
        results = [*self.outputs, self.values[-1]]
        results = [self.moved(x, host.to_host.default, ()) if self.draw.random() < 0.5 else x for x in results]
        out = self.graph.output(tuple(results))
        out.meta[ir.ROLES] = tuple(Role("output", f"o{i}", i) for i in range(len(results)))
        self.gm = fx.GraphModule({}, self.graph)

    def _record(self, node: fx.Node, name: str, shape: tuple[int, ...], role: Role | None = None) -> fx.Node:
        node.meta["val"] = torch.empty(shape, device="meta", dtype=torch.float64)
        return ir.set_info(node, Info(self.names.fresh(name), Value(torch.float64, shape), role=role))

    def emit(self, target: object, args: tuple[object, ...], shape: tuple[int, ...]) -> fx.Node:
        return self._record(self.graph.call_function(target, args), target._opname, shape)

    def moved(self, node: fx.Node, op: object, args: tuple[object, ...]) -> fx.Node:
        """``node`` on the other side, waited for right behind the move's start."""
        shape = ir.value(node).shape
        return self.emit(c10d.wait_tensor.default, (self.emit(op, (node, *args), shape),), shape)

    def group(self) -> tuple[int, str]:
        axes = tuple(sorted(self.draw.sample(self.mesh.axes, self.draw.randint(1, 2)), key=self.mesh.order))
        ranks = 1
        for axis in axes:
            ranks *= self.mesh.size(axis)
        return ranks, "shardc:" + ",".join(axes)

    def pick(self) -> tuple[fx.Node, tuple[int, ...]]:
        node = self.draw.choice(self.values[-5:] if self.draw.random() < 0.5 else self.values)
        return node, ir.value(node).shape

    def keep(self, node: fx.Node) -> None:
        if self.draw.random() < 0.3:
            self.outputs.append(node)
        else:
            self.values.append(node)

    def gather(self) -> None:
        (node, (rows, columns)), (ranks, group) = self.pick(), self.group()
        if rows * ranks > 200:
            return
        shape = (rows * ranks, columns)
        started = self.emit(c10d.all_gather_into_tensor.default, (node, ranks, group), shape)
        self.keep(self.emit(c10d.wait_tensor.default, (started,), shape))

    def reduce(self) -> None:
        (node, shape), (_, group) = self.pick(), self.group()
        op = self.draw.choice(("sum", "avg", "max"))
        started = self.emit(c10d.all_reduce.default, (node, op, group), shape)
        self.keep(self.emit(c10d.wait_tensor.default, (started,), shape))

    def scatter(self) -> None:
        (node, (rows, columns)), (ranks, group) = self.pick(), self.group()
        if rows % ranks:
            return
        shape = (rows // ranks, columns)
        started = self.emit(
            c10d.reduce_scatter_tensor.default, (node, self.draw.choice(("sum", "avg")), ranks, group), shape
        )
        self.keep(self.emit(c10d.wait_tensor.default, (started,), shape))

    def compute(self) -> None:
        node, shape = self.pick()
        others = [x for x in self.values if ir.value(x).shape == shape]
        self.keep(self.emit(aten.add.Tensor, (node, self.draw.choice(others)), shape))


def in_flight(graph: fx.Graph, fetched: bool) -> int:
    """The most bytes of parameters' gathers that are started and not yet first used, at any point.

    Args:
        fetched: of what is fetched for gathers instead: moves to the device, and maxima.
    """
    order = {node: at for at, node in enumerate(graph.nodes)}
    spans, free = [], prefetchable(graph)
    for node in graph.nodes:
        early = is_start(node) and all(x.op == "placeholder" or x in free for x in node.all_input_nodes)
        if early and (node in free if fetched else node not in free and move_kind(node) is None):
            uses = [order[user] for wait in waits_of(node) for user in wait.users]
            spans.append((order[node], min(uses, default=len(order)), result_bytes(node)))
    return max((sum(size for start, end, size in spans if start <= at < end) for at in order.values()), default=0)


def check(seed: int) -> tuple[int, int]:
    draft = Draft(seed)
    ranks = Lockstep(draft.mesh)
    generator = torch.Generator().manual_seed(seed)
    feed = [
        PerRank(torch.randint(-4, 5, ir.value(n).shape, generator=generator).double() for _ in range(draft.mesh.ranks))
        for n in ir.placeholders(draft.graph)
    ]
    before = ranks.run(draft.gm, feed)
    count, computed = sum(is_start(n) for n in draft.graph.nodes), identity.computed(draft.graph)
    alone = [in_flight(draft.graph, fetched) for fetched in (False, True)]
    bucket = Bucket(draft.draw.choice((0, 500, 2000, -1)), direct=draft.draw.random() < 0.5)
    schedule = Schedule(draft.draw.choice((0, 1000, 4000, -1)))
    gm = bucket(draft.gm)
    fused = [in_flight(gm.graph, fetched) for fetched in (False, True)]
    gm = schedule(gm)
    gm.graph.lint()
    assert [*check_waits(Subject(gm, draft.mesh, no_rules))] == []
    what = f"seed {seed}: {bucket}, {schedule} on {draft.mesh}"
    assert identity.same(computed, identity.computed(gm.graph)) is None, what
    gm = PlanMemory(draft.mesh)(gm)
    subject = Subject(gm, draft.mesh, no_rules)
    assert [*halves.slots(subject)] == [], what
    for mine, theirs in zip(ranks.run(gm, feed), before, strict=True):
        assert mine is not None and theirs is not None
        for rank, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            torch.testing.assert_close(
                a, b, rtol=1e-12, atol=1e-12, msg=lambda text, r=rank: f"{what}, rank {r}: {text}"
            )
    if schedule.max_in_flight >= 0:
        for fetched in (False, True):
            limit = max(alone[fetched], fused[fetched], schedule.max_in_flight)
            assert in_flight(gm.graph, fetched) <= limit, what
    late = [node for node in gm.graph.nodes if move_kind(node) == "to_host"]
    behind = [wait for node in late for wait in waits_of(node)]
    places = {node: at for at, node in enumerate(gm.graph.nodes)}
    assert not late or min(map(places.__getitem__, behind)) > max(map(places.__getitem__, late)), what
    text = dump(gm, draft.mesh)
    again = certify(draft.mesh, [("forward", parse(text).graph)])
    assert again == certify(draft.mesh, [("forward", gm.graph)]), what
    return count, sum(is_start(n) for n in gm.graph.nodes)


# The first graphs; maxima that depend on maxima; waits for maxima beside an op of the same position.
@pytest.mark.parametrize("seeds", [range(60), (458, 1737)], ids=str)
def test_some_random_graphs(seeds: Iterable[int]) -> None:
    for seed in seeds:
        check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_random_graphs(part: int) -> None:
    size = GRAPHS // 4
    counts = [check(seed) for seed in range(part * size, (part + 1) * size)]
    before, after = (sum(column) for column in zip(*counts, strict=True))
    print(f"{size} graphs, none wrong; {before} collectives became {after}")
    assert after < before
