"""Real ranks on this machine: checks that run on several gloo processes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing import set_forkserver_preload
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardc.ir.mesh import Mesh

Check = Callable[[], None]

# Ranks are forked from a process that has imported these and done nothing yet.
set_forkserver_preload(["torch._dynamo", "torch._functorch.aot_autograd", "shardc"])


def device_mesh(mesh: Mesh) -> DeviceMesh:
    """A DeviceMesh of the first ``mesh.ranks`` ranks of the world."""
    return init_device_mesh("cpu", tuple(size for _, size in mesh.shape), mesh_dim_names=mesh.axes)


def run_ranks(ranks: int, *checks: Check, programs: Path | None = None, timeout: timedelta | None = None) -> None:
    """Runs each check on ``ranks`` processes, one after the other in the same processes, each in a world of its own.

    A check is a function at the top of a module, or a `functools.partial` of one. What a rank raises is
    raised here, with the name of its check.

    Args:
        programs: a folder in which programs are stored and found; by default one for each check, of the test.
            A second run of the same checks then is of second starts.
        timeout: of each check's collectives, if not torch's.
    """
    with tempfile.TemporaryDirectory() as folder:
        named = str(programs or os.environ.get("SHARDC_STORE", "1"))
        by_check = programs is None and os.path.isabs(named)
        folders = [str(Path(named) / str(at)) if by_check else named for at in range(len(checks))]
        given = (ranks, checks, str(Path(folder) / "store"), folders, timeout)
        mp.start_processes(_rank, given, nprocs=ranks, start_method="forkserver")


def _rank(
    rank: int, ranks: int, checks: Sequence[Check], path: str, programs: Sequence[str], timeout: timedelta | None
) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(path, ranks)
    for at, check in enumerate(checks):
        torch.manual_seed(0)
        os.environ["SHARDC_STORE"] = programs[at]
        prefixed = dist.PrefixStore(str(at), store)
        dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=ranks, timeout=timeout)
        name = check.func.__name__ if isinstance(check, partial) else check.__name__
        try:
            check()
        except Exception as error:
            error.add_note(f"in {name} on rank {rank}") if hasattr(error, "add_note") else None
            raise
        # Nobody closes the connections of a rank that still reads from them. (Groups may be of no use any more.)
        if store.add(f"done/{at}", 1) == ranks:
            store.set(f"all done/{at}", "")
        try:
            store.wait([f"all done/{at}"])
        except RuntimeError as error:
            raise AssertionError(f"rank {rank} is done with {name}, and another rank is not") from error
        dist.destroy_process_group()
