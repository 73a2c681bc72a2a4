"""Models with a sequence at toy size: models of ``transformers`` as they are shipped, and one of one's own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

VOCAB = 32
TOY: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
TOY |= {"num_attention_heads": 4, "max_position_embeddings": 32, "pad_token_id": 0}
DECODER = {**TOY, "num_key_value_heads": 2, "head_dim": 4, "use_cache": False}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class Attention(nn.Module):
    """Grouped queries."""

    def __init__(self, width: int, heads: int, groups: int, causal: bool, dropout: float) -> None:
        super().__init__()
        self.heads, self.groups, self.causal, self.dropout = heads, groups, causal, dropout
        self.q, self.o = nn.Linear(width, width), nn.Linear(width, width)
        self.k, self.v = (nn.Linear(width, width // heads * groups) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (n, -1)).transpose(1, 2) for f, n in
                   ((self.q, self.heads), (self.k, self.groups), (self.v, self.groups)))  # fmt: skip
        dropout = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=self.causal, enable_gqa=True)
        return self.o(out.transpose(1, 2).flatten(2))


class Own(nn.Module):
    """Positions that are added, two layers of attention and a loss of each token."""

    def __init__(
        self, causal: bool = True, heads: int = 4, groups: int = 2, dropout: float = 0.0, width: int = 16,
        layers: int = 2,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)
        self.layers = nn.ModuleList([Attention(width, heads, groups, causal, dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        length, width = input_ids.shape[1], self.norm.weight.shape[0]
        place = torch.arange(length, device=input_ids.device)[:, None] * torch.linspace(0.1, 2, width)
        x = self.embed(input_ids) + place.to(self.norm.weight.dtype).sin()
        for layer in self.layers:
            x = x + layer(self.norm(x))
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-100)}


def build(name: str, **options: Any) -> nn.Module:
    """A model in float64, the same each time; ``options`` are those of `Own`."""
    torch.manual_seed(0)
    if name == "own":
        return Own(**options).double().train()
    configs = {
        "llama": (hf.LlamaForCausalLM, hf.LlamaConfig(**DECODER)),
        "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config(**DECODER)),
        "mistral": (hf.MistralForCausalLM, hf.MistralConfig(**DECODER, sliding_window=3)),
        "gemma2": (hf.Gemma2ForCausalLM, hf.Gemma2Config(**DECODER, sliding_window=3, attn_implementation="eager")),
        "bert": (hf.BertForMaskedLM, hf.BertConfig(**TOY, **NO_DROPOUT)),
    }
    make, config = configs[name]
    return make(config).double().train()


def batch(rows: int = 4, length: int = 8, padding: bool = False) -> dict[str, Tensor]:
    """Tokens; with ``padding``, some rows end early and a mask says so."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCAB, (rows, length), generator=generator)
    given = {"input_ids": ids, "labels": ids.clone()}
    if padding:
        mask = torch.ones_like(ids)
        mask[1, length - 2 :] = 0
        mask[2, length // 2 :] = 0
        given |= {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return given
