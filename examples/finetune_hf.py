"""Fine-tune a Hugging Face model with Trainer, and go on from a checkpoint under another plan. Nothing is downloaded.

python examples/finetune_hf.py --plan fsdp --nproc 2 --check
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import one_process
import torch
import torch.distributed as dist
import transformers as hf
from ranks import default_mesh, join_mesh
from text import show
from tiny_hf import LENGTHS, PLANS, history, llama, training
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc.integrations.accelerate import Trainer


def trainer_for(plan: str, folder: Path, args: argparse.Namespace) -> Trainer:
    """A Trainer of the published files under ``plan``: they go straight into shards."""
    axes = dict(axis.split("=") for axis in default_mesh(plan, dist.get_world_size()).split(","))
    mesh = init_device_mesh("cpu", tuple(map(int, axes.values())), mesh_dim_names=tuple(axes))
    with torch.device("meta"):
        model = llama(args.dtype)
    module = shardc.compile(model, mesh, PLANS[plan](model), backend=args.backend, dynamic=LENGTHS)
    module.load_pretrained(folder.parent / "published")
    return Trainer(module, **training(folder, args.steps, parts=dist.get_world_size() // int(axes.get("tp", 1))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", choices=PLANS, default="fsdp")
    parser.add_argument("--then", choices=PLANS, default="tp", help="the plan that goes on from the middle")
    parser.add_argument("--nproc", type=int, default=2, help="ranks to start where torchrun has not started any")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--backend", choices=["inductor", "eager"], default="inductor")
    parser.add_argument("--check", action="store_true", help="in float64, and compare with one process without shardc")
    args = parser.parse_args()
    args.dtype = torch.float64 if args.check else torch.float32
    join_mesh("fsdp", None, args.nproc)
    say = print if dist.get_rank() == 0 else (lambda *text: None)
    hf.logging.disable_progress_bar()
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    folder, middle = Path(names[0]), args.steps // 2
    if dist.get_rank() == 0:
        llama(args.dtype).save_pretrained(folder / "published")
    dist.barrier()

    trainer = trainer_for(args.plan, folder / "tuned", args)
    trainer.train()
    losses, scores = history(trainer)
    say(f"{args.plan}: loss {losses[0]:.4f} -> {losses[-1]:.4f} in {args.steps} steps, evaluated {scores[-1]:.4f}")

    trainer = trainer_for(args.then, folder / "resumed", args)
    trainer.train(resume_from_checkpoint=str(folder / "tuned" / f"checkpoint-{middle}"))
    again, _ = history(trainer)
    say(f"{args.then}, resumed after step {middle}: loss {again[-1]:.4f} in step {args.steps}")
    trainer.save_model(folder / "final")  # files that from_pretrained reads

    prompt = torch.tensor([list(b"    def __init__(self")])
    asked = {"max_new_tokens": 48, "do_sample": False, "pad_token_id": 0}
    tokens = trainer.model.generate(prompt, **asked)
    say("generated:", repr(show(tokens[0])))
    if args.check and dist.get_rank() == 0:
        print(one_process.compare(losses, again, scores))
        print(one_process.generated(folder / "final", prompt, asked, tokens))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
