"""Loggers of shardc by topic, the switch ``SHARDC_LOGS``, and the progress bar of a compile.

Messages go to the standard loggers ``shardc.<topic>`` at level INFO. Nothing is printed unless a program gives them a
handler, or the environment variable names topics: ``SHARDC_LOGS=cache,stages``, or ``all``.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TypeVar

import torch.distributed as dist
from tqdm import tqdm

from shardc.errors import WARNINGS, InputError
from shardc.validate import near

PATIENCE = 3.0  # seconds before the progress bar appears
T = TypeVar("T")

ROOT = logging.getLogger("shardc")
ROOT.addHandler(logging.NullHandler())  # else the last resort of `logging` would print
CACHE = logging.getLogger("shardc.cache")  # which call found a program, and why another one was compiled
STAGES = logging.getLogger("shardc.stages")  # the seconds of each stage of a compile
BUCKETS = logging.getLogger("shardc.buckets")  # the collectives of each graph that is lowered
TOPICS = {log.name.partition(".")[2]: log for log in (CACHE, STAGES, BUCKETS, WARNINGS)}


class _Formatter(logging.Formatter):
    """Formatter that puts the topic, and the rank if there are several, before the message."""

    def format(self, record: logging.LogRecord) -> str:
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        rank = f" [rank {dist.get_rank()}]" if several else ""
        return f"{record.name}{rank}: {super().format(record)}"


def configure(text: str) -> None:
    """Print the topics in ``text`` (the value of ``SHARDC_LOGS``) to standard error; nothing for "".

    Raises:
        InputError: there is no such topic.
    """
    wanted = [name.strip() for name in text.split(",") if name.strip()]
    if not wanted:
        return
    for name in wanted:
        if name not in (*TOPICS, "all"):
            fix = near(name, (*TOPICS, "all"), f"use some of {', '.join(TOPICS)}, or all")
            raise InputError(f"SHARDC_LOGS={text}: there is no topic {name!r}", fix=fix)
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter())
    ROOT.addHandler(handler)
    ROOT.propagate = False  # a handler of the root logger would print the same again
    for name, log in TOPICS.items():
        if name in wanted or "all" in wanted:
            log.setLevel(logging.INFO)


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Context manager: log the seconds of its block, as ``what``, to ``shardc.stages``."""
    start = perf_counter()
    yield
    STAGES.info("%s: %.3f s", what, perf_counter() - start)


def timed_each(items: Collection[T], what: str) -> Iterator[T]:
    """Yield ``items``, and log to ``shardc.stages`` the seconds that the caller's loop takes for each.

    Args:
        items: passes, which are named, or anything, which is numbered.
        what: the name of the whole.
    """
    begin = perf_counter()
    for number, item in enumerate(items):
        start = perf_counter()
        yield item
        STAGES.info(
            "%s, %s: %.3f s", what, getattr(item, "name", f"{number + 1} of {len(items)}"), perf_counter() - start
        )
    STAGES.info("%s, all %d: %.3f s", what, len(items), perf_counter() - begin)


def steps(items: Collection[T], what: str) -> Iterator[T]:
    """Yields ``items``, with a progress bar on the first rank's terminal after 3 seconds; logs the seconds of each."""
    speaks = not dist.is_initialized() or dist.get_rank() == 0
    bar = tqdm(items, f"shardc: {what}", leave=False, delay=PATIENCE, disable=None if speaks else True)
    yield from timed_each(bar, what) if STAGES.isEnabledFor(logging.INFO) else bar
