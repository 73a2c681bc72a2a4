"""Architectures of ``transformers`` at toy size: how to build each, and a batch of it with labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch._subclasses.functional_tensor import FunctionalTensor

BATCH, LENGTH, VOCAB, CLASSES = 4, 8, 64, 4
Batch = dict[str, Any]

IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ENCODER = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2} | IDS
ENCODER |= {"num_attention_heads": 4, "max_position_embeddings": 40}
DECODER = ENCODER | {"num_key_value_heads": 2, "head_dim": 4}
DRY = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32} | IDS
GPT2_DRY = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
SEQ2SEQ = {"vocab_size": VOCAB, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0} | IDS
SEQ2SEQ |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
SEQ2SEQ |= {"max_position_embeddings": 32, "decoder_start_token_id": 2}
T5 = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
T5 |= {"decoder_start_token_id": 0}
VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
VISION |= {"image_size": 16, "patch_size": 4}
AUDIO = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
AUDIO |= {"num_attention_heads": 4, "conv_dim": [8, 8], "conv_stride": [4, 2], "conv_kernel": [8, 4]}
AUDIO |= {"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
AUDIO |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "feat_proj_dropout": 0.0}
AUDIO |= {"final_dropout": 0.0, "apply_spec_augment": False, "layerdrop": 0.0, "pad_token_id": 0}
EXPERTS = {"experts_implementation": "batched_mm"}


def ids(length: int = LENGTH, classes: int = VOCAB) -> Tensor:
    return torch.randint(3, classes, (BATCH, length))


def of_tokens() -> Batch:
    """Rows of unequal length, padded on the right; the two halves of the batch count unequally many labels."""
    tokens, mask = ids(), torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[0, 3:], mask[1, 5:], mask[3, 7:] = 0, 0, 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def of_two() -> Batch:
    return of_tokens() | {"labels": ids(6).masked_fill(torch.arange(6) > torch.tensor([[1], [5], [3], [4]]), -100)}


def of_rows() -> Batch:
    return of_tokens() | {"labels": torch.randint(CLASSES, (BATCH,))}


def of_words() -> Batch:
    return of_tokens() | {"labels": torch.randint(CLASSES, (BATCH, LENGTH))}


def of_answers() -> Batch:
    places = {name: torch.randint(LENGTH, (BATCH,)) for name in ("start_positions", "end_positions")}
    return {key: x for key, x in of_tokens().items() if key != "labels"} | places


def images(size: int = 16) -> Tensor:
    return torch.randn(BATCH, 3, size, size, dtype=torch.float64)


def of_images() -> Batch:
    return {"pixel_values": images(), "labels": torch.randint(CLASSES, (BATCH,))}


def of_pixels() -> Batch:
    labels = torch.randint(CLASSES, (BATCH, 32, 32))
    labels[0, :20] = 255
    return {"pixel_values": images(32), "labels": labels}


def of_pairs() -> Batch:
    return {key: x for key, x in of_tokens().items() if key != "labels"} | {
        "pixel_values": images(),
        "return_loss": True,
    }


def of_speech() -> Batch:
    mask = torch.ones(BATCH, 160, dtype=torch.int64)
    mask[0, 100:], mask[2, 130:] = 0, 0
    waves = torch.randn(BATCH, 160, dtype=torch.float64)
    labels = torch.randint(1, 32, (BATCH, 5)).masked_fill(torch.arange(5) > torch.tensor([[1], [4], [2], [3]]), -100)
    return {"input_values": waves, "attention_mask": mask, "labels": labels}


def of_waves() -> Batch:
    return of_speech() | {"labels": torch.randint(CLASSES, (BATCH,))}


def of_spectrograms() -> Batch:
    labels = ids(6).masked_fill(torch.arange(6) > torch.tensor([[1], [5], [3], [4]]), -100)
    return {"input_features": torch.randn(BATCH, 8, 16, dtype=torch.float64), "labels": labels}


@dataclass(frozen=True)
class Architecture:
    """How to build one.

    Args:
        name: of its classes: ``f"{name}Config"`` and ``f"{name}{task}"``.
        config: where the class of the config is not of its name.
    """

    name: str
    task: str
    sizes: dict[str, Any]
    batch: Callable[[], Batch] = of_tokens
    config: str = ""

    def build(self, **changed: Any) -> nn.Module:
        config = getattr(hf, f"{self.config or self.name}Config")(**self.sizes | changed)
        torch.manual_seed(0)
        model = getattr(hf, f"{self.name}{self.task}")(config).double()
        return model.train()


LM, MLM, ROWS, IMAGES = "ForCausalLM", "ForMaskedLM", "ForSequenceClassification", "ForImageClassification"
CLASSIFIES = {"num_labels": CLASSES}
A = Architecture


@contextmanager
def in_float64() -> Iterator[None]:
    """Models whose norms or losses go through float32 stay in float64 there."""
    wide = [(torch, "float32", torch.float64), (torch, "float", torch.float64)]
    wide += [(owner, "float", owner.double) for owner in (Tensor, FunctionalTensor)]
    before = [(owner, name, vars(owner).get(name)) for owner, name, _ in wide]
    try:
        for owner, name, value in wide:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, held in before:
            delattr(owner, name) if held is None else setattr(owner, name, held)


ZOO = {
    # decoders
    "llama": A("Llama", LM, DECODER),
    "mistral": A("Mistral", LM, DECODER | {"sliding_window": 4}),
    "mixtral": A("Mixtral", LM, DECODER | EXPERTS | {"num_local_experts": 4, "output_router_logits": True}),
    "qwen2": A("Qwen2", LM, DECODER),
    "qwen3": A("Qwen3", LM, DECODER | {"tie_word_embeddings": True}),
    "qwen3-moe": A(
        "Qwen3Moe", LM, DECODER | EXPERTS | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    ),
    "gemma": A("Gemma", LM, DECODER),
    "gemma2": A("Gemma2", LM, DECODER | {"sliding_window": 6}),
    "gemma3": A("Gemma3", LM, DECODER | {"sliding_window": 4}, config="Gemma3Text"),
    "phi": A("Phi", LM, DECODER | {"partial_rotary_factor": 0.5}),
    "phi3": A("Phi3", LM, DECODER),
    "gpt2": A("GPT2", "LMHeadModel", GPT2 | GPT2_DRY),
    "gpt2-rows": A("GPT2", ROWS, GPT2 | GPT2_DRY | CLASSIFIES, of_rows),
    "gptj": A("GPTJ", LM, GPT2 | GPT2_DRY | {"rotary_dim": 4}),
    "gpt-neo": A(
        "GPTNeo",
        LM,
        {
            "vocab_size": VOCAB,
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 4,
            "window_size": 4,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 32,
            "resid_dropout": 0.0,
            "embed_dropout": 0.0,
            "attention_dropout": 0.0,
        }
        | IDS,
    ),
    "gpt-neox": A("GPTNeoX", LM, ENCODER | {"hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "gpt-bigcode": A("GPTBigCode", LM, GPT2 | GPT2_DRY),
    "opt": A(
        "OPT",
        LM,
        {
            "vocab_size": VOCAB,
            "hidden_size": 16,
            "ffn_dim": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 32,
            "word_embed_proj_dim": 16,
            "dropout": 0.0,
        }
        | IDS,
    ),
    "bloom": A(
        "Bloom",
        LM,
        {
            "vocab_size": VOCAB,
            "hidden_size": 16,
            "n_layer": 2,
            "n_head": 4,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        }
        | IDS,
    ),
    "falcon": A(
        "Falcon",
        LM,
        {
            "vocab_size": VOCAB,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        }
        | IDS,
    ),
    "mpt": A(
        "Mpt",
        LM,
        {"vocab_size": VOCAB, "d_model": 16, "n_heads": 4, "n_layers": 2, "expansion_ratio": 2, "max_seq_len": 32}
        | IDS,
    ),
    "olmo": A("Olmo", LM, DECODER),
    "olmo2": A("Olmo2", LM, DECODER),
    "stablelm": A("StableLm", LM, DECODER | {"hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "cohere": A("Cohere", LM, DECODER),
    "granite": A("Granite", LM, DECODER),
    "starcoder2": A(
        "Starcoder2", LM, DECODER | {"residual_dropout": 0.0, "embedding_dropout": 0.0, "attention_dropout": 0.0}
    ),
    "glm": A("Glm", LM, DECODER),
    "mamba": A("Mamba", LM, {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4} | IDS),
    # encoders
    "bert": A("Bert", MLM, ENCODER | DRY),
    "bert-rows": A("Bert", ROWS, ENCODER | DRY | CLASSIFIES, of_rows),
    "roberta": A("Roberta", MLM, ENCODER | DRY),
    "roberta-words": A("Roberta", "ForTokenClassification", ENCODER | DRY | CLASSIFIES, of_words),
    "electra": A("Electra", MLM, ENCODER | DRY | {"embedding_size": 8}),
    "deberta-v2": A("DebertaV2", MLM, ENCODER | DRY | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "albert": A("Albert", MLM, ENCODER | DRY | {"embedding_size": 8}),
    "distilbert": A(
        "DistilBert",
        "ForQuestionAnswering",
        {
            "vocab_size": VOCAB,
            "dim": 16,
            "hidden_dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "max_position_embeddings": 32,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "qa_dropout": 0.0,
        }
        | IDS,
        of_answers,
    ),
    "modernbert": A("ModernBert", MLM, ENCODER | {"local_attention": 4, "cls_token_id": 1, "sep_token_id": 2}),
    "mpnet": A("MPNet", MLM, ENCODER | DRY),
    "xlm-roberta": A("XLMRoberta", ROWS, ENCODER | DRY | CLASSIFIES, of_rows),
    "camembert": A("Camembert", MLM, ENCODER | DRY),
    # encoder and decoder
    "t5": A("T5", "ForConditionalGeneration", T5, of_two),
    "bart": A("Bart", "ForConditionalGeneration", SEQ2SEQ, of_two),
    "mbart": A("MBart", "ForConditionalGeneration", SEQ2SEQ, of_two),
    "pegasus": A("Pegasus", "ForConditionalGeneration", SEQ2SEQ, of_two),
    "marian": A("Marian", "MTModel", SEQ2SEQ, of_two),
    "whisper": A(
        "Whisper",
        "ForConditionalGeneration",
        SEQ2SEQ | {"num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16},
        of_spectrograms,
    ),
    # vision
    "vit": A("ViT", IMAGES, VISION | DRY | CLASSIFIES, of_images),
    "deit": A("DeiT", IMAGES, VISION | DRY | CLASSIFIES, of_images),
    "beit": A("Beit", IMAGES, VISION | DRY | CLASSIFIES | {"drop_path_rate": 0.0}, of_images),
    "dinov2": A("Dinov2", IMAGES, VISION | DRY | CLASSIFIES | {"mlp_ratio": 2}, of_images),
    "swin": A(
        "Swin",
        IMAGES,
        DRY
        | CLASSIFIES
        | {
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [1, 1],
            "num_heads": [2, 2],
            "window_size": 2,
            "drop_path_rate": 0.0,
        },
        of_images,
    ),
    "convnext": A(
        "ConvNext",
        IMAGES,
        CLASSIFIES | {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 2},
        of_images,
    ),
    "convnextv2": A(
        "ConvNextV2",
        IMAGES,
        CLASSIFIES | {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 2},
        of_images,
    ),
    "segformer": A(
        "Segformer",
        "ForSemanticSegmentation",
        DRY
        | CLASSIFIES
        | {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [8, 16],
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 8,
            "classifier_dropout_prob": 0.0,
            "drop_path_rate": 0.0,
        },
        of_pixels,
    ),
    "resnet": A(
        "ResNet",
        IMAGES,
        CLASSIFIES | {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
        of_images,
    ),
    "mobilenet-v2": A(
        "MobileNetV2",
        IMAGES,
        CLASSIFIES | {"image_size": 16, "depth_multiplier": 0.25, "classifier_dropout_prob": 0.0},
        of_images,
    ),
    "clip": A("CLIP", "Model", {"projection_dim": 8, "text_config": ENCODER, "vision_config": VISION}, of_pairs),
    "siglip": A("Siglip", "Model", {"text_config": ENCODER, "vision_config": VISION}, of_pairs),
    # speech
    "wav2vec2": A("Wav2Vec2", "ForCTC", AUDIO, of_speech),
    "wav2vec2-rows": A("Wav2Vec2", ROWS, AUDIO | CLASSIFIES, of_waves),
    "hubert": A("Hubert", "ForCTC", AUDIO, of_speech),
    "wavlm": A("WavLM", "ForCTC", AUDIO, of_speech),
}
