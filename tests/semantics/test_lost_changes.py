"""Changes in place of outputs that one device sees elsewhere: they arrive, or the line that makes them raises."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardc
from shardc.errors import LayoutError
from tests.ranks import run_ranks
from tests.semantics.output_cases import ROWS, SIZE, Net

Returns = Callable[[Any, Tensor, Tensor, Tensor], Any]

# Where ranks hold rows and parts of weights: what is a view of a rank's part too, and what is not.
VIEWS: dict[str, Returns] = {
    "part": lambda net, x, h, y: (y, y[..., :2]),
    "flat": lambda net, x, h, y: (y, y.view(-1)),
    "transposed": lambda net, x, h, y: (y.t(), y),
    "detached": lambda net, x, h, y: (y, y.detach()[:, 1:]),
    "two parts": lambda net, x, h, y: (y[..., :3], y[..., 2:]),
    "chunks": lambda net, x, h, y: h.chunk(2, -1),
    "chunks of two ops": lambda net, x, h, y: (h.chunk(2, -1)[0], h.split(3, -1)[0]),
    "expanded": lambda net, x, h, y: (lambda m: (m, m.expand(-1, 3)))(y.mean(-1, keepdim=True)),
    "complex": lambda net, x, h, y: (lambda c: (c, torch.view_as_real(c)))(torch.complex(y, y)),
    "of the input": lambda net, x, h, y: (x[:, :2], x.t()),
    "of the buffer": lambda net, x, h, y: (net.offset[1:], net.offset),
}
COPIES: dict[str, Returns] = {
    "row": lambda net, x, h, y: (y, y[0]),
    "row before": lambda net, x, h, y: (y[0], y),
    "rows that one op makes": lambda net, x, h, y: (y, *y.unbind(0)[:2]),
    "rows and columns": lambda net, x, h, y: (y[:2], y[:, 1:]),
    "diagonal": lambda net, x, h, y: (y, y.diagonal()),
    "bits": lambda net, x, h, y: (y, y.detach().view(torch.int64)),
    "row of the input": lambda net, x, h, y: (x[0], x.chunk(2)[0]),
    "parameter": lambda net, x, h, y: (net.second.weight, net.scale),
    "of parameters": lambda net, x, h, y: (net.second.weight.t(), net.scale[:2]),
    "detached parameter": lambda net, x, h, y: (net.second.weight.detach(), net.scale.detach()[1:]),
}


def numbers(x: Tensor) -> np.ndarray[Any, Any]:
    return x.detach().numpy()


def halved(x: Tensor) -> None:
    with torch.no_grad():
        x.mul_(2)


def item(x: Tensor) -> None:
    x.data[..., 0] = 7


def of_numpy(x: Tensor) -> None:
    numbers(x)[...] = 3


def of_array(x: Tensor) -> None:
    np.asarray(x.data)[...] *= 2


def part_of_view(x: Tensor) -> None:
    x.detach().unsqueeze(0).data[:1] = 9


def out_of(x: Tensor) -> None:
    torch.mul(x.detach(), 2, out=x.data)


def summed(x: Tensor) -> None:
    dist.all_reduce(x.detach())


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda x: x.mul_(2),
    "no_grad": halved,
    ".data": lambda x: x.data.mul_(2),
    ".data[]": item,
    "detach": lambda x: x.detach().mul_(2),
    "numpy": of_numpy,
    "array": of_array,
    "view": part_of_view,
    "foreach": lambda x: torch._foreach_mul_([x.detach()], 2),
    "out=": out_of,
}
MODES: tuple[Callable[[], AbstractContextManager[Any]], ...] = (
    torch.enable_grad,
    torch.no_grad,
    torch.inference_mode,
)


def module_of(returns: Returns, plan: shardc.Plan, backend: str = "eager") -> tuple[Any, Any]:
    """A net, and the module that is compiled of it."""
    torch.manual_seed(0)
    net = Net(returns).double()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    return net, shardc.compile(copy.deepcopy(net), mesh, plan, backend=backend)


def rows() -> Tensor:
    """The same on each rank, so that a row of all is one of a rank's."""
    return torch.arange(float(ROWS * SIZE), dtype=torch.float64).view(-1, SIZE).sin()


def after(net: Any, write: Callable[[Tensor], Any], mode: Any, at: int) -> list[Tensor]:
    """What there is after a write to an output."""
    x = rows()
    with mode():
        out = net(x)
        write(out[at])
    return [_whole(y) for y in (*out, x, net.offset, *net.parameters())]


def _whole(x: Tensor) -> Tensor:
    x = x.detach()
    return (x.full_tensor() if isinstance(x, DTensor) else x).clone()


def every(plan: shardc.Plan, names: Sequence[str], writes: Sequence[str], backend: str) -> None:
    """That each write does what it does on one device, or raises; what cannot be a view here raises at once."""
    wrong = []
    for name in names:
        net, module = module_of({**VIEWS, **COPIES}[name], plan, backend)
        before = {key: _whole(x) for key, x in module.state_dict().items()}
        for how, write in ((how, WRITES[how]) for how in writes):
            for mode in MODES:
                for at in (0, 1):
                    theirs: Any = None
                    ours: Any = None
                    try:
                        theirs = after(copy.deepcopy(net), write, mode, at)
                    except RuntimeError as error:
                        theirs = error
                    try:
                        ours = after(module, write, mode, at)
                    except (RuntimeError, LayoutError, ValueError) as error:
                        ours = error
                    case = f"{name}, {how} under {mode.__name__}, output {at}"
                    if isinstance(ours, Exception):
                        clear = isinstance(ours, LayoutError) or "read-only" in str(ours)
                        if not isinstance(theirs, Exception) and not (clear and name in COPIES):
                            wrong.append(f"{case}: {ours}")
                    elif isinstance(theirs, Exception) or any(
                        a.shape != b.shape or not torch.equal(a.isnan(), b.isnan()) or not torch.allclose(a, b)
                        for a, b in zip(theirs, ours, strict=True)
                        if name not in COPIES
                    ):
                        wrong.append(f"{case}: {theirs} and {ours}")
                    elif name in COPIES:
                        wrong.append(f"{case}: nothing")
                    module.load_state_dict(before)
    assert not wrong, "\n".join(wrong)


DTENSORS = shardc.fsdp("dp") | shardc.Plan(dtensor_outputs=True)
FEW = ("in place", ".data", "numpy")


@pytest.mark.slow
@pytest.mark.parametrize("names", [list(VIEWS), list(COPIES)], ids=["views", "copies"])
def test_every_write(names: list[str]) -> None:
    run_ranks(2, partial(every, shardc.fsdp("dp"), names, list(WRITES), "eager"))


@pytest.mark.slow
def test_every_write_with_inductor() -> None:
    run_ranks(2, partial(every, shardc.fsdp("dp", level=2), ("row", "parameter", "part", "two parts"), FEW, "inductor"))


def a_row() -> None:
    every(shardc.fsdp("dp"), ["row"], FEW, "eager")


def read_and_trained() -> None:
    """What cannot be written to is read as any other tensor, and leads gradients."""
    net, module = module_of(lambda net, x, h, y: (y, y[0], net.second.weight), shardc.fsdp("dp"))
    x = rows()
    out, expected = module(x), net(x)
    for a, b in zip(out, expected, strict=True):
        assert torch.equal(a, b) and a.tolist() == b.tolist() and np.array_equal(numbers(a), numbers(b))
        assert torch.equal(copy.deepcopy(a.detach()), b) and "tensor" in repr(a) and torch.equal(a[..., :2], b[..., :2])
        assert type(a * 2) is Tensor and type(a.clone()) is Tensor and torch.equal(a.to(torch.float32), b.float())
        a.clone().mul_(2)
    with pytest.raises(LayoutError, match="output 0 of the module cannot be changed in place.*outputs 1 "):
        out[0].mul_(2)
    with pytest.raises(LayoutError, match="output 2 .* changes 'second.weight' too"):
        out[2].data = out[2] * 2
    with pytest.raises(LayoutError, match="output 1"):
        dist.all_reduce(out[1].detach())
    together = torch.empty(2 * len(out[1]), dtype=torch.float64)
    dist.all_gather_into_tensor(together, out[1].detach())
    assert torch.equal(together, expected[1].repeat(2))
    for y in (out, expected):
        (y[0].square().mean() + y[1].sum() * 0.1 + y[2].sin().mean()).backward()
    for name, param in ((name, param) for name, param in net.named_parameters() if param.grad is not None):
        torch.testing.assert_close(module.get_parameter(name).grad.full_tensor(), param.grad, rtol=1e-9, atol=1e-12)
    again = shardc.compile(
        copy.deepcopy(net.first),
        init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)),
        shardc.fsdp("dp"),
        backend="eager",
    )
    padded = nn.functional.pad(module(x)[0], (0, 1))
    torch.testing.assert_close(again(padded), net.first(padded))
    _, passes = module_of(lambda net, x, h, y: (x, x[0]), shardc.fsdp("dp"))
    torch.testing.assert_close(passes(passes(x)[1].repeat(ROWS, 1))[0], x[:1].repeat(ROWS, 1))


def changed_elsewhere() -> None:
    """An output that is a copy of what was changed since is of no use."""
    net, module = module_of(lambda net, x, h, y: (net.second.weight, x[0], y), shardc.fsdp("dp"))
    x = rows()
    weight, row, _ = module(x)
    assert row.sum() + weight.sum() != 0
    x.mul_(2)
    with pytest.raises(LayoutError, match="'x' was changed in place since output 1"):
        row.sum()
    module(rows())[2].sum().backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    with pytest.raises(LayoutError, match="'second.weight' was changed in place since output 0"):
        weight.sum()


def as_dtensors() -> None:
    """What shares memory on one device does not as DTensors, of which none is a view of another."""
    _, module = module_of(lambda net, x, h, y: (y, y[..., :2], h), DTENSORS)
    for mode in MODES:
        for at in (0, 1):
            with mode():
                out = module(rows())
                for write in (
                    lambda x: x.data.mul_(2),
                    lambda x: x.detach()[0].mul_(2),
                    lambda x: x.to_local().data.zero_(),
                ):
                    with pytest.raises(LayoutError, match=f"output {at} of the module cannot be changed"):
                        write(out[at])
                WRITES[".data"](out[2])
    out = module(rows())
    assert torch.equal(out[0].full_tensor()[..., :2], out[1].full_tensor())
    out[1].sum().backward()


def test_two_ranks() -> None:
    run_ranks(2, a_row, read_and_trained, changed_elsewhere, as_dtensors)
