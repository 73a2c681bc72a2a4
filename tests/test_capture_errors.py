# ruff: noqa: E501
"""Models that are not one graph, and calls that they do not take: the message of each error, and nothing changed."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from shardc import fsdp
from shardc.errors import CaptureError, InputError, MeshError, PlanError
from tests.test_errors import MESH, Net, fails, lowers_not
from tests.unchanged import snapshot

# --- the model


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self.a(x))

    def step(self, y: Tensor) -> Tensor:
        return y if y.sum() > 0 else -y


class Filter(Branch):
    def step(self, y: Tensor) -> Tensor:
        return y[y > 0]


class Raises(Branch):
    def step(self, y: Tensor) -> Tensor:
        raise ValueError(f"{y.ndim} dims")


class Linearizes(Branch):
    def step(self, y: Tensor) -> Tensor:
        value, along = torch.func.linearize(torch.tanh, y)
        return value + along(torch.ones_like(y))


class Mismatch(Branch):
    def step(self, y: Tensor) -> Tensor:
        return y @ y


class ChangesInput(Branch):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x.mul_(2))


class TakesNumber(Branch):
    def step(self, y: Tensor) -> Tensor:
        torch._check(y.sum().item() > -1e9)
        return y


class ComparesNumber(Branch):
    def step(self, y: Tensor) -> Tensor:
        return y if y.sum().item() > 0 else -y


class Renormalises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Embedding(8, 8, max_norm=0.5, norm_type=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x.long())


class ChangesParameter(Branch):
    def step(self, y: Tensor) -> Tensor:
        with torch.no_grad():
            self.a.bias.mul_(0.5)
        return y


def line_of(function: Callable[..., Any], text: str) -> str:
    """``file:line`` of the first line of ``function`` that holds ``text``."""
    lines, first = inspect.getsourcelines(function)
    at = next(at for at, line in enumerate(lines) if text in line)
    return f"{inspect.getsourcefile(function)}:{first + at}"


@pytest.mark.parametrize(
    ("model", "what", "line", "fix"),
    [
        (
            Branch(),
            r"Branch cannot be traced to one graph: Data-dependent branching \(Detected data-dependent branching .*",
            line_of(Branch.step, "y.sum() > 0"),
            r"compute both and choose, by torch\.where\(condition, a, b\), or write torch\.cond\(.*",
        ),
        (
            Filter(),
            r"Filter selects elements by a mask, x\[mask\], or asks where it holds, .*; how many .* depends on values",
            line_of(Filter.step, "y[y > 0]"),
            r"keep the shape: torch\.where\(mask, x, 0\), .*",
        ),
        (
            TakesNumber(),
            "TakesNumber takes a number out of a tensor, and a program looks at no values",
            line_of(TakesNumber.step, "torch._check"),
            r"keep it a tensor: .*",
        ),
        (
            ComparesNumber(),
            "ComparesNumber takes a number out of a tensor, and a program looks at no values",
            line_of(ComparesNumber.step, ".item()"),
            r"keep it a tensor: .*",
        ),
        (
            Linearizes(),
            "Linearizes calls torch.func.linearize, which keeps values of this call, without their gradients, .*",
            line_of(Linearizes.step, "linearize"),
            r"call torch\.func\.jvp\(function, \(x,\), \(tangent,\)\) for each tangent: .*",
        ),
        (
            Raises(),
            r"Raises cannot be traced to one graph: .*raised exception ValueError\('2 dims'\).*",
            line_of(Raises.step, "raise"),
            r".+",
        ),
        (
            Mismatch(),
            r"Mismatch does not run on x: float32\[4, 8\]: .*must have same reduction dim, but got \[4, 8\] X \[4, 8\].*",
            line_of(Mismatch.step, "y @ y"),
            r".+",
        ),
        (
            ChangesInput(),
            "the model changes its input 'x' in place",
            line_of(ChangesInput.forward, "mul_"),
            "compute a new tensor from it, and return it",
        ),
        (
            ChangesParameter(),
            "the model changes its parameter 'a.bias' in place",
            line_of(ChangesParameter.step, "mul_"),
            "compute a new tensor from it, or register it as a buffer",
        ),
        (
            Renormalises(),
            "the model changes its parameter 'a.weight' in place",
            line_of(Renormalises.forward, "self.a"),
            r"set the embedding's max_norm to None, .*: with torch\.no_grad\(\): "
            r"module\.get_parameter\('a\.weight'\)\.renorm_\(1\.0, 0, 0\.5\)",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_a_model_that_is_not_one_graph(model: nn.Module, what: str, line: str, fix: str) -> None:
    """Dynamo words its reasons differently from version to version; the line is always the user's own."""
    module = shardc.compile(model, MESH, fsdp("dp"), backend="eager")
    before = snapshot(model), snapshot(module)
    with pytest.raises(CaptureError) as caught:
        module.lower(torch.empty(4, 8))
    assert re.fullmatch(what, caught.value.what)
    assert caught.value.source == line
    assert re.fullmatch(fix, caught.value.fix or "")
    assert (snapshot(model), snapshot(module)) == before


@dataclass
class Logits:
    logits: Tensor


def test_a_loss_of_torch_on_an_object() -> None:
    """As on the outputs of transformers."""

    class Returns(Branch):
        def forward(self, x: Tensor) -> Logits:
            return Logits(self.a(x))

    module = shardc.compile(Returns(), MESH, fsdp("dp"), loss=F.mse_loss, backend="eager")
    with pytest.raises(CaptureError, match=r"fix: pass tensors to functions of torch: .* loss=lambda output, target"):
        module.lower(torch.empty(4, 8), torch.empty(4, 8))


# --- the call


def test_arguments_that_forward_does_not_take() -> None:
    x = torch.empty(4, 8)
    lowers_not(
        fsdp("dp"),
        InputError,
        "Net.forward(x: 'Tensor') -> 'Tensor': missing a required argument: 'x'\n  fix: pass what forward takes",
    )
    lowers_not(
        fsdp("dp"),
        InputError,
        "Net.forward(x: 'Tensor') -> 'Tensor': too many positional arguments\n  fix: pass what forward takes",
        x,
        x,
    )
    module = shardc.compile(Net(), MESH, fsdp("dp"), loss=F.mse_loss, backend="eager")
    fails(
        module,
        lambda: module.lower(x, x, x),
        InputError,
        """\
Net.forward(x: 'Tensor') -> 'Tensor': too many positional arguments
  fix: pass what forward takes, and after these 1 for the loss, by position""",
    )


def test_an_input_that_is_neither_tensor_nor_constant() -> None:
    module = shardc.compile(Net(), MESH, fsdp("dp"), backend="eager")
    with pytest.raises(InputError, match="input 'x' is a ndarray, neither a tensor nor a constant") as caught:
        module.lower(torch.ones(4, 8).numpy())
    assert caught.value.source == line_of(test_an_input_that_is_neither_tensor_nor_constant, "module.lower")
    assert caught.value.fix is not None and caught.value.fix.startswith("pass a tensor, or a number, a string or None")


def test_an_unknown_stage() -> None:
    program = shardc.compile(Net(), MESH, fsdp("dp"), backend="eager").lower(torch.empty(4, 8))
    with pytest.raises(PlanError) as caught:
        program.text("reshrad")
    assert str(caught.value) == "there is no stage 'reshrad'\n  fix: did you mean 'reshard'?"
    with pytest.raises(PlanError) as caught:
        program.text("inline")
    assert str(caught.value) == f"there is no stage 'inline'\n  fix: use one of {', '.join(map(repr, program.stages))}"


def test_a_call_without_a_process_group() -> None:
    module = shardc.compile(Net(), MESH, fsdp("dp"), backend="eager")
    fails(
        module,
        lambda: module(torch.empty(4, 8)),
        MeshError,
        """\
the module was compiled for the abstract mesh dp=2 tp=2 and cannot run
  fix: pass a DeviceMesh to shardc.compile, or step it with shardc.Simulation(module)""",
    )
