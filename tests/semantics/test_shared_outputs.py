"""Outputs that share memory on one device: a change of one is seen in the others, or raises at its line."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import shardc
from shardc.errors import LayoutError
from tests.ranks import run_ranks

Returns = Callable[["Net", Tensor, Tensor], tuple[Tensor, ...]]


class Net(nn.Module):
    def __init__(self, returns: Returns) -> None:
        super().__init__()
        self.linear, self.dropout, self.returns = nn.Linear(4, 4), nn.Dropout(0.5).eval(), returns
        self.register_buffer("held", torch.ones(4, 4))
        self.table, self.tables = torch.ones(4, 4).double(), [torch.ones(4, 4).double()]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.returns(self, x, self.linear(x))


class Copied(torch.autograd.Function):
    """A copy of the first columns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x[:, :2].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.cat([grad, torch.zeros_like(grad)], 1)


def complex_of(y: Tensor) -> Tensor:
    return torch.complex(y, y * 2)


def changed_in_place(net: Net, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    nn.functional.dropout(y, 0.3, False).mul_(2.0)
    return y, x


# What shares memory here as well.
SHARE: dict[str, Returns] = {
    "dropout in evaluation": lambda net, x, y: (y, net.dropout(y)),
    "dropout of nothing": lambda net, x, y: (y, torch.dropout(y, 0.0, True)),
    "dropout of the input": lambda net, x, y: (net.dropout(x), y),
    "a change of what dropout returns": changed_in_place,
    "parts": lambda net, x, y: (y, *y.split(2, 1)),
    "windows": lambda net, x, y: (y, y.unfold(1, 2, 2)),
    "rows behind the first": lambda net, x, y: ((z := y * 2)[1:], z[2:]),
    "the last row, twice": lambda net, x, y: ((z := y * 2)[-1], z.narrow(0, 3, 1)),
    "a diagonal": lambda net, x, y: (y, y.diagonal()),
    "the real part": lambda net, x, y: ((z := complex_of(y)), z.real, torch.view_as_real(z)),
    "a view from a checkpoint region": lambda net, x, y: (
        y, checkpoint(lambda h: h[:, 1:], y, use_reentrant=False)
    ),
}  # fmt: skip
# What does not, and cannot be changed.
READ_ONLY: dict[str, Returns] = {
    "as_strided": lambda net, x, y: (y, y.as_strided((4, 2), (4, 1))),
    "as_strided twice": lambda net, x, y: (y.as_strided((4, 3), (4, 1)), y.as_strided((4, 3), (4, 1), 1)),
    "as_strided of a view": lambda net, x, y: (y, y.t().as_strided((4, 2), (4, 1)).t()),
    "as_strided, changed": lambda net, x, y: (y, y.as_strided((4, 2), (4, 1)).mul_(2.0)),
    "as_strided in a checkpoint region": lambda net, x, y: checkpoint(
        lambda h: ((z := h * 2), z.as_strided((4, 2), (4, 1))), y, use_reentrant=False
    ),
    "conjugate": lambda net, x, y: ((z := complex_of(y)), z.conj()),
    "negative": lambda net, x, y: ((z := complex_of(y)), z.conj().imag),
    "bits": lambda net, x, y: (y.detach(), y.detach().view(torch.int32)),
}
# The second of these is in the memory of what the module takes or holds.
OF_OTHERS: dict[str, Returns] = {
    "as_strided of the input": lambda net, x, y: (y, x.as_strided((4, 2), (4, 1))),
    "as_strided of a buffer": lambda net, x, y: (y, net.held.as_strided((4, 2), (4, 1))),
    "as_strided of a parameter": lambda net, x, y: (y, net.linear.weight.as_strided((4, 2), (4, 1))),
    "a plain attribute": lambda net, x, y: (y, net.table),
    "a view of a plain attribute": lambda net, x, y: (y, net.table.t()[1:], x * net.table),
    "a tensor in a list": lambda net, x, y: (y, net.tables[0].detach()),
    "dropout of a parameter": lambda net, x, y: (y, net.dropout(net.linear.weight)),
}
# What one device copies.
COPIES: dict[str, Returns] = {
    "a constant": lambda net, x, y: (y, y.new_tensor(2.0), torch.tensor([1.0, 2.0])),
    "a scattered copy": lambda net, x, y: (y, torch.as_strided_scatter(y, x, (4, 4), (4, 1))),
    "a copying op": lambda net, x, y: (y, torch.squeeze_copy(y), torch.view_copy(y, (2, 8))),
    "a function": lambda net, x, y: (y, Copied.apply(y)),  # type: ignore[no-untyped-call]
}


def seen(module: Any, x: Tensor, at: int, grad: bool) -> set[str] | str:
    """What changes with output ``at`` of a module, or what is said of the change."""
    with torch.set_grad_enabled(grad):
        out = module(x)
    named = {"input": x, "buffer": module.held, "attribute": module.table, "listed": module.tables[0]}
    named |= {f"output {place}": y for place, y in enumerate(out)}
    before = {name: y.detach().clone() for name, y in named.items()}
    try:
        with torch.no_grad():
            out[at].mul_(3)
    except LayoutError as error:
        return str(error)
    return {name for name, y in named.items() if not torch.equal(y.detach(), before[name])}


def compared(returns: Returns, **how: Any) -> list[tuple[int, Any, Any]]:
    """For each output, with gradients and without: what changes with it here, and on one device."""
    torch.manual_seed(0)
    model = Net(returns).double()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("dp",))
    module = shardc.compile(copy.deepcopy(model), mesh, shardc.fsdp("dp"), **how)
    found = []
    for grad in (False, True):
        for at in range(len(model(torch.ones(4, 4).double()))):
            x = torch.arange(1.0, 17.0, dtype=torch.float64).view(4, 4)
            mine = module.shardc.shard_inputs(x.clone())
            found.append((at, seen(module, mine, at, grad), seen(copy.deepcopy(model), x, at, grad)))
            out = [y.detach() for y in module(module.shardc.shard_inputs(x))]  # the next call computes the same
            if torch.distributed.get_world_size() == 1:
                torch.testing.assert_close([y.clone() for y in out], [y.detach() for y in copy.deepcopy(model)(x)])
    return found


def kinds(names: tuple[str, ...], **how: Any) -> None:
    """Compares each case; on several ranks what one device shares may be refused instead."""
    alone = torch.distributed.get_world_size() == 1
    for name in names:
        for at, ours, theirs in compared(ALL[name], **how):
            refused = isinstance(ours, str) and "cannot be changed in place" in ours
            if name in READ_ONLY:
                assert len(theirs) == 2 and refused, (name, at, ours)
            elif name in OF_OTHERS:
                assert refused or at != 1, (name, ours)
            else:
                assert ours == theirs or (refused and not alone), (name, at, ours)


ALL = SHARE | READ_ONLY | OF_OTHERS | COPIES
FIRST = (
    "dropout in evaluation",
    "the last row, twice",
    "as_strided",
    "as_strided of the input",
    "a view of a plain attribute",
    "a constant",
)
eagerly = partial(kinds, tuple(ALL), backend="eager")


def test_one_rank() -> None:
    run_ranks(1, partial(kinds, FIRST, backend="eager"))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_all_kinds(ranks: int) -> None:
    run_ranks(ranks, eagerly)


def by_inductor() -> None:
    for returns in (
        OF_OTHERS["a plain attribute"],
        READ_ONLY["as_strided"],
        COPIES["a constant"],
        SHARE["dropout in evaluation"],
    ):
        for _, ours, theirs in compared(returns):
            assert ours == theirs or "cannot be changed in place" in ours


@pytest.mark.slow
def test_two_ranks_with_inductor() -> None:
    run_ranks(2, by_inductor)


def last_rows() -> None:
    """Two views that begin behind the start of what they are views of, whose rows the ranks share."""
    torch.manual_seed(0)
    model = Net(lambda net, x, y: ((z := y * 2)[-1], z.narrow(0, 3, 1))).double()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("dp",))
    module = shardc.compile(copy.deepcopy(model), mesh, shardc.fsdp("dp"), backend="eager")
    x = torch.arange(1.0, 17.0, dtype=torch.float64).view(4, 4)
    for _ in range(2):
        ours, theirs = module(module.shardc.shard_inputs(x)), model(x)
        torch.testing.assert_close([y.detach() for y in ours], [y.detach() for y in theirs])
        for outputs in (ours, theirs):
            (outputs[0].square().sum() + 3 * outputs[1].sum()).backward()
    torch.testing.assert_close(module.linear.weight.grad.full_tensor(), model.linear.weight.grad)


@pytest.mark.parametrize("ranks", [1, 2])
def test_views_that_begin_behind_the_start(ranks: int) -> None:
    run_ranks(ranks, last_rows)
