"""The benchmark of optimizer steps runs, and its rows do the same work."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import optimizer_step


def test_rows_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    optimizer_step.main(["--size", "micro", "--steps", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == [
        optimizer_step.BASE, "shardc.optim.wrap", "fused, DTensors", "default, DTensors",
    ]  # fmt: skip
    assert lines[2].split("|")[4].strip() == "1.00"


def test_rows_do_the_same_work() -> None:
    """From the same parameters and gradients."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        steps = list(optimizer_step.rows("micro").values())
        optimizers = [step.__self__ for step in steps]  # type: ignore[attr-defined]
        every = [[p for group in one.param_groups for p in group["params"]] for one in optimizers]
        local = [[getattr(p, "_local_tensor", p) for p in params] for params in every]
        grads = [[getattr(p.grad, "_local_tensor", p.grad) for p in params] for params in every]
        for mine in grads[1:]:
            for one, other in zip(mine, grads[0], strict=True):
                one.copy_(other)
        for _ in range(3):
            for step in steps:
                step()
        for mine in local[1:]:
            for one, other in zip(mine, local[0], strict=True):
                torch.testing.assert_close(one, other.detach(), rtol=1e-5, atol=1e-7)
    finally:
        dist.destroy_process_group()
