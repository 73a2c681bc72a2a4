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

SIZES = {"vocab_size": 256, "hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "num_experts": 8}
SIZES |= {"num_experts_per_tok": 2, "output_router_logits": True, "bos_token_id": None, "eos_token_id": None}


def model() -> hf.PreTrainedModel:
    torch.manual_seed(0)
    return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**SIZES, use_cache=False)).train()


def train(module: torch.nn.Module, steps: int, shard: bool) -> list[float]:
    text, losses = standard_library(), []
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    bar = tqdm(range(steps), desc="train" if shard else "one device", disable=dist.get_rank() != 0)
    for step in bar:
        tokens, targets = batch(text, step, size=16, length=64)
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
    parser.add_argument("--plan", choices=["fsdp", "ep", "fsdp+ep"], default="fsdp+ep")
    parser.add_argument("--mesh", help="axis sizes, such as dp=2,ep=2 (default: all ranks along ep)")
    parser.add_argument("--nproc", type=int, default=2, help="ranks to start where torchrun has not started any")
    parser.add_argument("--way", choices=["auto", "gather", "send"], default="auto", help="how rows reach experts")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--backend", choices=["inductor", "eager"], default="inductor")
    parser.add_argument("--check", action="store_true", help="train the same on one device and compare")
    args = parser.parse_args()

    mesh = join_mesh(args.plan, args.mesh or f"ep={args.nproc}", args.nproc)
    say = print if dist.get_rank() == 0 else (lambda *text: None)
    plans = {"fsdp": shardc.fsdp(mesh.mesh_dim_names), "ep": shardc.ep("ep", "*.mlp.experts", dispatch=args.way)}
    plan = shardc.Plan()
    for part in args.plan.split("+"):
        plan |= plans[part]
    module = shardc.compile(model(), mesh, plan, backend=args.backend)
    losses = train(module, args.steps, shard=True)
    held, every = (sum(size(p) for p in module.parameters()) for size in (lambda p: p.to_local().numel(), torch.numel))
    say(f"plan {plan}: a rank holds {held:,} of {every:,} parameters")
    say(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {args.steps} steps")
    for name, counts in shardc.expert_tokens(module).items():
        say(f"tokens of each expert in {name}: {counts.tolist()}")
    if args.check:
        expected = train(model(), args.steps, shard=False)
        apart = max(abs(ours - theirs) / theirs for ours, theirs in zip(losses, expected, strict=True))
        say(f"largest relative difference from one device: {apart:.1e} in loss")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
