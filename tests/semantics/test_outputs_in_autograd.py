"""Outputs in autograd: changed in place, hooked, kept, used twice; each runs or is refused as on one device."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardc
from shardc.errors import LayoutError
from tests.ranks import run_ranks
from tests.semantics.output_cases import CASES, ROWS, SIZE, Case, Net

# Those that Inductor runs as well: outputs that share memory there, and what the cut saves.
FUSED = (
    "linear of three dims, divided", "linear of three dims, a class masked", "tanh, doubled",
    "tanh, a view that is kept", "a view of tanh", "a part of tanh", "log_softmax", "relu", "sin",
    "hidden and last, hidden changed",
    "last and its tanh, last changed", "last and its relu, last changed", "a copy beside it", "a copy of tanh",
    "the same twice, changed", "a view beside it, changed", "chunks, changed", "the input", "a view of the input",
    "a view beside it, the view changed", "a view in front of it, changed",
    "two views of what is not returned, changed",
    "a detached one beside it, changed", "a view beside it, no_grad", "chunks beside it, it changed",
    "without gradients", "plain values", "plain values, no_grad", "saved as a copy, transposed",
    "retain_graph", "inference_mode",
)  # fmt: skip


def outcome(case: Case, net: Any, x: Tensor) -> tuple[str, list[Tensor]]:
    """What one of the two does: "runs", or why not; and the tensors to compare."""
    try:
        made = case.act(net, x)
    except (RuntimeError, LayoutError) as error:
        return f"refused: {str(error)[:160]}", []
    return "runs", [y.detach() for y in _leaves(made)]


def _leaves(made: Any) -> Iterable[Tensor]:
    return [torch.as_tensor(y) for y in torch.utils._pytree.tree_leaves(made) if y is not None]


def differs(name: str, backend: str, plan: shardc.Plan) -> str:
    """How the compiled module differs from one device; "" where it does not."""
    case = CASES[name]
    torch.manual_seed(0)
    net = Net(case.returns).double()
    x = torch.randn(ROWS, *(3,) * (case.dims - 2), SIZE, dtype=torch.float64)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    module = shardc.compile(copy.deepcopy(net), mesh, plan, backend=backend)
    mine = module.shard_inputs(x)
    theirs, expected = outcome(case, net, x)
    ours, results = outcome(case, module, mine)
    if case.differs:
        return "" if case.differs in ours else f"one device {theirs}, compiled {ours}"
    if theirs.split()[0] != ours.split()[0]:
        return f"one device {theirs}, compiled {ours}"
    if theirs != "runs":
        return ""
    for at, (y, other) in enumerate(zip(results, expected, strict=True)):
        here, other = ((z.full_tensor() if isinstance(z, DTensor) else z).double() for z in (y, other))
        other = other.chunk(2)[module.shardc.spec.rank] if other.shape != here.shape else other
        # A rank's part of a gradient of the mean is of its own mean.
        if not any(torch.allclose(here, other * times, rtol=1e-9, atol=1e-12) for times in (1, 2)):
            return f"result {at}"
    for name, p in net.named_parameters():
        q = module.get_parameter(name).grad
        if (p.grad is None) != (q is None):
            return f"gradient of {name}: {p.grad} and {q}"
        if p.grad is not None and not torch.allclose(p.grad, q.full_tensor(), rtol=1e-9, atol=1e-12):
            return f"gradient of {name}"
    return ""


def all_of(names: Iterable[str], backend: str, plan: shardc.Plan) -> None:
    found = {}
    for name in names:
        try:
            found[name] = differs(name, backend, plan)
        except Exception as error:  # so that all cases are seen
            found[name] = repr(error)
    assert not any(found.values()), "\n".join(f"{name}: {how}" for name, how in found.items() if how)


@pytest.mark.slow
def test_two_ranks() -> None:
    run_ranks(2, partial(all_of, list(CASES), "eager", shardc.fsdp("dp")))


@pytest.mark.slow
def test_two_ranks_with_inductor() -> None:
    run_ranks(2, partial(all_of, FUSED, "inductor", shardc.fsdp("dp", level=2)))


@pytest.mark.slow
def test_the_order_of_passes_is_of_no_matter() -> None:
    """Without the cut's marks of FSDP other values are saved."""
    run_ranks(2, partial(all_of, FUSED, "eager", shardc.ddp("dp")))


# The same as DTensors: what is compared are whole tensors, and the loss is the global one.
GLOBAL = (
    "linear of three dims, divided", "tanh, doubled", "hidden and last, hidden changed",
    "hidden and last, hidden changed, alone used", "last and its tanh, last changed", "the same twice",
    "the same twice, changed", "a hook of what another is made of", "a hook of an unused output", "retain_grad",
    "log_softmax",
    "retain_graph", "backward twice", "chunks, changed", "without gradients", "no_grad",
)  # fmt: skip


@pytest.mark.slow
def test_two_ranks_with_dtensors() -> None:
    run_ranks(2, partial(all_of, GLOBAL, "eager", shardc.fsdp("dp") | shardc.Plan(dtensor_outputs=True)))


@pytest.mark.parametrize(("name", "refused"), [("tanh", True), ("linear", False)])
def test_a_simulation_refuses_what_one_device_does(name: str, refused: bool) -> None:
    torch.manual_seed(0)
    net = Net(CASES["tanh, doubled" if refused else "linear, divided"].returns).double()
    sim = shardc.Simulation(shardc.compile(net, shardc.Mesh(dp=2), shardc.fsdp("dp"), backend="eager"))
    out = sim(torch.randn(ROWS, SIZE, dtype=torch.float64))
    out.mul_(2.0)
    if refused:
        with pytest.raises(shardc.errors.BackwardError, match="output 0 of the module was modified in place"):
            sim.backward(torch.ones_like(out))
    else:
        sim.backward(torch.ones_like(out))
        assert sim.grads


def test_a_simulation_returns_one_tensor_twice() -> None:
    torch.manual_seed(0)
    net, x = Net(CASES["the same twice"].returns).double(), torch.randn(ROWS, SIZE, dtype=torch.float64)
    plan = shardc.fsdp("dp") | shardc.Plan(reduce="sum")
    sim = shardc.Simulation(shardc.compile(copy.deepcopy(net), shardc.Mesh(dp=2), plan, backend="eager"))
    out = sim(x)
    assert out[0] is out[1]
    sim.backward(torch.ones_like(out[0]))
    net(x)[0].sum().backward()
    for key, param in net.named_parameters():
        if param.grad is not None:
            torch.testing.assert_close(sim.grad(key), param.grad, rtol=1e-9, atol=1e-12)
