"""Ranges in a profile: the graphs of a step, and its segments by module."""

from __future__ import annotations

from functools import partial

import pytest
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


def buckets(backend: str) -> None:
    """Each collective of a step runs in the range of its bucket, and each bucket has a range."""
    # The second mesh of a process has groups of other names.
    shardc.compile(nn.Linear(4, 4), device_mesh(Mesh(tp=2)), shardc.fsdp("tp"), backend="eager")(torch.randn(2, 4))
    options = shardc.Options(bucket_size=4096)
    model = Blocks(layers=4, dim=16)
    module = shardc.compile(model, device_mesh(Mesh(dp=2)), shardc.fsdp("dp"), backend=backend, options=options)
    x = torch.randn(4, 16)
    module(x).sum().backward()
    with torch.profiler.profile() as profile:
        module(x).sum().backward()
    program = module.shardc.lower(torch.empty(8, 16))
    expected = [(c.phase, c.kind, c.cause.tensors) for c in program.schedule("cpu").collectives]
    ranges = [event for event in profile.events() if "(dp) of %" in event.name]
    ranges.sort(key=lambda event: event.time_range.start)
    assert len(ranges) == len(expected) > 6
    for event, (phase, kind, tensors) in zip(ranges, expected, strict=True):
        where, _, what = event.name.partition(", ")
        assert where == f"shardc {phase}" and what.startswith(f"{kind}(dp) of %"), event.name
        assert phase == "backward" or what.split("%")[1].startswith(tensors[0]), event.name
        ops = [child.name for child in event.cpu_children]
        assert any(kind in name for name in ops), ops
    started = [event for event in profile.events() if event.name.startswith("shardc::")]
    assert len(started) == len(ranges)


@pytest.mark.medium
def test_ranges_of_buckets() -> None:
    run_ranks(2, partial(buckets, "eager"), partial(buckets, "inductor"))
