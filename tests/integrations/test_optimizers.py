"""Optimizers and averages of other libraries, and torch's schedulers, on the parameters of a compiled module."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import lr_scheduler

from tests.integrations.loops import check_habits, compiled, steps
from tests.ranks import run_ranks

Loss = Callable[[], Tensor]

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 1, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 2]),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.5),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 4),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 3),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=5),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(o)]),
}


def schedulers(model: nn.Module, loss: Loss) -> list[float]:
    rates = []
    for make in SCHEDULES.values():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        schedule = make(optimizer)
        for _ in range(3):
            rates += [*steps(optimizer, loss, 1), *schedule.get_last_lr()]
            schedule.step()
    return rates


def on_a_plateau(model: nn.Module, loss: Loss) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule, rates = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0), []
    for _ in range(3):
        (value,) = steps(optimizer, loss, 1)
        schedule.step(value)
        rates += schedule.get_last_lr()
    return rates


def test_schedulers_of_torch() -> None:
    check_habits(schedulers, on_a_plateau)


def lion(model: nn.Module, loss: Loss) -> list[float]:
    from lion_pytorch import Lion

    return steps(Lion(model.parameters(), lr=1e-3, weight_decay=0.1), loss)


def schedule_free(model: nn.Module, loss: Loss) -> list[float]:
    from schedulefree import AdamWScheduleFree

    optimizer = AdamWScheduleFree(model.parameters(), lr=0.01)
    optimizer.train()
    out = steps(optimizer, loss)
    optimizer.eval()
    return [*out, loss().item()]


def adafactor_of_transformers(model: nn.Module, loss: Loss) -> list[float]:
    from transformers import Adafactor

    return steps(Adafactor(model.parameters(), lr=0.01, relative_step=False, scale_parameter=False), loss)


def schedules_of_transformers(model: nn.Module, loss: Loss) -> list[float]:
    from transformers import get_scheduler

    out = []
    for name in ("linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt", "constant_with_warmup"):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = get_scheduler(name, optimizer, num_warmup_steps=1, num_training_steps=4)
        for _ in range(2):
            out += [*steps(optimizer, loss, 1), *schedule.get_last_lr()]
            schedule.step()
    return out


def average_of_torch_ema(model: nn.Module, loss: Loss) -> list[float]:
    from torch_ema import ExponentialMovingAverage

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average, out = ExponentialMovingAverage(model.parameters(), decay=0.9), []
    for _ in range(3):
        out += steps(optimizer, loss, 1)
        average.update()
    with average.average_parameters():
        out.append(loss().item())
    average.copy_to()
    return [*out, loss().item()]


def average_of_ema_pytorch(model: nn.Module, loss: Loss) -> list[Tensor]:
    from ema_pytorch import EMA

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = EMA(model, beta=0.9, update_every=1, update_after_step=0)
    for _ in range(3):
        steps(optimizer, loss, 1)
        average.update()
    whole = [getattr(x, "full_tensor", lambda x=x: x)() for x in average.ema_model.parameters()]
    return [x.detach() for x in whole]


@pytest.mark.parametrize(
    ("library", "habit"),
    [
        ("lion_pytorch", lion),
        ("schedulefree", schedule_free),
        ("transformers", adafactor_of_transformers),
        ("transformers", schedules_of_transformers),
        ("torch_ema", average_of_torch_ema),
        ("ema_pytorch", average_of_ema_pytorch),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_of_a_library(library: str, habit: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(library)
    check_habits(habit)


def low_bits(module: str) -> None:
    """States of 8 bits are rounded in blocks of a rank's shards, so values are near those of one device."""
    AdamW8bit = importlib.import_module(module).AdamW8bit
    torch.manual_seed(0)
    source = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    x, y = torch.randn(2, 8, 64)
    start, ours = copy.deepcopy(source), compiled(model=source)
    for model, given in ((source, (x,)), (ours, ours.shard_inputs(x, y))):
        optimizer = AdamW8bit(model.parameters(), lr=0.01)
        steps(optimizer, lambda m=model, a=given: m(*a) if len(a) == 2 else mse_loss(m(*a), y))
        states = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
        assert any(getattr(v, "codes", getattr(v, "_local_tensor", v)).dtype is torch.uint8 or
                   hasattr(getattr(v, "_local_tensor", v), "codes") for v in states)  # fmt: skip
    for name, param in source.named_parameters():
        moved, whole = param - start.get_parameter(name), ours.get_parameter(name).full_tensor()
        assert (whole - param).abs().mean() < 0.05 * moved.abs().mean(), name


@pytest.mark.parametrize("module", ["torchao.optim", "bitsandbytes.optim"])
@pytest.mark.slow
def test_optimizers_of_8_bits(module: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(module)
    run_ranks(2, partial(low_bits, module))
