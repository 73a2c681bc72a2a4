"""`shardc.mesh`: of the ranks that torchrun started, and of a process alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import shardc
from shardc.errors import MeshError
from shardc.launch import sizes_of
from tests.ranks import run_ranks

SCRIPT = """
import torch
import torch.distributed as dist
import shardc

mesh = shardc.mesh(dp=-1, tp=2, device="cpu")
assert mesh.shape == (dist.get_world_size() // 2, 2) and mesh.mesh_dim_names == ("dp", "tp"), mesh
module = shardc.compile(torch.nn.Linear(8, 4), mesh, shardc.fsdp("dp"), backend="eager", init_sync=True)
module(torch.ones(2, 8)).sum().backward()
gradient = module.weight.grad.full_tensor().sum().item()
print(f"gradient {gradient}\\n", end="", flush=True)  # one write: lines of ranks that print at once stay whole
dist.destroy_process_group()
"""


def test_a_plain_process() -> None:
    code = SCRIPT.replace("tp=2", "tp=1").replace("() // 2, 2)", "(), 1)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=_without_ranks())
    assert done.stdout == "gradient 64.0\n", done.stderr


def test_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
    env = {**_without_ranks(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *launcher, str(script)], capture_output=True, text=True, env=env)
    assert sorted(done.stdout.splitlines()) == ["gradient 64.0"] * 2, done.stderr


def _without_ranks() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}


def check_a_group_that_is_there() -> None:
    group = dist.group.WORLD
    assert shardc.mesh(device="cpu").shape == (2,) and dist.group.WORLD is group
    with pytest.raises(MeshError, match=r"mesh\(dp=4\) is of 4 ranks, and the world has 2"):
        shardc.mesh(dp=4, device="cpu")


def test_a_group_that_is_there() -> None:
    run_ranks(2, check_a_group_that_is_there)


@pytest.mark.parametrize(
    "axes, ranks, text",
    [
        ({"dp": -1, "tp": -1}, 8, "two axes are -1"),
        ({"dp": -1, "tp": 3}, 8, r"mesh\(dp=-1, tp=3\) is of a multiple of 3 ranks, and the world has 8"),
        ({"dp": 2}, 8, "nproc-per-node 2 starts 2 ranks"),
        ({"dp": 0}, 8, "axis 'dp' has size 0"),
        ({"dp": -2}, 8, "axis 'dp' has size -2"),
        ({"dp": 2.0}, 2, "axis 'dp' has size 2.0"),
    ],
)
def test_sizes_that_do_not_fit(axes: dict[str, int], ranks: int, text: str) -> None:
    with pytest.raises(MeshError, match=text):
        sizes_of(axes, ranks)


@pytest.mark.parametrize("device, text", [("gpu", "there is no device 'gpu'"), ("cpu:0", "'cpu:0' has an index")])
def test_devices_that_are_none(device: str, text: str) -> None:
    with pytest.raises(MeshError, match=text):
        shardc.mesh(device=device)
    assert not dist.is_initialized()


def test_nothing_is_started_for_sizes_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(MeshError, match="the world has 2"):
        shardc.mesh(dp=4, device="cpu")
    assert not dist.is_initialized()
