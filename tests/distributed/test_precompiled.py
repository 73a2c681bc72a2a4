"""Saved by one rank and loaded by all, in other processes: bit for bit the fresh module, and nothing traced."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardc
from examples.models import llama
from tests.precompiled.steps import digest
from tests.ranks import run_ranks

WITHOUT_STORE = shardc.Options(program_cache=False)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def examples(at: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(at)
    return torch.randn(8, 8, generator=generator), torch.randn(8, 4, generator=generator)


def compiled(backend: str, precompiled: Any = ()) -> Any:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    return shardc.compile(mlp(), mesh, shardc.fsdp("dp"), loss=F.mse_loss, backend=backend, precompiled=precompiled)


def trained(module: Any) -> str:
    """A hash of this rank's part of two steps, and of an evaluation."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    found = []
    for at in range(2):
        found.append(module(*module.shard_inputs(*examples(at))))
        found[-1].backward()
        found += [param.grad for param in module.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        found.append(module(*module.shard_inputs(*examples(2))))
    locals_ = [x._local_tensor if isinstance(x, DTensor) else x for x in (*found, *module.parameters())]
    return digest(locals_)


def saves(folder: Path, backend: str) -> None:
    module = compiled(backend)
    found = trained(module)
    if dist.get_rank() == 0:
        module.lower(*examples()).save(folder / "program")
    (folder / f"expected_{dist.get_rank()}").write_text(found + str(module.memory().planned_peak))


def loads(folder: Path, backend: str, trust: bool) -> None:
    # Nothing else lies in Inductor's cache.
    with fresh_cache():
        counters.clear()
        program = shardc.load(folder / "program", trust=trust)
        module = compiled(backend, [program])
        assert (
            trained(module) + str(module.memory().planned_peak) == (folder / f"expected_{dist.get_rank()}").read_text()
        )
        assert list(module.shardc.programs.values()) == [program]
        hits = counters["inductor"]["fxgraph_cache_hit"]
        assert hits == (3 if trust else 0), "forward, backward and the evaluation"
        assert not counters["stats"], "Dynamo traced the model"


def fresh_where_nothing_was_saved_for_it(folder: Path) -> None:
    saved = shardc.load(folder / "program")
    module = compiled("eager", [saved])
    x, y = examples()
    module(*module.shard_inputs(torch.cat([x, x]), torch.cat([y, y]))).backward()
    assert len([program for program in module.shardc.programs.values() if program is not saved]) == 1


def finds_again(folder: Path) -> None:
    """Under a precision, a capture looks how each block is called, which a compiled module's blocks guard.

    Without the store, so that each rank captures: `lower` makes a program anew for the rank that took it from there.
    """

    def made(**options: Any) -> Any:
        plan = shardc.fsdp("dp") | shardc.precision(param=torch.bfloat16, reduce=torch.float32)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        source = llama.Llama(llama.LlamaConfig())
        return shardc.compile(source, mesh, plan, loss=llama.loss, backend="eager", options=WITHOUT_STORE, **options)

    whole = llama.batch(llama.LlamaConfig())
    module = made()
    module(*module.shard_inputs(*whole)).backward()
    counters.clear()
    program = module.lower(*whole)
    assert not counters["stats"], "the program of the call was not found again"
    if dist.get_rank() == 0:
        program.save(folder / "low")
    dist.barrier()
    served = made(precompiled=folder / "low")
    served(*served.shard_inputs(*whole)).backward()
    assert not counters["stats"], "the saved program was not used"


def test_a_program_under_a_precision_is_found_again(tmp_path: Path) -> None:
    run_ranks(2, partial(finds_again, tmp_path))


def test_two_ranks(tmp_path: Path) -> None:
    run_ranks(2, partial(saves, tmp_path, "eager"))
    run_ranks(2, partial(loads, tmp_path, "eager", False), partial(fresh_where_nothing_was_saved_for_it, tmp_path))


@pytest.mark.long
def test_two_ranks_of_inductor(tmp_path: Path) -> None:
    run_ranks(2, partial(saves, tmp_path, "inductor"))
    assert (tmp_path / "program" / "inductor.bin").exists()
    run_ranks(2, *(partial(loads, tmp_path, "inductor", trust) for trust in (True, False)))
