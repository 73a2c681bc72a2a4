"""Mixed precision on real ranks, beside FSDP2's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import shardc
from examples.models import llama
from shardc import fsdp, precision
from tests.ranks import run_ranks

LOW = precision(param=torch.bfloat16, reduce=torch.float32)


def as_fully_shard() -> None:
    """A step of a decoder is as near to full precision as FSDP2's is with the same policy, and in the same dtypes."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    source, (tokens,) = llama.tiny()
    theirs, _ = llama.tiny()
    theirs.load_state_dict(source.state_dict())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in theirs.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(theirs, mesh=mesh, mp_policy=policy)
    ours = shardc.compile(source, mesh, fsdp("dp") | LOW, loss=llama.loss, backend="eager")
    targets = tokens.roll(-1, 1)
    rows = slice(dist.get_rank() * len(tokens) // 2, (dist.get_rank() + 1) * len(tokens) // 2)
    value = ours(tokens[rows], targets[rows])
    value.backward()
    llama.loss(theirs(tokens[rows]), targets[rows]).backward()
    exact = llama.loss(source(tokens), targets)
    exact.backward()
    torch.testing.assert_close(value.detach(), exact.detach(), rtol=1e-2, atol=1e-2, check_dtype=False)
    for name, p in source.named_parameters():
        mine, other = ours.get_parameter(name).grad, theirs.get_parameter(name).grad
        assert mine.dtype == other.dtype == torch.float32
        error = (mine.full_tensor() - p.grad).norm() / p.grad.norm()
        allowed = (other.full_tensor() - p.grad).norm() / p.grad.norm()
        assert error < 1.5 * allowed, (name, error, allowed)
    kept = shardc.compile(
        source, mesh, fsdp("dp") | precision(param=torch.bfloat16, keep_low_precision_grads=True),
        loss=llama.loss, backend="eager",
    )  # fmt: skip
    kept(tokens[rows], targets[rows]).backward()
    assert {p.grad.dtype for p in kept.parameters()} == {torch.bfloat16}


@pytest.mark.slow
def test_two_ranks_agree_with_fully_shard() -> None:
    run_ranks(2, as_fully_shard)
