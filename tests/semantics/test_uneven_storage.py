"""Parameters of any size are stored over any axes: sizes 1, 3, 5, 6 and 7, scalars and empty ones, on real ranks."""

from __future__ import annotations

import copy
import warnings
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc.errors import LayoutError
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.plan.placed import as_dtensor
from tests.models.alike import trains_alike
from tests.ranks import run_ranks

SHAPES = ((3, 5), (1,), (), (7,), (0, 4), (5, 3, 1), (1, 1), (6,), (5,), (2, 3))
SQUARE, LINE = {"dp": 2, "tp": 2}, {"dp": 4}
PLANS = {
    "two axes": (SQUARE, lambda: shardc.fsdp(("dp", "tp"))),
    "hybrid": (SQUARE, lambda: shardc.hsdp("tp", "dp")),
    "over some ranks": (LINE, lambda: shardc.fsdp("dp", shard_size=2)),
    "mixed sizes": (LINE, lambda: shardc.fsdp("dp", overrides={"odd.0": 2, "odd.3": 1, "linear.*": 2})),
    "mixed sizes over two axes": (SQUARE, lambda: shardc.fsdp(("dp", "tp"), overrides={"odd.0": 2, "odd.3": 1})),
}


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in SHAPES)
        self.linear = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.linear(x), *(p.sin().sum() + (p * p).sum() * x.mean() for p in self.odd)


def loss(out: tuple[Tensor, ...]) -> Tensor:
    return sum((x.square().mean() for x in out), torch.zeros((), dtype=torch.float64))


def trains_on_ranks(name: str) -> None:
    warnings.simplefilter("ignore")
    mesh, plan = PLANS[name]
    torch.manual_seed(0)
    model, x = Odd().double(), torch.randn(8, 3, dtype=torch.float64)
    device_mesh = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    module = shardc.compile(copy.deepcopy(model), device_mesh, plan(), backend="eager", loss=loss)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (module, model))
    for _ in range(2):
        module(module.shard_inputs(x)).backward()
        loss(model(x)).backward()
        for (key, got), want in zip(module.named_parameters(), model.parameters(), strict=True):
            assert got.grad is not None and want.grad is not None
            torch.testing.assert_close(got.grad.full_tensor(), want.grad, rtol=1e-9, atol=1e-12, msg=key)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    kept = {key: x.clone() for key, x in module.state_dict().items()}
    for param in module.parameters():
        with torch.no_grad():
            param.to_local().zero_()
    module.load_state_dict(kept)
    for (key, got), want in zip(module.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(got.detach().full_tensor(), want.detach(), rtol=1e-9, atol=1e-12, msg=key)


@pytest.mark.slow
def test_storage_over_two_axes_and_of_mixed_sizes() -> None:
    run_ranks(4, *(partial(trains_on_ranks, name) for name in ("two axes", "mixed sizes")))


@pytest.mark.long
def test_all_kinds_of_storage() -> None:
    run_ranks(4, *(partial(trains_on_ranks, name) for name in PLANS))


@pytest.mark.parametrize(
    ("size", "stored", "cut_alike"),
    [(5, 8, False), (6, 8, False), (7, 8, True), (1, 4, True), (3, 4, True), (2, 4, False), (8, 8, True), (4, 4, True)],
)
def test_what_dtensor_can_say(size: int, stored: int, cut_alike: bool) -> None:
    mesh = Mesh(dp=2, tp=2)
    assert as_dtensor(Layout.parse(f"[{stored}@(dp,tp)]", mesh), (size,), mesh) == cut_alike


def test_a_split_that_no_dtensor_can_have_is_an_error_on_every_rank() -> None:
    """It was one on those ranks only that would have had other elements."""
    plan = shardc.fsdp("dp") | shardc.Plan(params={"odd.8": "@(dp,tp)"})
    with pytest.raises(LayoutError, match=r"parameter 'odd.8' of shape \(5,\) cannot be stored as \[8@\(dp,tp\)\]"):
        shardc.compile(Odd(), Mesh(SQUARE), plan)


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.none = nn.Linear(8, 8), nn.Parameter(torch.empty(0, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.none, self.up(x), self.none[:, :8]], 0) * 2


@pytest.mark.parametrize("plan", [shardc.ddp("dp"), shardc.fsdp("dp")], ids=["ddp", "fsdp"])
def test_a_batch_joined_with_an_empty_parameter(plan: shardc.Plan) -> None:
    trains_alike(Joined(), (torch.randn(8, 8),), {"dp": 2}, plan, steps=1)
