"""How long an 8B Llama takes from module to localized graph, how much memory, and how both grow with layers.

    python benchmarks/compile_time.py --layers 8,16,32
    python benchmarks/compile_time.py --first-step --layers 4,16,32      # of small decoders on two ranks, and FSDP2's

Each row runs in a process of its own, on meta tensors, for the mesh dp=8, tp=8 and the plan fsdp | llama_tp.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tabulate import tabulate

ROOT = Path(__file__).resolve().parent.parent
STAGES = ("capture", "propagate", "collectives", "localize")


def measure(layers: int) -> dict[str, float]:
    """Seconds since the start at the end of each stage, nodes of the local graph, and peak resident bytes."""
    sys.path.insert(0, str(ROOT))
    import shardc
    from examples.models import llama
    from shardc.passes import Hook

    model, args = llama.llama3_8b(layers)
    plan = shardc.fsdp("dp") | llama.llama_tp("tp")
    targets = torch.empty(args[0].shape, dtype=torch.int64, device="meta")
    reached: dict[str, float] = {}

    class Reached(Hook):
        def after(self, stage: str, gm: torch.fx.GraphModule) -> None:
            reached[stage] = time.perf_counter() - start

    options = shardc.Options(hooks=(Reached(),))
    module = shardc.compile(model, shardc.Mesh(dp=8, tp=8), plan, loss=llama.loss, options=options)
    start = time.perf_counter()
    made = module.lower(*args, targets)
    total = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"layers": layers, "nodes": len(made.graph("localize").nodes), **reached, "total": total, "peak": peak}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="8,16,32", help="layer counts, joined by commas")
    parser.add_argument("--first-step", action="store_true", help="time to the first finished step of two ranks")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one is not None:
        print(json.dumps(measure(options.one)))
        return
    if options.first_step:
        sys.path.insert(0, str(ROOT))
        from benchmarks import first_step

        print(first_step.table([int(part) for part in options.layers.split(",")]))
        return
    rows = []
    for layers in (int(part) for part in options.layers.split(",")):
        run = subprocess.run(
            [sys.executable, __file__, "--one", str(layers)], capture_output=True, text=True, check=False
        )
        if run.returncode:
            sys.exit(run.stderr)
        rows.append(json.loads(run.stdout.splitlines()[-1]))
    table = []
    for row in rows:
        ends = [row[stage] for stage in STAGES]
        spent = [ends[0], *(after - before for before, after in zip(ends, ends[1:], strict=False))]
        per_layer = 1000 * row["total"] / row["layers"]
        table.append([row["layers"], row["nodes"], *spent, row["total"], per_layer, row["peak"] / 1e9])
    headers = ["layers", "nodes", *(f"{stage} s" for stage in STAGES), "total s", "ms/layer", "peak GB"]
    print(tabulate(table, headers, floatfmt=".2f", tablefmt="github"))


if __name__ == "__main__":
    main()
