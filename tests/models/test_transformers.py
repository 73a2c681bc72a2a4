"""Models of ``transformers``, from their configs, unchanged: under sharding plans they equal one device in float64."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, fx, nn

import shardc
from shardc.ir import graph as ir
from shardc.passes.op_calls import call_of, operands_of
from shardc.rules import spec_of

STEPS, BATCH, LENGTH, VOCAB, CLASSES = 3, 4, 8, 64, 8
RATE = 1e-2

SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4}
DECODER = SIZES | {"num_key_value_heads": 4, "max_position_embeddings": 32, "use_cache": False, "pad_token_id": 0}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "use_cache": False}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
T5 = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4}
T5 |= {"num_decoder_layers": 1, "use_cache": False, "decoder_start_token_id": 0}
VIT = SIZES | NO_DROPOUT | {"image_size": 8, "patch_size": 4, "num_labels": CLASSES}
OPT = {"vocab_size": VOCAB, "hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
OPT |= {"max_position_embeddings": 32, "word_embed_proj_dim": 16, "dropout": 0.0, "use_cache": False}


def tokens() -> Tensor:
    return torch.randint(VOCAB, (BATCH, LENGTH))


def of_tokens() -> tuple[dict[str, Tensor], Tensor]:
    targets = tokens()
    targets[0, 2:] = -100  # ranks have unequal counts
    return {"input_ids": tokens()}, targets


def of_two() -> tuple[dict[str, Tensor], Tensor]:
    inputs, targets = of_tokens()
    return inputs | {"decoder_input_ids": tokens()}, targets


def of_images() -> tuple[dict[str, Tensor], Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, 8, 8, dtype=torch.float64)}, torch.randint(CLASSES, (BATCH,))


def loss(output: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, -2), targets.flatten())


@dataclass(frozen=True)
class Model:
    """How to build a model.

    Args:
        tp: a tensor-parallel plan, for a model that carries none.
        exact: whether it computes in float64 when it is asked to: some go through float32 inside.
    """

    config: type
    model: type
    sizes: dict[str, Any]
    batch: Callable[[], tuple[dict[str, Tensor], Tensor]] = of_tokens
    tp: shardc.Plan | None = None
    exact: bool = True

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return self.model(self.config(**self.sizes)).double().train()

    def tensor_parallel(self, model: nn.Module) -> shardc.Plan:
        return shardc.Plan.from_hf(model, axis="tp") if self.tp is None else self.tp


# Its Conv1D holds weights the other way round, and queries, keys and values in one.
GPT2_TP = shardc.Plan(
    params={
        "**.c_attn.weight": "_, (3 _@tp)",
        "**.c_attn.bias": "(3 _@tp)",
        "**.c_fc.weight": "_, @tp",
        "**.c_fc.bias": "@tp",
        "**.c_proj.weight": "@tp, _",
    }
)
BERT_TP = shardc.tp(
    "tp", colwise=["**.query", "**.key", "**.value", "**.intermediate.dense"], rowwise=["**.output.dense"]
)
T5_TP = shardc.tp("tp", colwise=["**.q", "**.k", "**.v", "**.wi"], rowwise=["**.o", "**.wo"], vocab=["shared"])
VIT_TP = shardc.tp("tp", colwise=["**.[qkv]_proj", "**.fc1"], rowwise=["**.o_proj", "**.fc2"])
OPT_TP = shardc.tp("tp", colwise=["**.[qkv]_proj", "**.fc1"], rowwise=["**.out_proj", "**.fc2"])

MODELS = {
    "gpt2": Model(hf.GPT2Config, hf.GPT2LMHeadModel, GPT2, tp=GPT2_TP),
    "llama": Model(hf.LlamaConfig, hf.LlamaForCausalLM, DECODER),
    "qwen3": Model(hf.Qwen3Config, hf.Qwen3ForCausalLM, DECODER | {"head_dim": 4}),
    "bert": Model(hf.BertConfig, hf.BertForMaskedLM, SIZES | NO_DROPOUT, tp=BERT_TP),
    "t5": Model(hf.T5Config, hf.T5ForConditionalGeneration, T5 | {"dropout_rate": 0.0}, of_two, T5_TP),
    "vit": Model(hf.ViTConfig, hf.ViTForImageClassification, VIT, of_images, VIT_TP),
}

MORE = {
    "mistral": Model(hf.MistralConfig, hf.MistralForCausalLM, DECODER | {"head_dim": 4, "sliding_window": 4}),
    "gemma2": Model(hf.Gemma2Config, hf.Gemma2ForCausalLM, DECODER | {"head_dim": 4, "sliding_window": 4}, exact=False),
    "gemma3": Model(
        hf.Gemma3TextConfig, hf.Gemma3ForCausalLM, DECODER | {"head_dim": 4, "sliding_window": 4}, exact=False
    ),
    "phi3": Model(hf.Phi3Config, hf.Phi3ForCausalLM, DECODER | {"bos_token_id": 0, "eos_token_id": 0}),
    "opt": Model(hf.OPTConfig, hf.OPTForCausalLM, OPT, tp=OPT_TP),
    "roberta": Model(
        hf.RobertaConfig, hf.RobertaForMaskedLM, SIZES | NO_DROPOUT | {"max_position_embeddings": 40}, tp=BERT_TP
    ),
    "gpt-neox": Model(hf.GPTNeoXConfig, hf.GPTNeoXForCausalLM, SIZES | {"use_cache": False}),
}

# Without a plan of their own: under FSDP alone.
BART = {"vocab_size": VOCAB, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
BART |= {"max_position_embeddings": 32, "use_cache": False}
BART |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
DEBERTA = SIZES | NO_DROPOUT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
SWIN = NO_DROPOUT | {"image_size": 8, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2]}
SWIN |= {"window_size": 2, "num_labels": CLASSES, "drop_path_rate": 0.0}
CONVNEXT = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 2, "num_labels": CLASSES}
SPARSE = {"num_local_experts": 4, "experts_implementation": "batched_mm"}
FSDP_ONLY = {
    "gptj": Model(hf.GPTJConfig, hf.GPTJForCausalLM, GPT2 | {"rotary_dim": 4}),
    "bart": Model(hf.BartConfig, hf.BartForConditionalGeneration, BART, of_two),
    "deberta": Model(hf.DebertaV2Config, hf.DebertaV2ForMaskedLM, DEBERTA | {"max_position_embeddings": 32}),
    "swin": Model(hf.SwinConfig, hf.SwinForImageClassification, SWIN, of_images),
    "convnext": Model(hf.ConvNextConfig, hf.ConvNextForImageClassification, CONVNEXT, of_images),
    "mixtral": Model(hf.MixtralConfig, hf.MixtralForCausalLM, DECODER | SPARSE, exact=False),
}

PLANS: dict[str, tuple[dict[str, int], bool, bool]] = {  # mesh, FSDP, TP
    "fsdp3": ({"dp": 4}, True, False),
    "tp": ({"tp": 4}, False, True),
    "fsdp3+tp": ({"dp": 2, "tp": 2}, True, True),
}


def cases() -> list[Any]:
    """The named models, with TP alone where the model itself says how; what is left takes longer."""
    out = []
    for name, model in (MODELS | MORE | FSDP_ONLY).items():
        for plan in ["fsdp3"] if name in FSDP_ONLY else PLANS:
            everyday = name in MODELS and (plan != "tp" or model.tp is None)
            quick = name not in ("t5", "bert", "vit") and (name, plan) not in (("qwen3", "fsdp3"), ("qwen3", "tp"))
            marks = () if everyday and quick else pytest.mark.slow if everyday else pytest.mark.long
            out.append(pytest.param(name, plan, marks=marks))
    return out


def relative(ours: Tensor, theirs: Tensor, floor: float) -> float:
    """Error relative to the largest element, or to ``floor`` where the whole tensor is smaller."""
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp_min(floor)).item()


def whole_ops(program: Any) -> list[fx.Node]:
    """What has no rule, and what every rank computes whole of operands that came in shards."""
    found = []
    for node in program.graph("propagate").nodes:
        operands = operands_of(node) if hasattr(node.target, "_schema") else []
        needs = ir.info(node).needs if operands else None
        gathered = any(ir.layout(x).bound for x in operands) and not any(layout.bound for layout in needs or ())
        if operands and (gathered or spec_of(call_of(node)) is None):
            found.append(node)
    return found


def is_scalar_or_mask(node: fx.Node) -> bool:
    value = ir.info(node).value
    return isinstance(value, ir.Value) and (value.shape in ((), (1,)) or not value.dtype.is_floating_point)


@pytest.mark.parametrize(("name", "plan"), cases())
def test_equals_one_device(name: str, plan: str) -> None:
    case = (MODELS | MORE | FSDP_ONLY)[name]
    limit = 1e-9 if case.exact else 1e-4
    sizes, fsdp, tp = PLANS[plan]
    model = case.build()
    parts = [shardc.fsdp("dp", level=3)] if fsdp else []
    parts += [case.tensor_parallel(model)] if tp else []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        module = shardc.compile(
            model, shardc.Mesh(sizes), parts[0] if len(parts) == 1 else parts[0] | parts[1], loss=loss, backend="eager"
        )
        sim = shardc.Simulation(module)
        step = sim.optimizers(lambda shards: torch.optim.AdamW(shards, lr=RATE))
        reference = torch.optim.AdamW(model.parameters(), lr=RATE)
        for at in range(STEPS):
            inputs, targets = case.batch()
            value = loss(model(**inputs), targets)
            reference.zero_grad()
            value.backward()
            assert relative(sim(targets, **inputs), value.detach(), 1e-12) < limit, f"loss of step {at}"
            sim.backward()
            # Some gradients are zero in exact arithmetic (a key bias under softmax): their noise is not an error,
            # and what AdamW makes of it is small beside its steps.
            floor = 1e-6 * max(p.grad.abs().max().item() for p in model.parameters() if p.grad is not None)
            for key, param in model.named_parameters():
                assert (key in sim.grads) == (param.grad is not None), f"{key} has a gradient on one side only"
                if param.grad is not None:
                    assert relative(sim.grad(key), param.grad, floor) < limit, f"gradient of {key} in step {at}"
            reference.step()
            step()
    for key, param in model.named_parameters():
        assert relative(sim.param(key), param.detach(), STEPS * RATE) < limit, f"{key} after {STEPS} steps"
    program = module.shardc.cache.program_for((targets,), inputs)
    whole = whole_ops(program)
    print(f"{name} {plan}: computed whole", *(f"{ir.info(x).name}: {ir.info(x).value}" for x in whole), sep="\n  ")
    assert all(map(is_scalar_or_mask, whole))
    assert [str(w.message) for w in said if "no rule" in str(w.message)] == []


@pytest.mark.parametrize(
    ("name", "limit"), [("gpt2", 1e-4), pytest.param("t5", 1e-9, marks=pytest.mark.slow), ("vit", 1e-9)]
)
def test_the_loss_of_the_model_itself(name: str, limit: float) -> None:
    """With ``labels`` a model computes its loss, GPT-2 in float32; by default it fills a cache, too."""
    case = MODELS[name]
    sizes = {key: value for key, value in case.sizes.items() if key != "use_cache"}
    model = replace(case, sizes=sizes).build()
    inputs, labels = case.batch()
    inputs = {key: x for key, x in inputs.items() if key != "decoder_input_ids"} | {"labels": labels}
    module = shardc.compile(
        model, shardc.Mesh(dp=4), shardc.fsdp("dp", level=3), loss=lambda output: output.loss, backend="eager"
    )
    sim = shardc.Simulation(module)
    value = model(**inputs).loss
    value.backward()
    assert relative(sim(**inputs), value.detach(), 1e-12) < limit
    sim.backward()
    for key, param in model.named_parameters():
        assert param.grad is not None
        assert relative(sim.grad(key), param.grad, 1e-6) < limit, f"gradient of {key}"


def test_a_result_of_a_class_of_its_own_can_be_pinned() -> None:
    """Of the dict with attributes that GPT-2 without its head returns, the first tensor is."""
    torch.manual_seed(0)
    case = MODELS["gpt2"]
    model = case.build()
    inputs, targets = case.batch()
    plan = shardc.ddp("dp") | shardc.Plan(activations={"transformer": "_, @dp, _"})
    module = shardc.compile(model, shardc.Mesh(dp=2), plan, loss=loss, backend="eager")
    value = shardc.Simulation(module)(targets, **inputs)
    assert relative(value, loss(model(**inputs), targets).detach(), 1e-12) < 1e-4
    graph = module.shardc.cache.program_for((targets,), inputs).graph("propagate")
    pins = [x for x in graph.nodes if x.op == "call_function" and "activations" in ir.info(x).origin.cause]
    assert pins and str(ir.layout(pins[0])).startswith("[4,8@dp,")
