"""What another rank's error ends in the midst of compiling, and that nothing of it stays behind in the process."""

from __future__ import annotations

import subprocess
import sys
from threading import Event, Thread, get_ident

import pytest

from shardc.errors import MeshError
from shardc.runtime.gloo.listen import Stopped, raise_in
from shardc.runtime.rank_consistency import RankConsistency

PROFILED = """
import cProfile
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import shardc

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
module = shardc.compile(torch.nn.Linear(2, 2), mesh, shardc.ddp("dp"), backend="eager")
for profile in (cProfile.Profile(), cProfile.Profile()):
    module(torch.ones(1, 2)).sum().backward()
    profile.enable()  # after the first compile
    module(torch.ones(1, 2)).sum().backward()
    profile.disable()
print("done")
"""


def test_a_profiler_runs_after_a_compile() -> None:
    ran = subprocess.run([sys.executable, "-c", PROFILED], capture_output=True, text=True, timeout=120)
    assert ran.stdout.endswith("done\n"), ran.stderr


class Mesh:
    def interrupt(self) -> None: ...


def test_what_is_raised_as_a_block_ends_is_raised_by_it() -> None:
    mesh = Mesh()
    consistency = RankConsistency("", 0, (0,), mesh.interrupt)
    for _ in range(200):
        ends = Event()

        def fail(ends: Event = ends) -> None:
            ends.wait()
            with consistency._lock:
                if consistency._compiling_thread is not None:
                    consistency._pending_error = MeshError("rank 1 raised", fix="mend it")
                    raise_in(consistency._compiling_thread, Stopped)

        other = Thread(target=fail)
        other.start()
        try:
            with consistency.compiles():
                assert consistency._compiling_thread == get_ident()
                ends.set()
        except MeshError as error:
            assert "rank 1 raised" in str(error)
        other.join()
        assert consistency._compiling_thread is None and consistency._pending_error is None
    with pytest.raises(MeshError), consistency.compiles():
        consistency._pending_error = MeshError("rank 1 raised", fix="mend it")
        raise_in(get_ident(), Stopped)
        raise AssertionError("it was not stopped")
