"""Layers that pass a state along the sequence, as their papers' code writes them, of ``[rows, length, WIDTH]``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, CHUNK = 8, 2, 4
SIZE = WIDTH // HEADS


def heads_of(x: Tensor) -> Tensor:
    """``[rows, length, WIDTH]`` as ``[rows, HEADS, length, SIZE]``."""
    return x.unflatten(-1, (HEADS, SIZE)).transpose(1, 2)


class Projected(nn.Module):
    """Inputs of a layer, and what adds its result to the residual."""

    def __init__(self, parts: int = 3) -> None:
        super().__init__()
        self.parts = parts
        self.norm, self.before = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, parts * WIDTH)
        self.gate, self.after = nn.Linear(WIDTH, HEADS), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.after(self.mix(y, *self.before(y).chunk(self.parts, -1)))

    def mix(self, x: Tensor, *parts: Tensor) -> Tensor:
        raise NotImplementedError


class Mamba2(Projected):
    """A short convolution, and the chunked scan of SSD: products in chunks, and a product over the chunks' states."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3 * WIDTH, 3 * WIDTH, 4, groups=3 * WIDTH, padding=3)

    def mix(self, x: Tensor, *parts: Tensor) -> Tensor:
        joined = F.silu(self.conv(torch.cat(parts, -1).transpose(1, 2)).transpose(1, 2))[:, : x.shape[1]]
        value, b, c = (z.unflatten(-1, (HEADS, SIZE)).unflatten(1, (-1, CHUNK)) for z in joined.chunk(3, -1))
        decay = -F.softplus(self.gate(x)).unflatten(1, (-1, CHUNK)).permute(0, 3, 1, 2)
        sums = decay.cumsum(-1)
        inside = torch.exp(self.between(decay))
        of_chunk = torch.einsum("bclhn,bcshn,bhcls,bcshp->bclhp", c, b, inside, value)
        states = torch.einsum("bclhn,bhcl,bclhp->bchpn", b, torch.exp(sums[..., -1:] - sums), value)
        states = torch.cat([torch.zeros_like(states[:, :1]), states], 1)
        over_chunks = torch.exp(self.between(F.pad(sums[..., -1], (1, 0))))
        states = torch.einsum("bhzc,bchpn->bzhpn", over_chunks, states)[:, :-1]
        before = torch.einsum("bclhn,bchpn,bhcl->bclhp", c, states, torch.exp(sums))
        return (of_chunk + before).flatten(1, 2).flatten(2)

    @staticmethod
    def between(x: Tensor) -> Tensor:
        """Sums of ``x`` from each element behind a place up to each later place; -inf for earlier ones."""
        n = x.shape[-1]
        x = x[..., None].expand(*x.shape, n).masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(-1), 0)
        return x.cumsum(-2).masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -torch.inf)


class Chunked(Projected):
    """Gated linear attention by chunks, whose state is passed in a loop."""

    def mix(self, x: Tensor, *parts: Tensor) -> Tensor:
        q, k, v = (heads_of(z).unflatten(2, (-1, CHUNK)) for z in parts)
        sums = F.logsigmoid(heads_of(x)).unflatten(2, (-1, CHUNK)).cumsum(3)
        state, out = torch.zeros(x.shape[0], HEADS, SIZE, SIZE, dtype=x.dtype), []
        for at in range(q.shape[2]):
            decay, end = sums[:, :, at].exp(), sums[:, :, at, -1:].exp()
            scores = (q[:, :, at] * decay) @ (k[:, :, at] / decay).mT
            out.append(scores.tril() @ v[:, :, at] + (q[:, :, at] * decay) @ state)
            state = state * end.mT + (k[:, :, at] * end / decay).mT @ v[:, :, at]
        return torch.stack(out, 2).flatten(2, 3).transpose(1, 2).flatten(2)


class Delta(Projected):
    """The gated delta rule by chunks: rows of a triangle one by one in all chunks, then a loop over the chunks."""

    def mix(self, x: Tensor, *parts: Tensor) -> Tensor:
        q, k, v = (heads_of(z) for z in parts)
        k, rate = F.normalize(k, dim=-1), self.gate(x).sigmoid().transpose(1, 2)[..., None]
        q, k, v, kept = (z.unflatten(2, (-1, CHUNK)) for z in (q, k, v * rate, k * rate))
        decay = F.logsigmoid(self.gate(x)).transpose(1, 2).unflatten(2, (-1, CHUNK)).cumsum(-1)
        between = (decay[..., :, None] - decay[..., None, :]).tril().exp().tril()
        attn = -(kept @ k.mT * between).tril(-1)
        for row in range(1, CHUNK):
            known = attn[..., row, :row].clone()
            attn[..., row, :row] = known + (known[..., None] * attn[..., :row, :row].clone()).sum(-2)
        attn = attn + torch.eye(CHUNK, dtype=x.dtype)
        v, seen = attn @ v, attn @ (kept * decay.exp()[..., None])
        state, out = torch.zeros(x.shape[0], HEADS, SIZE, SIZE, dtype=x.dtype), torch.zeros_like(v)
        for at in range(q.shape[2]):
            d = decay[:, :, at]
            new = v[:, :, at] - seen[:, :, at] @ state
            inner = (q[:, :, at] @ k[:, :, at].mT * between[:, :, at]).tril()
            out[:, :, at] = (q[:, :, at] * d[..., None].exp()) @ state + inner @ new
            state = state * d[..., -1, None, None].exp()
            state = state + (k[:, :, at] * (d[..., -1:] - d).exp()[..., None]).mT @ new
        return out.flatten(2, 3).transpose(1, 2).flatten(2)


class Summed(Projected):
    """Linear attention as running sums of the whole sequence."""

    def mix(self, x: Tensor, *parts: Tensor) -> Tensor:
        q, k, v = (heads_of(z) for z in parts)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        sums = (k[..., :, None] * v[..., None, :]).cumsum(2)
        out = (q[..., None, :] @ sums).squeeze(-2) / (q * torch.cumsum(k, 2)).sum(-1, keepdim=True)
        return out.transpose(1, 2).flatten(2)


class Rwkv(Projected):
    """Token shift, with a learned row before the first, and a loop over places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.share = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.rand(WIDTH))
        self.decay = nn.Parameter(torch.rand(WIDTH))

    def mix(self, x: Tensor, *parts: Tensor) -> Tensor:
        before = torch.cat([self.first.expand(x.shape[0], 1, -1), parts[1][:, :-1]], 1)
        key = torch.lerp(before, parts[1], self.share).exp()
        shifted = F.pad(parts[2], (0, 0, 1, -1))
        value = parts[2] * self.share + shifted * (1 - self.share)
        top, below, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0]), []
        for at in range(x.shape[1]):
            top, below = (z * self.decay + key[:, at] * n for z, n in ((top, value[:, at]), (below, 1)))
            out.append(top / (below + 1))
        return parts[0].sigmoid() * torch.stack(out, 1)


class Hyena(Projected):
    """Short convolutions, then long ones by Fourier transforms, with gates between."""

    def __init__(self) -> None:
        super().__init__()
        self.short = nn.Conv1d(3 * WIDTH, 3 * WIDTH, 3, groups=3 * WIDTH, padding=2)
        self.filter = nn.Linear(1, WIDTH)

    def mix(self, x: Tensor, *parts: Tensor) -> Tensor:
        length = x.shape[1]
        q, k, v = self.short(torch.cat(parts, -1).mT)[..., :length].chunk(3, 1)
        long = self.filter(torch.linspace(0, 1, length, dtype=x.dtype)[:, None]).sin().mT
        spectrum = torch.fft.rfft(k * v, n=2 * length) * torch.fft.rfft(long, n=2 * length)
        return (q * torch.fft.irfft(spectrum, n=2 * length)[..., :length]).mT


LAYERS = {layer.__name__.lower(): layer for layer in (Mamba2, Chunked, Delta, Summed, Rwkv, Hyena)}


def build(name: str, layers: int = 1) -> nn.Module:
    """A stack of one kind of layer, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(*(LAYERS[name]() for _ in range(layers)))
