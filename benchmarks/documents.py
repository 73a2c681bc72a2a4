"""The decoder with `flex_attention`, of sequences that are packed from several documents."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from examples.models import llama


class Documents(nn.Module):
    """The weights of `llama.Attention`; queries see the keys of their document up to themselves.

    Args:
        given: whose weights.
        document: of each place, its document.
        once: the mask is made here, and not in each forward.
    """

    block_mask: BlockMask | None

    def __init__(self, given: llama.Attention, document: Tensor, once: bool = False) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo, self.head_size = given.wq, given.wk, given.wv, given.wo, given.head_size
        self.register_buffer("document", document)
        self.block_mask = mask_of(document) if once else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = llama.rotate(q, cos, sin), llama.rotate(k, cos, sin)
        mask = mask_of(self.document) if self.block_mask is None else self.block_mask
        return self.wo(flex_attention(q, k, v, block_mask=mask, enable_gqa=True).transpose(1, 2).flatten(-2))


def mask_of(document: Tensor) -> BlockMask:
    """Causal, and of documents."""
    length = len(document)
    return create_block_mask(
        lambda b, h, i, j: (document[i] == document[j]) & (i >= j), None, None, length, length, device=document.device
    )


def documents(length: int, shortest: int = 64, longest: int = 1024) -> Tensor:
    """Of each place, its document."""
    sizes = torch.randint(shortest, longest + 1, (length // shortest,), generator=torch.Generator().manual_seed(0))
    return torch.arange(len(sizes)).repeat_interleave(sizes)[:length]


def packed(model: llama.Llama, document: Tensor, once: bool = False) -> llama.Llama:
    """``model``, its attention replaced by that of documents."""
    for layer in model.layers:
        layer.attn = Documents(layer.attn, document, once)
    return model
