"""The threads in which gloo moves bytes, beside those that compute."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_NAME = "gloo_tcp_loop"


def let_compute_first() -> None:
    """Lets gloo's event loops wait for a core's next tick where compute has it, instead of taking it at once.

    A loop that wakes while another thread of its rank holds the lock of a connection asks for it again and again
    (gloo/transport/tcp/pair.cc, Pair::handleEvents). Where it took that thread's core to do so, both stand still until
    the slice is over, 2 to 3 ms; that happens where ranks have as many threads as there are cores. In the class
    SCHED_BATCH (sched(7)) a loop has the share of a core that it had, and takes one that is idle at once, but none from
    a thread that runs.

    It is for loops that are there when it is called, and only those in the default class. Elsewhere than on Linux, and
    where the system allows no change, it does nothing.
    """
    tasks = Path("/proc/self/task")
    if not hasattr(os, "SCHED_BATCH") or not tasks.is_dir():
        return
    for task in tasks.iterdir():
        # A thread may end meanwhile.
        with suppress(OSError):
            thread = int(task.name)
            if (task / "comm").read_text().strip() == _NAME and os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
