"""Layers of torch.nn as they are, under FSDP: loss, gradients and buffers equal one device's, in float64."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import shardc
from shardc.ir import graph as ir

BATCH = 4


class Fn(nn.Module):
    """A linear layer, then ``fn`` of what it gives."""

    def __init__(self, fn: Callable[[Tensor], Tensor], inputs: int = 6, outputs: int = 6) -> None:
        super().__init__()
        self.lin, self.fn = nn.Linear(inputs, outputs), fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(self.lin(x))


class First(nn.Module):
    """The first result of ``inner``, called with ``copies`` of its input."""

    def __init__(self, inner: nn.Module, copies: int = 1) -> None:
        super().__init__()
        self.inner, self.copies = inner, copies

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(*[x] * self.copies)[0]


def tokens(*shape: int) -> Tensor:
    return torch.randint(10, (BATCH, *shape))


def floats(*shape: int) -> Tensor:
    return torch.randn(BATCH, *shape, dtype=torch.float64)


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "Linear": (lambda: nn.Linear(6, 5), lambda: floats(6)),
    "Bilinear": (lambda: Bilinear(), lambda: floats(6)),
    "Embedding": (lambda: nn.Embedding(10, 6), lambda: tokens(5)),
    "Embedding, padding": (lambda: nn.Embedding(10, 6, padding_idx=3), lambda: tokens(5)),
    "Embedding, scaled gradient": (lambda: nn.Embedding(10, 6, scale_grad_by_freq=True), lambda: tokens(5)),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(10, 6, mode="mean"), lambda: tokens(5)),
    "Conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1), lambda: floats(4, 8)),
    "Conv2d, strided": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), lambda: floats(4, 8, 8)),
    "Conv2d, depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4, bias=False), lambda: floats(4, 6, 6)),
    "Conv2d, circular": (lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), lambda: floats(4, 6, 6)),
    "Conv3d": (lambda: nn.Conv3d(2, 4, 2, dilation=2), lambda: floats(2, 5, 5, 5)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1), lambda: floats(4, 4, 4)),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(6), lambda: floats(6, 3)),
    "BatchNorm2d, no statistics": (lambda: nn.BatchNorm2d(4, track_running_stats=False), lambda: floats(4, 3, 3)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), lambda: floats(4, 3, 3)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(4, affine=True), lambda: floats(4, 3, 3)),
    "InstanceNorm1d, statistics": (
        lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
        lambda: floats(4, 3),
    ),
    "LayerNorm": (lambda: nn.LayerNorm([3, 6]), lambda: floats(3, 6)),
    "RMSNorm": (lambda: nn.RMSNorm(6), lambda: floats(3, 6)),
    "LocalResponseNorm": (lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.LocalResponseNorm(2)), lambda: floats(4, 3, 3)),
    "MultiheadAttention": (lambda: First(nn.MultiheadAttention(8, 2, batch_first=True), 3), lambda: floats(5, 8)),
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        lambda: floats(5, 8),
    ),
    "TransformerEncoder, not batch first": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), 2, enable_nested_tensor=False),
        lambda: floats(5, 8),
    ),
    "TransformerEncoder, with a mask": (lambda: Masked(), lambda: floats(5, 8)),
    "AdaptiveLogSoftmaxWithLoss": (lambda: Adaptive(), lambda: floats(6)),
    "GRUCell": (lambda: First(nn.GRUCell(6, 4)), lambda: floats(6)),
    "LSTMCell": (lambda: First(nn.LSTMCell(6, 4)), lambda: floats(6)),
    "PReLU": (lambda: nn.PReLU(4), lambda: floats(4, 3)),
    "GELU, tanh": (lambda: Fn(nn.GELU("tanh")), lambda: floats(6)),
    "Softmax over the batch": (lambda: Fn(nn.Softmax(0)), lambda: floats(6)),
    "LogSoftmax": (lambda: Fn(nn.LogSoftmax(-1)), lambda: floats(6)),
    "MaxPool2d": (lambda: nn.Sequential(nn.Conv2d(2, 4, 1), nn.MaxPool2d(3, 2, 1)), lambda: floats(2, 7, 7)),
    "AvgPool2d": (lambda: nn.Sequential(nn.Conv2d(2, 4, 1), nn.AvgPool2d(2)), lambda: floats(2, 6, 6)),
    "AdaptiveAvgPool2d": (lambda: nn.Sequential(nn.Conv2d(2, 4, 1), nn.AdaptiveAvgPool2d(2)), lambda: floats(2, 7, 7)),
    "Upsample, nearest": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 1), nn.Upsample(scale_factor=2)),
        lambda: floats(2, 3, 3),
    ),
    "Upsample, bilinear": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 1), nn.Upsample(scale_factor=2, mode="bilinear")),
        lambda: floats(2, 3, 3),
    ),
    "PixelShuffle": (lambda: nn.Sequential(nn.Conv2d(2, 8, 1), nn.PixelShuffle(2)), lambda: floats(2, 3, 3)),
    "Unfold": (lambda: nn.Sequential(nn.Conv2d(2, 2, 1), nn.Unfold(2)), lambda: floats(2, 4, 4)),
    "weight norm": (lambda: weight_norm(nn.Linear(6, 4)), lambda: floats(6)),
    "cumsum over the batch": (lambda: Fn(lambda x: x.cumsum(0)), lambda: floats(6)),
    "sort over the batch": (lambda: Fn(lambda x: x.sort(0).values), lambda: floats(6)),
    "topk": (lambda: Fn(lambda x: x.topk(2, -1).values), lambda: floats(6)),
    "flip and roll": (lambda: Fn(lambda x: x.flip(0).roll(1, 0)), lambda: floats(6)),
    "statistics of the batch": (lambda: Fn(lambda x: torch.stack([x.mean(0), x.std(0), x.amax(0)])), lambda: floats(6)),
    "var and norm": (lambda: Fn(lambda x: x.var() + x.norm() + x.logsumexp(0).sum()), lambda: floats(6)),
    "einsum over pairs of rows": (lambda: Fn(lambda x: torch.einsum("ai,bi->ab", x, x)), lambda: floats(6)),
    "cdist": (lambda: Fn(lambda x: torch.cdist(x, x.flip(0) + 1)), lambda: floats(6)),
    "indices": (lambda: Fn(lambda x: x[torch.tensor([0, 2, 2]), 1:] * 2), lambda: floats(6)),
    "masked fill": (lambda: Fn(lambda x: x.masked_fill(x > 0, -1.0).tril()), lambda: floats(6)),
    "gather and scatter": (
        lambda: Fn(lambda x: x.gather(1, x.argsort(1)).scatter_add(0, torch.zeros(2, 6).long(), x[:2])),
        lambda: floats(6),
    ),
    "cat and split": (lambda: Fn(lambda x: torch.cat([*x.split(4, 1), x[:, :2]], 1)), lambda: floats(6)),
    "outer shift": (lambda: Fn(lambda x: torch.cat([x[1:], x[:1]]) * x), lambda: floats(6)),
    "unflatten": (lambda: Fn(lambda x: x.unflatten(1, (2, 3)).movedim(1, 0).flatten(1)), lambda: floats(6)),
    "repeat": (lambda: Fn(lambda x: x.repeat(2, 2) + x.repeat_interleave(2, 0).repeat(1, 2)), lambda: floats(6)),
    "RNN": (lambda: First(nn.RNN(6, 4, batch_first=True)), lambda: floats(2, 6)),
    "LSTM, both ways": (lambda: First(nn.LSTM(6, 4, batch_first=True, bidirectional=True)), lambda: floats(2, 6)),
    "GRU, two layers": (lambda: First(nn.GRU(6, 4, 2, batch_first=True)), lambda: floats(2, 6)),
    "LSTM, projected, both ways": (
        lambda: First(nn.LSTM(6, 4, 2, batch_first=True, bidirectional=True, proj_size=3)),
        lambda: floats(3, 6),
    ),
    "LSTM, projected, no biases": (
        lambda: First(nn.LSTM(6, 4, batch_first=True, bias=False, proj_size=3)),
        lambda: floats(3, 6),
    ),
    "LSTM, all dropped between layers": (
        lambda: First(nn.LSTM(6, 4, 3, batch_first=True, dropout=1.0)),
        lambda: floats(3, 6),
    ),
    "GRU, both ways, no biases": (
        lambda: First(nn.GRU(6, 4, 2, batch_first=True, bidirectional=True, bias=False)),
        lambda: floats(3, 6),
    ),
    "RNN, relu": (lambda: First(nn.RNN(6, 4, 2, nonlinearity="relu", batch_first=True)), lambda: floats(3, 6)),
    "BatchNorm2d, cumulative": (lambda: nn.BatchNorm2d(4, momentum=None), lambda: floats(4, 3, 3)),
    "SyncBatchNorm": (lambda: nn.SyncBatchNorm(4), lambda: floats(4, 3, 3)),
    "SyncBatchNorm, cumulative": (lambda: nn.SyncBatchNorm(4, momentum=None), lambda: floats(4, 3, 3)),
    "EmbeddingBag, max": (lambda: nn.EmbeddingBag(10, 6, mode="max", padding_idx=2), lambda: tokens(5)),
    "LogSigmoid": (lambda: Fn(nn.LogSigmoid()), lambda: floats(6)),
    "ChannelShuffle": (lambda: nn.Sequential(nn.Conv2d(2, 8, 1), nn.ChannelShuffle(2)), lambda: floats(2, 3, 3)),
    "weight norm, transposed": (
        lambda: nn.Sequential(nn.Linear(6, 6), weight_norm(nn.ConvTranspose1d(3, 4, 2), dim=1)),
        lambda: floats(3, 6),
    ),
    "margins": (
        lambda: Fn(lambda x: F.multilabel_margin_loss(x, torch.tensor([[0, 3, -1, 0, 0, 0]] * BATCH)).view(1)),
        lambda: floats(6),
    ),
    "variances": (lambda: Fn(lambda x: F.gaussian_nll_loss(x, x.flip(0), x.exp()).view(1)), lambda: floats(6)),
    "soft margins": (lambda: Fn(lambda x: F.soft_margin_loss(x, x.sign().detach()).view(1)), lambda: floats(6)),
    "a gradient inside": (
        lambda: Fn(lambda x: torch.autograd.grad((x**3).sum(), x, create_graph=True)[0] + x),
        lambda: floats(6),
    ),
    "flatten the batch": (lambda: Fn(lambda x: x.reshape(-1).view(2, -1).softmax(1)), lambda: floats(6)),
}  # fmt: skip


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Bilinear(6, 6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x + 1)


class Masked(nn.Module):
    """An encoder that compares its mask with a causal one, for a hint."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype))


class Adaptive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.AdaptiveLogSoftmaxWithLoss(6, 20, [4, 10])

    def forward(self, x: Tensor) -> Tensor:
        output, loss = self.inner(x, torch.tensor([3, 19, 0, 7]))
        return output * loss


def close(ours: Tensor, theirs: Tensor, what: str) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10, msg=lambda text: f"{what}: {text}")


@pytest.mark.parametrize("name", LAYERS)
def test_layer(name: str) -> None:
    torch.manual_seed(0)
    build, inputs = LAYERS[name]
    model, x = build().double().train(), inputs()

    def loss(out: Tensor) -> Tensor:
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        return (out * weights).sum() + F.mse_loss(out, weights)

    module = shardc.compile(model, shardc.Mesh(dp=2), shardc.fsdp("dp", threshold=0), loss=loss, backend="eager")
    sim = shardc.Simulation(module)
    for step in range(2):
        theirs = loss(model(x))
        theirs.backward()
        close(sim(x), theirs.detach(), f"loss of step {step}")
        sim.backward()
    for path, p in model.named_parameters():
        assert (path in sim.grads) == (p.grad is not None), path
        if p.grad is not None:
            close(sim.grad(path), p.grad, path)
    for path, buffer in model.named_buffers():
        close(sim.buffer(path), buffer, path)


@pytest.mark.parametrize("build", [lambda: First(nn.LSTM(6, 4, batch_first=True)), lambda: nn.EmbeddingBag(10, 6)])
def test_split_over_the_batch(build: Callable[[], nn.Module]) -> None:
    """In float32, too, where torch has kernels for all steps of an LSTM at once, nothing is computed whole."""
    x = tokens(5) if isinstance(model := build(), nn.EmbeddingBag) else floats(2, 6).float()
    with warnings.catch_warnings():
        warnings.simplefilter("error", shardc.ShardcWarning)
        options = shardc.Options(strict=True)
        module = shardc.compile(model, shardc.Mesh(dp=2), shardc.fsdp("dp", threshold=0), options=options)
        program = module.lower(x)
    inputs = [node for node in program.graph("collectives").nodes if "gather" in str(node.target)]
    assert all(ir.info(node.args[0]).role is not None for node in inputs), "what is gathered are parameters"


def test_replicas_that_are_not_a_number() -> None:
    """A loss that is not a number is so on one device, too, and no sign that replicas differ."""
    plan = shardc.fsdp("dp", threshold=0)
    module = shardc.compile(nn.Linear(6, 4), shardc.Mesh(dp=2), plan, loss=lambda y: y.sum(), backend="eager")
    assert shardc.Simulation(module)(torch.full((BATCH, 6), float("nan"))).isnan()
