"""Other algorithms for a collective: the same values, chosen by the cost model alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._subclasses import FakeTensorMode

import shardc
from shardc.cost.model import CostModel, Measured
from shardc.ir.comm_volume import collective_kind
from shardc.ir.graph import Info, Role, Value, set_info
from shardc.ir.mesh import Mesh
from shardc.passes.schedule.algorithms import Algorithms
from shardc.runtime.sim.lockstep import Lockstep

MESH = Mesh(a=2, b=3)
c10d = torch.ops._c10d_functional
SLOW, FAST = (1e-4, 1e8), (1e-5, 1e9)

Add = Callable[..., fx.Node]


def slow(*kinds: str) -> CostModel:
    """A backend on which ``kinds`` are slow and all else is fast."""
    rows = ("reduce_scatter", "all_gather", "all_reduce", "all_to_all")
    return CostModel(kinds=tuple(Measured(kind, 2, *(SLOW if kind in kinds else FAST)) for kind in rows))


def program(x: torch.Tensor, collective: Callable[[Add, fx.Node], fx.Node]) -> fx.GraphModule:
    """A local graph: a collective on one input, waited for, times two."""
    graph, mode = fx.Graph(), FakeTensorMode()

    def record(node: fx.Node, val: torch.Tensor, role: Role | None = None) -> fx.Node:
        node.meta["val"] = val
        return set_info(node, Info(node.name, Value(val.dtype, tuple(val.shape)), role=role))

    def add(target: object, *args: object) -> fx.Node:
        node = graph.call_function(target, args)
        with mode:
            return record(node, target(*fx.map_arg(args, lambda n: n.meta["val"])))

    node = record(graph.placeholder("x"), mode.from_tensor(x), Role("input", "x"))
    node = add(c10d.wait_tensor.default, collective(add, node))
    graph.output((add(torch.ops.aten.mul.Tensor, node, 2),))
    return fx.GraphModule({}, graph)


def kinds(gm: fx.GraphModule) -> list[str]:
    return [kind for node in gm.graph.nodes if (kind := collective_kind(node)) is not None]


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "product"])
@pytest.mark.parametrize(
    ("called", "backend", "chosen"),
    [
        ("reduce_scatter", slow("reduce_scatter"), ["all_to_all"]),
        ("reduce_scatter", slow("all_to_all"), ["reduce_scatter"]),
        ("all_gather", slow("all_gather"), ["all_to_all"]),
        ("all_gather", CostModel(), ["all_gather"]),
        ("all_reduce", slow("all_reduce"), ["reduce_scatter", "all_gather"]),
        ("all_reduce", slow("all_reduce", "reduce_scatter"), ["all_to_all", "all_gather"]),
        ("all_reduce", slow("all_reduce", "all_gather"), ["reduce_scatter", "all_to_all"]),
        ("all_reduce", CostModel(), ["all_reduce"]),
    ],
)
def test_the_faster_algorithm_gives_the_same_values(
    called: str, backend: CostModel, chosen: list[str], op: str
) -> None:
    calls: dict[str, Callable[[Add, fx.Node], fx.Node]] = {
        "reduce_scatter": lambda add, x: add(c10d.reduce_scatter_tensor.default, x, op, 3, "shardc:b"),
        "all_gather": lambda add, x: add(c10d.all_gather_into_tensor.default, x, 3, "shardc:b"),
        "all_reduce": lambda add, x: add(c10d.all_reduce.default, x, op, "shardc:b"),
    }
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randint(-4, 5, (600, 3), generator=generator).double() for _ in range(MESH.ranks)]
    sim = Lockstep(MESH)
    (native,) = sim.run(program(inputs[0], calls[called]), [inputs])
    gm = Algorithms(MESH, backend)(program(inputs[0], calls[called]))
    assert kinds(gm) == chosen
    (made,) = sim.run(gm, [inputs])
    assert native is not None and made is not None
    for one, other in zip(native, made, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)


def test_an_all_reduce_that_the_ranks_do_not_divide_stays() -> None:
    gm = program(torch.zeros(7), lambda add, x: add(c10d.all_reduce.default, x, "sum", "shardc:b"))
    assert kinds(Algorithms(MESH, slow("all_reduce"))(gm)) == ["all_reduce"]


def test_integers_keep_their_type() -> None:
    x = [torch.full((6,), rank, dtype=torch.int32) for rank in range(MESH.ranks)]
    gm = program(x[0], lambda add, x: add(c10d.reduce_scatter_tensor.default, x, "sum", 3, "shardc:b"))
    (made,) = Lockstep(MESH).run(Algorithms(MESH, slow("reduce_scatter"))(gm), [x])
    assert made is not None
    assert [(t.dtype, t.tolist()) for t in made] == [(torch.int32, [2 * (0 + 1 + 2)] * 2)] * 3 + [
        (torch.int32, [2 * (3 + 4 + 5)] * 2)
    ] * 3


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_gather", "all_reduce"])
def test_a_program_runs_what_the_cost_model_prefers(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()
    plan = shardc.ddp("dp") if kind == "all_reduce" else shardc.fsdp("dp")
    x, y = torch.randn(2, 4, 8, dtype=torch.float64)
    found = {}
    for cost in (CostModel(kinds=()), slow(kind)):
        options = shardc.Options(cost=cost, bucket_size=0)
        module = shardc.compile(model, Mesh(dp=2), plan, loss=F.mse_loss, backend="eager", options=options)
        sim = shardc.Simulation(module)
        value = F.mse_loss(model(x), y)
        grads = torch.autograd.grad(value, list(model.parameters()))
        torch.testing.assert_close(sim(x, y), value.detach(), rtol=1e-12, atol=0)
        sim.backward()
        for (name, _), grad in zip(model.named_parameters(), grads, strict=True):
            torch.testing.assert_close(sim.grad(name), grad, rtol=1e-9, atol=1e-12, msg=name)
        halves = (module.lower(x, y).forward, module.lower(x, y).backward)
        found[cost] = {each for half in halves if half is not None for each in kinds(half)}
    native, other = found.values()
    if kind != "reduce_scatter":  # which gloo never runs natively, measured or not
        assert kind in native
    instead = {"reduce_scatter": "all_to_all", "all_gather": "all_to_all", "all_reduce": "all_gather"}[kind]
    assert instead in other and (kind == "all_reduce" or kind not in other)
