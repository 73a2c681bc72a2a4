"""One program for many sizes: it is what compiling at each size gives, and trains as one device does."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from examples.models import gpt2, llama
from shardc.errors import CaptureError, InputError, ShardcWarning
from shardc.ir.text import dump
from tests.models.alike import relative

TOKENS = {"tokens": {0: "b", 1: "t"}, "target": {0: "b", 1: "t"}}
Case = tuple[Callable[[], nn.Module], Any, dict[str, dict[int, str]], Callable[..., tuple[Tensor, ...]]]


def _tokens(b: int, t: int) -> tuple[Tensor, ...]:
    return tuple(torch.randint(64, (2, b, t), generator=torch.Generator().manual_seed(b * t)))


class Conv(nn.Module):
    """Strides that halve a size, statistics over the batch, and a mean over what is left."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(self.norm(self.second(self.first(x).relu())), 2).mean((-2, -1))


class Mixed(nn.Module):
    """Sizes that are sums of others, dropout, and a mean by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(64, 16), nn.Linear(16, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        x = torch.cat([x, x[:, :1]], 1)
        x = F.dropout(x[:, 1:] - x[:, :-1], 0.3)
        return self.out(x).sum(1) / tokens.shape[1]


def _square(out: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(out, target)


CASES: dict[str, Case] = {
    "llama": (lambda: llama.Llama(llama.LlamaConfig(layers=1)), llama.loss, TOKENS, _tokens),
    "gpt2": (
        lambda: gpt2.GPT2(gpt2.GPT2Config(layers=1, context=128, dropout=0.0)),
        llama.loss,
        TOKENS,
        _tokens,
    ),
    "conv": (
        Conv,
        _square,
        {"x": {0: "b", 2: "t"}, "target": {0: "b"}},
        lambda b, t: (torch.randn(b, 3, t, 12).double(), torch.randn(b, 8).double()),
    ),
    "mixed": (
        Mixed,
        _square,
        {"tokens": {0: "b", 1: "t"}, "target": {0: "b"}},
        lambda b, t: (_tokens(b, t)[0], torch.randn(b, 4).double()),
    ),
}
MESHES: dict[str, tuple[dict[str, int], shardc.Plan]] = {
    "ddp": ({"dp": 2}, shardc.ddp("dp")),
    "fsdp": ({"dp": 4}, shardc.fsdp("dp")),
    "hsdp": ({"rep": 2, "dp": 2}, shardc.hsdp("dp", replicate="rep")),
    "fsdp+tp+sp": ({"dp": 2, "tp": 2}, shardc.fsdp("dp") | llama.llama_tp("tp", sequence=True)),
}
RUNS = [
    *((model, plan) for model in CASES for plan in ("ddp", "fsdp")),
    ("llama", "hsdp"),
    ("llama", "fsdp+tp+sp"),
]
QUICK = {("conv", "fsdp"), ("mixed", "fsdp")}


def _compiled(case: Case, plan: str, source: nn.Module) -> Any:
    _, loss, dynamic, _ = case
    mesh, said = MESHES[plan]
    return shardc.compile(source, shardc.Mesh(mesh), said, loss=loss, backend="eager", dynamic=dynamic)


def _on_one_device(case: Case, source: nn.Module, inputs: tuple[Tensor, ...], seed: int) -> Any:
    """The loss and the gradients."""
    source.zero_grad()
    loss = case[1](source(*inputs[:-1]), inputs[-1])
    loss.backward()
    return loss.detach(), {name: param.grad for name, param in source.named_parameters()}


def _on_mesh_of_one(case: Case, source: nn.Module, inputs: tuple[Tensor, ...], seed: int) -> Any:
    """The same by shardc, whose random numbers do not depend on the mesh, compiled at these sizes alone."""
    sim = shardc.Simulation(shardc.compile(source, shardc.Mesh(dp=1), shardc.ddp("dp"), loss=case[1], backend="eager"))
    torch.manual_seed(seed)
    loss = sim(*inputs)
    sim.backward()
    return loss, {name: sim.grad(name) for name, _ in source.named_parameters()}


@pytest.mark.parametrize(
    ("model", "plan"), [pytest.param(*run, marks=[] if run in QUICK else [pytest.mark.slow]) for run in RUNS]
)
def test_is_what_each_size_gives(model: str, plan: str) -> None:
    case = CASES[model]
    torch.manual_seed(0)
    source = case[0]().double()
    module = _compiled(case, plan, copy.deepcopy(source))
    sim = shardc.Simulation(module)
    families = module.shardc.cache.build.families._families
    for b, t in ((8, 16), (12, 48), (4, 16), (16, 64)):
        inputs = case[3](b, t)
        sim.grads.clear()
        torch.manual_seed(b)
        ours = sim(*inputs)
        sim.backward()
        program = sim.state.cache.program_for(inputs, {})
        for which in ("forward", "backward") if model == "llama" and plan != "fsdp+tp+sp" else ():
            made, alone = getattr(program, which), getattr(program.alone, which)
            mesh = module.shardc.spec.mesh
            assert dump(made, mesh) == dump(alone, mesh), f"{which} at b={b}, t={t}"
        loss, grads = (_on_mesh_of_one if model == "mixed" else _on_one_device)(case, source, inputs, seed=b)
        assert relative(ours, loss) < 1e-9
        for name, grad in grads.items():
            assert relative(sim.grad(name), grad) < 1e-9, f"gradient of {name} at b={b}, t={t}"
        for name, buffer in source.named_buffers():
            assert relative(sim.buffer(name), buffer) < 1e-9, f"buffer {name} at b={b}, t={t}"
    (((_, family),),) = families.values()
    assert family is not None, "one program serves all sizes"


def test_marks() -> None:
    """Dims that `mark_dynamic` marks are dynamic, in later calls too; what must be of one size is found out."""
    torch.manual_seed(0)
    source = nn.Linear(4, 3).double()
    module = shardc.compile(copy.deepcopy(source), shardc.Mesh(dp=2), shardc.fsdp("dp"), loss=_square, backend="eager")
    sim = shardc.Simulation(module)
    for at, size in enumerate((6, 4, 10)):
        x, y = torch.randn(size, 4).double(), torch.randn(size, 3).double()
        if at == 0:
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(y, 0)
        assert relative(sim(x, y), _square(source(x), y).detach()) < 1e-9
    (((_, family),),) = module.shardc.cache.build.families._families.values()
    assert family.conditions[-1] in ("input[0] % 2 == 0", "target[0] % 2 == 0")


@pytest.mark.slow
def test_conditions() -> None:
    module = _compiled(CASES["llama"], "fsdp+tp+sp", CASES["llama"][0]())
    program = module.lower(*_tokens(8, 16))
    assert program.conditions == ("t >= 2", "b >= 2", "b % 2 == 0", "t % 2 == 0")
    assert program.text("schedule").startswith("mesh dp=2 tp=2\n")
    assert "all_gather(dp)" in program.text("collectives")


@pytest.mark.slow
def test_sizes_that_break_a_condition_have_a_program_of_their_own() -> None:
    case = CASES["llama"]
    torch.manual_seed(0)
    source = case[0]().double()
    module = _compiled(case, "ddp", copy.deepcopy(source))
    sim = shardc.Simulation(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShardcWarning)
        for b in (8, 5, 4, 9, 7):
            x, y = _tokens(b, 16)
            assert relative(sim(x, y), llama.loss(source(x), y).detach()) < 1e-9
    (found,) = module.shardc.cache.build.families._families.values()
    assert [family.conditions[-1] for _, family in found] == ["b % 2 == 0", "b % 2 == 1"]


def test_code_that_looks_at_a_size() -> None:
    class Short(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            scale = 2.0 if x.shape[0] > 20 else 3.0
            return x * self.weight * scale

    module = shardc.compile(Short(), shardc.Mesh(dp=2), shardc.ddp("dp"), backend="eager", dynamic={"x": {0: "b"}})
    sim = shardc.Simulation(module)
    for size, scale in ((4, 3.0), (40, 2.0), (10, 3.0), (60, 2.0)):
        assert torch.equal(sim(torch.ones(size, 4)), torch.full((size, 4), scale))
    (found,) = module.shardc.cache.build.families._families.values()
    assert ["b > 20" in family.conditions for _, family in found] == [False, True]


@pytest.mark.slow
def test_programs_met_longest_ago_are_forgotten() -> None:
    module = _compiled(CASES["llama"], "ddp", CASES["llama"][0]())
    families = module.shardc.cache.build.families
    families.capacity = 2
    gone: list[Any] = []
    families.forget = gone.append
    for t in (4, 6, 8, 4):
        module.lower(*_tokens(4, t))
    assert [program.sizes["t"] for program in gone] == [4, 6]


class Fixed(nn.Module):
    """Works at sequences of 16 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def _lower(model: nn.Module, dynamic: Any, *inputs: Tensor, **options: Any) -> Any:
    plan = shardc.ddp("dp")
    return shardc.compile(model, shardc.Mesh(dp=2), plan, dynamic=dynamic, **options).lower(*inputs)


def test_a_model_that_fixes_a_size_is_refused() -> None:
    with pytest.raises(CaptureError, match="Fixed works at one size of 't' only: it must be 16") as said:
        _lower(Fixed(), {"x": {1: "t"}}, torch.ones(4, 16))
    assert "test_dynamic.py" in str(said.value)
    assert "leave 't' out of dynamic" in str(said.value)


@pytest.mark.parametrize(
    ("dynamic", "text"),
    [
        ({"y": {0: "b"}}, "dynamic names 'y', which Fixed does not take\n  fix: its inputs are x"),
        ({"x": {2: "b"}}, "dynamic names dim 2 of input 'x', which is a tensor of 2 dims"),
        ({"x": {0: "b", 1: "b"}}, "size 'b' is 4 in dim 0 of 'x' and 16 in dim 1 of 'x'"),
        ({"x": "b"}, "is not a dict of dicts"),
        ({"x": {0: 4}}, "dynamic says 0: 4 of 'x'"),
    ],
)
def test_bad_input(dynamic: Any, text: str) -> None:
    with pytest.raises(InputError) as said:
        _lower(Fixed(), dynamic, torch.ones(4, 16))
    assert text in str(said.value)


class Cubed(nn.Module):
    """Its graph has a number that is no simple function of the size."""

    def forward(self, x: Tensor) -> Tensor:
        return x * float(x.shape[0] ** 0.5)


def test_sizes_that_one_program_cannot_serve() -> None:
    model = Cubed()
    with pytest.warns(ShardcWarning, match="there is no one program for all sizes b: at mul.*test_dynamic.py"):
        program = _lower(model, {"x": {0: "b"}}, torch.ones(4, 3), backend="eager")
    assert program.conditions == ()
    with pytest.raises(CaptureError, match="there is no one program"):
        _lower(model, {"x": {0: "b"}}, torch.ones(4, 3), options=shardc.Options(strict=True))


class Scored(nn.Module):
    """A layer over ``[batch, length, width]``, with weights of ``[batch, length]``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * weights.unsqueeze(-1)).sum()


def lowered_for(lengths: Sequence[int], **more: Any) -> list[str]:
    """What is warned of while a module is lowered for inputs of these lengths."""
    module = shardc.compile(Scored(), shardc.Mesh(dp=2), shardc.fsdp("dp"), backend="eager", **more)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for length in lengths:
            module.lower(torch.empty(4, length, 4), torch.empty(4, length))
    return [str(record.message) for record in caught if issubclass(record.category, shardc.ShardcWarning)]


def test_the_fourth_program_for_other_sizes_says_how_there_is_one() -> None:
    lengths = [8, 16, 24, 32]
    assert lowered_for(lengths[:3]) == [] and lowered_for([8] * 5) == []
    (warning,) = lowered_for([*lengths, 40])
    assert warning == (
        "the module was compiled 4 times for calls that differ only in sizes (dim 1 of 'x' was 8, 16, 24, 32); for one "
        "program of all sizes write shardc.compile(..., dynamic={'x': {1: 'n0'}, 'weights': {1: 'n0'}}), or pad the "
        "inputs to a few sizes"
    )
    assert lowered_for(lengths, dynamic={"x": {1: "n0"}, "weights": {1: "n0"}}) == []


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor, step: int = 0, name: str = "") -> torch.Tensor:
        return super().forward(x).sum()


def test_the_eighth_program_for_other_constants_warns() -> None:
    module = shardc.compile(Scaled(4, 4), shardc.Mesh(dp=2), shardc.fsdp("dp"), backend="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(7):
            module.lower(torch.empty(4, 4), step)
        assert caught == []
        module.lower(torch.empty(4, 4), 7)
    assert [str(record.message) for record in caught] == [
        "the module was compiled 8 times for calls that differ only in arguments that are no tensors ('step' was 4, 5, "
        "6, 7); pass a number that changes from step to step as a tensor, and leave out what forward does not need"
    ]
