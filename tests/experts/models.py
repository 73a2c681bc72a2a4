"""Mixtures of experts at toy size: models of ``transformers`` as they are shipped, and one of one's own."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

import shardc
from tests.experts.sorted_rows import Decoder

VOCAB, LENGTH = 64, 6
DECODER = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2, "head_dim": 4}
DECODER |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
CHOICES = {"num_experts": 8, "num_experts_per_tok": 2}


def qwen3_moe() -> nn.Module:
    config = {**DECODER, **CHOICES, "moe_intermediate_size": 12, "norm_topk_prob": True, "output_router_logits": True}
    return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**config))


def mixtral() -> nn.Module:
    return hf.MixtralForCausalLM(hf.MixtralConfig(**DECODER, num_local_experts=8, output_router_logits=True))


def deepseek_v3() -> nn.Module:
    """Sigmoid scores with a bias, groups of experts, a shared expert, and a first layer without experts."""
    config = {**DECODER, **LATENT, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2}
    config |= {"moe_intermediate_size": 12, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    return hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**config))


def olmoe() -> nn.Module:
    return hf.OlmoeForCausalLM(hf.OlmoeConfig(**DECODER, **CHOICES))


def gpt_oss() -> nn.Module:
    """Transposed weights with biases, gates between the features, a clamp."""
    config = {**DECODER, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 4}
    return hf.GptOssForCausalLM(hf.GptOssConfig(**config))


def llama4() -> nn.Module:
    """Every expert takes all tokens, scaled by zero where it was not chosen."""
    config = {**DECODER, "intermediate_size_mlp": 24, "num_local_experts": 8, "num_experts_per_tok": 1}
    return hf.Llama4ForCausalLM(hf.Llama4TextConfig(**config, attn_implementation="eager"))


@shardc.experts
def gated(rows: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(rows, gate)) * F.linear(rows, up), down)


class Own(nn.Module):
    """A layer of one's own: a router, experts of a plain function, and an expert that all tokens go to."""

    def __init__(self, width: int = 16, inner: int = 12, experts: int = 8, choices: int = 2) -> None:
        super().__init__()
        self.choices = choices
        self.embed = nn.Embedding(VOCAB, width)
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.Module()
        self.experts.gate = nn.Parameter(torch.randn(experts, inner, width) / 4)
        self.experts.up = nn.Parameter(torch.randn(experts, inner, width) / 4)
        self.experts.down = nn.Parameter(torch.randn(experts, width, inner) / 4)
        self.shared = nn.Sequential(nn.Linear(width, inner), nn.SiLU(), nn.Linear(inner, width))
        self.head = nn.Linear(width, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids).flatten(0, 1)
        scores, chosen = self.router(x).softmax(-1).topk(self.choices)
        routed = gated(x, chosen, scores, self.experts.gate, self.experts.up, self.experts.down)
        out = self.head(x + routed + self.shared(x))
        return {"loss": F.cross_entropy(out, labels.flatten(), ignore_index=-100)}


MODELS: dict[str, Callable[[], nn.Module]] = {
    "qwen3-moe": qwen3_moe, "mixtral": mixtral, "deepseek-v3": deepseek_v3, "olmoe": olmoe, "gpt-oss": gpt_oss,
    "llama4": llama4, "own": Own, "sorted": Decoder,
}  # fmt: skip
EXPERTS = {"llama4": "*.feed_forward.experts", "own": "experts"}


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The same weights at each call; computed as its own ``eager`` form says where it is called by itself."""
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype).train()
    if isinstance(model, hf.PreTrainedModel):
        model.set_experts_implementation("eager")
        model.config.use_cache = False
        for parameter in model.parameters():  # wide enough that routers choose
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.3)
    return model


def batch(rows: int = 4, length: int = LENGTH) -> dict[str, Tensor]:
    """Rows whose halves count unequally many labels."""
    torch.manual_seed(1)
    tokens = torch.randint(3, VOCAB, (rows, length))
    return {"input_ids": tokens, "labels": tokens.masked_fill(torch.arange(rows * length).view(rows, -1) < 5, -100)}


def experts_of(name: str) -> str:
    """The glob of its experts."""
    return EXPERTS.get(name, "*.experts")


def route(model: nn.Module, how: str) -> None:
    """Makes routers send tokens as ``how`` says: "as they are", "to one" (each token's first), "to few", "equal"."""
    weights = [p for name, p in model.named_parameters() if is_router(name)]
    assert weights, "the model has no router"
    with torch.no_grad():
        if isinstance(model, Own):
            model.embed.weight.abs_()
        for weight in weights:
            if how == "equal":
                weight.zero_()
            elif how == "to one":  # of two, by the sign of a token's sum, which has only one in a model of one's own
                weight.zero_()
                for at, factor in enumerate((1.0, -1.0, 0.9, -0.9)[: len(weight)]):
                    weight[at] = factor
            elif how == "to few":
                weight[2:] = weight[:2].mean(0) * 1e-3


def is_router(name: str) -> bool:
    return name.endswith(("mlp.gate.weight", "router.weight", "router.gate.weight"))


__all__ = ["MODELS", "batch", "build", "experts_of", "route"]
