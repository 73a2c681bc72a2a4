"""What `shardc.compile` takes: every way of writing a model and its loss, against the same module on one device."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import shardc
from shardc import Mesh, fsdp
from tests.unchanged import snapshot

MESH = Mesh(dp=2)
PLAN = fsdp("dp", threshold=0)


def simulation(model: Any, loss: Any = None, plan: shardc.Plan = PLAN) -> shardc.Simulation:
    return shardc.Simulation(shardc.compile(model, MESH, plan, loss=loss, backend="eager"))


def same(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def same_gradients(sim: shardc.Simulation, model: nn.Module) -> None:
    named = dict(model.named_parameters())
    assert set(sim.grads) == {name for name, p in named.items() if p.grad is not None}
    for name in sim.grads:
        same(sim.grad(name), named[name].grad)


def double(model: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64)
    return model.double()


def batch(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


class Everything(nn.Module):
    """Nested arguments and results, a keyword, a flag, None, and a result that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(
        self, x: Tensor, pair: dict[str, Tensor], *, scale: Tensor, twice: bool = False, extra: Any = None
    ) -> Any:
        hidden = self.a(x) * scale
        out = self.b(pair["left"]) + pair["right"][0]
        if twice:
            out = out * 2
        return {"hidden": hidden, "rest": (out, 3, None), "name": "everything"}


@pytest.mark.parametrize("twice", [False, True])
def test_nested_arguments_and_results(twice: bool) -> None:
    model = double(Everything())
    x, left, right, scale = batch(8, 4), batch(8, 4) + 1, (batch(8, 4) - 1, batch(8, 2)), batch(8, 1)
    given = {"left": left, "right": right}
    theirs = model(x, given, scale=scale, twice=twice)
    ours = simulation(model)(x, given, scale=scale, twice=twice, grad=False)
    assert ours["rest"][1:] == (3, None) and ours["name"] == "everything"
    same(ours["hidden"], theirs["hidden"].detach())
    same(ours["rest"][0], theirs["rest"][0].detach())


def test_gradients_of_several_outputs_and_of_inputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.a(x).tanh()
            return hidden, self.b(hidden)

    model = double(Two())
    x = batch(8, 4)
    sim = simulation(model, plan=PLAN | shardc.Plan(reduce="sum"))
    hidden, out = sim(x)
    theirs = model(x)
    same((hidden, out), tuple(t.detach() for t in theirs))
    one, other = batch(8, 6), batch(8, 4)
    torch.autograd.backward(theirs, (one, other))
    sim.backward(one, other)
    same_gradients(sim, model)


def test_without_a_loss_gradients_are_the_mean_over_ranks() -> None:
    model = double(nn.Linear(4, 3))
    x = batch(8, 4)
    sim = simulation(model)
    sim(x)
    sim.backward(torch.ones(8, 3, dtype=torch.float64) / 4)  # each rank: the mean over its own four rows
    model(x).mean(0).sum().backward()
    same_gradients(sim, model)


@pytest.mark.parametrize(
    "loss",
    [
        F.mse_loss,
        nn.MSELoss(),
        lambda output, target: (output - target).abs().max(),
        lambda output: output.square().mean(),
        lambda output, target, weight: ((output - target).square() * weight).sum() / weight.sum(),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)),
        nn.CrossEntropyLoss(label_smoothing=0.1),
    ],
    ids=["function", "module", "max", "no target", "two extra", "weights", "smoothing"],
)
def test_forms_of_a_loss(loss: Callable[..., Tensor]) -> None:
    model = double(nn.Linear(4, 3))
    x = batch(8, 4)
    extra: list[Tensor] = [batch(8, 3) * 2, batch(8, 3).abs()]
    if isinstance(loss, nn.CrossEntropyLoss):
        extra = [torch.tensor([0, 1, 2, 2, -100, 1, 0, 1])]
    extra = extra[: shardc.capture.loss_arity(loss)]
    sim = simulation(model, loss=loss)
    theirs = loss(model(x), *extra)
    same(sim(x, *extra), theirs.detach())
    theirs.backward()
    sim.backward()
    same_gradients(sim, model)
    if extra:  # the same module without targets gives its outputs
        same(sim(x, grad=False), model(x).detach())


def test_a_function() -> None:
    def distance(x: Tensor, y: Tensor) -> Tensor:
        return (x - y).square().sum(-1)

    x, y = batch(8, 4), batch(8, 4) * 3
    same(simulation(distance)(x, y, grad=False), distance(x, y))


def test_no_parameters() -> None:
    same(simulation(nn.Tanh())(batch(8, 4), grad=False), batch(8, 4).tanh())


def test_no_tensors_at_all() -> None:
    class Window(nn.Module):
        def forward(self) -> Tensor:
            return torch.signal.windows.hamming(6, dtype=torch.float64)

    same(simulation(Window())(grad=False), Window()())


def test_tied_parameters_have_one_gradient() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mid, self.head = nn.Embedding(12, 4), nn.Linear(4, 4), nn.Linear(4, 12, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.mid(self.embed(tokens)))

    model = double(Tied())
    tokens = torch.arange(24).reshape(8, 3) % 12
    sim = simulation(model, loss=lambda out: out.square().mean())
    assert sim.module.head.weight is sim.module.embed.weight
    assert set(sim.params) == {name for name, _ in model.named_parameters()}
    theirs = model(tokens).square().mean()
    theirs.backward()
    same(sim(tokens), theirs.detach())
    sim.backward()
    same_gradients(sim, model)


def test_shared_modules_and_a_layer_called_twice() -> None:
    shared = nn.Linear(4, 4)
    model = double(nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(4, 4), shared))
    x = batch(8, 4)
    sim = simulation(model, loss=lambda out: out.square().mean())
    theirs = model(x).square().mean()
    theirs.backward()
    same(sim(x), theirs.detach())
    sim.backward()
    same_gradients(sim, model)


def test_frozen_and_unused_parameters_have_no_gradient() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.trained, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.trained(self.frozen(x))

    model = double(Partly())
    x = batch(8, 4)
    sim = simulation(model, loss=lambda out: out.square().mean())
    theirs = model(x).square().mean()
    theirs.backward()
    same(sim(x), theirs.detach())
    sim.backward()
    assert set(sim.grads) == {"trained.weight", "trained.bias"}
    same_gradients(sim, model)


def test_a_frozen_model_has_no_backward() -> None:
    model = double(nn.Linear(4, 4)).requires_grad_(False)
    program = shardc.compile(model, MESH, PLAN, backend="eager").lower(torch.empty(8, 4, dtype=torch.float64))
    assert program.forward is None and program.backward is None
    same(simulation(model)(batch(8, 4)), model(batch(8, 4)))


class Counts(nn.Module):
    """Float, integer and bool buffers, changed in place, and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("seen", torch.zeros(4, dtype=torch.bool))
        self.register_buffer("scale", torch.tensor(2.0, dtype=torch.float64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
                self.steps += 1
                self.seen |= (x > 0).any(0)
        return self.lin(x - self.mean) * self.scale


def test_buffers_follow_the_global_batch_and_the_mode() -> None:
    model = double(Counts())
    sim = simulation(model, loss=lambda out: out.square().mean())
    assert "scale" not in sim.module.state_dict()
    for step in range(2):
        x = batch(8, 4) + step
        theirs = model(x).square().mean()
        same(sim(x), theirs.detach())
        for name, buffer in model.named_buffers():
            same(sim.buffer(name), buffer)
    model.eval()
    sim.module.eval()
    theirs = model(batch(8, 4)).square().mean()
    same(sim(batch(8, 4), grad=False), theirs.detach())
    for name, buffer in model.named_buffers():
        same(sim.buffer(name), buffer)


@pytest.mark.filterwarnings("error::shardc.errors.ShardcWarning")
def test_in_place_ops_and_views() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 6)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.lin(x)
            hidden[:, :3] *= 2
            hidden.add_(1).tanh_()
            return hidden, hidden.view(-1, 2, 3).transpose(1, 2)

    model = double(InPlace())
    sim = simulation(model, plan=PLAN | shardc.Plan(reduce="sum"))
    ours, theirs = sim(batch(8, 4)), model(batch(8, 4))
    same(ours, tuple(t.detach() for t in theirs))
    tangents = batch(8, 6), batch(8, 3, 2)
    torch.autograd.backward(theirs, tangents)
    sim.backward(*tangents)
    same_gradients(sim, model)


def test_modes_are_captured_apart() -> None:
    model = double(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)))
    sim = simulation(model.eval())
    x = batch(8, 4)
    same(sim(x, grad=False), model(x).detach())
    sim.module.train()
    assert not torch.equal(sim(x, grad=False), model(x).detach())
    sim.module.eval()
    assert sim.module[1].training is False


@pytest.mark.parametrize("where", ["cpu", "meta", "fake"])
def test_the_model_is_left_as_it_was(where: str) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 2))

    if where == "fake":
        with FakeTensorMode():
            model = build()
    else:
        with torch.device(where):
            model = build()
    model[3].weight.requires_grad_(False)
    model[0].register_forward_hook(lambda module, args, output: output + 1)
    before = snapshot(model)
    module = shardc.compile(model, MESH, PLAN, loss=F.cross_entropy, backend="eager")
    program = module.lower(torch.empty(8, 4, device="meta"), torch.empty(8, dtype=torch.long, device="meta"))
    assert program.backward is not None
    assert snapshot(model) == before
    assert type(module).__mro__[2] is nn.Sequential or isinstance(module, nn.Sequential)
    assert list(module.state_dict()) == list(model.state_dict())


def test_names_of_the_graph_are_the_models() -> None:
    model = Everything()
    x = torch.empty(8, 4)
    program = shardc.compile(model, MESH, PLAN, backend="eager").lower(
        x, {"left": x, "right": (x, x)}, scale=torch.empty(8, 1)
    )
    names = [name for name, _ in program.inputs]
    assert names == ["x", "pair.left", "pair.right.0", "pair.right.1", "scale"]
    text = program.text("canonicalize")
    assert all(name in text for name in ("a.weight", "b.bias", "pair.left"))


def test_capture_is_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shardc.compile(nn.Linear(4, 4), MESH, PLAN, backend="eager").lower(torch.empty(8, 4))


def test_an_input_of_a_parameters_name() -> None:
    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, dtype=torch.float64))
            self.register_buffer("offset", torch.randn(4, dtype=torch.float64))

        def forward(self, weight: Tensor, offset: Tensor) -> Tensor:
            return (weight * self.weight + offset * self.offset).sum()

    model = Same()
    x, y = batch(8, 4).requires_grad_(), batch(8, 4) + 1
    sim = simulation(model, loss=lambda out: out.square())
    theirs = model(x, y).square()
    theirs.backward()
    same(sim(x, y), theirs.detach())
    sim.backward()
    same_gradients(sim, model)


class Talkative(nn.Module):
    """Says what it does, through a method that it gave to loggers as well."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        LOGGER.warning("%d rows", x.shape[0])
        LOGGER.warning_twice("rows")
        return self.linear(x)


LOGGER = logging.getLogger(__name__)


def test_messages_of_loggers_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.Logger, "warning_twice", lambda self, text: None, raising=False)
    model = double(Talkative())
    same(simulation(model)(batch(4, 4), grad=False), model(batch(4, 4)).detach())


class Asks(nn.Module):
    """Reads texts of a parameter's class, as libraries do that know several kinds of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        kind = type(self.linear.weight)
        if kind.__module__.startswith("torchao.") or not kind.__qualname__.endswith("eter"):
            return x
        return self.linear(x) * len(kind.__name__.split("a"))


def test_texts_of_a_parameters_class_are_read() -> None:
    model = double(Asks())
    same(simulation(model)(batch(4, 4), grad=False), model(batch(4, 4)).detach())
