"""Models of several blocks with their batches and losses, for tests of pipeline stages: float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.models import gpt2, llama
from tests.microbatches.programs import ROWS, Case, masked
from tests.models.zoo import T5


class Pooled(nn.Module):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(inner, outer, 3, padding=1), nn.GroupNorm(2, outer)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(self.conv(x)))


class UNet(nn.Module):
    """Skips from each block on the way down to its counterpart on the way up, over all stages between them."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.inp = nn.Conv2d(3, d, 3, padding=1)
        self.down = nn.ModuleList([Pooled(d, d), Pooled(d, 2 * d), Pooled(2 * d, 2 * d)])
        self.mid = nn.ModuleList([Pooled(2 * d, 2 * d)])
        self.up = nn.ModuleList([Pooled(4 * d, 2 * d), Pooled(4 * d, d), Pooled(2 * d, d)])
        self.out = nn.Conv2d(d, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.inp(x), []
        for k, block in enumerate(self.down):
            x = block(x)
            skips.append(x)
            x = F.avg_pool2d(x, 2) if k < 2 else x
        for block in self.mid:
            x = block(x)
        for k, block in enumerate(self.up):
            x = block(torch.cat([x, skips.pop()], 1))
            x = F.interpolate(x, scale_factor=2) if k < 2 else x
        return self.out(x)


class Library(nn.Module):
    """Returns the loss of a Hugging Face model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *values: Tensor) -> Tensor:
        names = ("input_ids", "attention_mask", "labels")
        return self.model(**dict(zip(names, values, strict=True))).loss


class Blocks(nn.Module):
    """Residual blocks of two linears between two others; ``frozen`` of them get no gradient."""

    def __init__(self, layers: int = 4, dim: int = 8, frozen: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.first = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.Tanh(), nn.Linear(2 * dim, dim)) for _ in range(layers)
        )
        self.last = nn.Linear(dim, 4)
        for at in frozen:
            self.blocks[at].requires_grad_(False)

    def features(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.features(x))


class Experts(nn.Module):
    """A layer of experts of which each row uses one; also returns how even their load is."""

    def __init__(self, dim: int, count: int) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(dim, count), nn.Linear(dim, dim * count)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.gate(x).softmax(-1)
        chosen = F.one_hot(weights.argmax(-1), weights.shape[-1]).to(x.dtype)
        outputs = torch.tanh(self.experts(x)).unflatten(-1, (weights.shape[-1], -1))
        balance = (chosen.mean(0) * weights.mean(0)).sum() * weights.shape[-1]
        return x + ((weights * chosen).unsqueeze(-1) * outputs).sum(-2), balance


class Balanced(nn.Module):
    """Layers of experts, with a loss that balances their load: it is known when the whole batch has run."""

    def __init__(self, layers: int = 4, dim: int = 8, count: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(Experts(dim, count) for _ in range(layers))
        self.last = nn.Linear(dim, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x, balance = self.first(x), x.new_zeros(())
        for block in self.blocks:
            x, more = block(x)
            balance = balance + more
        return F.mse_loss(self.last(x), target) + 0.1 * balance


def decoder(rows: int = ROWS, masks: bool = False, **config: Any) -> Case:
    torch.manual_seed(0)
    c = llama.LlamaConfig(**{"layers": 4, "dim": 32, "hidden": 48, "heads": 4, "kv_heads": 2} | config)
    tokens, target = llama.batch(c, size=rows)
    return Case(llama.Llama(c).double(), (tokens, masked(target) if masks else target), llama.loss)


def tied(rows: int = ROWS, **config: Any) -> Case:
    torch.manual_seed(0)
    c = gpt2.GPT2Config(**{"layers": 4, "dim": 32, "heads": 4} | config)
    return Case(gpt2.GPT2(c).double(), gpt2.batch(c, size=rows), gpt2.loss)


def unet() -> Case:
    torch.manual_seed(0)
    x, y = torch.randn(2, 8, 3, 16, 16, dtype=torch.float64)
    return Case(UNet().double(), (x, y), F.mse_loss)


def encoder_decoder() -> Case:
    import transformers

    torch.manual_seed(0)
    config = transformers.T5Config(**T5 | {"num_layers": 4, "num_decoder_layers": 4})
    model = transformers.T5ForConditionalGeneration(config).double().train()
    tokens, labels, mask = torch.randint(3, 64, (8, 8)), torch.randint(3, 64, (8, 6)), torch.ones(8, 8).long()
    mask[0, 5:], labels[1, 4:], labels[4:6] = 0, -100, -100
    return Case(Library(model), (tokens, mask, labels))


def experts() -> Case:
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "moe_intermediate_size": 16, "num_hidden_layers": 4, "head_dim": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2}
    config = transformers.Qwen3MoeConfig(**sizes, use_cache=False, experts_implementation="batched_mm")
    model = transformers.Qwen3MoeForCausalLM(config).double().train()
    tokens = torch.randint(3, 64, (8, 8))
    return Case(Library(model), (tokens, torch.ones(8, 8).long(), tokens))


def blocks(**config: Any) -> Case:
    torch.manual_seed(0)
    x, y = torch.randn(ROWS, 8, dtype=torch.float64), torch.randn(ROWS, 4, dtype=torch.float64)
    return Case(Blocks(**config).double(), (x, y), F.mse_loss)


def balanced() -> Case:
    torch.manual_seed(0)
    x, y = torch.randn(ROWS, 8, dtype=torch.float64), torch.randn(ROWS, 4, dtype=torch.float64)
    return Case(Balanced().double(), (x, y))


CASES: dict[str, Callable[[], Case]] = {
    "decoder": decoder,
    "masked": lambda: decoder(masks=True),
    "tied": tied,
    "skips": unet,
    "encoder and decoder": encoder_decoder,
    "experts": experts,
    "blocks": blocks,
    "balanced experts": balanced,
}
