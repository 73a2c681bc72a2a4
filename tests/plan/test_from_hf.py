"""Tensor-parallel plans of Hugging Face models: every style, where the plan is found, and each error."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardc.errors import PlanError
from shardc.ir.mesh import Mesh
from shardc.plan import Plan, resolve_activations, resolve_params, tp


class Config:
    base_model_tp_plan = {
        "embed_tokens": "embedding_rowwise",
        "layers.*.attn.qkv_proj": "packed_colwise",
        "layers.*.attn.q_norm": "replicated_with_grad_allreduce",
        "layers.*.attn.o_proj": "rowwise_split_input",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
        "layers.*.experts.gate_up_proj": "packed_colwise",
        "layers.*.experts.down_proj": "rowwise",
        "layers.*.experts": "moe_tp_experts",
        "norm": "sequence_parallel",
    }


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(2, 16, 8))
        self.down_proj = nn.Parameter(torch.zeros(2, 8, 8))


class Base(nn.Module):
    base_model_prefix = "model"
    config = Config()

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(10, 8)
        attention = {"qkv_proj": nn.Linear(8, 16), "q_norm": nn.LayerNorm(4), "o_proj": nn.Linear(8, 8)}
        mlp = {"up_proj": nn.Linear(8, 12), "down_proj": nn.Linear(12, 8)}
        layer = {"attn": nn.ModuleDict(attention), "mlp": nn.ModuleDict(mlp), "experts": Experts()}
        self.layers = nn.ModuleList([nn.ModuleDict(layer)])
        self.norm = nn.LayerNorm(8)


class ForCausalLM(nn.Module):
    base_model_prefix = "model"
    config = Config()
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self) -> None:
        super().__init__()
        self.model = Base()
        self.lm_head = nn.Linear(8, 10, bias=False)


BASE = tp(
    "tp",
    colwise=["./layers.*.mlp.up_proj"],
    rowwise=["./layers.*.attn.o_proj", "./layers.*.mlp.down_proj"],
    vocab=["embed_tokens"],
) | Plan(
    params={
        "./layers.*.attn.qkv_proj.weight": {"tp": _StridedShard(0, split_factor=2)},
        "./layers.*.attn.qkv_proj.bias": {"tp": _StridedShard(0, split_factor=2)},
        "./layers.*.experts.gate_up_proj": {"tp": _StridedShard(1, split_factor=2)},
        "./layers.*.experts.down_proj": {"tp": Shard(2)},
    },
    activations={"norm:input": {"tp": Shard(1)}, "norm:output": {"tp": Shard(1)}},
)


def test_the_plan_of_a_base_model() -> None:
    assert Plan.from_hf(Base()) == BASE


def test_its_layouts() -> None:
    model = ForCausalLM()
    params = {name: (tuple(param.shape), 4) for name, param in model.named_parameters()}
    resolved = resolve_params(Plan.from_hf(model), Mesh(tp=2), params)
    assert {name: str(plan.compute) for name, plan in resolved.items() if plan.compute.axes} == {
        "model.embed_tokens.weight": "[10@tp,8]",
        "model.layers.0.attn.qkv_proj.weight": "[(2 8@tp),8]",
        "model.layers.0.attn.qkv_proj.bias": "[(2 8@tp)]",
        "model.layers.0.attn.o_proj.weight": "[8,8@tp]",
        "model.layers.0.mlp.up_proj.weight": "[12@tp,8]",
        "model.layers.0.mlp.up_proj.bias": "[12@tp]",
        "model.layers.0.mlp.down_proj.weight": "[8,12@tp]",
        "model.layers.0.experts.gate_up_proj": "[2,(2 8@tp),8]",
        "model.layers.0.experts.down_proj": "[2,8,8@tp]",
        "lm_head.weight": "[10@tp,8]",
    }
    pins = resolve_activations(Plan.from_hf(model), [name for name, _ in model.named_modules()])
    assert [(pin.module, pin.where) for pin in pins] == [
        ("model.norm", "input"),
        ("model.norm", "output"),
        ("lm_head", "output"),
    ]


def test_experts_that_are_split_in_features_are_split_between_ranks_where_the_model_says_how() -> None:
    model = ForCausalLM()
    keys = ("layers.*.experts.gate_up_proj", "layers.*.experts.down_proj")
    model._ep_plan = {f"model.{key}": "grouped_gemm" for key in keys}  # type: ignore[assignment]
    params = {name: (tuple(param.shape), 4) for name, param in model.named_parameters()}
    resolved = resolve_params(Plan.from_hf(model), Mesh(tp=2), params)
    experts = {name.rpartition(".")[2]: str(plan.compute) for name, plan in resolved.items() if "experts" in name}
    assert experts == {"gate_up_proj": "[2@tp,16,8]", "down_proj": "[2@tp,8,8]"}
    assert str(resolved["model.layers.0.mlp.up_proj.weight"].compute) == "[12@tp,8]"


def test_a_plan_that_has_the_base_models_keys_is_used_alone() -> None:
    model = ForCausalLM()
    model._tp_plan = {"lm_head": "colwise", "model.layers.*.mlp.up_proj": "colwise_rep"}
    assert Plan.from_hf(model, axis="x") == tp("x", colwise=["lm_head", "./model.layers.*.mlp.up_proj"]) | Plan(
        activations={"./model.layers.*.mlp.up_proj:output": {"x": Replicate()}}
    )


def test_embeddings() -> None:
    model = nn.ModuleDict({"tokens": nn.Embedding(10, 8), "positions": nn.Embedding(10, 8)})
    model._tp_plan = {"tokens": "rowwise", "positions": "embedding_colwise"}  # type: ignore[assignment]
    assert Plan.from_hf(model) == tp("tp", vocab=["tokens"]) | Plan(params={"positions.weight": {"tp": Shard(1)}})


def test_a_bias_is_whole_row_wise() -> None:
    model = nn.ModuleDict({"m": nn.Linear(8, 8)})
    model._tp_plan = {"m": "packed_rowwise"}  # type: ignore[assignment]
    assert Plan.from_hf(model) == Plan(params={"m.weight": {"tp": _StridedShard(1, split_factor=2)}})


def test_keys_that_match_nothing() -> None:
    """Some are for other configurations of the class; if all are, the plan splits nothing."""
    model = nn.ModuleDict({"m": nn.Linear(8, 8)})
    model._tp_plan = {"m": "colwise", "layers.*.m": "rowwise"}  # type: ignore[assignment]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Plan.from_hf(model) == tp("tp", colwise=["m"])
    model._tp_plan = {"layers.*.m": "rowwise"}  # type: ignore[assignment]
    with pytest.raises(PlanError, match=r"the plan that ModuleDict carries matches nothing of it: layers\.\*\.m"):
        Plan.from_hf(model)


def test_errors() -> None:
    model = nn.ModuleDict({"m": nn.Linear(8, 8)})
    with pytest.raises(PlanError) as caught:
        Plan.from_hf(model)
    assert str(caught.value) == (
        "ModuleDict has no tensor-parallel plan\n  plan entry: Plan.from_hf(model)\n"
        "  fix: write one with shardc.tp(axis, colwise=[...], rowwise=[...])"
    )
    model._tp_plan = {"m": "diagonal"}  # type: ignore[assignment]
    with pytest.raises(PlanError) as caught:
        Plan.from_hf(model)
    assert str(caught.value).splitlines()[:2] == [
        "unknown style 'diagonal' of 'm' in the plan of ModuleDict",
        "  plan entry: Plan.from_hf(model)",
    ]


def test_models_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=128)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    params = {name: (tuple(param.shape), 4) for name, param in model.named_parameters()}
    resolved = resolve_params(Plan.from_hf(model), Mesh(tp=2), params)
    assert {name: str(p.compute) for name, p in resolved.items() if "self_attn" in name or "mlp" in name} == {
        "model.layers.0.self_attn.q_proj.weight": "[32@tp,32]",
        "model.layers.0.self_attn.k_proj.weight": "[16@tp,32]",
        "model.layers.0.self_attn.v_proj.weight": "[16@tp,32]",
        "model.layers.0.self_attn.o_proj.weight": "[32,32@tp]",
        "model.layers.0.mlp.gate_proj.weight": "[64@tp,32]",
        "model.layers.0.mlp.up_proj.weight": "[64@tp,32]",
        "model.layers.0.mlp.down_proj.weight": "[32,64@tp]",
    }
