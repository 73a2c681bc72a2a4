"""Random draws are one device's whatever the mesh, and whatever the ranks were seeded with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc.errors import CaptureError
from shardc.runtime.sim.training import Simulation
from tests.ranks import run_ranks

BATCH, WIDTH, STEPS = 12, 6, 2


class Draws(nn.Module):
    """Functions of activations that draw, between linear layers; what they give is in the outputs too."""

    def __init__(self, draws: Sequence[Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.up, self.down, self.draws = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), draws

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = torch.tanh(self.up(x))
        drawn = [draw(h) for draw in self.draws]
        used = [y.to(h.dtype) if y.shape == h.shape else y.to(h.dtype).sum() for y in drawn]
        return self.down(h + sum(used)), *(y.detach() for y in drawn)


def images(h: Tensor) -> Tensor:
    return torch.cat([h, h.detach() ** 2], 1).view(-1, 2, 2, 3)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "multinomial": lambda h: torch.multinomial(h.abs() + 0.1, 3),
    "multinomial with replacement": lambda h: torch.multinomial(h.detach().abs() * (h > 0) + 0.01, 9, replacement=True),
    "one of each": lambda h: torch.multinomial(h.abs() + 0.1, 1),
    "rrelu": lambda h: F.rrelu(h, training=True),
    "rrelu in evaluation": lambda h: F.rrelu(h, training=False),
    "rrelu in place": lambda h: F.rrelu(h.clone(), 0.1, 0.9, training=True, inplace=True),
    "normal": lambda h: torch.normal(2.0, 0.5, (BATCH, WIDTH), dtype=h.dtype) * h,
    "normal of tensors": lambda h: torch.normal(h.detach(), h.detach().abs()),
    "bernoulli in place": lambda h: h * torch.empty_like(h).bernoulli_(0.3) + torch.zeros_like(h).bernoulli_(h**2),
    "exponential": lambda h: h * torch.empty_like(h).exponential_(2.0),
    "log normal, geometric, cauchy": lambda h: (
        torch.empty_like(h).log_normal_() + torch.empty_like(h).geometric_(0.4) + torch.empty_like(h).cauchy_()
    ),
    "permutation": lambda h: h[torch.randperm(BATCH)],
    "integers": lambda h: torch.randint(0, 100, (BATCH, WIDTH)) + torch.randint_like(h, 7),
    "like": lambda h: torch.rand_like(h) + torch.randn_like(h) + torch.rand(BATCH, WIDTH) + torch.randn(WIDTH),
    "dropout": lambda h: F.dropout(h, 0.4),
    "alpha dropout": lambda h: F.alpha_dropout(h, 0.4, training=True),
    "feature dropout": lambda h: F.dropout2d(images(h), 0.5).flatten(1)[:, :WIDTH],
    "feature alpha dropout": lambda h: F.feature_alpha_dropout(images(h), 0.5, training=True).flatten(1)[:, :WIDTH],
    "gumbel softmax": lambda h: F.gumbel_softmax(h, hard=True),
    "fractional pool": lambda h: F.fractional_max_pool2d(images(h), 2, output_size=(1, 2)).flatten(1),
    "attention": lambda h: F.scaled_dot_product_attention(h.view(-1, 1, 3, 2), h.view(-1, 1, 3, 2), h.view(-1, 1, 3, 2),
                                                          dropout_p=0.5).reshape(h.shape),
}  # fmt: skip
REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "poisson": lambda h: torch.poisson(h.abs()),
    "binomial": lambda h: torch.binomial(h.detach().abs().ceil() * 3, h.detach().sigmoid()),
    "gamma": lambda h: torch._standard_gamma(h.abs() + 0.1),
}


def model_and_input(names: Sequence[str]) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(3)
    return Draws([DRAWS[name] for name in names]).double(), torch.randn(BATCH, WIDTH, dtype=torch.float64)


def on_one(names: Sequence[str]) -> list[Tensor]:
    """The outputs of each step on a mesh of one, then the gradients of the last."""
    model, x = model_and_input(names)
    sim = Simulation(shardc.compile(model, shardc.Mesh(dp=1), shardc.ddp("dp"), backend="eager"))
    torch.manual_seed(7)
    seen: list[Tensor] = []
    for _ in range(STEPS):
        sim.grads.clear()
        seen += (out := sim(x))
        sim.backward(torch.ones_like(out[0]))
    return [*seen, *(sim.grad(name) for name, _ in model.named_parameters())]


def on_ranks(names: Sequence[str], path: str, ranks: int) -> None:
    """The same on real ranks, each seeded with another number but the first."""
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    model, x = model_and_input(names)
    wanted = iter(torch.load(path))
    module = shardc.compile(model, mesh, shardc.fsdp("dp", threshold=0), backend="eager")
    mine = module.shard_inputs(x)
    torch.manual_seed(7 + dist.get_rank())
    for _ in range(STEPS):
        module.zero_grad()
        out = module(mine)
        for name, got in zip(["out", *names], out, strict=True):
            want = next(wanted)
            want = want if got.shape == want.shape else want.chunk(ranks)[dist.get_rank()]
            assert torch.allclose(got.double(), want.double(), rtol=1e-12, atol=1e-12), name
        (out[0].sum() * ranks).backward()  # a rank's objective is averaged over ranks
    for name, param in module.named_parameters():
        want = next(wanted)
        assert param.grad is not None
        assert (param.grad.full_tensor() - want).abs().max() < 1e-9 * want.abs().max(), name


def check(names: Sequence[str], folder: Path, *worlds: int) -> None:
    torch.save(on_one(names), folder / "wanted.pt")
    for ranks in worlds:
        run_ranks(ranks, partial(on_ranks, names, str(folder / "wanted.pt"), ranks))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_ranks_that_were_seeded_differently_draw_the_same(tmp_path: Path) -> None:
    check(["multinomial", "multinomial with replacement", "rrelu", "dropout"], tmp_path, 3)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_all_draws(tmp_path: Path) -> None:
    check(list(DRAWS), tmp_path, 2, 3)


@pytest.mark.filterwarnings("ignore")
def test_what_is_drawn() -> None:
    """The distributions, by their means, at sizes where chance leaves them no way out."""
    p = torch.tensor([0.0, 1.0, 0.0, 3.0, 4.0, 0.0], dtype=torch.float64)

    class Many(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return (
                torch.multinomial(x.expand(4000, 6), 3),
                torch.multinomial(x, 40000, replacement=True),
                torch.multinomial(x.expand(8000, 6), 1),
                F.rrelu(-torch.ones(40000, dtype=x.dtype), 0.1, 0.5, training=True),
            )

    three, many, one, slopes = Simulation(shardc.compile(Many(), shardc.Mesh(dp=1), shardc.ddp("dp"), backend="eager"))(
        p, grad=False
    )
    assert (three.sort(1).values == torch.tensor([1, 3, 4])).all(), "without replacement all that has a weight is taken"
    for drawn in (many, one.flatten()):
        shares = torch.bincount(drawn, minlength=6) / drawn.numel()
        torch.testing.assert_close(shares.double(), p / p.sum(), rtol=0, atol=0.02)
    assert -0.5 <= slopes.min() < -0.49 and -0.11 < slopes.max() <= -0.1 and abs(slopes.mean() + 0.3) < 0.01


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_draws_of_ours_is_refused(name: str) -> None:
    model = Draws([REFUSED[name]]).double()
    module = shardc.compile(model, shardc.Mesh(dp=2), shardc.ddp("dp"), backend="eager")
    with pytest.raises(CaptureError, match="draws random numbers") as error:
        module.lower(torch.randn(BATCH, WIDTH, dtype=torch.float64))
    assert "test_draws.py" in str(error.value)


def test_a_generator_of_the_models_own_is_refused() -> None:
    model = Draws([lambda h: h * torch.rand(h.shape, generator=torch.Generator().manual_seed(0))])
    module = shardc.compile(model.double(), shardc.Mesh(dp=2), shardc.ddp("dp"), backend="eager")
    with pytest.raises(CaptureError):
        module.lower(torch.randn(BATCH, WIDTH, dtype=torch.float64))
