"""Programs with microbatches that another start stored, or that were saved: as fresh ones."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc.errors import PrecompiledError, ShardcError, ShardcWarning
from shardc.ir.executable import Executable
from shardc.precompiled import Store
from tests.microbatches.programs import CASES, IGNORED
from tests.microbatches.test_outputs import Features, Several
from tests.precompiled.steps import digest
from tests.ranks import run_ranks
from tests.semantics.forged import Change, forged, with_line

DP = shardc.Mesh(dp=2)


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def rows(masks: bool = True) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, target = torch.randn(16, 8, generator=generator).double(), torch.randint(4, (16,), generator=generator)
    target[1:12:3] = IGNORED if masks else 0
    return x, target


def plain(out: Tensor, target: Tensor) -> Tensor:
    return -out.log_softmax(-1).gather(-1, target[:, None]).mean()


def plan(level: int = 3, count: int = 4, **options: Any) -> shardc.Plan:
    return shardc.fsdp("dp", level=level) | shardc.microbatches(count, **options)


def compiled(mesh: Any, of: shardc.Plan, masks: bool = True, **options: Any) -> Any:
    loss = F.cross_entropy if masks else plain
    return shardc.compile(layers(), mesh, of, loss=loss, **{"backend": "eager", **options})


# --- later starts


def on_mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))


def starts(folder: Path, found: bool, backend: str, level: int, **options: Any) -> None:
    """A start that finds its program or makes it, trains two steps and evaluates, beside the first start's results."""
    counters.clear()
    module = compiled(on_mesh(), plan(level, **options), backend=backend)
    optimizer, results = torch.optim.AdamW(module.parameters(), lr=0.1), []
    for _ in range(2):
        results.append(module(*module.shard_inputs(*rows())))
        results[-1].backward()
        results += [p.grad.to_local() for p in module.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    (program,) = module.shardc.programs.values()
    assert not found or program.from_store, program.stored
    assert bool(counters["stats"]) != program.from_store, "whether Dynamo traced the model"
    with torch.no_grad():  # graphs that are not stored
        results.append(module(*module.shard_inputs(*rows())))
    makers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(makers, not program.from_store)
    assert sum(makers) == (0 if found else 1), f"one rank makes the program, others find it: {program.stored}"
    expected = folder / f"expected_{backend}_{level}_{dist.get_rank()}"
    if not found:
        expected.write_text(digest(results))
    assert digest(results) == expected.read_text()


def evaluates(makers: int) -> None:
    """An evaluation in a module's first call, whose graphs are stored too."""
    counters.clear()
    module = compiled(on_mesh(), plan(2))
    with torch.no_grad():
        loss = module(*module.shard_inputs(*rows()))
    torch.testing.assert_close(loss, F.cross_entropy(layers()(rows()[0]), rows()[1]))
    traced: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(traced, bool(counters["stats"]))
    assert traced.count(True) == makers


def uses_more_outputs(found: bool) -> None:
    """A backward whose graphs are not stored, of a model that was called under autocast."""
    torch.manual_seed(0)
    model = Several()
    batch = torch.randn(16, 8), torch.randn(16, 4)
    results: list[Tensor] = []
    for store in (True, False):
        options = shardc.Options(program_cache=store)
        module = shardc.compile(model, on_mesh(), plan(count=2), backend="eager", options=options)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = module(*module.shard_inputs(*batch))
        (program,) = module.shardc.programs.values()
        assert not (store and found) or program.from_store, program.stored
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (out["loss"] + out["sparsity"].float() / 2).backward()
        results.append(torch.cat([p.grad.full_tensor().flatten() for p in module.parameters()]))
    torch.testing.assert_close(*results, rtol=0, atol=0)


def without_loss(found: bool) -> None:
    torch.manual_seed(0)
    model, x, weight = Features().double(), torch.randn(16, 8).double(), torch.randn(16, 4).double()
    module = shardc.compile(model, on_mesh(), plan() | shardc.Plan(reduce="sum"), backend="eager")
    part = module.shard_inputs(x)
    (module(part) * module.shard_inputs(weight)).sum().backward()
    (model(x) * weight).sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(module.get_parameter(name).grad.full_tensor(), p.grad)
    (program,) = module.shardc.programs.values()
    assert not found or program.from_store, program.stored


def settings_changed(found: bool) -> None:
    """Graphs that are not stored are made for the settings of the call, or not at all."""
    torch.manual_seed(0)
    batch = torch.randn(16, 8), torch.randn(16, 4)
    module = shardc.compile(Several(), on_mesh(), plan(count=2), backend="eager")
    out = module(*module.shard_inputs(*batch))
    if found:
        torch.use_deterministic_algorithms(True)
        with warnings.catch_warnings(), pytest.raises(ShardcError, match="since the call, settings of torch"):
            warnings.simplefilter("ignore")
            (out["loss"] + out["sparsity"]).backward(retain_graph=True)  # or as another rank's error
        torch.use_deterministic_algorithms(False)
        assert all(p.grad is None for p in module.parameters())
    out["loss"].backward()


def contrasts(found: bool) -> None:
    """Loops before the forward that read gradients: an evaluation has other loops, which are not stored."""
    torch.set_default_dtype(torch.float64)
    case = CASES["contrastive"]()
    module = shardc.compile(case.model, on_mesh(), plan(count=2), backend="eager")
    batch = module.shard_inputs(*case.args)
    loss = module(*batch)
    loss.backward()
    expected, grads = case.reference()
    torch.testing.assert_close(loss.detach(), expected)
    for name, grad in grads.items():
        torch.testing.assert_close(module.get_parameter(name).grad.full_tensor(), grad, rtol=1e-6, atol=1e-12)
    (program,) = module.shardc.programs.values()
    assert program.opens_backward and (not found or program.from_store), program.stored
    with torch.no_grad():
        torch.testing.assert_close(module(*batch), expected)


def test_the_next_start_finds_them(tmp_path: Path) -> None:
    for found in (False, True):
        run_ranks(
            2,
            partial(starts, tmp_path, found, "eager", 3),
            partial(starts, tmp_path, found, "eager", 2, reduce="microbatch"),
            partial(evaluates, 0 if found else 1),
            partial(uses_more_outputs, found),
            partial(without_loss, found),
            partial(settings_changed, found),
            partial(contrasts, found),
            programs=tmp_path / "programs",
        )


def test_the_next_start_finds_them_with_inductor(tmp_path: Path) -> None:
    for found in (False, True):
        run_ranks(2, partial(starts, tmp_path, found, "inductor", 2), programs=tmp_path / "programs")


def test_plans_never_share_a_program(tmp_path: Path) -> None:
    """The number of microbatches is in the key, and how they reduce."""
    plans = plan(), plan(count=8), plan(reduce="microbatch"), plan(2), shardc.fsdp("dp")
    folders = set()
    for each in plans:
        store = Store.of(tmp_path, compiled(DP, each).lower(*rows()).key, shardc.Options())
        assert isinstance(store, Store)
        folders.add(store.folder)
    assert len(folders) == len(plans)


# --- saved programs


def description(program: Executable) -> dict[str, Any]:
    """What the runtime asks of a program beside its graphs."""
    names = "microbatches in_time reduce openings gathers_once opens_backward loss tangents inputs outputs returned"
    said = {name: getattr(program, name) for name in (*names.split(), "output_values", "levels", "causes")}
    return said | {f"certificate {training}": program.certificate(training).text() for training in (True, False)}


def results(module: nn.Module, batch: tuple[Tensor, ...], *tangents: Tensor | None) -> list[Tensor]:
    """Outputs and gradients of a step, and outputs of an evaluation."""
    sim = shardc.Simulation(module)
    values = [*torch.utils._pytree.tree_leaves(sim(*batch))]
    sim.backward(*tangents)
    values += [sim.grad(name) for name in sorted(sim.grads)]
    return [*values, *torch.utils._pytree.tree_leaves(sim(*batch, grad=False))]


@pytest.mark.parametrize("masks", [True, False], ids=["opening", "no opening"])
@pytest.mark.parametrize("level", [2, 3])
def test_saved_and_loaded(level: int, masks: bool, tmp_path: Path) -> None:
    fresh = compiled(DP, plan(level), masks)
    program = fresh.lower(*rows(masks))
    assert (program.openings > 0, program.gathers_once) == (masks, level == 2)
    program.save(tmp_path)
    loaded = shardc.load(tmp_path)
    assert description(loaded) == description(program)
    module = compiled(DP, plan(level), masks, precompiled=loaded)
    found, expected = (results(each, rows(masks)) for each in (module, fresh))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert list(module.shardc.programs.values()) == [loaded]


@pytest.mark.parametrize("name", ["masked", "weight decay", "token weights"])
def test_models_come_back(name: str, tmp_path: Path) -> None:
    case = CASES[name]()

    def module(**options: Any) -> Any:
        mesh = shardc.Mesh(dp=2)
        return shardc.compile(case.model, mesh, plan(2, 2), loss=case.loss, backend="eager", **options)

    fresh = module()
    fresh.lower(*case.args).save(tmp_path)
    found, expected = (results(each, case.args) for each in (module(precompiled=tmp_path), fresh))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def several(**options: Any) -> tuple[Any, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = Several().double()
    batch = torch.randn(16, 8).double(), torch.randn(16, 4).double()
    return shardc.compile(model, DP, plan(), backend="eager", **options), batch


def test_several_outputs(tmp_path: Path) -> None:
    fresh, batch = several()
    fresh.lower(*batch).save(tmp_path)
    module, _ = several(precompiled=tmp_path)
    one = torch.ones((), dtype=torch.float64)
    found, expected = (results(each, batch, one, None, None) for each in (module, fresh))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_graphs_that_were_not_saved(tmp_path: Path) -> None:
    """A loaded program has no stages to make them from, and says what to do."""
    fresh, batch = several()
    fresh.lower(*batch).save(tmp_path)
    sim = shardc.Simulation(several(precompiled=tmp_path)[0])
    sim(*batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(PrecompiledError, match=r"has no graphs for gradients of outputs 0, 3") as error:
            sim.backward(*(torch.ones((), dtype=torch.float64) if at != 1 else None for at in range(3)))
    assert "return one loss" in str(error.value) and "precompiled" in str(error.value)


def loaded_on_ranks(folder: Path) -> None:
    """A backward that has no graphs raises on all ranks, and they go on."""
    module = shardc.compile(several()[1] and Several().double(), on_mesh(), plan(), precompiled=folder, backend="eager")
    _, batch = several()
    local = module.shard_inputs(*batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ShardcWarning)  # the loaded program does not fit
        out = module(*local)
    with warnings.catch_warnings(), pytest.raises(ShardcError, match="has no graphs for"):
        warnings.simplefilter("ignore")
        (out["loss"] + out["sparsity"]).backward()
    assert all(p.grad is None for p in module.parameters())
    module(*local)["loss"].backward()
    assert all(p.grad is not None for p in module.parameters())


def saves(folder: Path) -> None:
    fresh, batch = several()
    fresh.lower(*batch).save(folder)


def test_loaded_on_ranks(tmp_path: Path) -> None:
    run_ranks(1, partial(saves, tmp_path))  # in a process of its own, as users do
    run_ranks(2, partial(loaded_on_ranks, tmp_path))


def test_loops_that_read_gradients(tmp_path: Path) -> None:
    """They are saved for a training step; an evaluation has others."""
    case = CASES["contrastive"]()
    shardc.compile(case.model, DP, plan(count=2), backend="eager").lower(*case.args).save(tmp_path)
    modules = [shardc.compile(case.model, DP, plan(count=2), backend="eager", precompiled=x) for x in (tmp_path, ())]
    sims = [shardc.Simulation(module) for module in modules]
    losses = [sim(*case.args) for sim in sims]
    torch.testing.assert_close(*losses, rtol=0, atol=0)
    for sim in sims:
        sim.backward()
    torch.testing.assert_close(sims[0].grads, sims[1].grads, rtol=0, atol=0)
    with pytest.raises(PrecompiledError, match="has no graphs for a call without gradients"):
        sims[0](*case.args, grad=False)
    torch.testing.assert_close(sims[1](*case.args, grad=False), losses[1])


def test_a_batch_too_small_to_be_split(tmp_path: Path) -> None:
    """No graph runs for each microbatch but the forward."""
    batch = tuple(x[:1] for x in rows())
    fresh = compiled(DP, plan(2))
    program = fresh.lower(*batch)
    assert program.backward is None
    program.save(tmp_path)
    found, expected = (results(each, batch) for each in (compiled(DP, plan(2), precompiled=tmp_path), fresh))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def with_artifacts(folder: Path, saves: bool) -> None:
    """Compiled code is saved with a program that has run, and nothing is compiled where it is loaded."""
    with fresh_cache():
        counters.clear()
        program = () if saves else shardc.load(folder, trust=True)
        module = compiled(on_mesh(), plan(2), backend="inductor", precompiled=program)
        module(*module.shard_inputs(*rows())).backward()
        with torch.no_grad():
            module(*module.shard_inputs(*rows()))
        if saves and dist.get_rank() == 0:
            module.lower(*rows()).save(folder)
            assert (folder / "inductor.bin").exists()
        if not saves:
            assert list(module.shardc.programs.values()) == [program]
            assert not counters["inductor"]["fxgraph_cache_miss"] and not counters["stats"]
            assert counters["inductor"]["fxgraph_cache_hit"] >= 6


@pytest.mark.slow
def test_compiled_code_is_saved_too(tmp_path: Path) -> None:
    run_ranks(2, partial(with_artifacts, tmp_path, True))
    run_ranks(2, partial(with_artifacts, tmp_path, False))


def frozen() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    model = layers()
    return model.requires_grad_(False), rows()


def test_without_gradients(tmp_path: Path) -> None:
    model, batch = frozen()
    fresh = shardc.compile(model, DP, plan(2), loss=F.cross_entropy, backend="eager")
    fresh.lower(*batch).save(tmp_path)
    module = shardc.compile(model, DP, plan(2), loss=F.cross_entropy, backend="eager", precompiled=tmp_path)
    values = [shardc.Simulation(each)(*batch) for each in (module, fresh)]
    torch.testing.assert_close(*values, rtol=0, atol=0)


# --- records of a stranger


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    saved: Path = tmp_path_factory.mktemp("saved")
    compiled(DP, plan(2)).lower(*rows()).save(saved)
    return saved


def test_files_have_plain_names(folder: Path) -> None:
    names = {path.stem for path in folder.glob("*.txt") if not path.name[:2].isdigit()}
    assert names == {
        "opening_1", "opened_1", "first_forward", "forward", "backward", "last_backward",
        "first_inference", "inference", "closing",
    }  # fmt: skip
    assert (folder / "forward.txt").read_text().startswith("mesh dp=2\n"), "graphs are on the mesh of devices"


def setting(**fields: object) -> Change:
    return lambda record, folder: record["timed"].update(fields)


def without(half: str) -> Change:
    def change(record: dict[str, Any], folder: Path) -> None:
        del record["halves"][half]
        del record["files"][f"{half.replace(' ', '_')}.txt"]

    return change


def counts(count: int) -> Change:
    def change(record: dict[str, Any], folder: Path) -> None:
        (entry,) = (call["microbatches"] for call in record["key"]["plan"]["calls"] if "microbatches" in call)
        entry["count"] = count

    return change


def renamed(half: str, kind: str) -> Change:
    """Another name of all arguments of this kind."""

    def change(record: dict[str, Any], folder: Path) -> None:
        path = folder / f"{half}.txt"
        text, count = re.subn(rf"(?m)^(  {kind}(?: #\d+)?) (?:[\w.]+ )?(%|=)", r"\1 nothing \2", path.read_text())
        assert count
        path.write_text(text)

    return change


def dropped(record: dict[str, Any], folder: Path) -> None:
    record["timed"] = None


FORGED: dict[str, tuple[str, Change]] = {
    "nothing of time": ("than its plan", dropped),
    "no microbatches in the plan": ("than its plan", counts(1)),
    "fewer microbatches": ("forward takes|opening 1 takes", counts(2)),
    "more microbatches than elements": ("takes|cannot be read", counts(64)),
    "endless": ("cannot be read|has .* ranks", counts(10**9)),
    "no backward": ("last backward takes", without("backward")),
    "no last backward": ("has the halves", without("last backward")),
    "no opening": ("has the halves", without("opened 1")),
    "one opening more": ("has the halves", setting(openings=2)),
    "many openings": ("not an integer from 0 to 100", setting(openings=10**9)),
    "gathers in each": ("has the halves", setting(gathers_once=False)),
    "gradients in an opening": ("has the halves", setting(opens_backward=True)),
    "a reduce op that is none": ("not 'sum' or", setting(reduce={"x": "import os"})),
    "terms of no sum": ("which is no sum", setting(reduce={})),
    "a loss that is no output": ("the loss is output 5", setting(loss=5)),
    "no such dtype": ("not a dtype", setting(tangents=[[0, "object"]])),
    "no gradients": ("outputs \\[\\] have gradients", setting(tangents=[])),
    "an output that is none": ("no parts of outputs \\[7\\]", setting(outputs=[[7, "[16@(dp,micro)]"]])),
    "another layout": ("no parts of outputs \\[0\\]", setting(outputs=[[0, "[16@(dp,micro)]"]])),
    "a sum that no graph gives": ("no graph takes the sum of", renamed("last_backward", "sum")),
    "a value that nobody knows": ("backward takes", renamed("backward", "known")),
    "a value that forward does not save": ("backward takes|cannot be read", renamed("forward", "saved")),
    "a half of another folder": (
        "has the halves",
        lambda record, folder: record["halves"].update({"../opening 1": record["halves"].pop("opening 1")}),
    ),
    "a call in an opening": (
        "may not call",
        with_line('%bad: f32[4] = from_file("/etc/passwd", False, 4)', "opening_1"),
    ),
}


@pytest.mark.parametrize("what", FORGED)
def test_forged_records_are_refused(what: str, folder: Path, tmp_path: Path) -> None:
    reason, change = FORGED[what]
    with pytest.raises(PrecompiledError, match=reason):
        shardc.load(forged(folder, tmp_path / "forged", change))


def test_as_it_was_saved_it_is_loaded(folder: Path, tmp_path: Path) -> None:
    unchanged: Callable[..., None] = lambda record, folder: None  # noqa: E731
    assert shardc.load(forged(folder, tmp_path / "again", unchanged)).microbatches == 4


# --- buffers


def start_with_buffers(found: bool) -> None:
    """Trains a start's first step. All buffers have one device's values, in a start that finds its program, too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)).double()
    module = shardc.compile(
        model, on_mesh(), shardc.ddp("dp") | shardc.microbatches(2), loss=F.mse_loss, backend="eager"
    )
    x, target = torch.randn(16, 8).double(), torch.randn(16, 4).double()
    module(*module.shard_inputs(x, target)).backward()
    F.mse_loss(model(x), target).backward()
    (program,) = module.shardc.programs.values()
    assert program.from_store == found, program.stored
    for (name, ours), theirs in zip(module.named_buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=lambda text, name=name: f"{name}: {text}")


def test_buffers_of_a_stored_program(tmp_path: Path) -> None:
    for found in (False, True):
        run_ranks(1, partial(start_with_buffers, found), programs=tmp_path)
