"""Mixed precision: what travels in which dtype, in which order, and what comes out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from shardc import Mesh, ddp, fsdp, hsdp, precision, tp
from shardc.errors import CaptureError, PlanError
from shardc.ir import graph as ir
from shardc.ir import ops


class Net(nn.Module):
    """Uneven sizes, a buffer that is used and changed, and a parameter that no rank splits."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 5)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.5).add_(x.mean(0), alpha=0.5)
        return self.down(self.up(x - self.mean.to(x.dtype)).tanh())


PLANS = {
    "fsdp": (Mesh(dp=2), fsdp("dp")),
    "fsdp2": (Mesh(dp=4), fsdp("dp", level=2)),
    "ddp": (Mesh(dp=2), ddp("dp")),
    "hsdp": (Mesh(rep=2, dp=2), hsdp(shard="dp", replicate="rep")),
    "fsdp+tp": (Mesh(dp=2, tp=2), fsdp("dp") | tp("tp", colwise=["up"], rowwise=["down"])),
}


@pytest.mark.parametrize("reduce", [torch.float32, None, torch.float64], ids=str)
@pytest.mark.parametrize("name", PLANS)
def test_parameters_travel_low_and_gradients_are_summed_in_reduce(name: str, reduce: torch.dtype | None) -> None:
    mesh, plan = PLANS[name]
    module = shardc.compile(
        Net(), mesh, plan | precision(param=torch.bfloat16, reduce=reduce), loss=F.cross_entropy, backend="eager"
    )
    program = module.lower(torch.empty(8, 8), torch.empty(8, dtype=torch.long))
    graph = program.graph("collectives")
    for node in ir.placeholders(graph, "param"):
        assert ir.value(node).dtype == torch.float32
    for node in graph.nodes:
        if node.target is ops.all_gather and any(part in ir.info(node).name for part in ("weight", "bias")):
            assert ir.value(node).dtype == torch.bfloat16, ir.info(node).name
    reductions = 0
    for role, node in ir.outputs(graph):
        if role.kind != "grad":
            continue
        assert ir.value(node).dtype == torch.float32
        if node.target is torch.ops.aten._to_copy.default:
            node = node.args[0]
        while node.target in ops.COLLECTIVES or node.target in ops.LOCAL_MOVES:
            if node.target in (ops.reduce_scatter, ops.all_reduce):
                reductions += 1
                assert ir.value(node).dtype == (reduce or torch.bfloat16), ir.info(node).name
            node = node.args[0]
    assert reductions >= 4


class Sum(nn.Module):
    """Its weight's gradient is the column sum of the input, exact in bfloat16 on each half of the batch alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum()


@pytest.mark.parametrize("plan", [fsdp("dp"), ddp("dp"), fsdp("dp", level=1)], ids=["fsdp", "ddp", "fsdp1"])
@pytest.mark.parametrize(("reduce", "total"), [(torch.float32, 257.0), (None, 256.0)])
def test_the_sum_over_ranks_is_exact_in_reduce(plan: shardc.Plan, reduce: torch.dtype | None, total: float) -> None:
    module = shardc.compile(
        Sum(), Mesh(dp=2), plan | precision(param=torch.bfloat16, reduce=reduce), loss=lambda out: out, backend="eager"
    )
    sim = shardc.Simulation(module)
    x = torch.tensor([[254.0] * 4, [3.0] * 4])  # 257 needs nine bits, bfloat16 has eight
    sim(x)
    sim.backward()
    assert sim.grad("weight").dtype == torch.float32
    assert sim.grad("weight").tolist() == [total] * 4


def test_reduced_gradients_can_stay_low() -> None:
    module = shardc.compile(
        Sum(), Mesh(dp=2), fsdp("dp") | precision(param=torch.bfloat16, keep_low_precision_grads=True), backend="eager",
        loss=lambda out: out,
    )  # fmt: skip
    sim = shardc.Simulation(module)
    sim(torch.ones(2, 4))
    sim.backward()
    assert sim.grad("weight").dtype == torch.bfloat16


def test_buffers_and_outputs() -> None:
    said = precision(param=torch.bfloat16, buffers=torch.bfloat16, output=torch.float32)
    model = Net()
    sim = shardc.Simulation(shardc.compile(model, Mesh(dp=2), fsdp("dp") | said, backend="eager"))
    x = torch.randn(8, 8)
    assert sim(x, grad=False).dtype == torch.float32
    model(x)
    assert sim.buffer("mean").dtype == torch.float32
    torch.testing.assert_close(sim.buffer("mean"), model.mean, rtol=2e-2, atol=2e-2)


def test_evaluation_in_full_precision() -> None:
    said = precision(param=torch.bfloat16, full_precision_eval=True)
    model = Net()
    module = shardc.compile(model, Mesh(dp=2), fsdp("dp") | said, backend="eager")
    sim = shardc.Simulation(module)
    x = torch.randn(8, 8)
    assert sim(x, grad=False).dtype == torch.bfloat16
    model.eval()
    module.eval()
    sim.buffers["mean"] = [model.mean.clone() for _ in range(2)]
    torch.testing.assert_close(sim(x, grad=False), model(x).detach())


class Scaled(nn.Module):
    """Its layers are called with a float32 buffer, in a list that the model goes on with."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.register_buffer("table", torch.linspace(0, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.up(x), [self.table]
        for layer in self.layers:
            x = layer(x, kept)
        return x * len(kept)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:
        return self.proj(x + kept[0])


LOW = precision(param=torch.bfloat16)


def test_layers_cast_what_they_are_called_with() -> None:
    module = shardc.compile(Scaled(), Mesh(dp=2), fsdp("dp") | LOW, backend="eager")
    program = module.lower(torch.empty(4, 4))
    dtypes = {
        ir.info(n).name: ir.value(n).dtype
        for n in program.graph("collectives").nodes
        if n.op != "output" and ir.is_tensor(n)
    }
    assert dtypes["table"] == torch.float32
    assert {x for name, x in dtypes.items() if name.startswith("layers.")} == {torch.bfloat16, torch.float32}
    assert dtypes["layers.0.add"] == dtypes["layers.1.add"] == torch.bfloat16


@pytest.mark.parametrize("casts", ["model", False])
def test_without_casts_the_error_names_the_tensor_that_kept_its_dtype(casts: bool | str) -> None:
    plan = fsdp("dp") | precision(param=torch.bfloat16, cast_forward_inputs=casts)
    x = torch.empty(4, 4, dtype=torch.float32 if casts else torch.bfloat16)
    with pytest.raises(CaptureError) as caught:
        shardc.compile(Scaled(), Mesh(dp=2), plan, backend="eager").lower(x)
    assert "bfloat16 and float32" in str(caught.value) or "float32 and bfloat16" in str(caught.value)
    assert "buffer 'table' is float32: precision(...) casts no buffers" in str(caught.value)
    assert "buffers=torch.bfloat16" in str(caught.value)


class Ropes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)
        self.register_buffer("cos", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q * self.cos, k * self.cos, v)


def test_an_op_that_refuses_two_dtypes_is_told_with_the_tensors_that_kept_theirs() -> None:
    with pytest.raises(CaptureError) as caught:
        shardc.compile(Ropes(), Mesh(dp=2), fsdp("dp") | LOW, backend="eager").lower(torch.empty(2, 3, 4))
    assert "buffer 'cos' is float32: precision(...) casts no buffers" in str(caught.value)
    assert "buffers=torch.bfloat16" in str(caught.value)


def test_a_policy_for_no_module_is_refused() -> None:
    with pytest.raises(PlanError, match=r"'upp' matches no module with parameters[\s\S]*did you mean"):
        shardc.compile(Net(), Mesh(dp=2), fsdp("dp") | precision(param=torch.bfloat16, modules="upp"), backend="eager")
