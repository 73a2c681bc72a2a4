"""The work that every row of the ruler does: one decoder, one stream of batches, one optimizer."""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from examples.models.llama import Llama, LlamaConfig, loss

LEARNING_RATE = 1e-3
PRECISION = {"cpu": "highest", "cuda": "high"}  # of float32's matrix products; "high" is TF32
Step = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Counted:
    """A training step that knows how many collectives it starts; of others the process groups' numbers tell."""

    step: Step
    collectives: Callable[[], int]

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.step(tokens, targets)


@dataclass(frozen=True)
class Work:
    """A model and how much of the batch each rank has.

    Args:
        config: of the decoder.
        length: tokens per sequence.
        batch: sequences per rank.
        dtype: of the parameters.
    """

    config: LlamaConfig
    length: int
    batch: int
    dtype: torch.dtype = torch.float32

    def model(self, device: str = "cpu") -> Llama:
        """The decoder with the same parameters on every rank and in every row."""
        torch.manual_seed(0)
        with torch.device(device):
            return Llama(self.config).to(self.dtype)

    def data(self, step: int, ranks: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets of the global batch of ``step``, both int64 ``[ranks * batch, length]``."""
        generator = torch.Generator().manual_seed(step)
        shape = (ranks * self.batch, self.length + 1)
        text = torch.randint(self.config.vocab, shape, generator=generator)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()


SIZES = {
    "micro": Work(LlamaConfig(256, 64, 2, heads=4, kv_heads=2, hidden=128), length=32, batch=2),  # to see rows run
    "tiny": Work(LlamaConfig(2048, 256, 4, heads=8, kv_heads=4, hidden=768), length=128, batch=4),
    "small": Work(LlamaConfig(8192, 512, 8, heads=8, kv_heads=4, hidden=1536), length=256, batch=2),
    "tiny16": Work(LlamaConfig(2048, 256, 4, heads=8, kv_heads=4, hidden=768), length=128, batch=16),
    # For a GPU: Llama 3.2 1B, and Llama 3 8B, with float32 parameters its first four layers.
    "1b": Work(LlamaConfig(128256, 2048, 16, 32, 8, 8192, 500000.0), length=2048, batch=2),
    "8b4": Work(LlamaConfig(128256, 4096, 4, 32, 8, 14336, 500000.0), length=2048, batch=2),
    "8b": Work(LlamaConfig(128256, 4096, 32, 32, 8, 14336, 500000.0), length=2048, batch=1, dtype=torch.bfloat16),
}


def train_step(
    forward: Step, parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer | None = None
) -> Step:
    """A training step, ``(tokens, targets) -> loss``, from a forward of the same form.

    The optimizer is AdamW, fused, which is the fastest for every row: with DTensor parameters it is one dispatch
    instead of several for every parameter. It takes DTensors and plain tensors only in groups of their own. A row may
    bring its own ``optimizer`` that makes the same updates.
    """
    if optimizer is None:
        groups: dict[bool, list[nn.Parameter]] = {}
        for p in parameters:
            groups.setdefault(isinstance(p, DTensor), []).append(p)
        optimizer = torch.optim.AdamW([{"params": ps} for ps in groups.values()], lr=LEARNING_RATE, fused=True)
    chosen = optimizer

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        value = forward(tokens, targets)
        value.backward()
        chosen.step()
        chosen.zero_grad()
        return value.detach()

    return step


def model_loss(model: Callable[[Tensor], Tensor]) -> Step:
    """The forward that gives the mean loss of ``model`` over the batch that it is given."""
    return lambda tokens, targets: loss(model(tokens), targets)


def train_alone(work: Work, steps: int, ranks: int, device: str) -> tuple[float, int]:
    """What one device makes of the global batches, in a process of its own: the loss of the last of ``steps``, and
    the bytes of the host that the process takes at most."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other:
        return other.submit(_train_alone, work, steps, ranks, device).result()


def _train_alone(work: Work, steps: int, ranks: int, device: str) -> tuple[float, int]:
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision(PRECISION[device])
    model = work.model(device)
    step = train_step(model_loss(model), model.parameters())
    value = torch.empty(())
    for at in range(steps):
        value = step(*(x.to(device) for x in work.data(at, ranks)))
    return value.item(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
