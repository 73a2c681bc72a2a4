"""Predicted step of Llama 3 8B by the size of buckets: fixed sizes, and the default on GPUs. No GPU is needed.

    python benchmarks/buckets.py [--meshes dp=8 dp=64,tp=8] [--hardware h100 a100]

Each data-parallel rank has one sequence of 8,192 tokens; parameters are gathered in bfloat16 (level 3) and gradients
reduced in float32. The last row of a mesh is ``Options(bucket_size=HARDWARE)``, which ranks on GPUs have by default.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

import torch
from tabulate import tabulate

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import shardc  # noqa: E402
from examples.models import llama  # noqa: E402
from shardc.capture import CaptureOnce  # noqa: E402
from shardc.cli.target import mesh_of  # noqa: E402
from shardc.cost import hardware  # noqa: E402

SIZES = (8, 32, 64, 128, 256, 450, 900)  # MiB
MESHES = ("dp=8", "dp=64", "dp=512", "dp=8,tp=8", "dp=64,tp=8")
CONFIG = llama.LlamaConfig(128256, 4096, 32, heads=32, kv_heads=8, hidden=14336, rope_theta=500000.0)


def rows(
    mesh_text: str, name: str, sizes: tuple[int, ...] = SIZES, config: llama.LlamaConfig = CONFIG
) -> list[list[str]]:
    """Mesh, hardware, bucket size, predicted ms of a step, ms exposed, collectives and GB at the peak, by size."""
    mesh, described = mesh_of(mesh_text), hardware.find(name)
    model, args = llama.build(config, "meta", size=mesh.size("dp"), length=8192)
    plan = shardc.fsdp("dp") | shardc.precision(param=torch.bfloat16, reduce=torch.float32)
    plan = plan | llama.llama_tp("tp") if "tp" in mesh.axes else plan
    once, out = CaptureOnce(), []
    for text, size in [*((f"{n} MiB", n << 20) for n in sizes), ("by the links", described)]:
        options = shardc.Options(capture=once, fold=True, verify=False, bucket_size=size)
        schedule = shardc.compile(model, mesh, plan, options=options).shardc.lower(*args).schedule(described)
        exposed, peak = sum(one.exposed for one in schedule.collectives), schedule.memory.peak.total
        out.append([
            str(mesh), name, text, f"{schedule.seconds * 1e3:.1f}", f"{exposed * 1e3:.1f}",
            str(len(schedule.collectives)), f"{peak / 1e9:.1f}",
        ])  # fmt: skip
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--meshes", nargs="+", default=MESHES, help="axes and sizes, as dp=64,tp=8")
    parser.add_argument("--hardware", nargs="+", default=("h100", "a100"), choices=sorted(hardware.KNOWN))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    table = [row for mesh in options.meshes for name in options.hardware for row in rows(mesh, name)]
    head = ("mesh", "hardware", "buckets", "step ms", "exposed ms", "collectives", "peak GB")
    print(tabulate(table, head, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
