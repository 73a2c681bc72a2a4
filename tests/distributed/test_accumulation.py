"""Several backwards before a step add up to the one big batch; the same as FSDP2 does on the same ranks."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardc
from shardc.runtime.full_params import unshard
from tests.ranks import run_ranks
from tests.state import assert_same, batch, close, model, sharded

MICRO = 3


def big_batch() -> tuple[torch.Tensor, torch.Tensor]:
    xs, ys = zip(*(batch(seed) for seed in range(MICRO)), strict=True)
    return torch.cat(xs), torch.cat(ys)


def adds_up(plan: str) -> None:
    """Each micro-batch's loss is divided by their number: the mean of the whole."""
    source = model()
    module = sharded(source, plan)
    ours, theirs = (torch.optim.AdamW(one.parameters(), lr=0.1) for one in (module, source))
    x, y = big_batch()
    for _ in range(2):
        for seed in range(MICRO):
            (module(*module.shard_inputs(*batch(seed))) / MICRO).backward()
        F.mse_loss(source(x), y).backward()
        assert_same(module, source, grads=True)
        # An accumulator that is kept is zeroed, and the next sum starts there.
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        assert_same(module, source)


class Halves(nn.Module):
    """Uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(5, 9), nn.Linear(5, 9)

    def forward(self, x: torch.Tensor, second: bool) -> torch.Tensor:
        return self.two(x) if second else self.one(x)


def unused_in_one_micro_batch() -> None:
    torch.manual_seed(0)
    source = Halves().double()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    module = shardc.compile(source, mesh, shardc.fsdp("dp"), loss=F.mse_loss, backend="eager")
    for at, second in enumerate((False, False, True, False)):
        x, y = batch(at)
        local_x, local_y = module.shard_inputs(x, y)
        module(local_x, second, local_y).backward()
        F.mse_loss(source(x, second), y).backward()
        assert (module.two.weight.grad is None) == (at < 2)
        assert_same(module, source, grads=True)


def as_fsdp2() -> None:
    """The gradients that FSDP2 accumulates from each rank's own mean loss."""
    source = model()
    module = sharded(source, "fsdp", loss=None)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    peer = model()
    # FSDP2 takes no 0-dim parameters.
    ignored = {peer.scale, peer.empty}
    fully_shard(peer, mesh=mesh, ignored_params=ignored)
    for seed in range(MICRO):
        x, y = (tensor.chunk(2)[mesh.get_rank()] for tensor in batch(seed))
        F.mse_loss(module(x), y).backward()
        F.mse_loss(peer(x), y).backward()
    for name, param in peer.named_parameters():
        mine = module.get_parameter(name).grad
        assert (mine is None) == (param.grad is None), name
        if mine is not None and param not in ignored:
            close(unshard(mine, module.shardc.spec.storages[name]), param.grad.full_tensor(), name)


def alone_without_communication() -> None:
    source = model()
    module = sharded(source, "fsdp", ranks=1)
    optimizer, other = (torch.optim.AdamW(one.parameters(), lr=0.1) for one in (module, source))
    x, y = batch()
    for _ in range(2):
        module(*module.shard_inputs(x, y)).backward()
        F.mse_loss(source(x), y).backward()
        close(module.clip_grad_norm_(0.5), nn.utils.clip_grad_norm_(source.parameters(), 0.5))
        for one in (optimizer, other):
            one.step()
            one.zero_grad()
    assert_same(module, source)
    (program,) = module.shardc.programs.values()
    kinds = {str(node.target) for half in (program.forward, program.backward) for node in half.graph.nodes}
    assert not [kind for kind in kinds if "c10d" in kind]
    close(module.full_state_dict()["fused"], source.fused.detach())


@pytest.mark.slow
def test_two_ranks() -> None:
    run_ranks(2, *(partial(adds_up, plan) for plan in ("fsdp", "ddp", "tp")), unused_in_one_micro_batch, as_fsdp2)


def test_one_rank() -> None:
    run_ranks(1, alone_without_communication)
