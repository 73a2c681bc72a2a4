"""Models that Dynamo cannot trace, captured by running them on fake tensors: right on every mesh, or refused."""

from __future__ import annotations

import contextlib
import os
import random
import time
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardc
from shardc.errors import CaptureError, PrecompiledError, ShardcWarning
from tests.higher_order.on_ranks import equal_one_device
from tests.models.alike import relative, trains_alike
from tests.ranks import run_ranks

WIDTH = 8
DP = shardc.fsdp("dp", threshold=0)
TP = shardc.tp("tp", colwise=["**.0"], rowwise=["**.2"])
MESHES: dict[str, tuple[dict[str, int], shardc.Plan]] = {
    "ddp": ({"dp": 2}, shardc.ddp("dp")),
    "fsdp": ({"dp": 2}, DP),
    "fsdp of 3": ({"dp": 3}, DP),
    "tp": ({"tp": 2}, TP),
    "fsdp and tp": ({"dp": 2, "tp": 2}, DP | TP),
}


def net(act: nn.Module, out: int) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), act, nn.Linear(16, out))


class Forces(nn.Module):
    """Energies of rows of positions, and forces: their negative gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net(nn.SiLU(), 1)

    def leaf(self, x: Tensor) -> Tensor:
        return x.detach().requires_grad_()

    def forward(self, x: Tensor) -> Any:
        x = self.leaf(x)
        energy = self.net(x)
        return energy, -torch.autograd.grad(energy.sum(), x, create_graph=True)[0]


class ForcesOfTheInput(Forces):
    """Makes the caller's tensor require a gradient."""

    def leaf(self, x: Tensor) -> Tensor:
        return x.requires_grad_()


class ForcesInEvaluation(Forces):
    def forward(self, x: Tensor) -> Any:
        with torch.enable_grad():
            x = x.detach().clone().requires_grad_(True)
            energy = self.net(x)
            ones = torch.ones_like(energy)
            (force,) = torch.autograd.grad([energy], [x], [ones], create_graph=self.training, retain_graph=True)
        return energy, -force


class Penalty(nn.Module):
    """The critic's loss of WGAN-GP, with the drift term of progressive growing."""

    def __init__(self) -> None:
        super().__init__()
        self.critic, self.weight = net(nn.LeakyReLU(0.2), 1), 10.0

    def forward(self, real: Tensor, fake: Tensor) -> Tensor:
        mixed = torch.lerp(real, fake, 0.3).requires_grad_(True)
        score = self.critic(mixed)
        (grad,) = torch.autograd.grad(
            outputs=score, inputs=mixed, grad_outputs=torch.ones_like(score), create_graph=True, only_inputs=True
        )
        penalty = ((grad.norm(2, dim=1) - 1) ** 2).mean()
        return self.critic(fake).mean() - self.critic(real).mean() + self.weight * penalty + self.drift(real)

    def drift(self, real: Tensor) -> Tensor:
        return 0.1 * self.critic(real).square().mean()


class PenaltyOfVariables(Penalty):
    def forward(self, real: Tensor, fake: Tensor) -> Tensor:
        mixed = torch.autograd.Variable(0.3 * real + 0.7 * fake, requires_grad=True)
        score = self.critic(mixed)
        (grad,) = torch.autograd.grad(score, mixed, torch.ones_like(score), create_graph=True)
        return self.critic(fake).mean() + ((grad.norm(2, dim=1) - 1) ** 2).mean() + self.drift(real)


class Score(nn.Module):
    """Sliced score matching."""

    def __init__(self) -> None:
        super().__init__()
        self.score = net(nn.Softplus(), WIDTH)

    def forward(self, x: Tensor, direction: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        score = self.score(x)
        (grad,) = torch.autograd.grad((score * direction).sum(), x, create_graph=True)
        return ((grad * direction).sum(-1) + 0.5 * (score * direction).sum(-1) ** 2).mean()


class Checkpointed(Forces):
    def forward(self, x: Tensor) -> Any:
        x = x.detach().requires_grad_()
        energy = checkpoint(self.net, x, use_reentrant=False)
        return energy, -torch.autograd.grad(energy.sum(), x, create_graph=True)[0]


class Normed(Forces):
    """Changes buffers in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Any:
        x = self.norm(x).detach().requires_grad_()
        energy = self.net(x).square()
        return energy, -torch.autograd.grad(energy.sum(), x, create_graph=True)[0]


ONE = [Forces, ForcesInEvaluation, Checkpointed, Normed]
TWO = [Penalty, PenaltyOfVariables, Score]


def inputs_of(kind: Callable[[], nn.Module], rows: int = 12) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    return tuple(torch.randn(rows, WIDTH, dtype=torch.float64) for _ in range(2 if kind in TWO else 1))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("kind", [*ONE, *TWO])
def test_gradients_of_gradients(kind: Callable[[], nn.Module], mesh: str) -> None:
    torch.manual_seed(0)
    with pytest.warns(ShardcWarning, match="captured by running"):
        trains_alike(kind(), inputs_of(kind), *MESHES[mesh])


def on_two_ranks() -> None:
    warnings.simplefilter("ignore", ShardcWarning)
    equal_one_device((Normed,), inputs_of(Normed), ("inductor",), found=False)
    equal_one_device((Penalty,), inputs_of(Penalty), ("inductor",), found=False)


@pytest.mark.slow
def test_on_two_ranks() -> None:
    run_ranks(2, on_two_ranks)


def vit_mae() -> nn.Module:
    """Reads a `ContextVar`, which Dynamo does not trace."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    sizes |= {f"decoder_{name}": size for name, size in sizes.items()}
    config = hf.ViTMAEConfig(**sizes, image_size=8, patch_size=4, mask_ratio=0.5, qkv_bias=False)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mae = hf.ViTMAEForPreTraining(config)

        def forward(self, pixels: Tensor, noise: Tensor) -> Tensor:
            return self.mae(pixels, noise=noise).loss  # type: ignore[no-any-return]

    return Loss()


@pytest.mark.parametrize("mesh", ["fsdp", "fsdp and tp"])
def test_vit_mae(mesh: str) -> None:
    plan = DP
    if "tp" in mesh:
        plan = DP | shardc.tp("tp", colwise=["**.[qkv]_proj", "**.fc1"], rowwise=["**.o_proj", "**.fc2"])
    torch.manual_seed(0)
    with pytest.warns(ShardcWarning, match="`ContextVar`"):
        trains_alike(vit_mae(), (torch.randn(4, 3, 8, 8), torch.rand(4, 4)), MESHES[mesh][0], plan)


GAIN = 1.0
SETTINGS = SimpleNamespace(gain=1.0)
CONTEXT: ContextVar[float] = ContextVar("CONTEXT", default=1.0)
STATES = (torch.initial_seed, torch.is_inference_mode_enabled, torch.get_num_threads, os.getpid, CONTEXT.get)


class Varied(nn.Module):
    """A gradient of a gradient, scaled by what ``run`` returns."""

    def __init__(self, run: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.net, self.run = net(nn.Tanh(), 1), run
        self.gain, self.steps, self.name = 1.0, 0, "a"
        self.config = SimpleNamespace(sizes=[1.0, 2.0], scales={"x": 1.0})
        self.seen: Any = None
        self.listed: list[Any] = []
        self.numbers = random.Random(0)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, flag: float = 1.0) -> Tensor:
        x = x.detach().requires_grad_()
        force = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)[0]
        return (force * self.run(self, x) * flag).square().mean()


def set_global(model: Any, value: float) -> None:
    globals()["GAIN"] = value


CHANGES: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[Any, float], None]]] = {
    "attribute": (lambda self, x: self.gain, lambda model, value: setattr(model, "gain", value)),
    "text": (lambda self, x: len(self.name), lambda model, value: setattr(model, "name", "a" * int(value))),
    "in an object": (
        lambda self, x: self.config.sizes[1],
        lambda model, value: model.config.sizes.__setitem__(1, value),
    ),
    "new object": (
        lambda self, x: self.config.scales["x"],
        lambda model, value: setattr(model, "config", SimpleNamespace(sizes=[], scales={"x": value})),
    ),
    "new attribute": (lambda self, x: getattr(self, "later", 1.0), lambda model, value: setattr(model, "later", value)),
    "training": (lambda self, x: 3.0 if self.training else 1.0, lambda model, value: model.train(value != 2.0)),
    "global": (lambda self, x: GAIN, set_global),
    "object in a global": (lambda self, x: SETTINGS.gain, lambda model, value: setattr(SETTINGS, "gain", value)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_captured_again(change: str) -> None:
    run, sets = CHANGES[change]
    model = Varied(run).double()
    module = shardc.compile(model, shardc.Mesh(dp=2), DP, backend="eager")
    sim, (x,) = shardc.Simulation(module), inputs_of(Forces)
    counts = []
    for value in (2.0, 2.0, 5.0, 2.0):
        sets(model, value)
        sets(module, value)
        out = sim(x)
        assert relative(out, model(x).detach()) < 1e-9, value
        counts.append(len(module.shardc.programs))
    set_global(None, 1.0)
    SETTINGS.gain = 1.0
    assert counts == [1, 1, 2, 2]


def test_another_argument_is_captured_again() -> None:
    model = Varied(lambda self, x: 1.0).double()
    sim = shardc.Simulation(shardc.compile(model, shardc.Mesh(dp=2), DP, backend="eager"))
    (x,) = inputs_of(Forces)
    for flag in (1.0, 3.0):
        assert relative(sim(x, flag), model(x, flag).detach()) < 1e-9


def draws(self: Any, x: Tensor) -> float:
    return random.random()


def draws_of_its_own(self: Any, x: Tensor) -> float:
    return float(self.numbers.randint(1, 3))


def draws_by_numpy(self: Any, x: Tensor) -> float:
    return float(np.random.rand())


def asks_the_time(self: Any, x: Tensor) -> float:
    return time.perf_counter()


def takes_a_number(self: Any, x: Tensor) -> float:
    return self.net(x).sum().item()


def counts_steps(self: Any, x: Tensor) -> float:
    self.steps += 1
    return min(1.0, self.steps / 10)


def counts_in_a_list(self: Any, x: Tensor) -> float:
    self.listed.append(1)
    return len(self.listed)


def keeps_a_tensor_and_reads_it(self: Any, x: Tensor) -> Tensor:
    if self.seen is None:
        self.seen = x.detach().mean(0)
    return self.seen


def replaces_a_buffer(self: Any, x: Tensor) -> Tensor:
    self.count = self.count + 1
    return self.count


def goes_backward(self: Any, x: Tensor) -> float:
    self.net(x).sum().backward()
    return 1.0


def reads_a_gradient(self: Any, x: Tensor) -> float:
    return 1.0 if self.net[0].weight.grad is None else 2.0


def hooks_a_parameter(self: Any, x: Tensor) -> float:
    self.net[0].weight.register_hook(lambda grad: 2 * grad)
    return 1.0


def freezes(self: Any, x: Tensor) -> float:
    self.net[0].weight.requires_grad_(False)
    return 1.0


ELSEWHERE = nn.Linear(WIDTH, WIDTH).double()


def uses_parameters_from_elsewhere(self: Any, x: Tensor) -> Tensor:
    return ELSEWHERE(x)


REFUSED: dict[Callable[[Any, Tensor], Any], str] = {
    draws: "draws a random number of Python's",
    draws_of_its_own: "draws a random number of Python's",
    draws_by_numpy: "takes a number out of a tensor",
    asks_the_time: "asks for the time",
    takes_a_number: "takes a number out of a tensor",
    counts_steps: "forward reads and changes the attribute 'steps'",
    counts_in_a_list: "forward reads and changes the attribute 'listed'",
    keeps_a_tensor_and_reads_it: "forward reads and changes the attribute 'seen'",
    replaces_a_buffer: "replaces the buffer 'count'",
    goes_backward: r"calls backward\(\)",
    reads_a_gradient: "reads or sets the .grad",
    hooks_a_parameter: "registers a hook of a parameter",
    freezes: "whether a tensor requires a gradient",
    uses_parameters_from_elsewhere: "needs a gradient and is no parameter of the compiled model",
}


def test_a_branch_that_only_dynamo_traces_is_refused_by_what_dynamo_refuses() -> None:
    def branches(self: Any, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, torch.tanh, torch.sin, (x,))

    module = shardc.compile(Varied(branches).double(), shardc.Mesh(dp=2), DP, backend="eager")
    with pytest.raises(
        CaptureError, match=r"a tensor that it calls requires_grad_\(\) on(.|\n)*fix: .*torch.func.grad"
    ):
        module.lower(*inputs_of(Forces))


@pytest.mark.parametrize("state", STATES)
def test_states_are_refused(state: Callable[[], Any]) -> None:
    module = shardc.compile(Varied(lambda self, x: float(state())).double(), shardc.Mesh(dp=2), DP, backend="eager")
    with pytest.raises(CaptureError, match="asks for a state"):
        module.lower(*inputs_of(Forces))


@pytest.mark.parametrize("run", REFUSED)
def test_what_a_program_cannot_do_is_refused_with_its_line(run: Callable[[Any, Tensor], Any]) -> None:
    module = shardc.compile(Varied(run).double(), shardc.Mesh(dp=2), DP, backend="eager")
    examples = inputs_of(Forces)
    python, torchs = random.getstate(), torch.get_rng_state()
    with pytest.raises(CaptureError, match=REFUSED[run]) as caught:
        module.lower(*examples)
    lines = range(run.__code__.co_firstlineno, run.__code__.co_firstlineno + 4)
    assert any(f"test_running.py:{line}\n" in str(caught.value) for line in lines), caught.value
    assert torch.equal(torchs, torch.get_rng_state()) and (run is draws or random.getstate() == python)
    assert not module.listed and module.steps == 0


def keeps_a_tensor(self: Any, x: Tensor) -> float:
    self.seen = x * 2
    return 1.0


def test_a_kept_tensor_is_told() -> None:
    module = shardc.compile(Varied(keeps_a_tensor).double(), shardc.Mesh(dp=2), DP, backend="eager")
    with pytest.warns(ShardcWarning, match="the model changes its attribute 'seen' in forward"):
        module.lower(*inputs_of(Forces))
    assert module.seen is None


def test_the_warning_says_what_no_guard_sees() -> None:
    module = shardc.compile(Forces().double(), shardc.Mesh(dp=2), DP, backend="eager")
    with pytest.warns(ShardcWarning, match=r"test_running.py:\d+\): captured by running Forces .* context variables"):
        module.lower(*inputs_of(Forces))


def reads_grad_fn(self: Any, x: Tensor) -> float:
    return 2.0 if self.net(x).grad_fn is None else 3.0


def enters_a_stack(self: Any, x: Tensor) -> Tensor:
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        return self.net(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("run", [reads_grad_fn, enters_a_stack])
def test_what_else_runs(run: Callable[[Any, Tensor], Any]) -> None:
    trains_alike(Varied(run), inputs_of(Forces), *MESHES["fsdp"])


def test_its_programs_are_not_saved(tmp_path: Any) -> None:
    module = shardc.compile(Forces().double(), shardc.Mesh(dp=2), DP, backend="eager")
    program = module.lower(*inputs_of(Forces))
    with pytest.raises(PrecompiledError, match="captured by running"):
        program.save(tmp_path)
