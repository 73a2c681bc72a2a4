"""NaN gradients under ``detect_anomaly`` on ranks, and norms of complex gradients."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

import shardc
from shardc.errors import BackwardError
from shardc.ir.mesh import Mesh
from tests.ranks import device_mesh, run_ranks

FSDP = shardc.fsdp("dp")


class Root(nn.Module):
    def forward(self, x, bad):
        return ((x - x.detach()).abs() + ~bad).sqrt()  # whose gradient is inf times 0 where it is bad


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.root, self.down = nn.Linear(4, 7), Root(), nn.Linear(7, 2)

    def forward(self, x, bad):
        hidden = self.up(x)
        return self.down(hidden + self.root(hidden, bad))


def _nan_is_named(backend: str) -> None:
    module = shardc.compile(Net(), device_mesh(Mesh(dp=2)), FSDP, backend=backend)
    bad = torch.zeros(4, 1, dtype=torch.bool)
    bad[3] = True  # of the second rank alone
    x, bad = module.shard_inputs(torch.randn(4, 4), bad)
    with torch.autograd.set_detect_anomaly(True):
        with pytest.raises(BackwardError) as raised:
            module(x, bad).sum().backward()
        assert "module 'root'" in str(raised.value)
        assert "test_anomaly.py:" in str(raised.value)
        assert all(p.grad is None for p in module.parameters())
        module(x, torch.zeros_like(bad)).sum().backward()


def _complex_norm() -> None:
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.weight = nn.Linear(4, 5), nn.Parameter(torch.randn(5, 4, dtype=torch.complex128))

        def forward(self, x):
            return (self.linear(x).to(torch.complex128) @ self.weight).abs().mean()

    net = Complex().double()
    x = torch.randn(4, 4).double()
    net(x).backward()
    for clip in (shardc_norm, torch.nn.utils.clip_grad_norm_):
        module = shardc.compile(copy.deepcopy(net).requires_grad_(), device_mesh(Mesh(dp=2)), FSDP, backend="eager")
        other = copy.deepcopy(net)
        for p, q in zip(other.parameters(), net.parameters(), strict=True):
            p.grad = q.grad.clone()
        module.zero_grad()
        module(module.shard_inputs(x)).backward()
        norm = clip(module if clip is shardc_norm else list(module.parameters()), 0.01)
        expected = torch.nn.utils.clip_grad_norm_(other.parameters(), 0.01)
        assert not norm.is_complex()
        assert norm.item() == pytest.approx(expected.item(), rel=1e-9)
        for p, q in zip(module.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)


def shardc_norm(module, most):
    return module.clip_grad_norm_(most)


def test_nan_is_named_by_module_and_line_on_all_ranks():
    run_ranks(2, partial(_nan_is_named, "eager"))


@pytest.mark.slow
def test_nan_is_named_behind_inductor():
    run_ranks(2, partial(_nan_is_named, "inductor"))


def test_the_norm_of_complex_gradients_is_real():
    run_ranks(2, _complex_norm)
