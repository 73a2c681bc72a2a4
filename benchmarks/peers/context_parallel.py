"""Context parallelism by hand, as in the report on Llama 3 (arXiv:2407.21783): keys gathered, an early and a late piece
of the sequence on each rank. And torch's own, for what it says on this device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.parallel import DistributedDataParallel

from benchmarks.work import Step
from examples.models import llama


def places(length: int, ranks: int, rank: int) -> Tensor:
    """Where in the sequence a rank's elements stand: piece r and piece 2n - 1 - r of 2n."""
    pieces = torch.arange(length).chunk(2 * ranks)
    return torch.cat([pieces[rank], pieces[2 * ranks - 1 - rank]])


class _Attention(nn.Module):
    """The weights of `llama.Attention`; this rank's queries see the gathered keys under a mask of places."""

    def __init__(self, given: llama.Attention, mesh: DeviceMesh, order: Tensor, mask: Tensor) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo, self.head_size = given.wq, given.wk, given.wv, given.wo, given.head_size
        self.mesh, self.order, self.mask = mesh, order, mask

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = llama.rotate(q, cos, sin), llama.rotate(k, cos, sin)
        both = torch.stack([k, v]).movedim(3, 0).contiguous()
        every = all_gather_tensor_autograd(both, 0, self.mesh)[self.order].movedim(0, 3)
        out = F.scaled_dot_product_attention(q, every[0], every[1], self.mask, enable_gqa=True)
        return self.wo(out.transpose(1, 2).flatten(-2))


class _Decoder(nn.Module):
    """`llama.Llama` of this rank's part of the sequence."""

    def __init__(
        self, model: llama.Llama, length: int, mesh: DeviceMesh, compiled: bool, document: Tensor | None = None
    ) -> None:
        super().__init__()
        self.model, self.places, self.length = model, places(length, mesh.size(), mesh.get_local_rank()), length
        every = torch.cat([places(length, mesh.size(), rank) for rank in range(mesh.size())])
        mask = self.places[:, None] >= torch.arange(length)
        if document is not None:
            mask &= document[self.places, None] == document
        for layer in model.layers:
            layer.attn = _Attention(layer.attn, mesh, every.argsort(), mask)
            if compiled:
                layer.compile(dynamic=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        tokens, targets = tokens[:, self.places], targets[:, self.places]
        x = self.model.embed(tokens)
        cos, sin = (table[self.places] for table in llama.rotary_tables(self.length, self.model.config, like=x))
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return llama.loss(self.model.head(self.model.norm(x)), targets)


def gathered(
    model: llama.Llama, length: int, mesh: DeviceMesh, compiled: bool = True, document: Tensor | None = None
) -> tuple[nn.Module, Step]:
    """A step on the global batch; gradients are averaged by DDP.

    Args:
        document: of each place, its document: queries see their own only. No key is skipped.
    """
    decoder = _Decoder(model, length, mesh, compiled, document)
    module = DistributedDataParallel(decoder, process_group=mesh.get_group())
    return module, module


def torchs(model: llama.Llama, length: int, mesh: DeviceMesh) -> tuple[nn.Module, Step]:
    """`context_parallel` of torch around the model; tables of positions are made whole and cut like the batch."""
    module = DistributedDataParallel(model, process_group=mesh.get_group())

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        tokens, targets = tokens.clone(), targets.clone()
        with context_parallel(mesh, buffers=[tokens, targets], buffer_seq_dims=[1, 1]):
            return llama.loss(module(tokens), targets)

    return module, step
