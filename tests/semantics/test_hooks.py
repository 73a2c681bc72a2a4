"""Hooks and changes on real ranks: of parameters, of modules, and what one rank alone changes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc.errors import InputError, LayoutError
from tests.ranks import run_ranks
from tests.state import assert_same, batch, close, model, sharded, step


def registers_on_parameters(before: bool) -> None:
    """Hooks of parameters see each gradient once, whole, and what they return is what is added to ``.grad``."""
    source = model()
    seen: dict[str, list[str]] = {"ours": [], "theirs": []}

    def register(of: Any, which: str) -> None:
        for name in ("mid.weight", "odd.bias"):
            of.get_parameter(name).register_hook(lambda grad: grad * 3)

        def accumulated(param: Tensor) -> None:
            assert param.grad is not None and param.grad.shape == (12, 9)
            seen[which].append("accumulated")

        of.mid.weight.register_post_accumulate_grad_hook(accumulated)

    if before:
        register(source, "theirs")
        module = sharded(source, "fsdp")
    else:
        module = sharded(source, "fsdp")
        register(source, "theirs")
        register(module, "ours")
    for _ in range(2):
        ours, theirs = step(module, source, *batch())
        close(ours, theirs, "loss")
        assert_same(module, source, grads=True)
    assert len(seen["ours"] + seen["theirs"]) == 4


def keeps_those_of_a_frozen_parameter() -> None:
    """Hooks of a parameter that was frozen behind them: they are called once it has gradients."""
    source = model()
    source.mid.weight.register_hook(lambda grad: grad * 3)
    source.mid.weight.register_post_accumulate_grad_hook(lambda param: None)
    source.mid.weight.requires_grad_(False)
    module = sharded(source, "fsdp")
    for frozen in (True, False):
        for net in (source, module):
            net.get_parameter("mid.weight").requires_grad_(not frozen)
        close(*step(module, source, *batch()), "loss")
        assert (module.mid.weight.grad is None) == frozen
        assert_same(module, source, grads=True)


def registers_on_modules() -> None:
    source = model()
    module = sharded(source, "fsdp")
    for register in (
        lambda m: None,
        lambda m: m.mid.register_forward_hook(lambda module, args, out: out * 2),
        lambda m: m.register_forward_pre_hook(lambda module, args: (args[0] + 1,)),
        lambda m: m.register_forward_hook(lambda module, args, out: out * 3),
        lambda m: m.back.register_forward_hook(lambda module, args, out: out.register_hook(lambda g: g * 5) and None),
    ):
        register(module), register(source)
        for one in (module, source):
            one.zero_grad()
        ours, theirs = step(module, source, *batch())
        close(ours, theirs, "loss")
        assert_same(module, source, grads=True)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


def are_not_called_without_a_gradient() -> None:
    """A backward that does not reach a parameter calls none of its hooks, which would get None for a gradient."""
    source, calls = TwoHeads(), list[str]()
    source.right.bias.register_hook(lambda grad: calls.append("before") or grad * 2)
    module = sharded(source, "fsdp", loss=None)
    module.right.weight.register_hook(lambda grad: calls.append("after") or grad * 2)
    for _ in range(2):
        module(torch.ones(2, 4))[0].sum().backward()
        assert calls == [] and module.right.weight.grad is None
        module(torch.ones(2, 4))[1].sum().backward()
        assert sorted(calls) == ["after", "before"]
        calls.clear()
        module.zero_grad()
        module.load_state_dict(source.state_dict())


def autocasts() -> None:
    """Forward and loss inside, backward outside; the first call is in none, the last again."""
    torch.manual_seed(0)
    source = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    module = shardc.compile(source, mesh, shardc.fsdp("dp"), loss=F.cross_entropy, backend="eager")
    x, y = torch.randn(4, 8), torch.randint(4, (4,))
    for low in (False, True, True, False):
        module.zero_grad(), source.zero_grad()
        with torch.autocast("cpu", enabled=low):
            ours, theirs = module(*module.shard_inputs(x, y)), F.cross_entropy(source(x), y)
        ours.backward()
        theirs.backward()
        assert ours.dtype == theirs.dtype
        tolerance = {"rtol": 2e-2, "atol": 2e-2} if low else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(ours, theirs, **tolerance)
        for name, param in source.named_parameters():
            found = module.get_parameter(name).grad
            assert found.dtype == param.grad.dtype
            torch.testing.assert_close(found.full_tensor(), param.grad, **tolerance)
    assert len(module.shardc.programs) == 2


def starts_in_inference_mode() -> None:
    source = model()
    module = sharded(source, "fsdp")
    x, y = batch()
    with torch.inference_mode():
        ours = module(*module.shard_inputs(x, y))
    close(ours.clone(), F.mse_loss(source(x), y).detach(), "loss")
    for _ in range(2):
        module.zero_grad(), source.zero_grad()
        ours, theirs = step(module, source, x, y)
        close(ours, theirs, "loss")
        assert_same(module, source, grads=True)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def refuses_other_parameters() -> None:
    """Before anything is computed; what has no parameters of its own may come."""
    for change in (
        lambda m: nn.utils.parametrize.register_parametrization(m.mid, "weight", Doubled()),
        lambda m: nn.utils.parametrizations.weight_norm(m.mid),
        lambda m: m.add_module("more", nn.Linear(2, 2)),
        lambda m: setattr(m, "mid", nn.Linear(9, 12).double()),
    ):
        module = sharded(model(), "fsdp")
        module(*module.shard_inputs(*batch()))
        change(module)
        with pytest.raises(LayoutError, match="is gone|came after|was replaced"):
            module(*module.shard_inputs(*batch()))


@pytest.mark.slow
def test_on_two_ranks() -> None:
    run_ranks(
        2,
        partial(registers_on_parameters, before=True),
        partial(registers_on_parameters, before=False),
        keeps_those_of_a_frozen_parameter,
        registers_on_modules,
        are_not_called_without_a_gradient,
        refuses_other_parameters,
        autocasts,
        starts_in_inference_mode,
    )


def test_a_simulation_refuses_hooks_of_parameters() -> None:
    module = shardc.compile(model(), shardc.Mesh(dp=2), shardc.fsdp("dp"), loss=F.mse_loss, backend="eager")
    simulation = shardc.Simulation(module)
    simulation(*batch())
    module.mid.weight.register_hook(lambda grad: grad * 2)
    with pytest.raises(InputError, match="'mid.weight' has a hook, which a simulation does not run"):
        simulation.backward()
