"""Models of real size: with storage and batch left open, the choice of layouts is solved to a gap of 0."""

from __future__ import annotations

from functools import partial
from itertools import combinations

import pytest

from shardc.cost.hardware import H100
from shardc.ir.mesh import Mesh
from shardc.passes.layout.exact.chooser import OpenLayoutProblem, StorageChoice, Weights
from shardc.passes.options import Options
from shardc.search.captured_model import CapturedModel
from shardc.search.memory_fit import LEAST
from shardc.search.plan_search import COPIES, storages
from shardc.solver import Solution, solve
from tests.auto.real_models import PRECISION, captured_model


def solved(found: CapturedModel, mesh: Mesh, over: tuple[str, ...]) -> Solution:
    """The solution with storage and batch left open, as the search of plans makes it."""
    laid = found.graph(mesh, PRECISION, Options(cost=H100), None)
    batches = tuple(some for count in range(len(mesh.axes) + 1) for some in combinations(mesh.axes, count))
    free = StorageChoice(over, partial(storages, over), batches, COPIES * LEAST)
    choice = OpenLayoutProblem(laid.problem, laid.graph, Weights(of=found.weight), free=free)
    return solve(choice.energy(LEAST))


QUICK = ("llama-2", "unet", "convnet")
FOLDED = ("llama-8", "gpt2", "bert", "t5", "vit")


@pytest.mark.parametrize("mesh", [Mesh(dp=8), Mesh(dp=64), Mesh(dp=4, tp=4), Mesh(dp=8, tp=8)], ids=str)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "unet" else pytest.mark.slow) for n in QUICK])
def test_the_gap_is_0(name: str, mesh: Mesh) -> None:
    assert solved(captured_model(name), mesh, mesh.axes[:1]).gap < 1e-9


@pytest.mark.long
@pytest.mark.parametrize("mesh", [Mesh(dp=8), Mesh(dp=64), Mesh(dp=4, tp=4), Mesh(dp=8, tp=8)], ids=str)
@pytest.mark.parametrize("name", FOLDED)
def test_the_gap_of_many_layers_is_0(name: str, mesh: Mesh) -> None:
    assert solved(captured_model(name), mesh, mesh.axes[:1]).gap < 1e-9


@pytest.mark.slow
def test_the_gap_over_three_axes_is_1_percent_at_most() -> None:
    assert solved(captured_model("unet"), Mesh(dp=2, cp=2, tp=2), ()).gap <= 0.01


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDED)
def test_alike_blocks_are_captured_once(name: str) -> None:
    assert captured_model(name).repeats
