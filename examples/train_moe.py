"""Train an unchanged Qwen3-MoE of transformers on bytes, its experts split over ranks.

python examples/train_moe.py --plan fsdp+ep --mesh dp=2,ep=2 --nproc 4 --check
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import transformers as hf
from ranks import join_mesh
from text import batch, standard_library
from tqdm import tqdm

import shardc

EXPERTS = "*.mlp.experts"
PLANS = {
    "fsdp": lambda way, axes: shardc.fsdp(axes),
    "ep": lambda way, axes: shardc.ep("ep", EXPERTS, **way),
    "fsdp+ep": lambda way, axes: shardc.fsdp(axes) | shardc.ep("ep", EXPERTS, **way),
}
SIZES = {"vocab_size": 256, "hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "num_experts": 8}
SIZES |= {"num_experts_per_tok": 2, "output_router_logits": True, "bos_token_id": None, "eos_token_id": None}
ROWS, LENGTH = 16, 64


def model() -> hf.PreTrainedModel:
    torch.manual_seed(0)
    return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**SIZES, use_cache=False)).train()


def train(module: torch.nn.Module, steps: int, shard: bool, show: bool) -> list[float]:
    text = standard_library()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    losses = []
    bar = tqdm(range(steps), desc="train" if shard else "one device", disable=not show)
    for step in bar:
        tokens, targets = batch(text, step, size=ROWS, length=LENGTH)
        given = {"input_ids": tokens, "labels": targets, "shift_labels": targets}
        loss = module(**(module.shard_inputs(**given)[1] if shard else given)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        bar.set_postfix(loss=f"{losses[-1]:.3f}")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", choices=PLANS, default="fsdp+ep")
    parser.add_argument("--mesh", help="axis sizes, such as dp=2,ep=2 (default: all ranks along ep)")
    parser.add_argument("--nproc", type=int, default=2, help="ranks to start where torchrun has not started any")
    parser.add_argument("--way", choices=["auto", "gather", "send", "bounded"], default="auto")
    parser.add_argument("--bound", type=float, default=2.0, help="of --way bounded, in rows of an even load")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--backend", choices=["inductor", "eager"], default="inductor")
    parser.add_argument("--check", action="store_true", help="train the same on one device in eager mode and compare")
    args = parser.parse_args()

    mesh = join_mesh(args.plan, args.mesh or f"ep={args.nproc}", args.nproc)
    first = dist.get_rank() == 0
    way = {"way": args.way} | ({"bound": args.bound} if args.way == "bounded" else {})
    plan = PLANS[args.plan](way, mesh.mesh_dim_names)
    module = shardc.compile(model(), mesh, plan, backend=args.backend)
    losses = train(module, args.steps, shard=True, show=first)
    held = sum(p.to_local().numel() for p in module.parameters())
    if first:
        every = sum(p.numel() for p in module.parameters())
        print(f"plan {plan} on {mesh}: a rank holds {held:,} of {every:,} parameters")
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {args.steps} steps")
    if args.check:
        alone = model()
        alone.set_experts_implementation("eager")
        expected = train(alone, args.steps, shard=False, show=first)
        apart = max(abs(ours - theirs) / theirs for ours, theirs in zip(losses, expected, strict=True))
        if first:
            print(f"largest relative difference from one device: {apart:.1e} in loss")
        assert apart < 1e-3, "the sharded run is another one"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
