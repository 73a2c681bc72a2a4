"""`shardc.optim.wrap` of optimizers that look at whole matrices: the updates of the class on whole tensors, bit by bit."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import shardc
from shardc.ir.mesh import Mesh
from tests.ranks import device_mesh, run_ranks
from tests.state import batch, close, model

DP, TP, GRID = Mesh(dp=2), Mesh(tp=2), Mesh(dp=2, tp=2)
SPLIT = shardc.tp("tp", colwise=["mid"], rowwise=["back"]) | shardc.Plan(params={"fused": "(3 4@tp), _"})
PLANS: dict[str, tuple[Mesh, Any]] = {
    "fsdp": (DP, shardc.fsdp("dp")),
    "level 2": (DP, shardc.fsdp("dp", level=2)),
    "ddp": (DP, shardc.ddp("dp")),
    "tp": (TP, SPLIT),
    "fsdp and tp": (GRID, shardc.fsdp("dp") | SPLIT),
    "hsdp": (Mesh(replicas=2, dp=2), shardc.hsdp("replicas", "dp")),
}


def compiled(plan: str, source: nn.Module | None = None) -> Any:
    mesh, described = PLANS[plan]
    source = source or model()
    return shardc.compile(source, device_mesh(mesh), described, loss=nn.functional.mse_loss, backend="eager")


def matrices(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.dim() == 2 and p.numel()]


class OnWholes:
    """The plain optimizer on whole copies of parameters, with the whole gradients that the module has."""

    def __init__(self, cls: Any, params: list[Any], **options: Any) -> None:
        self.params = params
        self.copies = [nn.Parameter(p.full_tensor().detach().clone()) for p in params]
        self.plain = cls(self.copies, **options)

    def step(self) -> None:
        for copy, param in zip(self.copies, self.params, strict=True):
            copy.grad = None if param.grad is None else param.grad.full_tensor().clone()
        self.plain.step()

    def check(self, what: str = "") -> None:
        for copy, param in zip(self.copies, self.params, strict=True):
            assert torch.equal(param.full_tensor(), copy), f"{what}: a parameter of shape {list(param.shape)}"


def train(module: Any, optimizer: Any, theirs: OnWholes, steps: int = 3, first: int = 0) -> None:
    for at in range(first, first + steps):
        module(*module.shard_inputs(*batch(at))).backward()
        theirs.step()
        optimizer.step()
        theirs.check(f"step {at}")
        optimizer.zero_grad()


def muon_is_that_of_one_device(plan: str) -> None:
    module = compiled(plan)
    params = matrices(module)
    options: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}
    train(module, shardc.optim.wrap(torch.optim.Muon, module, params, **options),
          OnWholes(torch.optim.Muon, params, **options))  # fmt: skip


def test_muon_on_two_ranks() -> None:
    run_ranks(2, partial(muon_is_that_of_one_device, "fsdp"))
