"""Programs that an earlier start stored: bit for bit the fresh ones, found where nothing changed and only there."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc.program import Program
from tests.precompiled.steps import digest
from tests.ranks import run_ranks

MODEL = """
import torch
from torch import nn

from storedparts.scale import scale

FACTOR = 1.5


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.by = nn.Linear(8, 16), nn.Linear(16, 4), 2.0
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return self.second(self.drop(scale(self.first(x)).tanh())) * FACTOR * self.by
"""
SCALE = "def scale(x):\n    return x * 0.5\n"


def power_loss(out: torch.Tensor, y: torch.Tensor, power: float) -> torch.Tensor:
    return (out - y).abs().pow(power).mean()


@contextmanager
def cached_in(folder: Path) -> Iterator[None]:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / f"cache{os.environ.get('OTHER', '')}")
    os.environ["SHARDC_STORE"] = "1"  # in that folder
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]


def written(folder: Path, model: str = MODEL, scale: str = SCALE) -> None:
    for package, file, text in (("storedmodel", "net", model), ("storedparts", "scale", scale)):
        (folder / package).mkdir(exist_ok=True)
        (folder / package / "__init__.py").write_text("")
        (folder / package / f"{file}.py").write_text(text)


def start(folder: Path, found: bool, change: Callable[[Any], Any] | None = None, **said: Any) -> None:
    """One start of a training script: whether its program is found, and that it trains as without a store."""
    with cached_in(folder):
        made: Any = importlib.import_module("storedmodel.net")
        results = [trained(folder, made, change, store, found, **said) for store in (True, False)]
        assert results[0] == results[1]


def trained(
    folder: Path, made: Any, change: Any, store: bool, found: bool, level: int = 3, backend: str = "eager",
    loss: Callable[..., Any] = F.mse_loss, options: Any = None, stores: bool = True,
) -> str:  # fmt: skip
    torch.manual_seed(0)
    model = made.Net()
    if change is not None:
        model = change(model) or model
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    plan = shardc.fsdp("dp", level=level)
    counters.clear()
    module = shardc.compile(
        model, mesh, plan, loss=loss, backend=backend, options=shardc.Options(program_cache=store, **(options or {}))
    )
    optimizer, out = torch.optim.AdamW(module.parameters(), lr=0.1), []
    for at in range(3):
        generator = torch.Generator().manual_seed(at)
        x, y = torch.randn(8, 8, generator=generator), torch.randn(8, 4, generator=generator)
        torch.manual_seed(at)
        out.append(module(*module.shard_inputs(x, y)))
        out[-1].backward()
        out += [param.grad.to_local() for param in module.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    (program,) = module.shardc.programs.values()
    assert bool(counters["stats"]) != program.from_store, "whether Dynamo traced the model"
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (found, program.from_store))
    if store and not any(found for found, _ in ranks):
        makers = [stored for _, stored in ranks].count(False)
        assert makers == (1 if stores else len(ranks)), "one rank makes the program, the others find it"
    else:
        assert ranks == [(found, store and found) for found, _ in ranks]
    with torch.no_grad():  # a half that is not stored
        torch.manual_seed(7)
        out.append(module(*module.shard_inputs(x, y)))
    return digest([*out, *(param.to_local() for param in module.parameters())])


def test_found_by_the_next_start_where_nothing_changed(tmp_path: Path) -> None:
    written(tmp_path)
    run_ranks(2, partial(start, tmp_path, False), partial(start, tmp_path, True))
    run_ranks(2, partial(start, tmp_path, True), partial(one_rank_alone, tmp_path), partial(looked_at, tmp_path))
    run_ranks(2, partial(evaluated_first, tmp_path))


def one_rank_alone(folder: Path) -> None:
    """Rank 1 has an empty store, as on another machine: both ranks train on, rank 0 with what it found."""
    os.environ["OTHER"] = "" if dist.get_rank() == 0 else "other"
    start(folder, dist.get_rank() == 0)


def looked_at(folder: Path) -> None:
    """A found program has no stages; who looks gets them, and the module trains on."""
    with cached_in(folder):
        made: Any = importlib.import_module("storedmodel.net")
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        module = shardc.compile(
            made.Net(),
            mesh,
            shardc.fsdp("dp"),
            loss=F.mse_loss,
            backend="eager",
            options=shardc.Options(program_cache=True),
        )
        x, y = torch.randn(8, 8), torch.randn(8, 4)
        module(*module.shard_inputs(x, y)).backward()
        assert [program.from_store for program in module.shardc.programs.values()] == [True]
        program = module.lower(x, y)
        assert isinstance(program, Program) and "all_gather" in program.text("collectives")
        module(*module.shard_inputs(x, y)).backward()
        with module.no_sync():
            module(*module.shard_inputs(x, y)).backward()
        module(*module.shard_inputs(x, y)).backward()


def evaluated_first(folder: Path) -> None:
    """The half that is not stored is made in a call that records no gradients; the module trains afterwards."""
    with cached_in(folder):
        made: Any = importlib.import_module("storedmodel.net")
        mesh, found = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), []
        x, y = torch.randn(8, 8), torch.randn(8, 4)
        for store in (True, False):
            torch.manual_seed(0)
            module = shardc.compile(
                made.Net(), mesh, shardc.fsdp("dp"), loss=F.mse_loss, backend="eager",
                options=shardc.Options(program_cache=store),
            )  # fmt: skip
            with torch.inference_mode():
                torch.manual_seed(1)
                found.append(module(*module.shard_inputs(x, y)).item())
            torch.manual_seed(1)
            module(*module.shard_inputs(x, y)).backward()
            found += [digest([param.grad.to_local() for param in module.parameters()])]
            assert [program.from_store for program in module.shardc.programs.values()] == [store]
        assert found[:2] == found[2:]


def test_what_the_first_evaluation_makes_is_found(tmp_path: Path) -> None:
    written(tmp_path)
    run_ranks(2, partial(evaluated, tmp_path, 1), partial(evaluated, tmp_path, 0))


def evaluated(folder: Path, makers: int) -> None:
    """An evaluation by what was stored: so many ranks trace the model."""
    with cached_in(folder):
        made: Any = importlib.import_module("storedmodel.net")
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        torch.manual_seed(0)
        model, (x, y) = made.Net().eval(), (torch.randn(8, 8), torch.randn(8, 4))
        counters.clear()
        module = shardc.compile(
            model, mesh, shardc.fsdp("dp"), loss=F.mse_loss, backend="eager", options=shardc.Options(program_cache=True)
        )
        with torch.no_grad():
            loss = module(*module.shard_inputs(x, y))
            torch.testing.assert_close(loss, F.mse_loss(model(x), y))
        traced: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(traced, bool(counters["stats"]))
        assert traced.count(True) == makers
        module(*module.shard_inputs(x, y)).backward()


def by_three(model: Any) -> None:
    model.by = 3.0


def without_drop(model: Any) -> None:
    model.drop = nn.Identity()


@pytest.mark.slow
def test_what_changed_is_compiled(tmp_path: Path) -> None:
    written(tmp_path)
    first = partial(start, tmp_path, False)
    run_ranks(
        2, first,
        partial(start, tmp_path, False, by_three), partial(start, tmp_path, True, by_three),
        partial(start, tmp_path, False, without_drop),
        partial(start, tmp_path, False, level=2),
        partial(start, tmp_path, False, options={"bucket_size": 64}),
        partial(start, tmp_path, False, loss=partial(power_loss, power=2.0)),
        partial(start, tmp_path, False, loss=partial(power_loss, power=3.0)),
        partial(start, tmp_path, True, loss=partial(power_loss, power=2.0)),
        partial(start, tmp_path, True),
    )  # fmt: skip
    written(tmp_path, scale=SCALE.replace("0.5", "0.25"))
    run_ranks(2, partial(start, tmp_path, False), partial(start, tmp_path, True))
    written(tmp_path, MODEL.replace("1.5", "2.5"), SCALE.replace("0.5", "0.25"))
    run_ranks(2, partial(start, tmp_path, False), partial(start, tmp_path, True))


def with_rule(model: Any) -> None:
    """A rule of the user's for an op of torch: it may give other layouts than those of the stored program."""
    shardc.register_rule("aten::tanh", "... d -> ... d", reduction={"d": "whole"})


def test_a_rule_that_is_registered_later_makes_another_program(tmp_path: Path) -> None:
    written(tmp_path)
    run_ranks(2, partial(start, tmp_path, False), partial(start, tmp_path, True))
    run_ranks(2, partial(start, tmp_path, False, with_rule, stores=False))


def changing(x: torch.Tensor, kept: dict[str, torch.Tensor]) -> torch.Tensor:
    kept["row"] = x
    return x + 1


def warned(folder: Path) -> None:
    """A warning that a program gave comes again with it."""
    with cached_in(folder):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        texts = []
        for _ in range(2):
            module = shardc.compile(
                changing, mesh, shardc.fsdp("dp"), backend="eager", options=shardc.Options(program_cache=True)
            )
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                module(torch.ones(4, 8), {})
            texts.append([str(each.message) for each in said if issubclass(each.category, shardc.ShardcWarning)])
        assert list(module.shardc.programs.values())[0].from_store
        assert texts[0] == texts[1] != []


def test_what_is_damaged_is_compiled_again(tmp_path: Path) -> None:
    written(tmp_path)
    run_ranks(2, partial(start, tmp_path, False), partial(warned, tmp_path))
    programs = list((tmp_path / "cache" / "shardc" / "programs").glob("*/*/program.json"))
    assert programs
    for path in programs:
        (path.parent / "forward.txt").write_text("mesh dp=2\n")
    run_ranks(2, partial(start, tmp_path, False), partial(start, tmp_path, True))


@pytest.mark.slow
def test_through_inductor(tmp_path: Path) -> None:
    written(tmp_path)
    inductor = partial(start, tmp_path, backend="inductor")
    run_ranks(2, partial(inductor, False), partial(inductor, True))
