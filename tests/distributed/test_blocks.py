"""Alike blocks on real gloo ranks: captured on four of them, lowered once; the steps are those of the whole graphs."""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc.errors import CollectiveError
from shardc.ir import graph as ir
from shardc.ir.comm_volume import collective_kind
from shardc.ir.repeat import cut
from shardc.lower.collective_calls import only_calls
from shardc.runtime.host import Completion
from tests.ranks import run_ranks

WIDTH, DEPTH = 32, 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x).square().mean()


def tower(backend: str = "inductor", **options: Any) -> tuple[Tower, Any]:
    torch.manual_seed(0)
    model = Tower().double()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    said: dict[str, Any] = {"bucket_size": 20_000, "max_in_flight": 60_000, **options}
    return model, shardc.compile(model, mesh, shardc.fsdp("dp"), backend=backend, options=shardc.Options(**said))


def rows(seed: int) -> Tensor:
    return torch.randn(12, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def trained(module: Any) -> list[Tensor]:
    """Losses and gradients of three steps, then a loss without gradients."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    found = []
    for seed in range(3):
        loss = module(module.shard_inputs(rows(seed)))
        loss.backward()
        found += [loss.detach(), *(param.grad.to_local().clone() for param in module.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return [*found, module(module.shard_inputs(rows(3)))]


def steps_are_those_of_the_whole(**options: Any) -> Any:
    _, whole = tower(compile_regions="whole", fold=False, **options)
    _, blocks = tower(**options)
    expected, found = trained(whole), trained(blocks)
    (one,), (other,) = whole.shardc.programs.values(), blocks.shardc.programs.values()
    assert one.folded is None and str(other.folded.repeats.runs[0]) == f"layers.0 to layers.{DEPTH - 1}"
    for half in (other.forward, other.backward):
        assert len(cut(half)) > len({each.gm for each in cut(half)}), "nothing is lowered once for several blocks"
    assert one.certificate().text() == other.certificate().text()
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    used, plain = blocks.memory(), whole.memory()
    assert used.strays == 0 and used.observed <= max(used.planned.values()), (used, plain)
    assert used.planned_peak <= 1.1 * plain.planned_peak
    return other


def calls_in_a_row_are_not_lowered() -> None:
    """All parameters in one gather, and all gradients in one reduce-scatter: what starts them and waits is apart."""
    with patch("shardc.ir.repeat.CALLS", 40):
        program = steps_are_those_of_the_whole(bucket_size=1 << 30, max_in_flight=1 << 30)
        halves = [half.gm for half in program.step()]
        rows = [[only_calls(each.gm.graph) for each in cut(gm)] for gm in halves]
        a_fault_is_of_its_own_block(bucket_size=1 << 30, max_in_flight=1 << 30)
    assert [sum(row) for row in rows] == [1, 1] and rows[0][0] and rows[1][-1], rows


def gradients_are_those_of_one_device() -> None:
    """In eager mode, too, where segments play no part."""
    model, module = tower("eager")
    module(module.shard_inputs(rows(0))).backward()
    model(rows(0)).backward()
    for name, param in model.named_parameters():
        found = module.get_parameter(name).grad.full_tensor()
        torch.testing.assert_close(found, param.grad, rtol=1e-9, atol=1e-12)


def parameters_are_watched_in_all_blocks() -> None:
    """A change in place of a block that was not captured is refused, and what forward reads of it is seen."""
    _, module = tower("eager")
    loss = module(module.shard_inputs(rows(0)))
    with torch.no_grad():
        module.get_parameter(f"layers.{DEPTH - 2}.up.weight").mul_(2)
    try:
        loss.backward()
    except shardc.errors.BackwardError as error:
        assert f"layers.{DEPTH - 2}.up.weight" in str(error)
    else:
        raise AssertionError("a changed parameter went unnoticed")
    module.layers[5].norm.eps = 1.0
    model = Tower().double()
    model.load_state_dict({name: x.full_tensor() for name, x in module.state_dict().items()})
    model.layers[5].norm.eps = 1.0
    found = module(module.shard_inputs(rows(0)))
    torch.testing.assert_close(found.detach(), model(rows(0)).detach(), rtol=1e-9, atol=1e-12)


def a_fault_is_of_its_own_block(**options: Any) -> None:
    """The collective that fails is named, in code that several blocks share, at its start or in a later segment."""
    _, module = tower(**options)
    x = module.shard_inputs(rows(0))
    module(x).backward()
    (program,) = module.shardc.programs.values()
    starts = [node for node in program.forward.graph.nodes if collective_kind(node) is not None]
    made, wait, count = Completion.__init__, Completion.wait, [0]
    broken = len(starts) // 2

    def counted(self: Any, *args: Any) -> None:
        made(self, *args)
        self.number, count[0] = count[0], count[0] + 1

    def fails(self: Any, timeout: Any = None) -> bool:
        done = wait(self, timeout)
        if self.number == broken:
            raise RuntimeError("the cable is out")
        return done

    Completion.__init__, Completion.wait = counted, fails  # type: ignore[method-assign]
    try:
        module(x)
    except CollectiveError as error:
        names = [ir.info(user).name for item in starts[broken].users for user in item.users]
        assert "the cable is out" in str(error) and any(f"%{name}" in str(error) for name in names), (str(error), names)
    else:
        raise AssertionError("nothing failed")
    finally:
        Completion.__init__, Completion.wait = made, wait  # type: ignore[method-assign]


def each_graph_is_compiled_by_one_rank() -> None:
    """Of what ranks of a machine lower alike, each graph is in Inductor's cache for all but the first that takes it."""
    folder = [tempfile.mkdtemp(prefix="shardc_cold_") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    counters.clear()
    with patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": str(folder[0])}), config.patch(force_disable_caches=False):
        _, module = tower()
        module(module.shard_inputs(rows(0))).backward()
        (program,) = module.shardc.programs.values()
        distinct = {x.gm for half in program.step() for x in cut(half.gm) if not only_calls(x.gm.graph)}
        mine, of_all = counters["inductor"]["fxgraph_cache_miss"], [0, 0]
        dist.all_gather_object(of_all, mine)
        dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(str(folder[0]), ignore_errors=True)
    assert sum(of_all) == len(distinct) and all(of_all), (of_all, len(distinct))


@pytest.mark.slow
def test_on_two_ranks() -> None:
    run_ranks(2, gradients_are_those_of_one_device, parameters_are_watched_in_all_blocks)


@pytest.mark.slow
def test_graphs_on_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDC_STORE", "0")  # a program of the store has no graph of the blocks that were captured
    run_ranks(
        2, steps_are_those_of_the_whole, a_fault_is_of_its_own_block, calls_in_a_row_are_not_lowered,
        each_graph_is_compiled_by_one_rank,
    )  # fmt: skip
