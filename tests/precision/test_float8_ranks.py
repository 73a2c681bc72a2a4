"""Products in float8 on gloo ranks: by Inductor and op by op, in a first start and in one that finds its program."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import shardc
from tests.precision.float8 import case, on_one_device
from tests.precision.test_float8 import PLANS, float8
from tests.ranks import device_mesh, run_ranks


def steps(name: str, scaling: str, backend: str) -> None:
    """Losses and gradients are those of one device, before and after an update."""
    (mesh, plan), (model, *batch) = PLANS[name], case(64, 96, 24) if scaling == "mxfp8" else case()
    expected = on_one_device(model, scaling, lambda name: name.startswith("layers."))
    module = shardc.compile(model, device_mesh(mesh), plan | float8(scaling), loss=F.mse_loss, backend=backend)
    local = module.shard_inputs(*batch)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (module, expected)]
    for _ in range(2):
        loss, whole = module(*local), F.mse_loss(expected(batch[0]), batch[1])
        loss.backward()
        whole.backward()
        torch.testing.assert_close(loss.detach(), whole.detach(), rtol=1e-9, atol=0)
        for name, p in expected.named_parameters():
            grad = module.get_parameter(name).grad.full_tensor()
            torch.testing.assert_close(grad, p.grad, rtol=1e-9, atol=1e-12)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


RANKS = {2: ("ddp2", "fsdp2", "fsdp2 level 2", "tp+sp"), 4: ("fsdp+tp", "fsdp+tp+sp", "hsdp")}


def checks(names: Sequence[str], backend: str) -> list[partial[None]]:
    scalings = ("tensorwise", "rowwise")
    return [partial(steps, name, scaling, backend) for name in names for scaling in scalings]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
def test_op_by_op(ranks: int) -> None:
    run_ranks(ranks, *checks(RANKS[ranks], "eager"))


@pytest.mark.medium
def test_blocks_by_inductor_and_from_stored_programs(tmp_path: Path) -> None:
    for _ in range(2):
        run_ranks(2, partial(steps, "fsdp2", "mxfp8", "inductor"), programs=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
def test_by_inductor_and_from_stored_programs(ranks: int, tmp_path: Path) -> None:
    for _ in range(2):
        run_ranks(ranks, *checks(RANKS[ranks][::2], "inductor"), programs=tmp_path)
