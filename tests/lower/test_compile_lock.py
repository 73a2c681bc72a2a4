"""Which rank compiles which graph."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from torch import fx
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from shardc.ir.executable import FORWARD
from shardc.lower import compile_lock


@pytest.fixture
def first_of_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The first of two ranks, with an empty cache."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_lock.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(compile_lock.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(compile_lock.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(compile_lock, "_POLL", 0.0)
    with inductor_config.patch(force_disable_caches=False, fx_graph_cache=True):
        yield


@pytest.mark.usefixtures("first_of_two")
def test_what_no_rank_has_made_comes_first() -> None:
    """What another has made may still be with g++, and is there in the end."""
    with FakeTensorMode():
        made, other, third = (make_fx(op)(torch.empty(4)) for op in (torch.sin, torch.cos, torch.tan))
    graphs, order = dict.fromkeys((made, other, third), FORWARD), list[fx.GraphModule]()
    compile_lock.in_turns({made: FORWARD}, lambda gm, kind: kind)
    compile_lock.in_turns(graphs, lambda gm, kind: order.append(gm))
    assert order == [other, third, made]


@pytest.mark.usefixtures("first_of_two")
def test_nobody_waits_for_a_graph_that_cannot_be_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one rank compiled and could not leave in the cache, another compiles too, while others have it in work."""
    with FakeTensorMode():
        gm = make_fx(lambda x: x + 1)(torch.empty(4))
    waited: list[float] = []

    def compiled(gm: fx.GraphModule, kind: str) -> str:
        counters["inductor"]["fxgraph_cache_bypass"] += 1
        return kind

    def other_is_done(seconds: float) -> None:
        waited.append(seconds)
        lock.release()

    monkeypatch.setattr(compile_lock.time, "sleep", other_is_done)
    lock = FileLock(compile_lock.cache_folder("locks") / f"{compile_lock.name_of(gm, FORWARD)}.lock")
    lock.acquire()
    assert compile_lock.in_turns({gm: FORWARD}, compiled) == {gm: FORWARD} and len(waited) == 1
    lock.acquire()
    assert compile_lock.in_turns({gm: FORWARD}, compiled) == {gm: FORWARD} and len(waited) == 1
    lock.release()
