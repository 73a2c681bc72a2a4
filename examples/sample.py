"""Continue a text with a compiled byte-level decoder."""

from __future__ import annotations

import torch
from torch import Tensor, nn


@torch.no_grad()
def sample(module: nn.Module, prompt: bytes, *, count: int, length: int, copies: int, heat: float = 0.7) -> Tensor:
    """``prompt`` and ``count`` bytes sampled after it, ``i64[n]``; the plan must return outputs whole.

    The window has a fixed ``length``, so that one compiled program serves every step: causal attention never looks
    at what comes after the last byte. It is repeated ``copies`` times, a number that the plan's batch axes divide.
    """
    module.eval()
    text = torch.tensor(list(prompt))
    dice = torch.Generator().manual_seed(0)
    for _ in range(count):
        window = text[-length:]
        tokens = torch.zeros(copies, length, dtype=torch.int64)
        tokens[:, : len(window)] = window
        logits = module(module.shard_inputs(tokens))
        odds = torch.softmax(logits[0, len(window) - 1] / heat, dim=-1)
        text = torch.cat([text, torch.multinomial(odds, 1, generator=dice)])
    module.train()
    return text
