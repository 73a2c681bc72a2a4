"""Calls, losses, state and the rest that people get wrong with a module that is compiled; see `bad_input`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from shardc.errors import CaptureError, InputError, LayoutError, MeshError, PlanError, RuleError
from tests.semantics.bad_input import Case, Mlp, X, compiled, lowered


def simulated(*args: Any, **said: Any) -> Any:
    return shardc.Simulation(compiled(**said))(*args)


def given(*args: Any, **kwargs: Any) -> Callable[[], object]:
    """A call of a model that nobody called before."""
    return lambda: simulated(*args, **kwargs)


def after(*args: Any, **kwargs: Any) -> Callable[[], object]:
    """A call of a model that was called as it should be before."""

    def do() -> object:
        sim = shardc.Simulation(compiled())
        sim(X)
        return sim(*args, **kwargs)

    return do


def losing(loss: Any, *targets: Any) -> Callable[[], object]:
    return lambda: simulated(X, *targets, loss=loss)


class Ids(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


class Wrong(nn.Module):
    """A model that does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.up(x))


class Raises(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("there is no such thing")


class Nothing(Mlp):
    def forward(self, x: Tensor) -> None:
        super().forward(x)


def float_loss(out: Tensor) -> float:
    return float(out.shape[0])


CALLS: dict[str, Case] = {
    "nothing": (given(), InputError, "forward.*x"),
    "one too many": (given(X, X), InputError, "forward"),
    "a keyword misspelt": (lambda: shardc.Simulation(compiled())(y=X), InputError, "forward.*'x'"),
    "None": (given(None), CaptureError, "linear says.*NoneType"),
    "an array of numpy": (given(np.zeros((8, 8))), InputError, "'x' is a ndarray"),
    "text": (given("x"), CaptureError, "linear says.*str"),
    "too narrow": (
        given(torch.rand(8, 7)),
        CaptureError,
        r"Mlp does not run on x: float32\[8, 7\].*linear says(.|\n)*7",
    ),
    "of three dims, too narrow": (given(torch.rand(8, 2, 7)), CaptureError, "Mlp"),
    "no dims": (given(torch.tensor(1.0)), (InputError, CaptureError, PlanError), "x|Mlp"),  # type: ignore[dict-item]
    "of float64": (given(X.double()), CaptureError, r"mm.* is given float64 and float32.*x: float64\[8, 8\]"),
    "of integers": (given(X.long()), CaptureError, r"mm.* is given int64 and float32.*x: int64\[8, 8\]"),
    "floats for indices": (given(X, model=Ids()), CaptureError, "Ids"),
    "complex": (given(X.to(torch.complex64)), CaptureError, "Mlp"),
    "sparse": (given(X.to_sparse()), InputError, "'x'.*sparse"),
    "sparse rows": (given(X.to_sparse_csr()), InputError, "'x'.*sparse"),
    "quantised": (given(torch.quantize_per_tensor(X, 0.1, 0, torch.qint8)), InputError, "'x'.*q"),
    "nested": (
        given(torch.nested.nested_tensor([X[0], X[1, :4]], layout=torch.jagged)),
        InputError,
        "'x'.*nested|jagged",
    ),
    "without values": (given(X.to("meta")), InputError, "'x'.*meta"),
    "then too narrow": (after(torch.rand(8, 4)), CaptureError, "Mlp"),
    "then nothing": (after(), InputError, "forward"),
    "then without values": (after(X.to("meta")), InputError, "'x'.*meta"),
    "then sparse": (after(X.to_sparse()), InputError, "'x'.*sparse"),
    "a model that does not run": (
        given(X, model=Wrong()),
        CaptureError,
        r"Wrong does not run on x.*linear says",
    ),
    "a model that raises": (given(X, model=Raises()), CaptureError, "Raises.*(.|\n)*there is no such thing"),
    "a model that gives nothing": (
        lambda: lowered(X, model=Nothing(), loss=F.mse_loss),
        (InputError, CaptureError),
        "",
    ),  # type: ignore[dict-item]
    "on an abstract mesh": (lambda: compiled()(X), MeshError, "abstract mesh.*dp=2"),
    "lowering of nothing": (lambda: lowered(), InputError, "forward"),
    "lowering of a shape": (lambda: lowered((8, 8)), (InputError, CaptureError), "x|Mlp"),  # type: ignore[dict-item]
    "shards of a number": (lambda: compiled().shard_inputs(3, 4), InputError, "forward"),
    "a simulation without values": (
        lambda: shardc.Simulation(compiled(model=Mlp().to("meta"))),
        LayoutError,
        "up.weight.*on meta",
    ),
    "a simulation of a model": (lambda: shardc.Simulation(Mlp()), InputError, "Mlp.*compile"),
    "a backward before a forward": (lambda: shardc.Simulation(compiled()).backward(), InputError, "backward"),
}

LOSSES: dict[str, Case] = {
    "a float": (losing(float_loss), CaptureError, "the loss 'float_loss' gives a float, not one real number"),
    "a number of one element": (losing(lambda out: out.sum().item()), CaptureError, "loss|Mlp"),
    "nothing": (losing(lambda out: None), CaptureError, "loss.*None"),
    "a vector": (losing(lambda out: out.sum(1)), CaptureError, r"loss.*\[8\]"),
    "a pair": (losing(lambda out: (out.sum(), out)), CaptureError, "loss.*tuple"),
    "a dict": (losing(lambda out: {"loss": out.sum()}), CaptureError, "loss.*dict"),
    "text": (losing(lambda out: "loss"), CaptureError, "loss.*str"),
    "complex": (losing(lambda out: out.sum() * 1j), CaptureError, "loss.*complex64"),
    "a target too many": (losing(F.mse_loss, X, X), InputError, "forward|loss"),
    "a target of another size": (losing(F.mse_loss, torch.rand(8, 3)), CaptureError, "Mlp|loss"),
    "a target of None": (losing(F.mse_loss, None), (InputError, CaptureError), "target|loss"),  # type: ignore[dict-item]
    "a loss of nothing": (
        losing(lambda: torch.tensor(0.0)),
        CaptureError,
        "a loss, with arguments that it does not take",
    ),
    "that raises": (losing(lambda out: out.nothing_of_this_name), CaptureError, "nothing_of_this_name"),
    "a builtin": (losing(max), InputError, "max"),
}


def trained() -> Any:
    module = compiled()
    sim = shardc.Simulation(module)
    sim(X)
    return sim


STATE: dict[str, Case] = {
    "an optimizer of a function": (
        lambda: shardc.optim.wrap(F.relu, Mlp()),
        InputError,
        "optimizer_cls is .*relu.*not a class",
    ),
    "values on no ranks": (lambda: compiled().init_weights(), MeshError, "abstract mesh"),
    "values by what is no function": (lambda: compiled().init_weights("xavier"), (MeshError, InputError), "."),  # type: ignore[dict-item]
}

RULES: dict[str, Case] = {
    "a rule without an arrow": (lambda: shardc.register_rule("a::b", "i k"), RuleError, "i k"),
    "a rule of no text": (lambda: shardc.register_rule("a::b", 3), RuleError, "3"),  # type: ignore[arg-type]
    "a rule of no op": (lambda: shardc.register_rule(3, "i -> i"), RuleError, "3"),
    "a reduction misspelt": (
        lambda: shardc.register_rule("a::b", "i k -> i", reduction={"k": "add"}),
        RuleError,
        "add",
    ),
    "a reduction of what is not there": (
        lambda: shardc.register_rule("a::b", "i k -> i", reduction={"z": "sum"}),
        RuleError,
        "z",
    ),
    "linear as text": (lambda: shardc.register_rule("a::b", "i -> i", linear="first"), RuleError, "linear is 'first'"),
    "linear as a list": (lambda: shardc.register_rule("a::b", "i -> i", linear=[0]), RuleError, r"\[0\]"),  # type: ignore[arg-type]
    "a region of no function": (lambda: shardc.local_map(3, in_layouts="_", out_layouts="_"), InputError, "3"),  # type: ignore[arg-type]
    "a region of another number": (
        lambda: shardc.local_map(lambda x: x, in_layouts=("_", "_"), out_layouts="_")(X),
        InputError,
        "1 argument.*2",
    ),
    "a region of layouts that are none": (
        lambda: shardc.local_map(lambda x: x, in_layouts=3, out_layouts="_"),
        PlanError,
        "3",
    ),
    "clipping to text": (lambda: compiled().clip_grad_norm_("1"), InputError, "max_norm is '1'"),
    "clipping below 0": (lambda: compiled().clip_grad_norm_(-1.0), InputError, "max_norm is -1.0"),
    "clipping by a norm of text": (lambda: compiled().clip_grad_norm_(1.0, "l2"), InputError, "norm_type is 'l2'"),
    "clipping by a norm of 0": (lambda: compiled().clip_grad_norm_(1.0, 0), InputError, "norm_type is 0"),
    "a sync of text": (lambda: compiled().set_requires_grad_sync("no"), InputError, "sync is 'no'"),
}
