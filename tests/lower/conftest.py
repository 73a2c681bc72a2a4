"""Inductor asks for the groups of collectives: here is one of two ranks, over which nothing is sent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardc.runtime.groups  # noqa: F401  (implements the collectives)
from tests.lower.lowering import GROUP


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """Inductor asks for the group; nothing is sent."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    assert dist.group.WORLD is not None
    _register_process_group(GROUP, dist.group.WORLD)  # type: ignore[arg-type]
    yield
    _unregister_process_group(GROUP)  # type: ignore[arg-type]
    dist.destroy_process_group()
