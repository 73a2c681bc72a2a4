"""A step of a decoder whose sequence is split over the ranks: methods, lengths and peers, side by side.

    python benchmarks/sequence.py
    python benchmarks/sequence.py --ranks 4 --lengths 4096 --rows 'shardc/*,peer/*'
    python benchmarks/sequence.py --ranks 4 --lengths 4096 --rows 'flex/*'

Rows of flex have documents of 64 to 1,024 tokens, by `flex_attention`; their peer gathers all keys and masks scores.

Every row trains the same model on the same sequence (forward and backward, float32, gloo, one thread a rank). All
rows are in memory at once and take turns step by step. Sent are the bytes that a rank's link carried; those of
attention alone are what the program's own count says, and what docs/sequence.md says. Kept is what forward leaves for
backward.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from fnmatch import fnmatch
from functools import partial
from math import gcd
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent.parent))
import shardc  # noqa: E402
from benchmarks import documents, meters  # noqa: E402
from benchmarks.peers.context_parallel import gathered, torchs  # noqa: E402
from examples.models.llama import Llama, LlamaConfig, loss  # noqa: E402
from shardc.ir.comm_volume import tally  # noqa: E402

Step = Callable[[Tensor, Tensor], Tensor]
METHODS = ("gather", "ring", "ulysses", "auto")
# Of attention; parameters are whole here, so their gradients are all-reduced.
KINDS = {
    "gather": ("all_gather", "reduce_scatter"),
    "ring": ("permute_ranks",),
    "ulysses": ("all_to_all", "all_gather", "reduce_scatter"),
}


def model(options: argparse.Namespace) -> Llama:
    torch.manual_seed(0)
    heads = options.width // 64
    made = Llama(LlamaConfig(512, options.width, options.layers, heads, max(heads // 2, 1), 2 * options.width))
    for module in made.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return made.train()


def ours(options: argparse.Namespace, length: int, mesh: DeviceMesh, method: str) -> tuple[nn.Module, Step]:
    module = shardc.compile(model(options), mesh, shardc.cp("cp", method=method), loss=loss)
    return module, lambda *batch: module(*module.shard_inputs(*batch))


def whole(options: argparse.Namespace, length: int, mesh: DeviceMesh) -> tuple[nn.Module, Step]:
    module = model(options)
    compiled = torch.compile(module, dynamic=False)
    return module, lambda tokens, targets: loss(compiled(tokens), targets)


def packed(options: argparse.Namespace, length: int, mesh: DeviceMesh, method: str) -> tuple[nn.Module, Step]:
    module = shardc.compile(
        documents.packed(model(options), documents.documents(length)), mesh, shardc.cp("cp", method=method), loss=loss
    )
    return module, lambda *batch: module(*module.shard_inputs(*batch))


def rows() -> dict[str, Callable[..., tuple[nn.Module, Step]]]:
    out: dict[str, Callable[..., tuple[nn.Module, Step]]] = {
        f"shardc/cp/{method}": partial(ours, method=method) for method in METHODS
    }
    out |= {f"flex/{method}": partial(packed, method=method) for method in METHODS}
    out["flex/peer/gathered"] = lambda options, length, mesh: gathered(
        model(options), length, mesh, document=documents.documents(length)
    )
    out["peer/gathered"] = lambda options, length, mesh: gathered(model(options), length, mesh)
    out["torch/context_parallel"] = lambda options, length, mesh: torchs(model(options), length, mesh)
    return out | {"each rank all of it": whole}


def measure(rank: int, ranks: int, store: str, options: argparse.Namespace, length: int, found: str) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    tokens = torch.randint(0, 512, (options.rows_of_batch, length), generator=torch.Generator().manual_seed(0))
    batch = tokens, tokens.roll(-1, 1)
    chosen = {name: make for name, make in rows().items() if any(fnmatch(name, glob) for glob in options.rows)}
    built: dict[str, Any] = {}
    failed: dict[str, str] = {}
    kept: dict[str, int] = {}
    bar = tqdm(total=len(chosen) + options.steps, disable=rank != 0)
    for name, make in chosen.items():
        bar.set_description(name)
        try:
            module, step = make(options, length, mesh)
            for _ in range(2):
                step(*batch).backward()
            kept[name] = left_for_backward(module, lambda: step(*batch))  # noqa: B023
            built[name] = module, step
        except Exception as error:  # a row that cannot run says why
            failed[name] = f"{type(error).__name__}: {error}".split("\n")[0]
        bar.update()
    took: dict[str, list[tuple[float, int, float]]] = {name: [] for name in built}
    for _ in range(options.steps):
        for name, (_, step) in built.items():
            dist.barrier()
            sent, start, cpu = meters.bytes_sent(), time.perf_counter(), time.process_time()
            step(*batch).backward()
            seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
            took[name].append((seconds, meters.bytes_sent() - sent, cpu))
        bar.update()
    bar.close()
    said = {name: predicted(module, name, ranks, options, length) for name, (module, _) in built.items()}
    if rank == 0:
        torch.save((took, kept, said, failed), found)
    dist.barrier()
    dist.destroy_process_group()


def left_for_backward(module: nn.Module, forward: Callable[[], Tensor]) -> int:
    """Bytes that a forward leaves, beside parameters: what it gives autograd, or a compiled program its backward."""
    storages: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        made = forward()
        for x in getattr(made.grad_fn, "saved", {}).values():
            note(x)
    for param in module.parameters():
        local = param.to_local() if hasattr(param, "to_local") else param
        storages.pop(local.untyped_storage().data_ptr(), None)
    made.backward()
    return sum(storages.values())


def predicted(module: nn.Module, name: str, ranks: int, options: argparse.Namespace, length: int) -> list[str]:
    """KiB of attention by count and by the page, MiB kept by the schedule."""
    if name.startswith(("peer", "torch", "flex/peer", "each")):
        return ["", "", ""]
    tokens = torch.zeros(options.rows_of_batch, length, dtype=torch.int64)
    program = module.lower(tokens, tokens)  # type: ignore[operator]
    method = name.rpartition("/")[2]
    kinds = set(KINDS.get(method, sum(KINDS.values(), ())))
    counted = sum(row.bytes for half in program.step() for row in tally(half.gm, program.mesh) if row.kind in kinds)
    config = module.config if hasattr(module, "config") else model(options).config
    queries = 4 * options.rows_of_batch * length * options.width // ranks
    keys = 2 * queries * config.kv_heads // config.heads
    sharing = ranks // gcd(ranks, config.kv_heads)
    page = {"ulysses": 2 * (ranks - 1) * (2 * queries + sharing * keys) // ranks}.get(method, 3 * (ranks - 1) * keys)
    memory = program.schedule("cpu").memory
    held = max(sample.sizes[4] for sample in memory.samples)
    said = "" if method == "auto" else f"{options.layers * page / 1024:,.0f}"
    return [f"{counted / 1024:,.0f}", said, f"{held / 2**20:.0f}"]


def table(
    took: dict[str, list[tuple[float, int, float]]],
    kept: dict[str, int],
    said: dict[str, list[str]],
    failed: dict[str, str],
) -> str:
    median = {name: statistics.median(seconds for seconds, *_ in steps) for name, steps in took.items()}
    base = median.get("peer/gathered", median.get("flex/peer/gathered"))
    lines = []
    for name, steps in took.items():
        sent = statistics.median(sent for _, sent, _ in steps)
        cpu = statistics.median(cpu for *_, cpu in steps)
        lines.append([
            name, f"{1e3 * median[name]:.0f}", f"{1e3 * min(seconds for seconds, *_ in steps):.0f}",
            f"{1e3 * cpu:.0f}",
            "" if base is None else f"{median[name] / base:.2f}", f"{sent / 1024:,.0f}", *said[name][:2],
            said[name][2], f"{kept[name] / 2**20:.0f}",
        ])  # fmt: skip
    header = ["row", "median ms", "least ms", "CPU ms of a rank", "of the peer", "KiB sent", "of attention",
              "by the page", "MiB kept, predicted", "measured"]  # fmt: skip
    text = tabulate(lines, header, disable_numparse=True, colalign=("left", *["right"] * 9))
    return "\n".join([text, *(f"{name}: {why}" for name, why in failed.items())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4", help="of the world, joined by commas: one table each")
    parser.add_argument("--lengths", default="1024,4096", help="of the sequence, joined by commas: one table each")
    parser.add_argument("--rows", default="*", help="globs over row names, joined by commas")
    parser.add_argument("--steps", type=int, default=9, help="timed steps of each row")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rows-of-batch", type=int, default=1)
    options = parser.parse_args()
    options.rows = options.rows.split(",")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for ranks in map(int, options.ranks.split(",")):
        for length in map(int, options.lengths.split(",")):
            with tempfile.TemporaryDirectory() as folder:
                found = str(Path(folder) / "found")
                mp.spawn(measure, (ranks, str(Path(folder) / "store"), options, length, found), nprocs=ranks)
                print(f"\n{ranks} ranks, {length:,} tokens, load {', '.join(f'{x:.1f}' for x in os.getloadavg())}")
                print(table(*torch.load(found, weights_only=False)))


if __name__ == "__main__":
    main()
