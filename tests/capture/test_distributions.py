"""``torch.distributions`` in forward, with their checks of values, as in a process that never called torch.compile."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributions as D
from torch import Tensor, nn
from torch.nn.functional import softplus

import shardc
from shardc.capture.randomness import _Draws
from shardc.errors import CaptureError, ShardcWarning

X = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Head = Callable[[Tensor], Tensor]


def scale(h: Tensor) -> Tensor:
    return softplus(h) + 0.1


def normal(h: Tensor) -> D.Normal:
    return D.Normal(h, scale(h))


SCORES: dict[str, Head] = {
    "normal": lambda h: normal(h).log_prob(h.detach() + 1),
    "checked": lambda h: D.Normal(h, scale(h), validate_args=True).entropy(),
    "unchecked": lambda h: D.Normal(h, scale(h), validate_args=False).entropy(),
    "categorical": lambda h: D.Categorical(logits=h).entropy(),
    "categorical of probabilities": lambda h: D.Categorical(h.softmax(-1)).log_prob(torch.arange(4)),
    "bernoulli": lambda h: D.Bernoulli(logits=h).log_prob((h > 0).double()),
    "gamma": lambda h: D.Gamma(scale(h), scale(h)).log_prob(scale(h)),
    "beta": lambda h: D.Beta(scale(h), scale(h)).log_prob(h.sigmoid()),
    "dirichlet": lambda h: D.Dirichlet(scale(h)).log_prob(h.softmax(-1)),
    "gumbel": lambda h: D.Gumbel(h, scale(h)).log_prob(h * 2),
    "independent": lambda h: D.Independent(normal(h), 1).log_prob(h * 2),
    "transformed": lambda h: D.TransformedDistribution(normal(h), [D.TanhTransform()]).log_prob(h.tanh()),
    "mixture": lambda h: D.MixtureSameFamily(D.Categorical(logits=h), normal(h)).log_prob(h[:, 0]),
    "multivariate normal": lambda h: D.MultivariateNormal(h, torch.eye(4, dtype=h.dtype)).log_prob(h * 2),
    "divergence": lambda h: D.kl_divergence(normal(h), D.Normal(torch.zeros_like(h), torch.ones_like(h))),
    "divergence of categoricals": lambda h: D.kl_divergence(D.Categorical(logits=h), D.Categorical(logits=h * 2)),
    "divergence of multivariate normals": lambda h: D.kl_divergence(
        D.MultivariateNormal(h, torch.eye(4, dtype=h.dtype)), D.MultivariateNormal(h * 2, torch.eye(4, dtype=h.dtype))
    ),
}


class Policy(nn.Module):
    def __init__(self, head: Head) -> None:
        super().__init__()
        self.linear, self.head = nn.Linear(6, 4).double(), head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.linear(x)).mean()


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has asked for no divergence yet."""
    monkeypatch.setattr(D.kl, "_KL_MEMOIZE", {})


def compiled(head: Head) -> tuple[nn.Module, shardc.Simulation]:
    model = Policy(head)
    return model, shardc.Simulation(shardc.compile(model, shardc.Mesh(dp=2), shardc.fsdp("dp"), backend="eager"))


@pytest.fixture(autouse=True, params=[True, False], ids=["checks", "no-checks"])
def checks(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether values are checked by default. ``torch.compile`` turns that off for the process."""
    before = D.Distribution._validate_args
    D.Distribution.set_default_validate_args(request.param)
    yield request.param
    D.Distribution.set_default_validate_args(before)


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.filterwarnings("ignore::shardc.errors.ShardcWarning")
def test_scores_are_those_of_one_device(kind: str) -> None:
    model, run = compiled(SCORES[kind])
    torch.testing.assert_close(run(X), model(X).detach(), rtol=1e-9, atol=1e-9)


def test_a_warning_names_the_line_of_a_check_once(checks: bool) -> None:
    _, run = compiled(lambda h: D.Normal(h, softplus(h)).log_prob(h * 2))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run(X)
    lines = [str(warning.message) for warning in said if issubclass(warning.category, ShardcWarning)]
    assert len(lines) == checks and all("test_distributions.py:" in line and "raises where" in line for line in lines)


DRAWS: dict[str, Head] = {
    "normal": lambda h: normal(h).rsample(),
    "categorical": lambda h: D.Categorical(logits=h).log_prob(D.Categorical(logits=h).sample()),
    "gumbel": lambda h: D.Gumbel(h, scale(h)).rsample(),
    "transformed": lambda h: D.TransformedDistribution(normal(h), [D.TanhTransform(cache_size=1)]).rsample((3,)),
}


@pytest.mark.parametrize("kind", DRAWS)
@pytest.mark.filterwarnings("ignore::shardc.errors.ShardcWarning")
def test_draws_are_drawn(kind: str) -> None:
    assert torch.isfinite(compiled(DRAWS[kind])[1](X))


@pytest.mark.filterwarnings("ignore::shardc.errors.ShardcWarning")
def test_draws_without_a_rule_are_refused_with_their_line() -> None:
    with pytest.raises(CaptureError, match=r"_standard_gamma(.|\n)*test_distributions\.py") as caught:
        compiled(lambda h: D.Gamma(scale(h), scale(h)).rsample())[1](X)
    assert caught.value.fix


def test_an_index_without_weight_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    uniform = torch.tensor([0.3, 0.0, 0.5])
    monkeypatch.setattr(_Draws, "uniform", lambda self, size, **how: uniform.expand(size))
    drawn = _Draws().multinomial(torch.tensor([1.0, 0.0, 2.0]), 2)
    assert sorted(drawn.tolist()) == [0, 2]
