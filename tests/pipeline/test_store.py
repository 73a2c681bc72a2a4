"""Programs of pipeline stages that another start stored, or that were saved: as fresh ones."""

from __future__ import annotations

import json
import shutil
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

import shardc
from shardc.errors import PrecompiledError, ShardcWarning
from shardc.ir.executable import Executable
from shardc.precompiled import Store
from tests.microbatches.programs import Case
from tests.pipeline.programs import CASES, blocks
from tests.pipeline.test_ranks import pp, several
from tests.precompiled.steps import digest
from tests.ranks import device_mesh, run_ranks

PP2 = shardc.Mesh(pp=2)


def local(x: Tensor) -> Tensor:
    return x.to_local() if hasattr(x, "to_local") else x


# --- later starts


def starts(folder: Path, found: bool, case: str, mesh: shardc.Mesh, plan: shardc.Plan, backend: str = "eager") -> None:
    """A start that finds its program or compiles it, trains two steps and evaluates, as the first start does."""
    counters.clear()
    torch.set_default_dtype(torch.float64)
    of = CASES[case]()
    module = shardc.compile(of.model, device_mesh(mesh), plan, loss=of.loss, backend=backend)
    optimizer, results = torch.optim.AdamW(module.parameters(), lr=0.1), []
    begin = time.perf_counter()
    for at in range(2):
        results.append(module(*module.shard_inputs(*of.args)))
        results[-1].backward()
        if at == 0:
            print(f"{case}, {plan}, {backend}, found {found}: first step {time.perf_counter() - begin:.2f} s")
        results += [local(p.grad) for p in module.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    (program,) = module.shardc.programs.values()
    assert not found or program.from_store, program.stored
    assert bool(counters["stats"]) != program.from_store, "whether Dynamo traced the model"
    with torch.no_grad():  # graphs that are not stored
        results.append(module(*module.shard_inputs(*of.args)))
    fresh: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(fresh, not program.from_store)
    assert sum(fresh) == (0 if found else 1), f"one rank compiles the program, others find it: {program.stored}"
    expected = folder / f"expected_{case}_{plan}_{backend}_{dist.get_rank()}".replace("/", "")
    if not found:
        expected.write_text(digest(results))
    assert digest(results) == expected.read_text()
    reference = of.reference_loss()
    torch.testing.assert_close(results[0].detach(), reference.detach(), rtol=1e-9, atol=0)


def outputs(found: bool) -> None:
    """Outputs beside the loss and a buffer; then the gradients of another output, whose graphs are not stored."""
    model, batch = several()
    module = shardc.compile(model, device_mesh(PP2), pp(), backend="eager")
    results, expected = module(*batch), model(*batch)
    (program,) = module.shardc.programs.values()
    assert not found or program.from_store, program.stored
    for key, value in expected.items():
        torch.testing.assert_close(results[key].detach(), value.detach(), rtol=1e-12, atol=0)
    assert int(module.calls) == int(model.calls) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (results["loss"] + results["early"]).backward()
    (expected["loss"] + expected["early"]).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(module.get_parameter(name).grad.full_tensor(), p.grad, rtol=1e-9, atol=1e-12)


def evaluates(makers: int) -> None:
    """An evaluation in a module's first call, whose graphs are stored too."""
    counters.clear()
    case = blocks()
    module = shardc.compile(case.model, device_mesh(PP2), pp("gpipe"), loss=case.loss, backend="eager")
    with torch.no_grad():
        loss = module(*case.args)
    torch.testing.assert_close(loss, case.reference_loss(), rtol=1e-12, atol=0)
    traced: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(traced, bool(counters["stats"]))
    assert traced.count(True) == makers


STARTS = {
    "1f1b": ("blocks", PP2, pp()),
    "zbv, tied": ("tied", PP2, pp("zbv")),
    "zb, masked": ("masked", PP2, pp("zb")),
}


@pytest.mark.slow
def test_the_next_start_finds_them(tmp_path: Path) -> None:
    for found in (False, True):
        run_ranks(
            2,
            *(partial(starts, tmp_path, found, *case) for case in STARTS.values()),
            partial(outputs, found),
            partial(evaluates, 0 if found else 1),
            programs=tmp_path / "programs",
        )


def test_the_next_start_finds_them_with_inductor(tmp_path: Path) -> None:
    for found in (False, True):
        run_ranks(2, partial(starts, tmp_path, found, "blocks", PP2, pp(), "inductor"), programs=tmp_path / "programs")


def test_what_decides_is_in_the_key(tmp_path: Path) -> None:
    """Another cut, schedule, number of microbatches or ranks, or another model is a miss."""

    def folder(plan: shardc.Plan, mesh: shardc.Mesh = PP2, **of: Any) -> Path:
        case = blocks(**of)
        program = shardc.compile(case.model, mesh, plan, loss=case.loss, backend="eager").lower(*case.args)
        store = Store.of(tmp_path, program.key, shardc.Options())
        assert isinstance(store, Store)
        return store.folder

    cut = pp(cut=["blocks.1"])
    plans = pp(), cut, pp(cut=["blocks.3"]), pp("gpipe"), pp(microbatches=8), pp("zb"), pp("zb", stages_per_rank=1)
    folders = [
        *map(folder, plans),
        folder(pp(), shardc.Mesh(pp=4)),
        folder(pp(), shardc.Mesh(pp=2, dp=1)),
        folder(pp(), layers=5),
        folder(cut, layers=5),
        folder(pp(), frozen=(0,)),
    ]
    assert len(set(folders)) == len(folders)
    assert folder(cut) == folders[1]


# --- saved programs


def description(program: Executable) -> dict[str, Any]:
    """What the runtime asks of a program beside its graphs."""
    names = (
        "mesh microbatches in_time reduce openings loss tangents inputs outputs returned output_values levels causes"
    )
    out = {name: getattr(program, name) for name in (*names.split(), "stage_ranks", "stage_of")}
    return out | {f"certificate {training}": program.certificate(training).text() for training in (True, False)}


def module_of(case: Case, plan: shardc.Plan, **options: Any) -> Any:
    return shardc.compile(case.model, PP2, plan, loss=case.loss, backend="eager", **options)


@pytest.mark.parametrize("case", ["1f1b", "zbv, tied"])
def test_saved_and_loaded(case: str, tmp_path: Path) -> None:
    name, _, plan = STARTS[case]
    of = CASES[name]()
    fresh = module_of(of, plan)
    program = fresh.lower(*of.args)
    program.save(tmp_path)
    loaded = shardc.load(tmp_path)
    assert description(loaded) == description(program)
    results = []
    for module in (fresh, module_of(of, plan, precompiled=loaded)):
        sim = shardc.Simulation(module)
        loss = sim(*of.args)
        sim.backward()
        results.append([loss, *(sim.grad(name) for name in sorted(sim.grads)), sim(*of.args, grad=False)])
    torch.testing.assert_close(*results, rtol=0, atol=0)


def saves(folder: Path) -> None:
    case = blocks()
    module_of(case, pp()).lower(*case.args).save(folder)


def loads(folder: Path) -> None:
    """Trains with a program that was saved where there was no process group."""
    case = blocks()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ShardcWarning)  # the loaded program does not fit
        module = shardc.compile(case.model, device_mesh(PP2), pp(), loss=case.loss, precompiled=folder, backend="eager")
        loss = module(*case.args)
    expected = case.reference_loss()
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-12, atol=0)
    for name, p in case.model.named_parameters():
        torch.testing.assert_close(module.get_parameter(name).grad.full_tensor(), p.grad, rtol=1e-9, atol=1e-14)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved program."""
    path = tmp_path_factory.mktemp("saved")
    saves(path)
    return path


def test_loaded_on_ranks(folder: Path) -> None:
    run_ranks(2, partial(loads, folder))


def test_programs_of_other_stages_are_refused(folder: Path) -> None:
    case = blocks()
    for mesh, plan, reason in (
        (shardc.Mesh(pp=4), pp(), "the mesh was pp=2 and is pp=4"),
        (PP2, pp("gpipe"), "the plan was"),
        (PP2, pp(cut=["blocks.1"]), "the plan was"),
    ):
        with pytest.raises(PrecompiledError, match=reason):
            shardc.compile(case.model, mesh, plan, loss=F.mse_loss, precompiled=folder)


REASONS = {
    "backward of stage 1": "takes|sends|cannot be read",
    "forward of stage 0": "backward of stage 0 takes",
    "gradients of stage 0": "no graph takes the sum of",
    "inference of stage 1": "has the halves|takes|cannot be read",
}


@pytest.mark.parametrize("what", REASONS)
def test_records_without_a_graph_are_refused(what: str, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    record = json.loads((tmp_path / "program.json").read_text())
    del record["halves"][what], record["files"][f"{what.replace(' ', '_')}.txt"]
    (tmp_path / "program.json").write_text(json.dumps(record))
    with pytest.raises(PrecompiledError, match=REASONS[what]):
        shardc.load(tmp_path)
