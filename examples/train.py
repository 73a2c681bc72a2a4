r"""Train a language model: one file to copy. CUDA and NCCL where there are GPUs, else CPUs and gloo.

    python examples/train.py                                              # one process
    torchrun --nproc-per-node 8 examples/train.py --bf16                  # one node
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d \
        --rdzv-endpoint FIRST_HOST:29500 examples/train.py --bf16         # on each of two nodes
    torchrun --nproc-per-node 8 examples/train.py --tp 4 --bf16           # FSDP over 2 times tensor parallelism over 4
    torchrun --nproc-per-node 8 examples/train.py --rows 64 --microbatches 4 # the activations of 16 rows
    torchrun --nproc-per-node 8 examples/train.py --hf Qwen/Qwen3-0.6B --bf16

It runs again from the last checkpoint of ``--checkpoint``, on any number of ranks. The text is the source of Python's
standard library; put your data loader in place of `batches`.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.profiler import profile, schedule

import shardc

# Dense bf16 FLOP/s of a device, by a word of its name (NVIDIA's data sheets), for the share that a step uses (MFU).
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}


class Block(nn.Module):
    """Causal attention and an MLP, each behind a norm."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """A decoder over bytes: tokens ``i64[batch, length]`` -> logits ``[batch, length, 256]``."""

    def __init__(self, dim: int, layers: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, heads=8) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


TP = shardc.tp("tp", colwise=["*.q", "*.k", "*.v", "*.up"], rowwise=["*.o", "*.down"])


def loss_of(output, targets: Tensor) -> Tensor:
    """The mean loss of the global batch; ``output``: logits, or what a Hugging Face model returns."""
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def text(limit: int = 2_000_000) -> Tensor:
    """Bytes to train on, ``uint8[n]``."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)[:limit]), dtype=torch.uint8)


def batches(first: int, steps: int, rows: int, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The global batch of each step, the same on every rank."""
    data = text()
    for step in range(first, steps):
        starts = torch.randint(len(data) - length, (rows, 1), generator=torch.Generator().manual_seed(step))
        windows = data[starts + torch.arange(length + 1)].long()
        yield windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


class Checkpoints:
    """Saves every so often, written while training goes on; a checkpoint is named when it is complete."""

    def __init__(self, folder: Path | None, module: nn.Module, optimizer, scheduler) -> None:
        self.folder, self.parts, self.scheduler = folder, (module, optimizer), scheduler
        self.writing, self.step = None, 0
        self.group = dist.new_group(backend="gloo")  # of its own: it is written while a step communicates

    def state(self, step: int) -> dict:
        model, optimizer = get_state_dict(*self.parts)
        return {"model": model, "optimizer": optimizer, "scheduler": self.scheduler.state_dict(), "step": step}

    def resume(self) -> int:
        """Load the last complete checkpoint; return how many steps it has, 0 if there is none."""
        complete = [int(path.name[5:]) for path in self.folder.glob("step_*")] if self.folder else []
        if not complete:
            return 0
        state = self.state(0)
        dcp.load(state, checkpoint_id=self.folder / f"step_{max(complete)}")
        set_state_dict(*self.parts, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        return state["step"]

    def save(self, step: int) -> None:
        if self.folder:
            self.finish()
            self.step = step
            writing = self.folder / f"writing_{step}"
            self.writing = dcp.async_save(self.state(step), checkpoint_id=writing, process_group=self.group)

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, and name it."""
        if self.writing is not None:
            self.writing.result()
            self.writing = None
            dist.barrier()
            if dist.get_rank() == 0:
                (self.folder / f"writing_{self.step}").rename(self.folder / f"step_{self.step}")
            dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rows", type=int, default=16, help="of the global batch")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--tp", type=int, default=1, help="ranks of tensor parallelism; the others are FSDP's")
    parser.add_argument("--microbatches", type=int, default=1, help="parts of each rank's batch, one after the other")
    parser.add_argument("--bf16", action="store_true", help="compute and gather in bfloat16, reduce in float32")
    parser.add_argument("--hf", help="a Hugging Face model to go on from: its name, or a folder")
    parser.add_argument("--checkpoint", type=Path, help="a folder to save to, and to go on from")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--profile", type=Path, help="a file for the trace of ten steps, for ui.perfetto.dev")
    args = parser.parse_args()

    mesh = shardc.mesh(dp=-1, tp=args.tp)
    device, say = mesh.device_type, print if dist.get_rank() == 0 else (lambda *text: None)
    with torch.device("meta"):
        if args.hf:
            from transformers import AutoConfig, AutoModelForCausalLM

            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.hf))
        else:
            model = Decoder(args.dim, args.layers, args.length)
    plan = shardc.fsdp("dp")
    if args.microbatches > 1:
        plan |= shardc.microbatches(args.microbatches)
    if args.tp > 1:
        plan |= shardc.Plan.from_hf(model) if args.hf else TP
    if args.bf16:
        plan |= shardc.precision(param=torch.bfloat16, reduce=torch.float32)
    module = shardc.compile(model, mesh, plan, loss=loss_of)
    torch.manual_seed(0)
    if args.hf:
        from huggingface_hub import snapshot_download

        module.shardc.load_pretrained(args.hf if Path(args.hf).is_dir() else snapshot_download(args.hf))
    else:
        module.shardc.init_weights()
    optimizer = torch.optim.AdamW(module.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / args.warmup, 0.5 + 0.5 * math.cos(math.pi * min(step / args.steps, 1.0))),
    )
    checkpoints = Checkpoints(args.checkpoint, module, optimizer, scheduler)
    first = checkpoints.resume()
    count = sum(p.numel() for p in module.parameters())
    say(f"{count:,} parameters on {dist.get_world_size()} ranks of {device}, {plan}, from step {first}")

    peak = next((p for name, p in PEAKS.items() if device == "cuda" and name in torch.cuda.get_device_name()), None)
    trace = profile(schedule=schedule(wait=5, warmup=1, active=10, repeat=1)) if args.profile else None
    if trace:
        trace.start()
    began, since = time.perf_counter(), first
    loader = batches(first, args.steps, args.rows, args.length)
    for step, batch in enumerate(shardc.batches(loader, module), first):  # each rank's part, on its device
        loss = module(*batch)
        loss.backward()
        norm = module.shardc.clip_grad_norm_(args.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if trace:
            trace.step()
        if (step + 1) % 10 == 0 or step + 1 == args.steps:
            value, gradient = loss.item(), norm.item()  # waits for the device
            rate = args.rows * args.length * (step + 1 - since) / (time.perf_counter() - began)
            share = f", MFU {6 * count * rate / dist.get_world_size() / peak:.1%}" if peak else ""
            say(f"step {step + 1}: loss {value:.3f}, norm {gradient:.2f}, {rate:,.0f} tokens/s{share}")
            began, since = time.perf_counter(), step + 1
        if (step + 1) % args.every == 0 or step + 1 == args.steps:
            checkpoints.save(step + 1)
    checkpoints.finish()
    if trace:
        trace.stop()
        if dist.get_rank() == 0:
            trace.export_chrome_trace(str(args.profile))
            say(f"{args.profile}: the trace of rank 0")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
