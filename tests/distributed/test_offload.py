"""Parameters kept on the host, on real ranks: steps, accumulation, whole views, checkpoints, saved programs, errors."""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import set_state_dict
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc.errors import LayoutError
from shardc.ir.comm import is_loaded, is_stored, move_kind
from tests.distributed.test_checkpoint import STEPS, adamw, state_of, train, trained
from tests.distributed.test_no_sync import MICRO, big_batch, micro
from tests.ranks import run_ranks
from tests.state import assert_same, batch, close, model, step

PLANS = {
    "level 3": shardc.fsdp("dp") | shardc.offload(),
    "level 2, some": shardc.fsdp("dp", level=2) | shardc.offload(["odd.*", "fused", "scale", "empty"]),
    "level 1": shardc.fsdp("dp", level=1) | shardc.offload(),
    "whole": shardc.ddp("dp") | shardc.offload(),
    "level 3, activations too": shardc.fsdp("dp") | shardc.offload() | shardc.save("", on="host"),
}


def compiled(source: nn.Module, plan: shardc.Plan, backend: str = "eager", **options: Any) -> Any:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    return shardc.compile(source, mesh, plan, loss=F.mse_loss, backend=backend, **options)


def trains_as_one_device(name: str, backend: str = "eager") -> None:
    """Losses, gradients, clipping by their norm, and a wrapped optimizer whose state is on the host."""
    source = model()
    module = compiled(source, PLANS[name], backend)
    ours = shardc.optim.wrap(torch.optim.AdamW, module, lr=0.05)
    theirs = torch.optim.AdamW(source.parameters(), lr=0.05)
    for at in range(3):
        close(*step(module, source, *batch(at)))
        assert_same(module, source, grads=True)
        mine = module.clip_grad_norm_(0.5)
        close(mine, nn.utils.clip_grad_norm_(source.parameters(), 0.5))
        assert_same(module, source, grads=True)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        assert_same(module, source)


def accumulates(name: str, kind: str) -> None:
    """Two steps of micro-batches: inside of no_sync, without reduction by set_requires_grad_sync, or all reduced."""
    source = model()
    module = compiled(source, PLANS[name])
    ours, theirs = (torch.optim.AdamW(one.parameters(), lr=0.1) for one in (module, source))
    x, y = big_batch()
    for _ in range(2):
        if kind == "no_sync":
            with module.no_sync():
                for seed in range(MICRO - 1):
                    micro(module, seed)
        else:
            module.set_requires_grad_sync(kind == "sync")
            for seed in range(MICRO - 1):
                micro(module, seed)
            module.set_requires_grad_sync(True)
        micro(module, MICRO - 1)
        F.mse_loss(source(x), y).backward()
        assert_same(module, source, grads=True)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        assert_same(module, source)


def whole_views() -> None:
    source = model()
    module = compiled(source, PLANS["level 3"])
    for name, value in module.full_state_dict().items():
        close(value, source.state_dict()[name], name)
    with module.summon_full_params(), torch.no_grad():
        module.mid.weight.mul_(2)
    source.mid.weight.data.mul_(2)
    close(*step(module, source, *batch()))
    assert_same(module, source, grads=True)


def loads_and_initialises() -> None:
    """From meta: values come by init_weights, or by load_state_dict, and steps run from there."""
    source = model()
    with torch.device("meta"):
        empty = type(source)().double()
    empty.offset = source.offset.clone()
    module = compiled(empty, PLANS["level 3"])
    module.load_state_dict(source.state_dict())
    close(*step(module, source, *batch()))
    assert_same(module, source, grads=True)
    with torch.device("meta"):
        linear = nn.Linear(5, 9).double()
    module = compiled(linear, shardc.fsdp("dp") | shardc.offload())
    with pytest.raises(LayoutError) as caught:
        module(*module.shard_inputs(*batch()))
    assert str(caught.value) == (
        "parameter 'weight' is on meta and has no values\n  plan entry: offload(\"*\")\n"
        "  fix: give it some: module.init_weights(...) or module.load_state_dict(...)"
    )
    torch.manual_seed(7)
    module.init_weights()
    plain = nn.Linear(5, 9).double()
    torch.manual_seed(7)
    plain.reset_parameters()
    close(*step(module, plain, *batch()))
    assert_same(module, plain, grads=True)


def resumes_with_other_places() -> None:
    """A checkpoint of parameters on the host goes on with parameters on the device, and back."""
    source = trained()
    first = compiled(source, PLANS["level 3"])
    reference, optimizer = adamw(source), adamw(first)
    folders: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    train(first, optimizer, 0), train(source, reference, 0)
    dcp.save(state_of(first, optimizer), checkpoint_id=folders[0])
    losses = train(source, reference, STEPS)
    for plan in (shardc.fsdp("dp"), PLANS["level 2, some"]):
        module = compiled(trained(seed=3), plan)
        again = shardc.optim.wrap(torch.optim.AdamW, module, lr=0.05)
        state = state_of(module, again)
        dcp.load(state, checkpoint_id=folders[0])
        set_state_dict(module, again, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        for mine, theirs in zip(train(module, again, STEPS), losses, strict=True):
            close(mine, theirs)
        assert_same(module, source)


def saved_programs_run() -> None:
    source = model()
    plan = PLANS["level 3, activations too"] | shardc.precision(reduce=torch.float64)
    module = compiled(source, plan)
    folders: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    program = module.lower(*batch())
    if dist.get_rank() == 0:
        program.save(folders[0])
    dist.barrier()
    again = compiled(source, plan, precompiled=folders[0])
    close(*step(again, source, *batch()))
    assert_same(again, source, grads=True)
    loaded = next(iter(again.shardc.programs.values()))
    assert isinstance(loaded, type(shardc.load(folders[0])))
    kinds = [move_kind(node) for node in loaded.backward.graph.nodes]
    assert kinds.count("to_host") == sum(param.grad is not None for param in again.parameters()) > 0
    assert any(is_stored(node) for node in loaded.forward.graph.nodes) and any(
        map(is_loaded, loaded.backward.graph.nodes)
    )


@pytest.mark.slow
def test_two_ranks() -> None:
    run_ranks(
        2,
        *(partial(trains_as_one_device, name) for name in PLANS),
        *(partial(accumulates, name, "no_sync") for name in PLANS),
        *(partial(accumulates, name, "no reduction") for name in PLANS),
        partial(accumulates, "level 3", "sync"),
        whole_views,
        loads_and_initialises,
        resumes_with_other_places,
        saved_programs_run,
    )


def test_through_inductor() -> None:
    run_ranks(2, partial(trains_as_one_device, "level 3, activations too", "inductor"))
