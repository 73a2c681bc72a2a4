"""meta-pytorch/autoparallel, where it is installed: it is not on PyPI, and its row says so where it is not there."""

from __future__ import annotations

from importlib.util import find_spec

from torch.distributed.device_mesh import DeviceMesh

from benchmarks.peers.row import Row
from benchmarks.work import Step, Work

INSTALL = "pip install git+https://github.com/meta-pytorch/autoparallel"


def _build(work: Work, mesh: DeviceMesh) -> Step:
    if find_spec("autoparallel") is None:
        raise RuntimeError(f"autoparallel is not installed: {INSTALL} (and it asks for a nightly torch and a GPU)")
    raise NotImplementedError("autoparallel is installed, and this row has not been tried with it")


ROWS = (Row("autoparallel", "autoparallel", "fsdp", _build),)
