"""meta-pytorch/autoparallel: it asks for a nightly torch and a GPU, and its row says so."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.peers.row import Row
from benchmarks.work import Step, Work

SOURCE = "https://github.com/meta-pytorch/autoparallel"


def _build(work: Work, mesh: DeviceMesh) -> Step:
    here = f"torch {torch.__version__} on {mesh.device_type}"
    raise RuntimeError(f"{SOURCE} is not on PyPI and asks for a nightly torch and a GPU; here is {here}")


ROWS = (Row("autoparallel", "autoparallel", "fsdp", _build),)
