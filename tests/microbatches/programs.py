"""Small models with their batches and losses, for tests of microbatches: float64, 16 rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.models import convnet, gpt2, llama, vit

ROWS = 16
IGNORED = -100


@dataclass
class Case:
    """A model, its arguments (targets last) and its loss; None if the model returns its loss."""

    model: nn.Module
    args: tuple[Any, ...]
    loss: Callable[..., Tensor] | None = None

    def reference_loss(self) -> Tensor:
        """The loss of one device, on the whole batch."""
        return self.model(*self.args) if self.loss is None else self.loss(self.model(self.args[0]), *self.args[1:])

    def reference(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and the gradients of one device, on the whole batch."""
        self.model.zero_grad()
        loss = self.reference_loss()
        loss.backward()
        grads = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        self.model.zero_grad()
        return loss.detach(), grads


def plain(logits: Tensor, target: Tensor) -> Tensor:
    return -logits.log_softmax(-1).gather(-1, target[..., None]).mean()


def smoothed(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), label_smoothing=0.1, ignore_index=IGNORED)


def token_weights(logits: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    each = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    return (each * weight.flatten()).sum() / weight.sum()


def class_weights(logits: Tensor, target: Tensor) -> Tensor:
    weight = torch.linspace(1, 2, logits.shape[-1])
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), weight=weight, ignore_index=IGNORED)


def z_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Two terms, each a mean of its own."""
    z = logits.logsumexp(-1)
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED) + 1e-3 * (z**2).mean()


def normalised(logits: Tensor, target: Tensor) -> Tensor:
    """Weights that the model computes: their sum is known when all microbatches have run forward."""
    each = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    weight = ((1 - torch.exp(-each)) ** 2).detach()
    return (each * weight).sum() / weight.sum()


def perplexity(logits: Tensor, target: Tensor) -> Tensor:
    """Gradients that have the loss itself as a factor."""
    return torch.exp(F.cross_entropy(logits.flatten(0, 1), target.flatten()))


def masked(target: Tensor) -> Tensor:
    """Targets of which a third do not count, and none in rows 0 to 3 and 8 to 11."""
    target = target.clone()
    target[torch.rand(target.shape) < 0.3] = IGNORED
    target[0:4] = target[8:12] = IGNORED
    return target


def decoder(loss: Callable[..., Tensor], *, masks: bool = False, rows: int = ROWS, **config: Any) -> Case:
    torch.manual_seed(0)
    model, _ = llama.build(llama.LlamaConfig(**{"layers": 1} | config), "cpu")
    tokens, target = llama.batch(llama.LlamaConfig(), size=rows)
    extra = (torch.rand(rows, tokens.shape[1]),) if loss is token_weights else ()
    return Case(model, (tokens, masked(target) if masks else target, *extra), loss)


class Regularised(nn.Module):
    """A loss with a term of the parameters alone, and a parameter that only this term reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.alone = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        decay = sum(p.square().sum() for p in self.parameters())
        return F.mse_loss(self.second(torch.relu(self.first(x))), target) + 0.01 * decay


class Clip(nn.Module):
    """A contrastive loss: each row is compared with every row of the batch."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(24, dim), nn.GELU(), nn.Linear(dim, dim))
        self.embedding = nn.Embedding(64, dim)
        self.text = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        a = F.normalize(self.image(image), dim=-1)
        b = F.normalize(self.text(self.embedding(text).mean(1)), dim=-1)
        logits = self.scale.exp() * a @ b.t()
        target = torch.arange(image.shape[0], device=image.device)
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2


class Orthogonal(nn.Module):
    """A loss with products of a weight with itself, which no microbatch should compute a part of."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, width), nn.Linear(width, 32)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        weight = self.first.weight
        product = weight @ weight.t()
        away = (product @ product - torch.eye(len(weight), device=weight.device)).square().sum()
        return F.mse_loss(self.second(torch.relu(self.first(x))), target) + 0.01 * away


def orthogonal() -> Case:
    torch.manual_seed(0)
    return Case(Orthogonal(), (torch.randn(ROWS, 32), torch.randn(ROWS, 32)))


def regularised() -> Case:
    torch.manual_seed(0)
    return Case(Regularised(), (torch.randn(ROWS, 8), torch.randn(ROWS, 4)))


def tied() -> Case:
    torch.manual_seed(0)
    config = gpt2.GPT2Config(dropout=0.0)
    return Case(gpt2.build(config, "cpu")[0], gpt2.batch(config, size=ROWS), gpt2.loss)


def images() -> Case:
    torch.manual_seed(0)
    return Case(vit.tiny()[0], vit.batch(vit.ViTConfig(), size=ROWS), vit.loss)


def batch_norm() -> Case:
    torch.manual_seed(0)
    return Case(convnet.tiny()[0], convnet.batch(convnet.ConvNetConfig(), size=ROWS), convnet.loss)


def contrastive() -> Case:
    torch.manual_seed(0)
    return Case(Clip(), (torch.randn(ROWS, 24), torch.randint(64, (ROWS, 6))))


CASES: dict[str, Callable[[], Case]] = {
    "plain": lambda: decoder(plain),
    "masked": lambda: decoder(llama.loss, masks=True),
    "smoothed": lambda: decoder(smoothed, masks=True),
    "token weights": lambda: decoder(token_weights),
    "class weights": lambda: decoder(class_weights, masks=True),
    "two terms": lambda: decoder(z_loss, masks=True),
    "checkpointed": lambda: decoder(llama.loss, masks=True, checkpoint=True),
    "factor of all": lambda: decoder(perplexity),
    "normalised by the model": lambda: decoder(normalised),
    "weight decay": regularised,
    "orthogonal": orthogonal,
    "tied": tied,
    "images": images,
    "contrastive": contrastive,
}
