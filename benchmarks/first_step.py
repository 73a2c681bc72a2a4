"""Time to the first finished step of two ranks, from nothing and with the compilers' caches of the run before.

A rank is a process of its own; its time runs from the start of that process, imports included. Python has compiled
shardc's files before, as an installation does and as it has torch's. The peer imports nothing of shardc.
"""

from __future__ import annotations

import compileall
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.work import LEARNING_RATE, Step, Work, train_step  # noqa: E402
from examples.models.llama import LlamaConfig, loss  # noqa: E402

RANKS = 2
LATER = 10  # steps after the first


def _work(layers: int) -> Work:
    return Work(LlamaConfig(256, 64, layers, heads=4, kv_heads=2, hidden=128), length=32, batch=2)


def _shardc(work: Work, mesh: DeviceMesh, by: str) -> Step:
    import shardc

    module = shardc.compile(
        work.model(), mesh, shardc.fsdp("dp"), loss=loss, options=shardc.Options(compile_regions=by)
    )
    return train_step(module, (), shardc.optim.wrap(torch.optim.AdamW, module, lr=LEARNING_RATE, fused=True))


def _fsdp2(work: Work, mesh: DeviceMesh) -> Step:
    from benchmarks.peers.sharded import ROWS

    return next(row for row in ROWS if row.name == "fsdp2/blocks/reshard").build(work, mesh)


ROWS: dict[str, Callable[[Work, DeviceMesh], Step]] = {
    "shardc": lambda work, mesh: _shardc(work, mesh, "auto"),
    "shardc, lowered whole": lambda work, mesh: _shardc(work, mesh, "whole"),
    "FSDP2, compiled blocks": _fsdp2,
}


def rank(row: str, layers: int, at: int, store: str, started: float) -> None:
    """Trains on rank ``at``; rank 0 prints seconds to the first finished step since ``started``, and of a later one."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=at, world_size=RANKS)
    work = _work(layers)
    tokens, targets = (x[at * work.batch : (at + 1) * work.batch].clone() for x in work.data(0, RANKS))
    step = ROWS[row](work, init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",)))
    step(tokens, targets)
    dist.barrier()
    first, later = time.time() - started, []
    for _ in range(LATER):
        start = time.perf_counter()
        step(tokens, targets)
        later.append(time.perf_counter() - start)
    dist.barrier()
    if at == 0:
        print(json.dumps({"first": first, "later": sorted(later)[LATER // 2]}))
    dist.destroy_process_group()


def run(row: str, layers: int, cache: str) -> dict[str, float]:
    """Both ranks of a row, once."""
    with tempfile.TemporaryDirectory(prefix="first_step_") as folder:
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": cache, "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "ignore",
        }  # fmt: skip
        said = [str(layers), str(Path(folder) / "store"), str(time.time())]
        ranks = [
            subprocess.Popen([sys.executable, __file__, row, str(at), *said], stdout=subprocess.PIPE, text=True,
                             stderr=subprocess.PIPE, env=environment)
            for at in range(RANKS)
        ]  # fmt: skip
        printed = [each.communicate() for each in ranks]
    if any(each.returncode for each in ranks):
        sys.exit("\n".join(errors for _, errors in printed))
    return json.loads(printed[0][0].splitlines()[-1])


def table(layers: Sequence[int]) -> str:
    """Every row at every depth, cold and then warm."""
    for package in ("shardc", "benchmarks", "examples"):
        compileall.compile_dir(ROOT / package, quiet=1)
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    for row, depth in tqdm([(row, depth) for depth in layers for row in ROWS], leave=False, disable=None):
        with tempfile.TemporaryDirectory(prefix="first_step_cache_", ignore_cleanup_errors=True) as cache:
            found[row, depth] = [run(row, depth, cache) for _ in range(2)]
    peer = "FSDP2, compiled blocks"
    lines = []
    for (row, depth), (cold, warm) in found.items():
        base, (other, again) = found[row, layers[0]][0], found[peer, depth]
        lines.append([
            row, depth, cold["first"], cold["first"] / base["first"], cold["first"] / other["first"], warm["first"],
            warm["first"] / again["first"], 1000 * warm["later"],
        ])  # fmt: skip
    headers = [
        "row", "layers", "cold s", f"of {layers[0]} layers", "of FSDP2", "warm s", "of FSDP2", "later step ms",
    ]  # fmt: skip
    return tabulate(
        lines, headers, floatfmt=("", "", ".1f", ".2f", ".2f", ".1f", ".2f", ".1f", ".6f"), tablefmt="github"
    )


if __name__ == "__main__":
    name, number, depth, place, begun = sys.argv[1:]
    rank(name, int(depth), int(number), place, float(begun))
