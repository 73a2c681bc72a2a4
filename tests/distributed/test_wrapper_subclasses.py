"""Adapters on frozen quantised weights on two ranks: training, checkpoints, copies, second starts."""

from __future__ import annotations

import copy
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import shardc
from shardc.errors import LayoutError
from shardc.ir.mesh import Mesh
from tests.ranks import device_mesh, run_ranks
from tests.semantics.quantised import Int8, Shell, adapted, batch, loss


def sharded(model: nn.Module, level: int = 3, backend: str = "eager") -> Any:
    return shardc.compile(model, device_mesh(Mesh(dp=2)), shardc.fsdp("dp", level), loss=loss, backend=backend)


def steps(model: Any, count: int = 2) -> list[Tensor]:
    """The losses of ``count`` steps of AdamW on what is trained."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for _ in range(count):
        x, target = batch()
        value = model(*model.shard_inputs(x, target)) if hasattr(model, "shardc") else loss(model(x), target)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.detach())
    return losses


def plain(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: x.dequantize() if isinstance(x, Int8 | Shell) else x for name, x in state.items()}


def trains(backend: str = "eager") -> None:
    for level in (2, 3):
        model = adapted()
        module = sharded(model, level, backend)
        torch.testing.assert_close(steps(module), steps(model), rtol=1e-9, atol=0)
        torch.testing.assert_close(plain(module.full_state_dict()), plain(model.state_dict()), rtol=1e-9, atol=1e-9)


def state_dicts() -> None:
    """Of the model's names and classes where tensors are whole; by inner names where they are sharded."""
    model = adapted(lambda x: Shell(Int8.of(x)))
    module = sharded(model)
    steps(module)
    whole, sharded_state = module.full_state_dict(), module.state_dict()
    assert whole.keys() == model.state_dict().keys() and type(whole["0.base.weight"]) is Shell
    assert "0.base.weight.inside.q" in sharded_state and "0.base.weight" not in sharded_state
    for state in (whole, sharded_state, {**whole, "0.up.weight": sharded_state["0.up.weight"]}):
        other = sharded(adapted(lambda x: Shell(Int8.of(x * 2))))
        other.load_state_dict(state)
        torch.testing.assert_close(plain(other.full_state_dict()), plain(whole), rtol=0, atol=0)
    adapted(lambda x: Shell(Int8.of(x * 2))).load_state_dict(whole, assign=True)
    first = module.full_state_dict(rank0_only=True)
    assert type(first["0.base.weight"]) is Shell if dist.get_rank() == 0 else not first


def wrong_states() -> None:
    module = sharded(adapted())
    before = plain(module.full_state_dict())
    state = module.full_state_dict()
    for wrong in (torch.rand(16, 8), Int8.of(torch.rand(16, 8).double(), 0.5), Shell(state["0.base.weight"])):
        with pytest.raises(RuntimeError, match=r"0.base.weight is a .*, the module has a Int8 with"):
            module.load_state_dict({**state, "0.base.weight": wrong})
    torch.testing.assert_close(plain(module.full_state_dict()), before, rtol=0, atol=0)


def checkpoints() -> None:
    module, folder = sharded(adapted()), [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    steps(module)
    dcp.save(get_model_state_dict(module), checkpoint_id=folder[0])
    other = sharded(adapted(lambda x: Int8.of(x * 2)), 2)
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=folder[0])
    set_model_state_dict(other, state)
    torch.testing.assert_close(plain(other.full_state_dict()), plain(module.full_state_dict()), rtol=0, atol=0)


def on_meta() -> None:
    model = adapted()
    with torch.device("meta"):
        empty = adapted(
            lambda x: Int8(torch.empty(x.shape, dtype=torch.int8), torch.empty(len(x), 1).double(), x.dtype)
        )
    module = sharded(empty)
    module.load_state_dict(model.state_dict())
    torch.testing.assert_close(steps(module), steps(model), rtol=1e-9, atol=0)


def whole_inside() -> None:
    model = adapted()
    module = sharded(model)
    weight = module[0].base.weight
    assert (weight.shape, weight.dtype, weight.device, weight.requires_grad) == (
        model[0].base.weight.shape, torch.float64, torch.device("cpu"), False,
    )  # fmt: skip
    with pytest.raises(AttributeError, match=r"(?s)a Int8.*have no 'dequantize'.*summon_full_params"):
        weight.dequantize()
    with module.summon_full_params():
        torch.testing.assert_close(module[0].base.weight.dequantize(), model[0].base.weight.dequantize())
        module[0].base.weight.scale.mul_(2)
    with torch.no_grad():
        model[0].base.weight.scale.mul_(2)
    torch.testing.assert_close(steps(module), steps(model), rtol=1e-9, atol=0)
    with pytest.raises(LayoutError, match="was replaced inside of summon_full_params"), module.summon_full_params():
        module[0].base.weight = nn.Parameter(torch.rand(16, 8).double())
    torch.testing.assert_close(plain(module.full_state_dict()), plain(model.state_dict()), rtol=1e-9, atol=1e-9)


def copies() -> None:
    model = adapted()
    module = copy.deepcopy(sharded(model))
    torch.testing.assert_close(steps(module), steps(model), rtol=1e-9, atol=0)


def not_stored() -> None:
    module = sharded(adapted())
    steps(module, 1)
    assert all("wrapper subclasses" in program.stored for program in module.shardc.programs.values())


def test_on_ranks(tmp_path: Path) -> None:
    checks = trains, state_dicts, wrong_states, checkpoints, on_meta, whole_inside, copies, not_stored
    run_ranks(2, *checks, programs=tmp_path)
    assert not list(tmp_path.glob("*/*/program.json"))


@pytest.mark.slow
def test_with_inductor() -> None:
    run_ranks(2, partial(trains, "inductor"))
