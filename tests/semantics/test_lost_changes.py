"""Changes in place of outputs that one device sees elsewhere: they arrive, or the next call or backward raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardc
from shardc.errors import LayoutError
from tests.ranks import run_ranks
from tests.semantics.output_cases import ROWS, SIZE, Net

X = torch.arange(float(ROWS // 2 * SIZE)).view(-1, SIZE) / 10


def module_of(returns: Callable[..., Any], plan: shardc.Plan) -> Any:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    return shardc.compile(Net(returns), mesh, plan, backend="eager")


def halved(x: Tensor) -> None:
    with torch.no_grad():
        x.mul_(0.5)


def other_memory(x: Tensor) -> None:
    x.data = x.data * 2


def parameters() -> None:
    returns = lambda net, x, h, y: (net.second.weight, y)  # noqa: E731
    for change in (halved, other_memory):
        for mode in (torch.enable_grad, torch.no_grad):
            module = module_of(returns, shardc.fsdp("dp"))
            with mode():
                out = module(X)
            module(X)  # nothing was changed
            change(out[0])
            with pytest.raises(LayoutError, match="output 0 of the module was changed in place.*'second.weight'"):
                module(X)
            module(X)  # it is told once
    module = module_of(returns, shardc.fsdp("dp"))
    out = module(X)
    halved(out[0].view(-1)[:3])
    with pytest.raises(LayoutError, match="change a copy"):
        out[1].sum().backward()
    module = module_of(returns, shardc.ddp("dp"))  # each rank has all of it
    weight: Any = module.second.weight
    before = weight.full_tensor().clone()
    with torch.no_grad():
        halved(module(X)[0])
        module(X)
    assert isinstance(weight, DTensor) and torch.equal(weight.full_tensor(), before * 0.5)


def rows() -> None:
    """A row of a batch that is split is of one rank, and the others have a copy."""
    module = module_of(lambda net, x, h, y: (y, y[0]), shardc.fsdp("dp"))
    with torch.no_grad():
        out = module(X)
        module(X)
        halved(out[0])
        with pytest.raises(LayoutError, match="output 0 of the module.*outputs 1 too"):
            module(X)
    out = module(X)
    with pytest.raises(RuntimeError, match="inplace"):
        out[0].mul_(2.0)


def test_two_ranks() -> None:
    run_ranks(2, parameters, rows)
