"""A step of a small Qwen3-MoE whose parameters are mostly experts: ways to split them, side by side.

    python benchmarks/experts.py
    python benchmarks/experts.py --ranks 4 --choices 8 --rows 'shardc/*,peer/*'
    benchmarks/two_hosts.sh 1gbit python benchmarks/experts.py --rows 'shardc/fsdp+ep/*,peer/*'

Every row trains the same model of transformers on the same batches (forward and backward, float32, gloo, one thread a
rank). All rows are in memory at once and take turns step by step. Sent are the bytes that a rank's link carried.
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
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers as hf
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent.parent))
import shardc  # noqa: E402
from benchmarks import meters  # noqa: E402
from benchmarks.peers.expert_parallel import PRODUCTS, expert_parallel  # noqa: E402

EXPERTS = "*.experts"
Step = Callable[[Tensor], Tensor]


def model(options: argparse.Namespace) -> hf.PreTrainedModel:
    torch.manual_seed(0)
    width, inner = options.width, options.inner
    config = hf.Qwen3MoeConfig(
        vocab_size=512, hidden_size=width, moe_intermediate_size=inner, num_hidden_layers=2, head_dim=64,
        num_attention_heads=width // 64, num_key_value_heads=width // 64, num_experts=options.experts,
        num_experts_per_tok=options.choices, use_cache=False,
    )  # fmt: skip
    return hf.Qwen3MoeForCausalLM(config).train()


def ours(options: argparse.Namespace, mesh: DeviceMesh, plan: shardc.Plan) -> tuple[nn.Module, Step]:
    module = shardc.compile(model(options), mesh, plan)
    return module, lambda ids: module(input_ids=ids, labels=ids).loss


def peer(options: argparse.Namespace, mesh: DeviceMesh, product: str) -> tuple[nn.Module, Step]:
    module = expert_parallel(model(options), mesh, product)
    return module, lambda ids: module(input_ids=ids, labels=ids).loss


def fsdp2(options: argparse.Namespace, mesh: DeviceMesh) -> tuple[nn.Module, Step]:
    module = model(options)
    for layer in module.model.layers:
        layer.compile(dynamic=False)
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module, lambda ids: module(input_ids=ids, labels=ids).loss


def rows() -> dict[str, Callable[..., tuple[nn.Module, Step]]]:
    base = shardc.fsdp("ep")
    plans = {"shardc/fsdp3": base, "shardc/fsdp+ep/auto": base | shardc.ep("ep", EXPERTS)}
    plans |= {f"shardc/fsdp+ep/{way}": base | shardc.ep("ep", EXPERTS, dispatch=way) for way in ("gather", "send")}
    for chunks in (1, 2, 4):
        entry = shardc.ep("ep", EXPERTS, dispatch="bounded", capacity=2.0, chunks=chunks)
        plans["shardc/fsdp+ep/bounded" + f"/{chunks} chunks" * (chunks > 1)] = base | entry
    plans["shardc/fsdp+ep/send/2 chunks"] = base | shardc.ep("ep", EXPERTS, dispatch="send", chunks=2)
    out: dict[str, Callable[..., tuple[nn.Module, Step]]] = {n: partial(ours, plan=p) for n, p in plans.items()}
    out |= {f"peer/ep/{product}": partial(peer, product=product) for product in PRODUCTS}
    return out | {"fsdp2/blocks": fsdp2}


def measure(rank: int, ranks: int, store: str | None, options: argparse.Namespace, found: str) -> None:
    """Measures all rows on one rank, and saves what rank 0 found; without a ``store``, as a rank of the environment."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    given = {} if store is None else {"store": dist.FileStore(store, ranks), "rank": rank, "world_size": ranks}
    dist.init_process_group("gloo", **given)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
    batches = torch.randint(0, 512, (4, options.tokens // 128, 128), generator=torch.Generator().manual_seed(rank))
    chosen = {name: make for name, make in rows().items() if any(fnmatch(name, glob) for glob in options.rows)}
    built, failed = {}, {}
    bar = tqdm(total=len(chosen) + options.steps, disable=rank != 0)
    for name, make in chosen.items():
        bar.set_description(name)
        try:
            module, step = make(options, mesh)
            for at in range(2):
                loss = step(batches[at])
                loss.backward()
                module.zero_grad()
            held = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in module.parameters())
            built[name] = (module, step, held)
        except Exception as error:  # a row that cannot run says why
            failed[name] = f"{type(error).__name__}: {error}".split("\n")[0]
        bar.update()
    took: dict[str, list[tuple[float, int]]] = {name: [] for name in built}
    for at in range(options.steps):
        for name, (module, step, _) in built.items():
            dist.barrier()
            sent, start = meters.bytes_sent(), time.perf_counter()
            step(batches[at % 4]).backward()
            module.zero_grad()
            took[name].append((time.perf_counter() - start, meters.bytes_sent() - sent))
        bar.update()
    bar.close()
    if rank == 0:
        held = {name: held for name, (_, _, held) in built.items()}
        torch.save((took, held, failed), found)
    dist.barrier()
    dist.destroy_process_group()


def table(took: dict[str, list[tuple[float, int]]], held: dict[str, int], failed: dict[str, str]) -> str:
    median = {name: statistics.median(seconds for seconds, _ in steps) for name, steps in took.items()}
    base = median.get("shardc/fsdp3")
    best = min((value for name, value in median.items() if name.startswith("peer/")), default=None)
    lines = []
    for name, steps in took.items():
        sent = statistics.median(sent for _, sent in steps)
        lines.append([
            name, f"{1e3 * median[name]:.0f}", f"{1e3 * min(seconds for seconds, _ in steps):.0f}",
            "" if base is None else f"{median[name] / base:.2f}", "" if best is None else f"{median[name] / best:.2f}",
            f"{sent / 1024:,.0f}", f"{2 * 4 * held[name] / 2**20:.1f}",
        ])  # fmt: skip
    header = ["row", "median ms", "least ms", "of fsdp3", "of the peer", "KiB sent", "MiB of params and grads"]
    text = tabulate(lines, header, disable_numparse=True, colalign=("left", *["right"] * 6))
    return "\n".join([text, *(f"{name}: {why}" for name, why in failed.items())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4", help="of the world, joined by commas: one table each")
    parser.add_argument("--rows", default="*", help="globs over row names, joined by commas")
    parser.add_argument("--steps", type=int, default=15, help="timed steps of each row")
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--choices", type=int, default=2, help="experts of a token")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--inner", type=int, default=512, help="hidden features of an expert")
    parser.add_argument("--tokens", type=int, default=512, help="of a rank; a multiple of 128")
    options = parser.parse_args()
    options.rows = options.rows.split(",")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rank, world = os.environ.get("RANK"), int(os.environ.get("WORLD_SIZE", 1))
    for ranks in map(int, options.ranks.split(",")) if rank is None else (world,):
        with tempfile.TemporaryDirectory() as folder:
            found = str(Path(folder) / "found")
            if rank is None:
                mp.spawn(measure, (ranks, str(Path(folder) / "store"), options, found), nprocs=ranks)
            else:
                measure(int(rank), world, None, options, found)
                if rank != "0":
                    continue
            print(f"\n{ranks} ranks, {options.experts} experts, {options.choices} of them a token, load "
                  f"{', '.join(f'{x:.1f}' for x in os.getloadavg())}")  # fmt: skip
            print(table(*torch.load(found, weights_only=False)))


if __name__ == "__main__":
    main()
