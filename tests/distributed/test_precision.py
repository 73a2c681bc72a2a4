"""Mixed precision on real ranks, beside FSDP2's."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
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


class Block(nn.Module):
    """Attention with positions from tables that it is given; one norm is a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor, tables: dict[str, Tensor], *, scale: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        q, k = (t * tables["cos"] + t.flip(-1) * tables["sin"] for t in (q, k))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)) * scale


class Decoder(nn.Module):
    """Its rotary tables are float32 buffers, which its layers are called with."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.layers = nn.ModuleList(Block() for _ in range(6))
        angles = torch.arange(4.0)[:, None] * torch.arange(1.0, 9.0)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Tensor) -> Tensor:
        x, scale = self.embed(tokens), self.cos.mean()
        for layer in self.layers:
            x = layer(x, {"cos": self.cos, "sin": self.sin}, scale=scale)
        return self.head(x)


def by_module() -> None:
    """Policies by module do what FSDP2's do: values and gradients of the same dtypes, equal up to their rounding."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    low, full = MixedPrecisionPolicy(torch.bfloat16, torch.float32), MixedPrecisionPolicy(torch.float32)
    exact = MixedPrecisionPolicy(torch.float32, output_dtype=torch.bfloat16)
    half = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    torch.manual_seed(0)
    source = Decoder()
    theirs = copy.deepcopy(source)
    for at, layer in enumerate(theirs.layers):
        fully_shard(layer.norm, mesh=mesh, mp_policy=exact if at == 1 else low)
        fully_shard(layer, mesh=mesh, mp_policy=half if at == 5 else low)
    fully_shard(theirs.head, mesh=mesh, mp_policy=full)
    fully_shard(theirs, mesh=mesh, mp_policy=low)
    plan = fsdp("dp") | LOW | precision(param=torch.float32, modules="head")
    plan |= precision(param=torch.float32, output=torch.bfloat16, modules="layers.1.norm")
    plan |= precision(param=torch.bfloat16, modules="layers.5")
    tokens = torch.randint(16, (4, 4))
    rows = tokens.chunk(2)[dist.get_rank()]
    theirs(rows).square().mean().backward()
    for fold in (None, False):
        options = shardc.Options(fold=fold)
        ours = shardc.compile(source, mesh, plan, backend="eager", options=options)
        out = ours(rows)
        assert out.dtype == torch.float32
        out.square().mean().backward()
        for name, param in theirs.named_parameters():
            mine = ours.get_parameter(name).grad
            assert mine.dtype == param.grad.dtype
            torch.testing.assert_close(mine.full_tensor(), param.grad.full_tensor(), rtol=2e-2, atol=2e-3)


def one_rank_alone() -> None:
    """Casts are decided by the plan: a rank whose inputs are in another dtype is told so, and no rank hangs."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    module = shardc.compile(nn.Linear(4, 4), mesh, fsdp("dp") | LOW, backend="eager")
    mine = torch.float32 if dist.get_rank() else torch.bfloat16
    with pytest.raises(shardc.ShardcError, match="float32|bfloat16|f32|bf16"):
        module(torch.ones(2, 4, dtype=mine))


@pytest.mark.slow
@pytest.mark.parametrize("case", [as_fully_shard, by_module, one_rank_alone])
def test_two_ranks_agree_with_fully_shard(case: Callable[[], None]) -> None:
    run_ranks(2, case)
