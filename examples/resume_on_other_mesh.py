"""Train under FSDP, save, and resume from that checkpoint under tensor parallelism and on one device: the same losses.

python examples/resume_on_other_mesh.py --nproc 2
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models.llama import Llama, LlamaConfig, loss
from ranks import PLANS, join_mesh
from text import batch, standard_library
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

import shardc

CONFIG = LlamaConfig(256, 32, 2, heads=4, kv_heads=2, hidden=72)
STEPS = 3  # before the checkpoint, and after it


def train(module, optimizer, batches, steps) -> list[float]:
    """The losses of ``steps``, of a sharded module or of the plain one."""
    losses = []
    for x, y in map(batches, steps):
        value = module(*module.shard_inputs(x, y)) if hasattr(module, "shard_inputs") else loss(module(x), y)
        value.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def state_of(module, optimizer) -> dict:
    return dict(zip(("model", "optimizer"), get_state_dict(module, optimizer), strict=True))


def resume(module, optimizer, folder) -> None:
    state = state_of(module, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nproc", type=int, default=2)
    mesh = join_mesh("fsdp", None, parser.parse_args().nproc)
    meshes = {"fsdp": mesh, "tp": init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))}
    say = print if dist.get_rank() == 0 else (lambda *text: None)
    batches = partial(batch, standard_library(), size=4, length=16)
    adamw = partial(torch.optim.AdamW, lr=3e-3, eps=1e-6)

    torch.manual_seed(0)
    module = shardc.compile(Llama(CONFIG), mesh, PLANS["fsdp"](), loss=loss, backend="eager")
    optimizer = adamw(module.parameters())
    say("trained under fsdp:", *(f"{x:.5f}" for x in train(module, optimizer, batches, range(STEPS))))
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    dcp.save(state_of(module, optimizer), checkpoint_id=folder[0])

    for where in ("fsdp", "tp", "one device"):
        other = Llama(CONFIG)
        if where in meshes:
            other = shardc.compile(other, meshes[where], PLANS[where](), loss=loss, backend="eager")
        optimizer = adamw(other.parameters())
        resume(other, optimizer, folder[0])
        losses = train(other, optimizer, batches, range(STEPS, 2 * STEPS))
        say(f"resumed on {where}:", *(f"{x:.5f}" for x in losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
