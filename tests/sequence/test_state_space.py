"""Layers that pass a state along a split sequence equal one device, and send no more of the sequence than is said."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

import shardc
from shardc.ir.comm_volume import collective_kind
from shardc.ir.mesh import Mesh
from tests.experts.alike import trains_alike as trains_language_model_alike
from tests.models.alike import relative, trains_alike
from tests.ranks import device_mesh, run_ranks
from tests.sequence.models import batch
from tests.sequence.state_space import CHUNK, HEADS, LAYERS, SIZE, WIDTH, build

MESHES: tuple[tuple[dict[str, int], int], ...] = (
    ({"cp": 2}, 16), ({"cp": 3}, 12), ({"cp": 4}, 16), ({"dp": 2, "cp": 2}, 16), ({"cp": 2}, 20), ({"cp": 3}, 16),
)  # fmt: skip
QUICK = {"mamba2", "summed", "hyena"}


def plan(mesh: dict[str, int], order: str = "contiguous") -> shardc.Plan:
    cp = shardc.cp("cp", order=order)
    return shardc.fsdp(("dp", "cp")) | cp if "dp" in mesh else cp


def cases() -> list[Any]:
    """Every layer on every mesh in both orders; all but three are slow."""
    out = []
    for layer in LAYERS:
        for mesh, length in MESHES:
            for order in ("contiguous", "striped"):
                quick = layer in QUICK and (mesh, length, order) == ({"cp": 2}, 16, "contiguous")
                out.append(pytest.param(layer, mesh, length, order, marks=() if quick else pytest.mark.slow))
    return out


@pytest.mark.parametrize(("layer", "mesh", "length", "order"), cases())
def test_equals_one_device(layer: str, mesh: dict[str, int], length: int, order: str) -> None:
    trains_alike(build(layer), (torch.randn(2, length, WIDTH),), mesh, plan(mesh, order), steps=1)


# --- what is sent


def sent(layer: str, ranks: int, length: int) -> dict[str, list[int]]:
    """Kind of collective -> elements that each sends or takes in, without sums of gradients of parameters."""
    module = shardc.compile(build(layer), shardc.Mesh(cp=ranks), plan({"cp": ranks}), loss=lambda y: y.square().mean())
    program = module.lower(torch.empty(1, length, WIDTH))
    out: dict[str, list[int]] = {}
    for half in ("partition", "partition.backward"):
        for node in program.graph(half).nodes:
            kind = collective_kind(node) if node.op == "call_function" else None
            if kind not in (None, "all_reduce"):
                out.setdefault(str(kind), []).append(node.meta["val"].numel())
    return out


def test_mamba_2_gathers_states_of_chunks_and_no_token() -> None:
    """Forward, states and decays of all chunks; backward, gradients of states. Neighbours exchange three places."""
    for ranks, length in ((2, 32), (4, 64)):
        chunks, places = length // CHUNK, 3 * 3 * WIDTH
        states = chunks * HEADS * SIZE * SIZE
        moved = sent("mamba2", ranks, length)
        assert sorted(moved.pop("all_gather")) == sorted([states, chunks * HEADS, states])
        assert moved == {"permute_ranks": [places, places]}


def test_running_sums_gather_a_sum_of_each_rank() -> None:
    """Of keys times values, and of keys; and of the gradients of both."""
    products, keys = HEADS * SIZE * SIZE, HEADS * SIZE
    for ranks, length in ((2, 32), (4, 64)):
        moved = sent("summed", ranks, length)
        assert sorted(moved.pop("all_gather")) == sorted([ranks * products, ranks * keys] * 2) and not moved


# --- models of transformers


def language_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "use_cache": False}
    attention = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24}
    scan = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 4, "mamba_chunk_size": 4}
    delta = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 4, "head_dim": 8}
    delta |= {"linear_value_head_dim": 4, "layer_types": ["linear_attention"], "mlp_only_layers": [0]}
    configs: dict[str, tuple[Any, Any]] = {
        "mamba": (hf.MambaForCausalLM, hf.MambaConfig(**sizes, state_size=4)),
        "mamba2": (
            hf.Mamba2ForCausalLM,
            hf.Mamba2Config(**sizes, state_size=4, num_heads=4, head_dim=8, n_groups=2, chunk_size=4),
        ),
        "bamba": (
            hf.BambaForCausalLM,
            hf.BambaConfig(**sizes | {"num_hidden_layers": 2}, **attention, **scan, attn_layer_indices=[1]),
        ),
        "rwkv": (
            hf.RwkvForCausalLM,
            hf.RwkvConfig(**sizes | {"num_hidden_layers": 2}, intermediate_size=24, context_length=32),
        ),
        "qwen3_next": (hf.Qwen3NextForCausalLM, hf.Qwen3NextConfig(**sizes, **attention, **delta, num_experts=0)),
    }
    make, config = configs[name]
    return make(config).double().train()


@pytest.mark.slow
@pytest.mark.parametrize("order", ["contiguous", "striped"])
@pytest.mark.parametrize(("mesh", "length"), [({"cp": 2}, 16), ({"cp": 3}, 10), ({"dp": 2, "cp": 2}, 16)], ids=str)
@pytest.mark.parametrize("name", ["mamba", "mamba2", "bamba", "rwkv", "qwen3_next"])
def test_models_of_transformers(name: str, mesh: dict[str, int], length: int, order: str) -> None:
    trains_language_model_alike(partial(language_model, name), batch(2, length), mesh, plan(mesh, order))


# --- on ranks


class Short(nn.Module):
    """A causal convolution, a shift with a first row, a roll, and running sums both ways."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.first = nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH, padding=3), nn.Parameter(torch.randn(WIDTH))
        self.before = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        y = F.silu(self.conv(x.mT))[..., : x.shape[1]].mT
        y = y + torch.cat([self.first.expand(x.shape[0], 1, -1), y[:, :-1]], 1) * y.roll(-1, 1)
        return (x + y.cumsum(1) / x.shape[1]).square().mean()


def trains(make: Any, length: int, backend: str) -> None:
    """Two steps in float64 on ranks equal those of one device, to 1e-9."""
    x = torch.randn(2, length, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model = make().double()
    module = shardc.compile(make().double(), device_mesh(Mesh(cp=2)), plan({"cp": 2}), backend=backend)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, module)]
    for _ in range(2):
        expected = model(x)
        loss = module(module.shard_inputs(x))
        assert relative(loss.detach(), expected.detach()) < 1e-9
        expected.backward()
        loss.backward()
        for (name, mine), other in zip(module.named_parameters(), model.parameters(), strict=True):
            assert (mine.grad is None) == (other.grad is None), name  # not every layer has a use for all parameters
            if other.grad is None:
                continue
            grad = mine.grad.full_tensor() if hasattr(mine.grad, "full_tensor") else mine.grad
            assert relative(grad, other.grad) < 1e-9, name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


class Mean(nn.Module):
    """The mean square of a layer's result."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()


def mean_of(name: str) -> nn.Module:
    return Mean(build(name))


@pytest.mark.medium
def test_two_ranks_by_inductor() -> None:
    run_ranks(2, partial(trains, Short, 8, "inductor"), partial(trains, Short, 9, "eager"))


@pytest.mark.slow
def test_two_ranks_of_all_layers() -> None:
    run_ranks(2, *(partial(trains, partial(mean_of, name), 16, "eager") for name in LAYERS),
              partial(trains, partial(mean_of, "mamba2"), 16, "inductor"))  # fmt: skip
