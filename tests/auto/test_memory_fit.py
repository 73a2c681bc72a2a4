"""Plans that fit by what they give up for time: values computed or gathered again, parameters on the host."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.cost.hardware import H100
from shardc.ir.mesh import Mesh
from shardc.plan import resolve_params
from shardc.plan.entries import Offload, Save
from shardc.search.captured_model import CapturedModel, ModelCall
from shardc.search.memory_fit import Fit
from shardc.search.result import SearchResult
from tests.models.alike import trains_alike

MESH = Mesh(dp=2)


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    """Two residual parts; the wide one keeps more."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Sequential(nn.Linear(width, width), nn.Tanh()), Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.narrow(x)
        return x + self.wide(x)


class Net(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers, self.last = nn.ModuleList(Block(width) for _ in range(layers)), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def loss(out: Tensor) -> Tensor:
    return out.square().mean()


@lru_cache
def find(
    layers: int, width: int, batch: int, memory: float, hand: shardc.Plan | None = None, device: str = "h100"
) -> SearchResult:
    with torch.device("meta"):
        model, x = Net(layers, width).double(), torch.empty(batch, width, dtype=torch.float64)
    options = shardc.Options(bucket_size=8 << 20)  # as `peak` has; in smaller ones parameters on the host cost less
    return shardc.find_plan(model, MESH, x, loss=loss, memory=int(memory), plan=hand, hardware=device, options=options)


def peak(layers: int, width: int, batch: int, plan: shardc.Plan, mesh: Mesh = MESH) -> int:
    """Bytes of a rank under a plan."""
    with torch.device("meta"):
        model, x = Net(layers, width).double(), torch.empty(batch, width, dtype=torch.float64)
    schedule = shardc.compile(model, mesh, plan, loss=loss, options=shardc.Options(fold=True)).lower(x).schedule("h100")
    return schedule.memory.peak.total


@dataclass
class Trial:
    memory: float
    seconds: float


def recomputed(found: SearchResult) -> list[str]:
    return [entry.glob for entry in found.plan.entries if isinstance(entry, Save)]


# Many rows and few parameters: activations are what is held.
ACTIVATIONS, FOLDED = (3, 16, 4096), (7, 16, 4096)
# Few rows and many parameters.
PARAMETERS = (3, 256, 32)


@pytest.mark.parametrize(
    ("size", "part"),
    [
        pytest.param(ACTIVATIONS, 0.8, id="some", marks=pytest.mark.slow),
        pytest.param(ACTIVATIONS, 0.5, id="more", marks=pytest.mark.slow),
        pytest.param(FOLDED, 0.8, id="folded", marks=pytest.mark.long),
    ],
)
def test_as_much_is_computed_again_as_has_to_be(size: tuple[int, int, int], part: float) -> None:
    """Parts of blocks, of the first ones only where these are enough; it is what `compile` compiles."""
    most = find(*size, 1e9)
    assert recomputed(most) == []
    found = find(*size, part * most.memory)
    assert recomputed(found) and found.memory <= part * most.memory
    assert found.schedule.seconds > most.schedule.seconds
    assert not any(t.fits for t in found.trials if t.seconds < found.schedule.seconds)
    assert peak(*size, found.plan) == found.memory
    trains_alike(Net(*size[:2]), (torch.randn(64, size[1]),), {"dp": 2}, found.plan, steps=2)


@pytest.mark.long
def test_some_blocks_are_enough() -> None:
    """One fewer than the plan names would not fit."""
    most = find(*FOLDED, 1e9)
    limit = 0.8 * most.memory
    assert recomputed(find(*FOLDED, limit)) == ["layers.[0-2].wide"]
    assert peak(*FOLDED, most.plan | shardc.recompute("layers.[0-1].wide")) > limit


@pytest.mark.slow
def test_parameters_lie_on_the_host_where_that_is_needed() -> None:
    most = find(*PARAMETERS, 1e9)
    found = find(*PARAMETERS, 0.3 * most.memory)
    moved = [entry.glob for entry in found.plan.entries if isinstance(entry, Offload)]
    assert moved and "*" not in moved and found.memory <= 0.3 * most.memory
    assert peak(*PARAMETERS, found.plan) == found.memory
    trains_alike(Net(*PARAMETERS[:2]), (torch.randn(8, 256),), {"dp": 2}, found.plan, steps=2)


@pytest.mark.slow
def test_the_update_on_the_host_is_a_part_of_the_step() -> None:
    """Moves that compute hides are not free: AdamW reads 4 and writes 3 times the parameters in the host's memory."""
    size, hand = (2, 1024, 16384), shardc.fsdp("dp")
    most = find(*size, 1e12, hand)
    found = find(*size, 0.93 * most.memory, hand)
    assert recomputed(found) and not any(isinstance(entry, Offload) for entry in found.plan.entries)
    moved = next(trial for trial in found.trials if 'offload("*")' in str(trial.plan))
    assert moved.schedule.seconds < found.schedule.seconds, "without the update it would be the faster plan"
    params = 8 * sum(p.numel() for p in Net(*size[:2]).parameters()) / 2  # of a rank
    update = (4 + 3) * params / (H100.host_memory_bandwidth * H100.streaming)
    assert any(str(trial.plan).startswith("save(") for trial in found.trials), "activations on the host are tried too"
    assert moved.seconds == pytest.approx(moved.schedule.seconds + update, rel=1e-3)


@pytest.mark.slow
def test_on_the_host_itself_nothing_is_won_by_that() -> None:
    with pytest.raises(shardc.ShardcError) as error:
        find(3, 64, 512, 1e5, None, "cpu")
    assert "offload" not in error.value.what and "recompute" in error.value.what


@pytest.mark.slow
def test_what_is_given_holds() -> None:
    """What a plan keeps on the device stays there; a region that it names does too."""
    given = shardc.offload("*.up.*", to="device") | shardc.recompute("layers.6") | shardc.fsdp("dp", level=3)
    found = find(7, 64, 64, 1e9, given)
    lower = find(7, 64, 64, 0.85 * found.memory, given)
    assert set(given.entries) <= set(lower.plan.entries) and lower.memory < found.memory
    placed = resolve_params(lower.plan, MESH, {n: (tuple(p.shape), 8) for n, p in Net(7, 64).named_parameters()})
    assert {name for name, p in placed.items() if p.host} and not any(p.host for n, p in placed.items() if ".up." in n)


@pytest.mark.long
def test_the_error_says_the_least_that_would_fit() -> None:
    with pytest.raises(shardc.ShardcError) as error:
        find(*ACTIVATIONS, 1e5)
    said = re.fullmatch(r".* takes (\S+) GB: (.*)", error.value.what)
    assert said is not None and said[2].startswith('offload("*") | ')
    least = 1e9 * float(said[1])
    assert find(*ACTIVATIONS, 1.01 * least).memory <= 1.01 * least
    with pytest.raises(shardc.ShardcError):
        find(*ACTIVATIONS, 0.99 * least)


@pytest.mark.parametrize(
    "plan",
    [shardc.save("layers.[0-6]", on="host"), shardc.recompute("layers.[0-6]"), shardc.offload("layers.[0-6].*")],
    ids=str,
)
def test_measures_for_some_blocks_are_predicted_as_without_folding(plan: shardc.Plan) -> None:
    with torch.device("meta"):
        model, x = Net(12, 8).double(), torch.empty(16, 8, dtype=torch.float64)

    def captured(keep: int) -> CapturedModel:
        source = ModelCall(model, (x,), {}, loss, torch.device("cpu"))
        return CapturedModel.of(source, shardc.fsdp("dp"), MESH, keep)

    plan |= shardc.fsdp("dp")
    folded, whole = captured(4), captured(0)
    expected = whole.program(MESH, plan, shardc.Options()).schedule(H100)
    for _ in range(2):  # the second from the capture of the first
        schedule = folded.of_plan(plan, MESH).program(MESH, plan, shardc.Options()).schedule(H100)
        assert (schedule.peak, schedule.seconds) == (expected.peak, pytest.approx(expected.seconds, rel=1e-9))
        assert len(folded.source.captures) == 2


@pytest.mark.slow
def test_some_parameters_are_gathered_again() -> None:
    """Between levels 2 and 3: as many as has to be, those that forward uses first."""
    sizes, tried = (6, 256, 32), {}
    globs = [name for name, _ in Net(*sizes[:2]).named_parameters()]

    def schedule(plan: shardc.Plan) -> Trial:
        tried[str(plan)] = Trial(peak(*sizes, plan, Mesh(dp=8)), len(tried))
        return tried[str(plan)]

    kept, again = (peak(*sizes, shardc.fsdp("dp", level=level), Mesh(dp=8)) for level in (2, 3))
    limit = (kept + again) / 2
    with torch.device("meta"):
        model = Net(*sizes[:2]).double()
    Fit(model, globs, shardc.Plan(), limit, True, schedule, lambda: math.inf).run(shardc.fsdp("dp"))
    assert list(tried)[:2] == [str(shardc.fsdp("dp", level=level)) for level in (2, 3)]
    some = {plan: trial.memory for plan, trial in tried.items() if "levels" in plan}
    assert all(plan.startswith('fsdp("dp", level=2, levels={"layers.0.narrow.0.weight": 3') for plan in some)
    assert again <= min(some.values()) <= limit < kept
