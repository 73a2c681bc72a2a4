"""One training step of a decoder, sharded by shardc and by its peers, side by side on the same work.

    python benchmarks/train_step.py --size tiny,small --steps 15
    python benchmarks/train_step.py --size tiny --rows 'limit,ddp/*,shardc/ddp' --json out.json --png out.png
    python benchmarks/train_step.py --device cuda --size 8b4 --rows 'limit,fsdp2/blocks/*/bf16,shardc/fsdp?/bf16'
    benchmarks/two_hosts.sh 1gbit python benchmarks/train_step.py --size tiny --steps 15

Every row (see benchmarks/peers/) trains the same model on the same batches: AdamW, float32, gloo, one thread a
rank; rows of "bf16" cast parameters to it and reduce gradients in float32. Each has worker processes of its own; the
rows of a family take turns step by step, so that what else the machine does falls on all alike, and only the row whose
turn it is has work to do. Families run one after another, each with the limit (every rank alone on its share of the
batch, in float32) beside it. All rows of a family are in memory at once, as far as it has room for them by what one
device took; larger families are cut into parts, each with the limit and shardc's rows (`--at-once` says how many rows,
`--rows` picks fewer). A row that cannot run says why and the others go on. What was measured of a family is in the
files as soon as the family is through.

On GPUs, each rank has one, over NCCL; products of float32 are TF32. Rows run one after another there, each alone. With
one GPU there is one rank: what is seen is the host's overhead, the kernels and memory.

Started by itself it runs two ranks on this machine, or one for each of its GPUs; under torchrun, or with RANK,
WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, it is one of the hosts of a run.
"""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks import chart, meters, report  # noqa: E402
from benchmarks.peers.rows import groups  # noqa: E402
from benchmarks.stage import perform, room, together  # noqa: E402
from benchmarks.work import SIZES, train_alone  # noqa: E402


def main() -> None:
    options = _options()
    _start_ranks(options.device)
    # So that a host that is told to stop ends its workers first.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    torch.set_num_threads(1)
    # A host waits here for the others while its own workers compile.
    dist.init_process_group("gloo", timeout=timedelta(hours=1))
    leads = dist.get_rank() == 0
    conditions = _conditions(options)
    single: dict[str, float] = {}
    results: list[report.Result] = []
    with tqdm(total=0, disable=not leads) as bar, _cache(options.cache) as cache:

        def progress(name: str) -> None:
            bar.set_description(name)
            bar.update()

        for size in options.size:
            work = SIZES[size]
            at_once: int | None = None
            if leads:
                bar.set_description("one device")
                single[size], taken = train_alone(
                    work, options.warmup + options.steps, dist.get_world_size(), options.device
                )
                at_once = options.at_once or room(meters.available(), taken, dist.get_world_size())
            chosen = list(groups(options.rows, None if options.device != "cpu" else together(at_once)[0]).items())
            if options.device != "cpu":
                chosen = [(family, [row]) for family, rows in chosen for row in rows]
            bar.total += (options.warmup + options.steps) * sum(len(rows) for _, rows in chosen)
            for family, rows in chosen:
                results += perform(
                    size, work, family, rows,
                    steps=options.steps, warmup=options.warmup, trace=options.trace, cache=cache,
                    device=options.device, progress=progress,
                )  # fmt: skip
                if leads and options.json:
                    Path(options.json).write_text(report.to_json(results, single, conditions))
                if leads and options.png:
                    chart.draw(results, options.png)
    if leads:
        print(report.markdown(results, single, conditions))
    dist.barrier()
    dist.destroy_process_group()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="of the ranks (default: cpu)")
    parser.add_argument("--size", default="tiny", help=f"of {', '.join(SIZES)}, joined by commas")
    parser.add_argument("--rows", default="*", help="globs over row names, joined by commas")
    parser.add_argument("--steps", type=int, default=15, help="timed steps of each row")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them, compilation included")
    parser.add_argument("--at-once", type=int, help="rows in memory at once (default: as memory allows)")
    parser.add_argument("--json", help="write all numbers to this file")
    parser.add_argument("--png", help="draw a bar chart to this file")
    parser.add_argument("--cache", help="keep what is compiled here, for later runs (default: start from nothing)")
    parser.add_argument("--trace", action="store_true", help="print the traceback of a row that fails")
    options = parser.parse_args()
    options.size, options.rows = options.size.split(","), options.rows.split(",")
    if unknown := set(options.size) - set(SIZES):
        parser.error(f"unknown size {', '.join(sorted(unknown))}: use {', '.join(SIZES)}")
    if options.steps < 1 or options.warmup < 1:
        parser.error("--steps and --warmup are at least 1: the first step compiles")
    if not groups(options.rows):
        parser.error("no row matches --rows")
    return options


def _start_ranks(device: str) -> None:
    """Return inside a rank; elsewhere replace this process by torchrun with the ranks of this machine."""
    if "RANK" in os.environ:
        return
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    ranks = 2 if device == "cpu" else torch.get_device_module(device).device_count()
    launch = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}"]
    os.execv(sys.executable, [sys.executable, *launch, "--", *sys.argv])


@contextmanager
def _cache(kept: str | None) -> Iterator[str]:
    """The compilers' cache of the whole run: ``kept``, or a directory of rank 0's that goes when the run is over."""
    if kept is not None:
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="ruler_", ignore_cleanup_errors=True) as folder:
        mine: list[str] = together(folder)
        yield mine[0]
        dist.barrier()


def _conditions(options: argparse.Namespace) -> list[str]:
    """What was measured where, in lines."""
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    link = os.environ.get("GLOO_SOCKET_IFNAME", "any interface")
    if rate := os.environ.get("RULER_LINK"):
        link += f", limited to {rate}"
    ranks, cores = dist.get_world_size(), os.cpu_count()
    where = f"{ranks} ranks on {cores} cores; gloo over {link}"
    if options.device != "cpu":
        kind = torch.get_device_module(options.device).get_device_name(0)
        where = f"{ranks} ranks, each on a {kind}, NCCL; {cores} cores; products of float32 are TF32"
    return [
        f"{now}; torch {torch.__version__}; {where}",
        f"load averages before: {load} (the run itself makes about {dist.get_world_size()})",
        f"AdamW, float32 (rows of bf16: computed in it), one thread a rank; {options.steps} timed steps after "
        f"{options.warmup}, rows of a family in turn",
        f"first step: rows share the compilers' cache, {'kept from earlier runs' if options.cache else 'new'}; "
        "what an earlier row compiled costs nothing",
    ]


if __name__ == "__main__":
    main()
