"""Train a Llama-style decoder as a byte-level language model on Python's standard library, under any plan.

python examples/train_decoder.py --plan fsdp+tp --mesh dp=2,tp=2 --nproc 4 --check
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import torch
import torch.distributed as dist
from checkpoints import Checkpoints, steps
from models.llama import Llama, loss
from ranks import PLANS, join_mesh
from sample import sample
from single import compare
from sizes import SIZES
from text import batch, show, standard_library
from tqdm import tqdm

import shardc


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", choices=PLANS, default="fsdp")
    parser.add_argument("--mesh", help="axis sizes, such as dp=2,tp=2 (default: what suits the plan)")
    parser.add_argument("--microbatches", type=int, default=1, help="parts of each rank's batch, one after the other")
    parser.add_argument("--nproc", type=int, default=2, help="ranks to start where torchrun has not started any")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--steps", type=int, help="300, or 60 with --check")
    parser.add_argument("--backend", choices=["inductor", "eager"], default="inductor")
    parser.add_argument("--dtype", choices=["float32", "float64"], help="float32; float64 with --check")
    parser.add_argument("--check", action="store_true", help="train the same on one device and compare")
    parser.add_argument("--checkpoint", help="a directory to save to every 10 steps, and to resume from")
    parser.add_argument("--kill-at", type=steps, default=(), help="steps after which a rank dies, such as 20,40")
    args = parser.parse_args()
    args.steps = args.steps or (60 if args.check else 300)
    args.dtype = args.dtype or ("float64" if args.check else "float32")

    mesh = join_mesh(args.plan, args.mesh, args.nproc, restarts=len(args.kill_at))
    say = print if dist.get_rank() == 0 else (lambda *text: None)
    torch.set_default_dtype(getattr(torch, args.dtype))
    config, size, length, lr = SIZES[args.size]
    batches = partial(batch, standard_library(), size=size, length=length)

    with torch.device("meta"):
        model = Llama(config)
    plan = PLANS[args.plan]() | shardc.microbatches(args.microbatches) | shardc.Plan(outputs="...")  # whole, to sample
    module = shardc.compile(model, mesh, plan, loss=loss, backend=args.backend)
    torch.manual_seed(0)
    module.init_weights(None)
    optimizer = torch.optim.AdamW(module.parameters(), lr=lr)
    say(f"plan {args.plan} on {mesh}: {sum(p.numel() for p in module.parameters()):,} parameters")

    run = Checkpoints(args.checkpoint, module, optimizer, kill_at=args.kill_at)
    losses, times = run.resume(), [time.perf_counter()]
    for step in (bar := tqdm(range(len(losses), args.steps), desc="train", disable=dist.get_rank() != 0)):
        value = module(*module.shard_inputs(*batches(step)))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
        times.append(time.perf_counter())
        run.after(len(losses), losses)
        bar.set_postfix(loss=f"{losses[-1]:.3f}", tokens_per_s=f"{size * length / (times[-1] - times[-2]):,.0f}")
    rate = size * length * (len(times) - 2) / (times[-1] - times[1] or 1.0)
    say(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {args.steps} steps, {rate:,.0f} tokens/s after the first step")

    if args.check:
        say(compare(module, losses, Llama(config), loss, batches, lr, args.backend))
    say("sampled:", show(sample(module, b"def ", count=2 * length, length=length, copies=dist.get_world_size())))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
