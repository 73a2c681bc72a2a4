"""Dumps and predictions are the same to the byte in another process, under another hash seed, and on every rank."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardc
from tests.ranks import run_ranks
from tests.test_fold import MLP_TP, stack

ROOT = Path(__file__).parents[1]


def digests(mesh: shardc.Mesh | DeviceMesh, fold: bool) -> dict[str, str]:
    """A digest of every stage's text, of the schedule's table, data and trace, and of the certificate."""
    model, args, _ = stack(6)
    module = shardc.compile(model, mesh, shardc.fsdp("dp") | MLP_TP, options=shardc.Options(fold=fold))
    program = module.lower(*args)
    schedule = program.schedule("cpu")
    made = {stage: program.text(stage, origins=True) for stage in program.stages}
    made |= {"table": schedule.table(), "json": schedule.to_json(), "trace": schedule.to_trace()}
    made["certificate"] = program.certificate().text()
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in made.items()}


def printed() -> str:
    return "".join(f"{fold} {digests(shardc.Mesh(dp=2, tp=2), fold)}\n" for fold in (False, True))


@pytest.mark.slow
def test_the_same_under_another_hash_seed() -> None:
    there = subprocess.run(
        [sys.executable, "-c", "from tests.test_deterministic import printed; print(printed(), end='')"],
        cwd=ROOT, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": "3"},
    )  # fmt: skip
    assert there.stdout == printed()


def _same_on_all_ranks() -> None:
    # Every rank holds other values; what it compiles must not know.
    torch.manual_seed(dist.get_rank())
    mine = digests(init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp")), fold=False)
    every: list[dict[str, str]] = [{}] * 2
    dist.all_gather_object(every, mine)
    assert every[0] == every[1] == mine and "schedule.backward" in mine


@pytest.mark.slow
def test_the_same_on_every_rank() -> None:
    run_ranks(2, _same_on_all_ranks)
