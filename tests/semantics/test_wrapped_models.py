"""Models that another library has wrapped, compiled modules that another is given, and a forward that prints."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.errors import InputError, ShardcWarning

X = torch.rand(4, 6)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Talks(Net):
    def forward(self, x: Tensor) -> Tensor:
        print("called with", x.shape)
        return super().forward(x)


def wrapped(model: nn.Module) -> nn.Module:
    """As accelerate's add_hook_to_module wraps a forward."""
    inner = model.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs) * 2

    model.forward = forward
    return model


def compiled(model: nn.Module) -> Any:
    return shardc.compile(model, shardc.Mesh(dp=2), shardc.fsdp("dp"), backend="eager")


@pytest.mark.parametrize("make", [wrapped, torch.fx.symbolic_trace], ids=["wrapped", "graph"])
def test_a_model_in_another_form_runs(make: Any) -> None:
    model = make(Net())
    torch.testing.assert_close(shardc.Simulation(compiled(model))(X), model(X).detach())


@pytest.mark.parametrize(
    ("make", "what"),
    [(nn.DataParallel, "wrapped by DataParallel"), (torch.jit.script, "a script of torch.jit")],
    ids=["parallel", "script"],
)
def test_a_wrapped_model_is_refused_by_name(make: Any, what: str) -> None:
    with pytest.raises(InputError, match=f"the model is {what}"):
        compiled(make(Net()))
    with pytest.raises(InputError, match=f"module '0' is {what}"):
        compiled(nn.Sequential(make(Net())))


def test_data_parallel_of_a_compiled_module_is_refused() -> None:
    with pytest.raises(InputError, match=r"DistributedDataParallel is given a compiled module(.|\n)*accelerate"):
        hasattr(compiled(Net()), "_ddp_params_and_buffers_to_ignore")


def test_a_print_is_left_out_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    model = Talks()
    module = compiled(model)
    with pytest.warns(ShardcWarning, match=r"test_wrapped_models\.py:\d+ prints in forward"):
        program = module.lower(X)
    assert program is not None and capsys.readouterr().out == ""
    print("still prints")
    assert capsys.readouterr().out == "still prints\n"
