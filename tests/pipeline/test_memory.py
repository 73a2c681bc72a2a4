"""Memory of a rank: the predicted peak of a step beside what the rank allocates, for stages and microbatches."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch

import shardc
from examples.models import llama
from shardc.ir.mesh import Mesh
from shardc.report.stage_schedule import PipelineSchedule
from shardc.runtime.profile import alive, peak_of
from tests.ranks import device_mesh, run_ranks

CONFIG = llama.LlamaConfig(layers=4, dim=128, hidden=256, heads=4, kv_heads=4, vocab=512)


def as_predicted(mesh: Mesh, plan: shardc.Plan, within: float = 0.1) -> None:
    """The third step, with the state of AdamW: parameters, state, gradients and activations."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    tokens = torch.randint(CONFIG.vocab, (16, 128))
    model, batch = llama.Llama(CONFIG), (tokens, tokens.roll(-1, 1))
    module = shardc.compile(model, device_mesh(mesh), plan, loss=llama.loss)
    args, optimizer = module.shard_inputs(*batch), torch.optim.AdamW(module.parameters())
    for _ in range(2):  # the second has the arenas of the first
        module(*args).backward()
        optimizer.step()
        optimizer.zero_grad()
    schedule = module.shardc.lower(*batch).schedule("cpu")
    stage = torch.distributed.get_rank() if isinstance(schedule, PipelineSchedule) else None
    predicted = schedule.peak if stage is None else schedule.ranks[stage].peak
    state = [x for state in optimizer.state.values() for x in state.values()]
    before = alive([*module.parameters(), *module.buffers(), *args, *state])
    measured = before + peak_of(lambda: module(*args).backward()) + module.shardc.memory().arena
    assert abs(predicted / measured - 1) < within, f"predicted {predicted}, measured {measured}"


STAGES = {name: (Mesh(pp=2), shardc.pp("pp", name, microbatches=4)) for name in ("gpipe", "1f1b", "interleaved", "zbv")}
LEVELS = {f"fsdp {x}": (Mesh(dp=2), shardc.fsdp("dp", level=x) | shardc.microbatches(4)) for x in (2, 3)}


@pytest.mark.slow
@pytest.mark.parametrize("case", [*STAGES, *LEVELS])
def test_the_peak_of_each_rank_is_as_predicted(case: str) -> None:
    """Each in processes of its own, where no garbage of others is freed while memory is measured."""
    run_ranks(2, partial(as_predicted, *(STAGES | LEVELS)[case]))
