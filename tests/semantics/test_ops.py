"""Ops that a model may use freely: each runs sharded, and gives what one device gives.

They compile under ``strict``, so that none is computed whole, and take a parameter that is split over both axes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def warned(x: Tensor) -> Tensor:
    warnings.warn("a library says something on the way", stacklevel=2)
    return x.cos()


class Sent(nn.Module):
    """``fn`` of a parameter."""

    def __init__(self, fn: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> None:
        super().__init__()
        self.fn, self.weight = fn, nn.Parameter(draw(*shape))

    def forward(self) -> Tensor:
        return self.fn(self.weight)


COUNTS, WEIGHTS = torch.tensor([1, 2, 1, 3, 1, 1, 2, 1]), torch.rand(8, dtype=torch.float64)
OTHER, IDS, OFFSETS = draw(5, 8), torch.tensor([1, 0, 5, 2, 2, 4, 3]), torch.tensor([0, 3, 3, 5])
WINDOW = (torch.tensor([[-1, 0], [2, 7]]), torch.tensor([5, 9]))
INSIDE = torch.tensor([[False, False], [True, False]])
# Some look at values in torch's own form, though the shapes of what they give are known; others are kernels for all.
OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "cov": lambda x: torch.cov(x),  # looked up when it is called, as in a user's code
    "cov, method": lambda x: x.cov(correction=0),
    "cov, counted": lambda x: torch.cov(x, fweights=COUNTS),
    "cov, weighted": lambda x: torch.cov(x, fweights=COUNTS, aweights=WEIGHTS, correction=2),
    "cov of one": lambda x: torch.cov(x[0], aweights=WEIGHTS),
    "corrcoef": lambda x: torch.corrcoef(x),
    "corrcoef, method": lambda x: x.corrcoef(),
    "corrcoef of complex": lambda x: torch.view_as_real(torch.corrcoef(torch.complex(x, x.sin()))),
    "combinations": lambda x: torch.combinations(x[0], 3),
    "combinations with replacement": lambda x: torch.combinations(x[1], with_replacement=True),
    "bags of any sizes": lambda x: F.embedding_bag(IDS, x, OFFSETS, mode="mean"),
    "bags of any sizes, max": lambda x: torch.nn.functional.embedding_bag(IDS, x, OFFSETS, mode="max", padding_idx=2),
    "a warning": warned,
    "diag_embed": lambda x: torch.diag_embed(x, 1),
    "isin": lambda x: x * torch.isin((x * 3).round(), (x[:, :2] * 3).round(), invert=True),
    "cdist": lambda x: torch.cdist(x, OTHER) + torch.cdist(x, x[1:] + 1, p=1.0),
    "cdist of batches": lambda x: torch.cdist(x.view(2, 3, 8), x.view(3, 2, 8)[:2] + 2, p=3.0),
    "cdist of many rows": lambda x: torch.cdist(x.repeat(5, 1), OTHER) + torch.cdist(x.repeat(5, 1), x[1:] + 1),
    "affine_grid": lambda x: F.affine_grid(x[:, :6].view(6, 2, 3), [6, 1, 4, 2], align_corners=False),
    "bilinear": lambda x: F.bilinear(x, x.sin(), x.view(2, 3, 8).mT @ x[:3] * 0.3),
    "index under a mask": lambda x: torch.ops.aten._unsafe_masked_index(x, INSIDE, WINDOW, 0.5),
    "put under a mask": lambda x: torch.ops.aten._unsafe_masked_index_put_accumulate(x, INSIDE, WINDOW, x[:2, :2] * 2),
}
if hasattr(F, "linear_cross_entropy"):
    from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

    TARGETS = torch.tensor([0, 2, -100, 3, 1, 2])
    OPS |= {
        f"linear_cross_entropy in chunks, {reduction}": lambda x, reduction=reduction: F.linear_cross_entropy(
            x, x[:4] * 2, TARGETS, options=LinearCrossEntropyOptions(batch_chunk_size=2), reduction=reduction
        )
        for reduction in ("mean", "sum", "none")
    }


@pytest.mark.parametrize("name", OPS)
def test_sharded(name: str) -> None:
    fn = OPS[name]
    model = Sent(fn, (6, 8))
    plan = shardc.Plan(params={"weight": ("dp", "tp")})
    module = shardc.compile(model, shardc.Mesh(dp=2, tp=2), plan, backend="eager", options=shardc.Options(strict=True))
    sim = shardc.Simulation(module)
    expected = model()
    weights = torch.linspace(1, 2, expected.numel(), dtype=torch.float64).view(expected.shape)
    (expected * weights).sum().backward()
    torch.testing.assert_close(sim(), expected.detach(), rtol=1e-9, atol=1e-12)
    sim.backward(weights)
    assert model.weight.grad is not None
    torch.testing.assert_close(sim.grad("weight"), model.weight.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", (torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2))
def test_outputs_of_dtypes_with_few_kernels(dtype: torch.dtype) -> None:
    """In parts on ranks, in replicas, and whole."""

    class Cast(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x.to(dtype), x.sum(0).to(dtype)

    x = torch.arange(24.0).view(6, 4) % 5
    module = shardc.compile(Cast(), shardc.Mesh(dp=3, tp=2), shardc.fsdp("dp"), backend="eager")
    for ours, theirs in zip(shardc.Simulation(module)(x, grad=False), Cast()(x), strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=0, atol=0)
