"""Layouts chosen exactly: programs equal one device, and no rank does work that others do too."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any, Literal

import pytest
import torch

import shardc
from examples.models import llama
from shardc.cost import redistribute
from shardc.cost.model import CostModel
from shardc.ir import graph as ir
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.passes.layout.exact.axis_strategies import nested
from shardc.passes.layout.exact.chooser import LayoutProblem
from shardc.passes.layout.exact.prices import prices
from shardc.passes.layout.greedy import Greedy
from shardc.rules.spec import Strategy, infer
from shardc.solver import solve
from tests.models.test_matrix import Case, cases, check
from tests.passes.exact_reference import Reference
from tests.passes.exact_spaces import spec_of_op
from tests.passes.small_programs import small
from tests.semantics.random_programs import program, simulated, verdict

EVERYDAY = (
    Case("mlp", "ddp", {"dp": 2}),
    Case("mlp", "fsdp2", {"dp": 2}),
    Case("mlp", "tp", {"tp": 2}),
    Case("mlp", "tp", {"tp": 4}),
    Case("mlp", "fsdp+tp", {"dp": 2, "tp": 2}),
    Case("mlp", "hsdp+tp", {"rep": 2, "dp": 2, "tp": 2}),
    Case("convnet", "fsdp3", {"dp": 2}),
    Case("convnet", "tp", {"tp": 2}),
    Case("vit", "hsdp", {"rep": 2, "dp": 2}),
    Case("vit", "tp+sp", {"tp": 2}),
    Case("gpt2", "fsdp3", {"dp": 2}),
    Case("llama", "tp", {"tp": 2}),
)


def matrix() -> list[Any]:
    rest = [each.values[0] for each in cases() if each.values[0] not in EVERYDAY]
    slow = [pytest.param(each, marks=pytest.mark.slow) for each in EVERYDAY if each.model in ("gpt2", "vit")]
    return [
        *(each for each in EVERYDAY if each.model not in ("gpt2", "vit")),
        *slow,
        *(pytest.param(each, marks=pytest.mark.long) for each in rest),
    ]


@pytest.mark.filterwarnings("ignore::shardc.errors.ShardcWarning")
@pytest.mark.parametrize(
    "seeds", [range(100), pytest.param(range(100, 500), marks=pytest.mark.slow)], ids=["some", "500"]
)
def test_no_choice_costs_less_than_the_one_that_is_found(seeds: range) -> None:
    """Against a search over all choices, by an objective and a space of strategies that are written a second time."""
    for seed in seeds:
        program = small(seed)
        graph = program.graph()
        choice = LayoutProblem(program.problem, graph)
        reference = Reference.of(program.problem, graph, choice.outside.wanted)
        for op, space in reference.space.items():
            for one in choice.options[op]:
                if one not in space:  # axes that meet in several factors of one dim
                    assert infer(spec_of_op(op), one.operands, one.results) == one.results, f"{seed}\n{program.text}"
                    space.append(one)
        reference.price()
        solution = solve(choice.energy())
        chosen = {op: choice.options[op][solution.labels[choice.variable[op]]] for op in reference.ops}
        assert solution.gap < 1e-9
        assert reference.seconds(chosen) == pytest.approx(solution.value, rel=1e-9), f"seed {seed}\n{program.text}"
        below = solution.value * (1 - 1e-9)
        assert reference.least(below) == below, f"seed {seed}\n{program.text}"
        choice.apply(solution.labels)
        for op, one in chosen.items():
            assert (ir.info(op).needs, ir.layout(op)) == (one.operands, one.results[0])


@pytest.mark.parametrize(("sizes", "inner"), [((2, 4), "[16@(a,b)]"), ((4, 2), "[16@(a,b)]"), ((2, 8), "[16@(a,b)]")])
def test_a_dim_is_split_over_two_axes_whichever_is_larger(sizes: tuple[int, int], inner: str) -> None:
    mesh = Mesh(a=sizes[0], b=sizes[1])
    outer, under = (Layout.whole(mesh, (16,)).split(0, axis) for axis in mesh.axes)
    assert outer is not None and under is not None
    digits = nested(mesh, outer.dims[0], under.dims[0])
    assert digits is not None and str(Layout(mesh, [digits])) == inner


@pytest.mark.filterwarnings("ignore::shardc.errors.ShardcWarning")
def test_the_sweep_never_costs_less() -> None:
    """By the same objective, with the strategies that the sweep chose."""
    for seed in range(100):
        program = small(seed)
        graph, swept = program.graph(), program.graph()
        choice = LayoutProblem(program.problem, graph)
        wanted = Greedy()(program.problem, swept)
        reference = Reference.of(program.problem, swept, wanted)
        greedy = {op: Strategy(ir.info(op).needs or (), (ir.layout(op),)) for op in reference.ops}
        for op, one in greedy.items():
            reference.space[op] += [one] * (one not in reference.space[op])
        reference.price()
        assert reference.seconds(greedy) >= solve(choice.energy()).value * (1 - 1e-9), f"seed {seed}\n{program.text}"


@pytest.mark.filterwarnings("ignore::shardc.errors.ShardcWarning")
def test_reshards_are_priced_as_they_are_planned() -> None:
    """Over one axis alike; over two, steps that the planner takes one after another may count as one."""
    for seed in range(0, 100, 3):
        program = small(seed)
        cost = program.problem.cost
        reference = Reference.of(program.problem, program.graph(), {})
        reference.price()
        for layouts in map(tuple, reference.layouts):
            table = prices(layouts, layouts, 4, cost)
            for (row, have), (column, want) in itertools.product(enumerate(layouts), repeat=2):
                if want.partial or want == have:
                    continue
                least, most = (1 - 1e-9, 1 + 1e-9) if len(have.mesh.axes) == 1 else (0.5, 4)
                planned = redistribute.seconds(have, want, 4, cost)
                assert least * planned <= table[row, column] <= most * planned, f"{have} to {want} by {cost}"


def test_a_gradient_is_scattered_over_one_axis_and_reduced_over_another() -> None:
    """Though no use has it in between."""
    whole, cost = Layout.whole(Mesh(dp=8, tp=8), (256, 512)), CostModel()
    stored = whole.split(0, "tp")
    assert stored is not None
    pending = whole.with_partial(["dp", "tp"])
    planned = redistribute.seconds(pending, stored, 4, cost)
    assert prices((pending,), (stored,), 4, cost).item() == pytest.approx(planned, rel=1e-9)


@pytest.mark.parametrize("case", matrix(), ids=str)
def test_example_models_equal_one_device(case: Case) -> None:
    check(case, "exact")


def check_random(seeds: range) -> None:
    found = []
    for seed in seeds:
        torch._dynamo.reset()
        made = program(seed)
        said = verdict(made, partial(simulated, options=shardc.Options(layout_solver="exact")))
        if said is not None:
            found.append(f"{said}\n{made}")
    assert not found, "\n\n".join(found)


def test_some_random_programs_equal_one_device() -> None:
    check_random(range(8))


@pytest.mark.long
@pytest.mark.parametrize("part", range(20))
def test_random_programs_equal_one_device(part: int) -> None:
    check_random(range(50 * part, 50 * (part + 1)))


@pytest.mark.slow
@pytest.mark.parametrize(("chooser", "most"), [("greedy", 5.5e12), ("exact", 5.1e12)])
def test_an_axis_that_only_inputs_are_split_over_splits_the_backward_too(
    chooser: Literal["greedy", "exact"], most: float
) -> None:
    """A 64th of what one device does is 5.05e12 operations."""
    model, given = llama.llama3_8b(1)
    plan = shardc.ddp("dp") | shardc.Plan(inputs={"tokens": ("dp", "cp")})
    options = shardc.Options(layout_solver=chooser)
    module = shardc.compile(model, shardc.Mesh(dp=8, cp=8), plan, loss=llama.loss, options=options)
    assert module.lower(*given, *given).schedule().flops <= most
