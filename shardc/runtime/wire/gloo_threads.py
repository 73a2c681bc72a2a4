"""Scheduling of gloo's event loop threads relative to compute threads."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_NAME = "gloo_tcp_loop"


def let_compute_first() -> None:
    """Sets gloo's event loops to SCHED_BATCH (sched(7)), so that they do not preempt compute threads.

    A loop spins on a connection's lock while another thread holds it (gloo/transport/tcp/pair.cc, Pair::handleEvents).
    If it has preempted that thread, both stall for a time slice of 2 to 3 ms; this happens with as many threads as
    cores. Under SCHED_BATCH a loop keeps its share of a core and uses idle ones at once.

    Affects existing loops in the default class only; no effect outside Linux, or if not permitted.
    """
    tasks = Path("/proc/self/task")
    if not hasattr(os, "SCHED_BATCH") or not tasks.is_dir():
        return
    for task in tasks.iterdir():
        # The thread may have ended.
        with suppress(OSError):
            thread = int(task.name)
            if (task / "comm").read_text().strip() == _NAME and os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
