"""A model that is trained, or loaded, in place of the module that was compiled of it: a warning."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc.errors import ShardcWarning
from tests.ranks import run_ranks

X = torch.linspace(-1, 1, 24).view(4, 6)


def compiled(model: nn.Module) -> Any:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    return shardc.compile(model, mesh, shardc.fsdp("dp"), backend="eager")


def messages(*calls: Any) -> list[str]:
    """What is warned of, each message once a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in calls:
            call()
    return [str(w.message) for w in caught if isinstance(w.message, ShardcWarning)]


def backward(module: nn.Module) -> None:
    module(X).square().mean().backward()


def optimizers() -> None:
    model = nn.Sequential(nn.Linear(6, 4))
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    module = compiled(model)
    late = torch.optim.AdamW([{"params": model.parameters()}], lr=0.1)
    right = torch.optim.SGD(module.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(late, 1)
    # Nobody has trained yet.
    assert not messages(early.step, late.step, right.step)
    backward(module)
    assert not messages(right.step)
    for optimizer, kind in ((early, "SGD"), (late, "AdamW")):
        (text,) = messages(optimizer.step, optimizer.step)
        assert text == (
            f"the optimizer {kind} has the parameters of the model that was compiled, not those of the compiled "
            f"module: no step of it trains the module; make the optimizer of the compiled module's parameters: "
            f"{kind}(module.parameters(), ...)"
        )
    assert not messages(schedule.step)
    # Both are trained, each by its own optimizer.
    other = nn.Sequential(nn.Linear(6, 4))
    both = compiled(other)
    own = torch.optim.SGD(other.parameters(), lr=0.1)
    backward(other)
    backward(both)
    assert not messages(own.step)
    # The compiled module is gone.
    last = nn.Sequential(nn.Linear(6, 4))
    unused = torch.optim.SGD(last.parameters(), lr=0.1)
    backward(compiled(last))
    gc.collect()
    assert not messages(unused.step)


def loads() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4))
    values = {name: torch.ones_like(x) for name, x in model.state_dict().items()}
    module = compiled(model)
    before = module.full_state_dict()
    assert not messages(lambda: module.load_state_dict(before))
    for part, prefix in ((model, ""), (model[1], "1.")):
        own = {name.removeprefix(prefix): x for name, x in values.items() if name.startswith(prefix)}
        load = partial(part.load_state_dict, own)
        (text,) = messages(load, load)
        assert text.startswith("values were loaded into the model that was compiled: the compiled module has")
        assert "module.load_state_dict(...)" in text
        module = compiled(model)
    # Copies are of their own.
    copied = pickle.loads(pickle.dumps(model))
    assert not messages(lambda: copy.deepcopy(model).load_state_dict(values), lambda: copied.load_state_dict(values))
    assert not messages(lambda: backward(compiled(copied)))


def test_what_is_lost_is_a_warning() -> None:
    run_ranks(2, optimizers, loads)
