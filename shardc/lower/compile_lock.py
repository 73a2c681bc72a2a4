"""Divides the compilation of graphs among the ranks of a machine: one rank compiles a graph, the others load it."""

from __future__ import annotations

import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from filelock import BaseFileLock, FileLock, Timeout
from torch import fx
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.runtime.cache_dir_utils import cache_dir

from shardc.ir.repeat import type_of
from shardc.logs import steps

PATIENCE = 600.0  # seconds; a rank that waits longer compiles the graph itself
_POLL = 0.05  # seconds
MADE, ALONE = ".made", ".alone"
T = TypeVar("T")


def in_turns(graphs: Mapping[fx.GraphModule, str], make: Callable[[fx.GraphModule, str], T]) -> dict[fx.GraphModule, T]:
    """Compile each graph by ``make(graph, kind)``, and return graph -> result. Ranks of this machine share the work.

    Each rank begins with another graph and defers those that another process is compiling or has compiled. At the end
    it loads these from Inductor's cache. Graphs that the cache cannot hold are compiled by every rank.

    Args:
        graphs: graph -> its kind ("forward", ...).
    """
    results: dict[fx.GraphModule, T] = {}
    several = dist.is_initialized() and dist.get_world_size() > 1
    shares = several and caches()
    shared = graphs if shares else {}
    locks = {gm: FileLock(cache_folder("locks") / f"{name_of(gm, kind)}.lock") for gm, kind in shared.items()}
    waiting = deque(sorted(graphs, key=lambda gm: -len(gm.graph.nodes)))  # the large ones first
    waiting.rotate(-dist.get_rank() if shares else 0)
    for _ in steps(range(len(graphs)), "lowering"):
        gm = _take_free(waiting, locks) if shares else waiting.popleft()
        before = _uncached()
        try:
            results[gm] = make(gm, graphs[gm])
            if shares:
                _mark_file(locks[gm], ALONE if _uncached() > before else MADE).touch()
        finally:
            if shares:
                locks[gm].release()
    return results


def _take_free(waiting: deque[fx.GraphModule], locks: Mapping[fx.GraphModule, BaseFileLock]) -> fx.GraphModule:
    """Remove from ``waiting`` a graph that no other process is compiling, acquire its lock, and return the graph.

    The lock is not acquired if the graph cannot be cached, or after a long wait. Graphs that nobody has compiled come
    first: g++ may still be at work for the others.
    """
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        for anew in (True, False):
            for _ in range(len(waiting)):
                gm = waiting.popleft()
                if _mark_file(locks[gm], ALONE).exists():
                    return gm
                with suppress(Timeout):
                    if not (anew and _mark_file(locks[gm], MADE).exists()):
                        locks[gm].acquire(timeout=0)
                        return gm
                waiting.append(gm)
        time.sleep(_POLL)
    return waiting.popleft()


def _uncached() -> int:
    """Return how many graphs of this process Inductor's cache could not hold."""
    return int(counters["inductor"]["fxgraph_cache_bypass"])


def _mark_file(lock: BaseFileLock, what: str) -> Path:
    """Return the file beside ``lock`` that records, by the suffix ``what``, that its graph is compiled (`MADE`) or
    cannot be cached (`ALONE`).
    """
    return Path(lock.lock_file).with_suffix(what)


def caches() -> bool:
    """Return whether Inductor may use its cache of graphs."""
    return bool(config.fx_graph_cache) and not config.force_disable_caches


def cache_folder(name: str) -> Path:
    """Return a folder of shardc's own beside Inductor's cache of graphs."""
    folder = Path(cache_dir()) / "shardc" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def program_folder() -> Path:
    """Return the folder of stored programs: that of the environment variable ``SHARDC_STORE`` if it is an absolute
    path, else one beside Inductor's cache.
    """
    named = os.environ.get("SHARDC_STORE", "")
    return Path(named) if os.path.isabs(named) else cache_folder("programs")


def name_of(gm: fx.GraphModule, kind: str, settings: str = "") -> str:
    """Return a hash of ``kind``, ``settings`` and the graph's ops and input types; the names of nodes do not count."""
    number = {node: f"%{at}" for at, node in enumerate(gm.graph.nodes)}
    lines = [kind, settings]
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            lines.append(str(type_of(node.meta["val"])))
        else:
            lines.append(f"{node.target} {fx.node.map_arg((node.args, node.kwargs), number.__getitem__)}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]
