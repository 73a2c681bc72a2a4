"""Models of real size on meta, each with a batch, opened for plans."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

import shardc
from examples.models import convnet, llama
from shardc.ir.mesh import Mesh
from shardc.search.captured_model import CapturedModel, ModelCall

BATCH = 64
PRECISION = shardc.precision(param=torch.bfloat16, reduce=torch.float32)
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False} | IDS
BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0} | IDS
T5 = {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "dropout_rate": 0.0, "use_cache": False}
T5 |= {"decoder_start_token_id": 0}


def decoder(layers: int) -> ModelCall:
    """Llama 3 8B, or its first layers, at sequences of 8,192 tokens."""
    config = llama.LlamaConfig(128256, 4096, layers, heads=32, kv_heads=8, hidden=14336, rope_theta=500000.0)
    model, given = llama.build(config, "meta", size=BATCH, length=8192)
    return source(model, (*given, *given), {}, llama.loss)


def source(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Callable[..., Any]) -> ModelCall:
    return ModelCall(model.train(), args, kwargs, loss, torch.device("cpu"))


def ids(length: int) -> Tensor:
    return torch.empty(BATCH, length, dtype=torch.int64, device="meta")


def of_transformers(name: str, config: Any, **batch: Tensor) -> ModelCall:
    with torch.device("meta"):
        model = getattr(hf, name)(config)
    return source(model, (), batch, lambda output: output["loss"])


class Halving(nn.Module):
    """Two convolutions, and their result at half the size."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.two(F.relu(self.one(x))))
        return x, F.max_pool2d(x, 2)


class Doubling(nn.Module):
    """A transposed convolution to twice the size, beside what was halved there, and two convolutions."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(inputs, outputs, 2, stride=2)
        self.one, self.two = nn.Conv2d(2 * outputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)

    def forward(self, x: Tensor, beside: Tensor) -> Tensor:
        return F.relu(self.two(F.relu(self.one(torch.cat([beside, self.up(x)], dim=1)))))


class UNet(nn.Module):
    """Images ``[B, 3, h, w]`` to class scores ``[B, classes, h, w]``."""

    def __init__(self, widths: tuple[int, ...] = (64, 128, 256, 512), classes: int = 32) -> None:
        super().__init__()
        self.down = nn.ModuleList(Halving(a, b) for a, b in zip((3, *widths[:-2]), widths[:-1], strict=True))
        self.middle = nn.Conv2d(widths[-2], widths[-1], 3, padding=1)
        self.up = nn.ModuleList(Doubling(a, b) for a, b in zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.down:
            kept, x = down(x)
            skips.append(kept)
        x = F.relu(self.middle(x))
        for up in self.up:
            x = up(x, skips.pop())
        return self.head(x)


def images(model: nn.Module, size: int, *target: int) -> ModelCall:
    inputs = torch.empty(BATCH, 3, size, size, device="meta")
    return source(model, (inputs, torch.empty(BATCH, *target, dtype=torch.int64, device="meta")), {}, F.cross_entropy)


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def pixels() -> dict[str, Tensor]:
    return {
        "pixel_values": torch.empty(BATCH, 3, 224, 224, device="meta"),
        "labels": torch.empty(BATCH, dtype=torch.int64, device="meta"),
    }


MODELS: dict[str, Callable[[], ModelCall]] = {
    "llama-2": lambda: decoder(2),
    "llama-8": lambda: decoder(8),
    "gpt2": lambda: of_transformers("GPT2LMHeadModel", hf.GPT2Config(**GPT2), input_ids=ids(1024), labels=ids(1024)),
    "bert": lambda: of_transformers("BertForMaskedLM", hf.BertConfig(**BERT), input_ids=ids(512), labels=ids(512)),
    "t5": lambda: of_transformers(
        "T5ForConditionalGeneration", hf.T5Config(**T5), input_ids=ids(512), labels=ids(128)
    ),
    "vit": lambda: of_transformers("ViTForImageClassification", hf.ViTConfig(num_labels=1000), **pixels()),
    "convnet": lambda: images(
        on_meta(lambda: convnet.ConvNet(convnet.ConvNetConfig(64, (64, 128, 256, 512), 1024))), 64
    ),
    "unet": lambda: images(on_meta(UNet), 128, 128, 128),
}  # fmt: skip


@lru_cache
def captured_model(name: str) -> CapturedModel:
    return CapturedModel.of(MODELS[name](), PRECISION, Mesh(dp=2))
