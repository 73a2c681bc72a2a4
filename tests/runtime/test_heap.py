"""What a step frees stays with the process, and the next step finds it there."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

STEPS = """
import ctypes, resource
import torch
from shardc.runtime.host import keep_heap

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def step():
    # Blocks that malloc takes from the heap, all free at the end; more of them than it keeps by itself.
    blocks = [libc.malloc(1 << 20) for _ in range(160)]
    for block in blocks:
        ctypes.memset(block, 1, 1 << 20)
    for block in blocks:
        libc.free(block)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

torch.empty(1 << 20)  # as a program's own tensors: from here on blocks of 1 MiB come from the heap
if KEPT:
    keep_heap()
for _ in range(3):
    step()
before = faults()
for _ in range(10):
    step()
print((faults() - before) // 10)
"""


def _faults(kept: bool) -> int:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_"))}
    ran = subprocess.run(
        [sys.executable, "-c", f"KEPT = {kept}\n{STEPS}"],
        check=True, capture_output=True, text=True, timeout=120, env=plain,
    )  # fmt: skip
    return int(ran.stdout)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc's malloc")
def test_steps_do_not_get_their_pages_anew() -> None:
    """160 MiB a step are 40,960 pages: without it they are taken anew by every step, with it by the first."""
    assert _faults(kept=False) > 30000
    assert _faults(kept=True) < 100
