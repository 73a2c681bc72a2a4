"""Lines of user code about sharded parameters and gradients, on ranks, beside the same lines on one device."""

from __future__ import annotations

import copy
import math
import re
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardc
from shardc import errors
from shardc.ir.mesh import Mesh
from tests.ranks import device_mesh, run_ranks
from tests.semantics import parameter_lines
from tests.semantics.parameter_lines import PLAIN_READS, PLAIN_WRITES, READS, REFUSED, WRITES


class Net(nn.Module):
    """Uneven rows, fewer rows than ranks, numbers, a fused projection."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 9)
        self.one = nn.Linear(9, 1, bias=False)
        self.qkv = nn.Linear(9, 12)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        hidden = self.up(x).tanh()
        q, k, v = self.qkv(hidden).chunk(3, -1)
        return self.one(hidden).sum() * self.scale + (q * k + v).square().sum()


def _execute(line: str, name: str, model: nn.Module, grad: bool):
    ps = list(model.parameters())
    names = dict(
        vars(parameter_lines), p=model.get_parameter(name), ps=ps, torch=torch, nn=nn, np=np, math=math, copy=copy,
        rank=dist.get_rank(),
    )  # fmt: skip
    torch.manual_seed(3)
    with torch.set_grad_enabled(grad):
        try:
            code = compile(line, line, "eval")
        except SyntaxError:
            return exec(compile(line, line, "exec"), names)
        return eval(code, names)


@torch.no_grad()
def _whole(x):
    if isinstance(x, Tensor):
        return (x.full_tensor() if isinstance(x, DTensor) else x).detach().double()
    if isinstance(x, np.ndarray | float | int):
        return torch.tensor(x).double()
    return [_whole(y) for y in x] if isinstance(x, list | tuple) else x


def _compare(line: str, ours, theirs) -> None:
    if isinstance(theirs, list):
        assert len(ours) == len(theirs), line
        for one, other in zip(ours, theirs, strict=True):
            _compare(line, one, other)
    elif isinstance(theirs, Tensor):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10, equal_nan=True, msg=lambda m: f"{line}: {m}")
    else:
        assert ours == theirs, line


class Pair:
    """A model on one device and the compiled one, with equal values and gradients."""

    def __init__(self, mesh: Mesh, plan) -> None:
        torch.manual_seed(0)
        self.net = Net().double()
        self.module = shardc.compile(copy.deepcopy(self.net), device_mesh(mesh), plan, backend="eager")
        x = torch.randn(8, 6).double()
        self.net(x).backward()
        self.module(self.module.shard_inputs(x)).backward()
        self.values = [(p.detach().clone(), p.grad.clone()) for p in self.net.parameters()]
        local = [(p._local_tensor, p.grad._local_tensor) for p in self.module.parameters()]
        self.shards = [(value.detach().clone(), grad.clone()) for value, grad in local]

    def reset(self) -> None:
        with torch.no_grad():
            for p, (value, grad) in zip(self.net.parameters(), self.values, strict=True):
                p.copy_(value)
                p.grad = grad.clone()
            for p, (value, grad) in zip(self.module.parameters(), self.shards, strict=True):
                p._local_tensor.copy_(value)
                p.grad = DTensor(grad.clone(), p._spec, requires_grad=False)

    def check(self, line: str, name: str, grad: bool) -> None:
        self.reset()
        theirs = _execute(line, name, self.net, grad)
        try:
            ours = _execute(line, name, self.module, grad)
        except Exception as error:
            raise AssertionError(f"{line} of {name}: {error!r}") from error
        _compare(f"{line} of {name}", _whole(ours), _whole(theirs))
        for mine, p in zip(self.module.parameters(), self.net.parameters(), strict=True):
            _compare(f"after {line} of {name}", _whole(mine), _whole(p))
            _compare(f"gradients after {line} of {name}", _whole(mine.grad), _whole(p.grad))


def _lines(mesh: Mesh, plan, names: tuple[str, ...], every: int = 1) -> None:
    pair = Pair(mesh, plan)
    for name in names:
        for line in (*PLAIN_READS, *READS)[::every]:
            pair.check(line, name, grad=True)
        for line in (*PLAIN_WRITES, *WRITES)[::every]:
            pair.check(line, name, grad=False)


def _refused(mesh: Mesh, plan) -> None:
    pair = Pair(mesh, plan)
    for line, text in REFUSED.items():
        pair.reset()
        with pytest.raises((errors.ShardcError, RuntimeError, ValueError)) as raised:
            _execute(line, "up.weight", pair.module, grad=False)
        assert re.search(text, str(raised.value)), (line, raised.value)
        for mine, p in zip(pair.module.parameters(), pair.net.parameters(), strict=True):
            _compare(f"after {line}", _whole(mine), _whole(p))


DP = Mesh(dp=2)
FSDP = shardc.fsdp("dp")
FUSED = shardc.fsdp("dp") | shardc.Plan(params={"up.weight": "_@tp, _", "qkv.weight": "(3 _@tp), _"})


def test_lines_give_what_one_device_gives():
    run_ranks(2, partial(_lines, DP, FSDP, ("up.weight",)))


@pytest.mark.slow
def test_lines_of_a_parameter_with_fewer_rows_than_ranks():
    run_ranks(2, partial(_lines, DP, FSDP, ("one.weight",)))


@pytest.mark.slow
def test_lines_on_replicas_and_on_two_axes_of_which_one_is_strided():
    run_ranks(
        4,
        partial(_lines, Mesh(rep=2, dp=2), shardc.hsdp(shard="dp", replicate="rep"), ("up.weight",), 3),
        partial(_lines, Mesh(dp=2, tp=2), FUSED, ("qkv.weight", "up.weight"), 3),
    )


def test_lines_that_cannot_be_right_are_refused():
    run_ranks(2, partial(_refused, DP, FSDP))
