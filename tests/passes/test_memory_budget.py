"""Selective unsharding: parameters of level 3 that stay whole for backward, within a budget of memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import shardc
from examples.models import llama
from shardc.ir.comm_volume import collective_kind
from tests.models.alike import relative

GIVEN = llama.batch(llama.LlamaConfig(), size=4, length=8)
MESH = shardc.Mesh(dp=4)


def _module(model: Any, budget: int, level: int = 3, bucket_size: int | None = 0) -> Any:
    options = shardc.Options(memory_budget=budget, bucket_size=bucket_size)
    return shardc.compile(
        model, MESH, shardc.fsdp("dp", level=level), loss=llama.loss, backend="eager", options=options
    )


def _gathers(program: Any) -> int:
    return sum(collective_kind(node) == "all_gather" for node in program.backward.graph.nodes)


def _kept(program: Any) -> int:
    """Bytes of the parameters that the program says it keeps whole."""
    shapes = {name: p.numel() for name, p in llama.tiny()[0].named_parameters()}
    return sum(4 * shapes[name] for name, level in program.levels.items() if level == 2)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return llama.tiny()[0]


@pytest.mark.slow
def test_budget_moves_from_level_3_to_level_2(model: Any) -> None:
    """The more memory, the fewer gathers in backward; never more kept than allowed."""
    whole = sum(4 * p.numel() for p in model.parameters())
    gathers, peaks = [], []
    for budget in (0, whole // 4, whole // 2, whole, -1):
        program = _module(model, budget).lower(*GIVEN)
        assert budget < 0 or _kept(program) <= budget
        gathers.append(_gathers(program))
        peaks.append(program.schedule().memory.peak.total)
        assert budget < 0 or peaks[-1] <= peaks[0] + budget
    assert gathers[0] > gathers[1] > gathers[2] > gathers[3] == gathers[4] == 0
    assert peaks[-1] == _module(model, 0, level=2).lower(*GIVEN).schedule().memory.peak.total


def test_what_saves_most_time_per_byte_is_kept_first(model: Any) -> None:
    """Small parameters, whose gathers are all latency."""
    sizes = {name: 4 * p.numel() for name, p in model.named_parameters()}
    program = _module(model, sum(sizes.values()) // 4).lower(*GIVEN)
    kept = [sizes[name] for name, level in program.levels.items() if level == 2]
    left = [sizes[name] for name, level in program.levels.items() if level == 3]
    assert kept and max(kept) <= min(left)


def test_in_buckets_what_backward_uses_first_is_kept_first(model: Any) -> None:
    """Where a bucket's latency is shared, a byte of one parameter costs what a byte of another does."""
    sizes = {name: 4 * p.numel() for name, p in model.named_parameters()}
    late = {name for name in sizes if name.startswith(("layers.1.", "norm.", "head."))}
    program = _module(model, sum(sizes[name] for name in late), bucket_size=None).lower(*GIVEN)
    assert {name for name, level in program.levels.items() if level == 2} == late


@pytest.mark.parametrize("bucket_size", [0, None])
def test_what_no_gradient_needs_takes_nothing_of_it(model: Any, bucket_size: int | None) -> None:
    """An embedding is not gathered again anyhow: what suffices for all the others keeps all the others."""
    others = sum(4 * p.numel() for name, p in model.named_parameters() if name != "embed.weight")
    program = _module(model, others, bucket_size=bucket_size).lower(*GIVEN)
    assert [name for name, level in program.levels.items() if level == 3] == ["embed.weight"]
    assert _kept(program) == others and not _gathers(program)


@pytest.mark.slow
def test_results_do_not_depend_on_it(model: Any) -> None:
    source = copy.deepcopy(model).double()
    expected = llama.loss(source(GIVEN[0]), GIVEN[1])
    expected.backward()
    sim = shardc.Simulation(_module(copy.deepcopy(source), 100_000))
    assert relative(sim(*GIVEN), expected.detach()) < 1e-9
    sim.backward()
    for name, param in source.named_parameters():
        assert relative(sim.grad(name), param.grad) < 1e-9, name
