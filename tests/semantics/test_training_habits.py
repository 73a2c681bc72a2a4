"""Optimizers, averages, penalties, clipping, pruning and more around a compiled model on ranks, as on one device."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

import shardc
from shardc import errors
from shardc.ir.mesh import Mesh
from tests.ranks import device_mesh, run_ranks
from tests.semantics.test_parameter_lines import DP, FSDP, Net, _compare, _whole
from tests.semantics.training_habits import HABITS, REFUSED

SPLIT = shardc.Plan(params={"up.weight": "_@tp, _", "qkv.weight": "(3 _@tp), _"})
QUICK = ("scales", "penalises", "starts_anew", "averages_by_hand", "prunes by mask")


def _models(mesh: Mesh, plan):
    torch.manual_seed(0)
    net = Net().double()
    x = torch.randn(8, 6, dtype=torch.float64)
    module = shardc.compile(copy.deepcopy(net), device_mesh(mesh), plan, backend="eager")
    return net, x, module, module.shard_inputs(x)


def _trained(habit, model, x):
    torch.manual_seed(7)
    return habit(model, x)


def _as_on_one_device(mesh: Mesh, plan, names: tuple[str, ...]) -> None:
    for name in names:
        net, x, module, rows = _models(mesh, plan)
        theirs = _trained(HABITS[name], net, x)
        try:
            ours = _trained(HABITS[name], module, rows)
        except Exception as error:
            raise AssertionError(f"{name}: {error!r}") from error
        _compare(name, _whole(ours), _whole(theirs))
        for mine, p in zip(module.parameters(), net.parameters(), strict=True):
            _compare(f"parameters after {name}", _whole(mine), _whole(p))


def _refused(mesh: Mesh, plan) -> None:
    for habit, text in REFUSED.values():
        _, _, module, rows = _models(mesh, plan)
        with pytest.raises(errors.ShardcError, match=text):
            habit(module, rows)


def test_some_habits_and_refusals():
    run_ranks(2, partial(_as_on_one_device, DP, FSDP, QUICK), partial(_refused, DP, FSDP))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "plan"), [(DP, FSDP), (DP, shardc.ddp("dp")), (Mesh(tp=2), SPLIT)], ids=["fsdp", "ddp", "split"]
)
def test_all_habits(mesh: Mesh, plan):
    run_ranks(2, partial(_as_on_one_device, mesh, plan, tuple(HABITS)))
