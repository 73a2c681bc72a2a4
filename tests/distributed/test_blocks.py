"""Alike blocks on real gloo ranks: captured on four of them, lowered once; the steps are those of the whole graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc.errors import CollectiveError
from shardc.ir import graph as ir
from shardc.ir.segments import cut
from shardc.ir.tally import collective_kind
from shardc.runtime.wire import direct
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


def steps_are_those_of_the_whole() -> None:
    _, whole = tower(lower_by="whole", fold=False)
    _, blocks = tower()
    expected, found = trained(whole), trained(blocks)
    (one,), (other,) = whole.shardc.programs.values(), blocks.shardc.programs.values()
    assert one.folded is None and str(other.folded.repeats[0]) == f"layers.0 to layers.{DEPTH - 1}"
    for half in (other.forward, other.backward):
        assert len(cut(half)) > len({each.gm for each in cut(half)}), "nothing is lowered once for several blocks"
    assert one.certificate().text() == other.certificate().text()
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    used, plain = blocks.memory(), whole.memory()
    assert used.strays == 0 and used.observed <= max(used.planned.values()), (used, plain)
    assert used.planned_peak <= 1.1 * plain.planned_peak


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


def a_fault_is_of_its_own_block() -> None:
    """The collective that fails is named, in code that several blocks share, at its start or in a later segment."""
    _, module = tower()
    x = module.shard_inputs(rows(0))
    module(x).backward()
    (program,) = module.shardc.programs.values()
    starts = [node for node in program.forward.graph.nodes if collective_kind(node) is not None]
    made, wait, count = direct._Exchange.__init__, direct._Exchange.wait, [0]
    broken = len(starts) // 2

    def counted(self: Any, *args: Any) -> None:
        made(self, *args)
        self.number, count[0] = count[0], count[0] + 1

    def fails(self: Any, timeout: Any = None) -> bool:
        done = wait(self, timeout)
        if self.number == broken:
            raise RuntimeError("the cable is out")
        return done

    direct._Exchange.__init__, direct._Exchange.wait = counted, fails  # type: ignore[method-assign]
    try:
        module(x)
    except CollectiveError as error:
        names = [ir.info(user).name for item in starts[broken].users for user in item.users]
        assert "the cable is out" in str(error) and any(f"%{name}" in str(error) for name in names), (str(error), names)
    else:
        raise AssertionError("nothing failed")
    finally:
        direct._Exchange.__init__, direct._Exchange.wait = made, wait  # type: ignore[method-assign]


def test_on_two_ranks() -> None:
    run_ranks(
        2, steps_are_those_of_the_whole, gradients_are_those_of_one_device, parameters_are_watched_in_all_blocks,
        a_fault_is_of_its_own_block,
    )  # fmt: skip
