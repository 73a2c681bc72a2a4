"""Recurrent layers: all steps are one op, split over the batch; outputs, last states and gradients equal one device."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import shardc
from shardc.errors import CaptureError
from tests.models.alike import trains_alike
from tests.ranks import device_mesh, run_ranks


class Layer(nn.Module):
    """All that ``inner`` returns, in one tuple; it starts from zeros, or from ``first``."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, *first: Tensor) -> tuple[Tensor, ...]:
        out, last = self.inner(x, *([first if len(first) > 1 else first[0]] if first else []))
        return out, *(last if isinstance(last, tuple) else (last,))


LAYERS: dict[str, tuple[nn.Module, list[tuple[int, ...]]]] = {
    "LSTM": (nn.LSTM(6, 4, 2, bidirectional=True), [(4, 4, 4), (4, 4, 4)]),
    "LSTM, projected": (nn.LSTM(6, 4, proj_size=3), [(1, 4, 3), (1, 4, 4)]),
    "LSTM, all dropped between layers": (nn.LSTM(6, 4, 2, dropout=1.0), [(2, 4, 4), (2, 4, 4)]),
    "GRU": (nn.GRU(6, 4, 2, bidirectional=True), [(4, 4, 4)]),
    "RNN": (nn.RNN(6, 4, nonlinearity="relu"), [(1, 4, 4)]),
}


@pytest.mark.parametrize("name", LAYERS)
def test_equals_one_device(name: str) -> None:
    torch.manual_seed(0)
    inner, states = LAYERS[name]
    plan = shardc.fsdp("dp", threshold=0) | shardc.Plan(inputs="_, @dp, _")
    with warnings.catch_warnings():
        warnings.simplefilter("error", shardc.ShardcWarning)
        sim = trains_alike(Layer(inner), (torch.randn(5, 4, 6), *map(torch.randn, states)), {"dp": 2}, plan, steps=2)
    (program,) = sim.state.cache.programs.values()
    assert "5,4@dp,4" in program.text("propagate") or "5,4@dp,8" in program.text("propagate")
    trains_alike(Layer(inner), (torch.randn(5, 4, 6),), {"dp": 2}, plan, steps=1)


def test_a_program_is_as_large_for_many_steps_as_for_few() -> None:
    module = shardc.compile(nn.LSTM(6, 4, 2, batch_first=True), shardc.Mesh(dp=2), shardc.fsdp("dp"), backend="eager")
    few, many = (len(module.lower(torch.randn(4, steps, 6)).graph("capture").nodes) for steps in (4, 400))
    assert few == many < 200


def test_dropout_between_layers() -> None:
    """A share of the elements is zero; which, the program's own generator says."""
    layer = nn.LSTM(6, 200, 2, dropout=0.5, batch_first=True)
    second = {name: p for name, p in layer.named_parameters() if "l1" in name}
    for p in second.values():
        nn.init.zeros_(p)
    nn.init.ones_(second["weight_ih_l1"])
    module = shardc.compile(layer, shardc.Mesh(dp=2), shardc.fsdp("dp"), backend="eager")
    sim = shardc.Simulation(module)
    x = torch.randn(4, 3, 6)
    first, other = sim(x, grad=False)[0], sim(x, grad=False)[0]
    assert not torch.equal(first, other), "each step draws anew"
    module.eval()
    torch.testing.assert_close(shardc.Simulation(module)(x, grad=False)[0], copy.deepcopy(layer).eval()(x)[0].detach())


class Packs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(6, 4, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.inner(pack_padded_sequence(x, lengths, batch_first=True))[0].data


def test_packed_sequences_are_refused() -> None:
    module = shardc.compile(Packs(), shardc.Mesh(dp=2), shardc.fsdp("dp"), backend="eager")
    x, lengths = torch.randn(4, 3, 6), torch.tensor([3, 3, 2, 1])
    with pytest.raises(CaptureError) as caught:
        module.lower(x, lengths)
    assert "fix: run the layer on the padded tensor" in str(caught.value)
    module = shardc.compile(nn.GRU(6, 4), shardc.Mesh(dp=2), shardc.fsdp("dp"), backend="eager")
    with pytest.raises(CaptureError) as caught:
        module.lower(pack_padded_sequence(x, lengths, batch_first=True))
    assert "fix: run the layer on the padded tensor" in str(caught.value)


def trains(backend: str) -> None:
    layer = nn.Sequential(Layer(nn.LSTM(6, 4, 2, batch_first=True, bidirectional=True))).double()
    mesh = device_mesh(shardc.Mesh(dp=2))

    def loss(out: Any) -> Tensor:
        return sum((x.square().mean() for x in out), torch.zeros(()))

    plan = shardc.fsdp("dp", level=3, threshold=0)
    module = shardc.compile(copy.deepcopy(layer), mesh, plan, loss=loss, backend=backend)
    x = torch.randn(4, 5, 6, dtype=torch.float64)
    theirs, ours = loss(layer(x)), module(module.shard_inputs(x))
    theirs.backward()
    ours.backward()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    for name, p in layer.named_parameters():
        torch.testing.assert_close(module.get_parameter(name).grad.full_tensor(), p.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_ranks_train_a_recurrent_layer() -> None:
    run_ranks(2, partial(trains, "eager"), partial(trains, "inductor"))
