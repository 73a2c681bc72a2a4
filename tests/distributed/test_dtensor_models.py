"""Models whose parameters are DTensors already: compiled where these lie, with the results of one device."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import shardc
from shardc.errors import InputError, PlanError, ShardcError
from tests.ranks import run_ranks
from tests.state import close

X = torch.linspace(-1, 1, 64, dtype=torch.float64).view(4, 2, 8).sin()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(8), nn.Linear(8, 10), nn.Tanh(), nn.Linear(10, 8)
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(self.norm(x)))) + self.shift


def net() -> Any:
    torch.manual_seed(0)
    return Net().double()


def square(out: Tensor) -> Tensor:
    return out.square().mean()


def place(model: Any, mesh: Any, placements: dict[str, tuple[Any, ...]]) -> Any:
    for name, where in placements.items():
        module, _, key = name.rpartition(".")
        param = distribute_tensor(model.get_parameter(name).data, mesh, where)
        setattr(model.get_submodule(module), key, nn.Parameter(param))
    return model


def trains(module: Any, source: Any) -> None:
    """Loss, gradients and the state after three steps are those of ``source`` on one device."""
    ours = torch.optim.AdamW(module.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(source.parameters(), lr=1e-2)
    for _ in range(3):
        loss, expected = module(module.shard_inputs(X)), square(source(X))
        loss.backward(), expected.backward()
        close(loss.detach(), expected.detach())
        for name, param in source.named_parameters():
            close(module.get_parameter(name).grad.full_tensor(), param.grad, name)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for name, param in source.named_parameters():
        close(module.get_parameter(name).full_tensor(), param, name)


WHERE: dict[str, dict[str, tuple[Any, ...]]] = {
    "rows, columns, whole": {"up.weight": (Shard(0),), "up.bias": (Shard(0),), "down.weight": (Shard(1),),
                             "down.bias": (Replicate(),)},
    "one of them": {"up.weight": (Shard(1),)},
    "all whole": {"up.weight": (Replicate(),), "down.weight": (Replicate(),)},
}  # fmt: skip


def distributed(where: str, axis: str, plan: shardc.Plan) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
    source, placed = net(), place(net(), mesh, WHERE[where])
    before = {name: param for name, param in placed.named_parameters()}
    module = shardc.compile(placed, mesh, plan, loss=square, backend="eager")
    for name, placements in WHERE[where].items():
        if placements != (Replicate(),):
            assert module.get_parameter(name).placements == placements, name
    trains(module, source)
    assert all(placed.get_parameter(name) is param for name, param in before.items())  # the model is left as it was
    close(before["up.weight"].full_tensor(), net().up.weight)


def uneven() -> None:
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    source = net()
    module = shardc.compile(
        place(net(), mesh, {"up.weight": (Shard(0),), "down.weight": (Shard(1),)}),
        mesh, shardc.Plan(), loss=square, backend="eager",
    )  # fmt: skip
    assert [*module.up.weight.to_local().shape] == ([4, 8] if mesh.get_rank() < 2 else [2, 8])
    trains(module, source)


def parallelized(on: str) -> None:
    """By `parallelize_module`, over all of the mesh or one of its axes: hooks are dropped, FSDP may be added."""
    styles = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "act": PrepareModuleInput(input_layouts=Shard(-1), desired_input_layouts=Shard(-1), use_local_output=True),
        "down": RowwiseParallel(),
    }
    shape, names = ((2,), ("tp",)) if on == "all" else ((2, 2), ("dp", "tp"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    wrapped = parallelize_module(net(), mesh["tp"], styles)
    hooks = len(wrapped.up._forward_pre_hooks)
    plan = shardc.Plan() if on == "all" else shardc.fsdp("dp")
    module = shardc.compile(wrapped, mesh, plan, loss=square, backend="eager")
    at = 0 if on == "all" else 1
    assert module.up.weight.placements[at] != Replicate()
    assert module.down.weight.placements[at] == Shard(1)
    trains(module, net())
    assert hooks == len(wrapped.up._forward_pre_hooks) == 1


def without_values() -> None:
    """On meta: the shards get memory and values as those of a plain model."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with torch.device("meta"):
        plain = Net().double()
    placed = place(plain, mesh, WHERE["rows, columns, whole"])
    module = shardc.compile(placed, mesh, shardc.Plan(), loss=square, backend="eager")
    assert module.up.weight.placements == (Shard(0),) and module.up.weight.is_meta
    module.load_state_dict(net().state_dict(), assign=True)
    trains(module, net())


def refuses() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    other = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    rows = {"up.weight": (Shard(0),)}
    cases: list[tuple[Callable[[], Any], shardc.Plan, type[ShardcError], str]] = [
        (lambda: place(net(), mesh, rows), shardc.Plan(params={"up.weight": (None, "dp")}), PlanError,
         "'up.weight' is a DTensor whose dim 0 is split over 'dp'(.|\n)*leave the parameter out of the plan"),
        (lambda: place(net(), mesh, rows), shardc.tp("dp", rowwise=["up"]), PlanError, "'up.weight' is a DTensor"),
        (lambda: place(net(), mesh, rows), shardc.Plan(params={"up.*": "..., _"}), PlanError, "'up.weight' is a DT"),
        (lambda: place(net(), other, rows), shardc.fsdp("dp"), InputError, "'up.weight' is a DTensor on .*tp"),
        (lambda: pending(net(), mesh), shardc.fsdp("dp"), InputError, "'up.weight' is a DTensor with a partial sum"),
        (lambda: fully_shard(net(), mesh=mesh), shardc.fsdp("dp"), InputError, "fully_shard"),
        (lambda: nn.Sequential(fully_shard(net(), mesh=mesh)), shardc.fsdp("dp"), InputError, "'0' is wrapped by full"),
        (lambda: distribute_module(net(), mesh, input_fn=lambda module, inputs, mesh: inputs), shardc.fsdp("dp"),
         InputError, "distribute_module"),
    ]  # fmt: skip
    for make, plan, error, said in cases:
        with pytest.raises(ShardcError) as caught:
            shardc.compile(make(), mesh, plan, backend="eager")
        assert isinstance(caught.value, error) and re.search(said, str(caught.value)), str(caught.value)


def pending(model: Any, mesh: Any) -> Any:
    weight: Any = DTensor.from_local(model.up.weight.data, mesh, [Replicate()])
    model.up.weight = nn.Parameter(weight)
    model.up.weight._spec = replace(weight._spec, placements=(Partial(),))  # an op on it would do the sum
    return model


PLANS = [("tp", shardc.Plan()), ("dp", shardc.fsdp("dp")), ("dp", shardc.ddp("dp")), ("dp", shardc.fsdp("dp", 1))]


def test_two_ranks() -> None:
    checks = [partial(distributed, where, axis, plan) for where in WHERE for axis, plan in PLANS]
    run_ranks(2, *checks, partial(parallelized, "all"), without_values, refuses)


def test_three_ranks() -> None:
    run_ranks(3, uneven)


def test_four_ranks() -> None:
    run_ranks(4, partial(parallelized, "an axis"))


def test_for_an_abstract_mesh() -> None:
    """Nothing is communicated: the program is that of the plain model and a plan that says the same."""
    run_ranks(2, abstract)


def abstract() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    if mesh.get_rank():
        return
    placed = distribute_on_meta(mesh)
    text = shardc.compile(placed, shardc.Mesh(tp=2), shardc.Plan()).lower(X).text("collectives")
    said = shardc.Plan(params={"up.weight": {"tp": Shard(0)}})
    assert text == shardc.compile(net(), shardc.Mesh(tp=2), said).lower(X).text("collectives")


def distribute_on_meta(mesh: Any) -> Any:
    model = net()
    local = model.up.weight.data.chunk(2)[0].clone()
    model.up.weight = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))
    return model
