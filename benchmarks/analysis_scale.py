"""How long the schedule of Llama 3.1 405B takes from module to prediction, by layers and by ranks, on a laptop.

    python benchmarks/analysis_scale.py

Sequence 8192, one sequence a data-parallel rank, mesh dp=ranks/8, tp=8, ``fsdp("dp") | llama_tp("tp", sequence=True)``,
repeated layers folded, no process group. Each row runs in a process of its own. Seconds are the process's own (which
other load does not change) and the clock's; memory is the most that the process held.
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
from typing import Any

import torch
from tabulate import tabulate

ROOT = Path(__file__).resolve().parent.parent
TENSOR_PARALLEL = 8


def measure(layers: int, ranks: int, size: str, fold: bool) -> dict[str, Any]:
    """One row: what was predicted, seconds of each part, peak resident bytes of the process."""
    sys.path.insert(0, str(ROOT))
    import shardc
    from examples.models import llama

    data = ranks // TENSOR_PARALLEL
    if size == "405b":
        model, args = llama.llama3_405b(layers, size=data)
    else:
        model, args = llama.build(llama.LlamaConfig(layers=layers), "meta", size=data)
    targets = torch.empty(args[0].shape, dtype=torch.int64, device="meta")
    plan = shardc.fsdp("dp") | llama.llama_tp("tp", sequence=True)
    mesh = shardc.Mesh(dp=data, tp=TENSOR_PARALLEL)
    wall, start = time.perf_counter(), time.process_time()
    module = shardc.compile(model, mesh, plan, loss=llama.loss, options=shardc.Options(fold=fold))
    program = module.lower(*args, targets)
    lowered = time.process_time()
    schedule = program.schedule("h100")
    end = time.process_time()
    return {
        "layers": layers, "ranks": ranks, "parameters": sum(p.numel() for p in model.parameters()),
        "lower": lowered - start, "schedule": end - lowered, "total": end - start, "wall": time.perf_counter() - wall,
        "held": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "collectives": len(schedule.collectives),
        "step": schedule.seconds, "exposed": schedule.exposed, "memory": schedule.memory.peak.total,
        "mfu": schedule.mfu,
        "notes": list(schedule.notes), "process_group": torch.distributed.is_initialized(),
    }  # fmt: skip


def row_of(layers: int, ranks: int, size: str, fold: bool) -> dict[str, Any]:
    """`measure` in a process of its own.

    Raises:
        SystemExit: it failed; with what it said.
    """
    command = [sys.executable, __file__, "--one", json.dumps([layers, ranks, size, fold])]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        sys.exit(run.stderr)
    made: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="16,32,64,126", help="layer counts, at the most ranks")
    parser.add_argument("--ranks", default="8,64,512,2048,16384", help="rank counts, at the most layers")
    parser.add_argument("--size", default="405b", choices=("405b", "tiny"), help="of the layers (tiny: to see it run)")
    parser.add_argument("--whole", action="store_true", help="without folding")
    parser.add_argument("--json", metavar="FILE", help="write the rows")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one is not None:
        print(json.dumps(measure(*options.one)))
        return
    layers, ranks = ([int(part) for part in text.split(",")] for text in (options.layers, options.ranks))
    cases = [(count, max(ranks)) for count in layers] + [(max(layers), count) for count in ranks[:-1]]
    rows = []
    for case in cases:
        rows.append(row_of(*case, options.size, not options.whole))
        print(f"{case[0]} layers, {case[1]} ranks: {rows[-1]['total']:.1f} s", file=sys.stderr)
    headers = [
        "layers", "ranks", "parameters", "lower s", "schedule s", "total s", "clock s", "peak GB", "collectives",
        "step ms", "exposed", "GB a rank", "MFU",
    ]  # fmt: skip
    table = [
        (
            row["layers"], row["ranks"], f"{row['parameters'] / 1e9:.1f}e9", *(f"{row[k]:.1f}" for k in
            ("lower", "schedule", "total", "wall")), f"{row['held'] / 1e9:.2f}", row["collectives"],
            f"{row['step'] * 1e3:.1f}", f"{row['exposed'] / row['step']:.1%}", f"{row['memory'] / 1e9:.1f}",
            f"{row['mfu']:.1%}",
        )
        for row in rows
    ]  # fmt: skip
    print(tabulate(table, headers, tablefmt="github", disable_numparse=True))
    first, last = rows[0], rows[len(layers) - 1]
    print(
        f"\n{last['layers']} layers take {last['total'] / first['total']:.2f} times the time of {first['layers']}, at "
        f"{last['ranks']} ranks; {'; '.join(last['notes']) or 'nothing folded'}; process group: "
        f"{'yes' if any(row['process_group'] for row in rows) else 'none'}"
    )
    if options.json:
        Path(options.json).parent.mkdir(parents=True, exist_ok=True)
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
