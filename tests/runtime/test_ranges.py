"""Ranges in a profile: the graphs of a step, and its segments by module."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

import shardc
from shardc.ir.mesh import Mesh
from tests.pipeline.programs import Blocks
from tests.ranks import device_mesh, run_ranks


def names(module: nn.Module, x: torch.Tensor) -> list[str]:
    """Trains a step, then another in a profile; returns the names of its ranges."""
    module(x).sum().backward()
    with torch.profiler.profile() as profile:
        module(x).sum().backward()
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    return [event.name for event in events if event.name.startswith("shardc ")]


def segments(backend: str) -> None:
    module = shardc.compile(Blocks(layers=8, dim=16), device_mesh(Mesh(dp=1)), shardc.fsdp("dp"), backend=backend)
    found = names(module, torch.randn(4, 16))
    assert [name for name in found if "," not in name] == ["shardc forward", "shardc backward"]
    inside = [name for name in found if name.startswith("shardc forward, ")]
    if backend == "eager":  # in one segment
        assert not inside
    else:
        assert any(name.startswith("shardc forward, blocks.") for name in inside), inside
        assert found.index(inside[-1]) < found.index("shardc backward")


def stages() -> None:
    module = shardc.compile(
        Blocks(), device_mesh(Mesh(dp=1)), shardc.fsdp("dp") | shardc.microbatches(2), backend="eager",
        loss=lambda out: out.sum(),
    )  # fmt: skip
    found = [name for name in names(module, torch.randn(4, 8)) if "," not in name]
    assert found == ["shardc forward", "shardc backward", "shardc forward", "shardc last backward"]


def test_ranges() -> None:
    run_ranks(1, partial(segments, "eager"), partial(segments, "inductor"), stages)
