"""The census of a model is torch's own walk, and notices whatever comes, goes or changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from shardc.runtime.identity_guards import ModuleSnapshot


def model() -> nn.Module:
    """With a tied parameter, a module under two names, buffers and a missing bias."""
    made = nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 4))
    made.add_module("tied", nn.Linear(4, 4))
    made.tied.weight = made[0].weight
    made.add_module("again", made[1])
    return made


def test_it_is_what_torch_finds() -> None:
    made = model()
    census = ModuleSnapshot(made)
    assert census.modules == list(made.modules())
    assert list(census.parameters) == [name for name, _ in made.named_parameters(remove_duplicate=False)]
    assert list(census.buffers) == [name for name, _ in made.named_buffers(remove_duplicate=False)]
    mode = census.mode()
    assert len(mode.grads) == len(list(made.parameters()))
    assert len(mode.dtypes) == len(list(made.parameters())) + len(list(made.buffers()))


def _swap_names(made: nn.Module) -> None:
    first, second = made._modules.pop("0"), made._modules.pop("2")
    made._modules.update({"0": second, "2": first})


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "a parameter is replaced": lambda m: setattr(m[2], "weight", nn.Parameter(torch.zeros(4, 4))),
    "a parameter comes": lambda m: m.register_parameter("new", nn.Parameter(torch.zeros(1))),
    "a parameter goes": lambda m: delattr(m[2], "bias"),
    "a parameter becomes None": lambda m: setattr(m[2], "bias", None),
    "a buffer is replaced": lambda m: setattr(m[1], "running_mean", torch.ones(4)),
    "a module is replaced": lambda m: m.__setitem__(2, nn.Linear(4, 4)),
    "modules change places": _swap_names,
    "a module comes, deep inside": lambda m: m[2].add_module("inner", nn.ReLU()),
    "a hook comes": lambda m: m[2].register_forward_hook(lambda module, args, out: None),
    "a backward hook comes": lambda m: m.register_full_backward_hook(lambda module, grads, others: None),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_it_notices(change: Callable[[nn.Module], object]) -> None:
    made = model()
    census = ModuleSnapshot(made)
    assert census.holds()
    change(made)
    assert not census.holds()
    assert ModuleSnapshot(made).holds()


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m[1].eval(),
        lambda m: m[2].bias.requires_grad_(False),
        lambda m: m.double(),
        lambda m: setattr(m[1], "num_batches_tracked", torch.tensor(0.0)),
    ],
    ids=["mode", "requires_grad", "dtype", "dtype of a buffer"],
)
def test_modes_differ(change: Callable[[nn.Module], object]) -> None:
    made = model()
    before = ModuleSnapshot(made).mode()
    change(made)
    assert ModuleSnapshot(made).mode() != before
