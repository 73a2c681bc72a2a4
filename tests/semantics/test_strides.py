"""What a program computes does not depend on where in memory its values lie: shards lie otherwise than the trace."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._functorch import aot_autograd
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import shardc
from shardc.capture.decompositions import fake_like
from shardc.capture.replacements import traceable_functions
from shardc.capture.trace import Traced, decompositions
from shardc.errors import CaptureError
from shardc.ir import graph as ir
from shardc.ir.guards import Reads
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.ir.returned import Memory
from shardc.passes import Canonicalize, Localize
from shardc.runtime.sim.training import Simulation
from tests.models.alike import trains_alike

MESH = Mesh(one=1)
PARTS = 8
# What is known to look at strides, in its kernel or in the formula of its gradient.
LOOKING = (
    "as_strided as_strided_copy as_strided_scatter view_as_complex stft logdet linalg.det linalg.slogdet linalg.solve "
    "linalg.lu_solve linalg.inv nn.functional.adaptive_max_pool3d nn.functional.pdist view reshape flatten"
).split()
# Ops whose results are not defined, or made on something else than dense memory.
LEFT_OUT = ("empty", "new_empty", "empty_like", "resize_", "resize_as_", "to_sparse", "sparse")


# --- the same values elsewhere in memory


def elsewhere(x: Tensor) -> Tensor:
    """``x`` with its dims in the opposite order in memory, as part of a larger tensor."""
    if not x.ndim:
        return x.clone()
    large = torch.zeros([n + 2 for n in reversed(x.shape)], dtype=x.dtype)
    if x.is_floating_point() or x.is_complex():
        large.fill_(float("nan"))
    made = large[tuple(slice(1, n + 1) for n in reversed(x.shape))].permute(*reversed(range(x.ndim)))
    return made.copy_(x)


_library = torch.library.Library("aten_strides_test", "DEF")
_library.define("elsewhere(Tensor x) -> Tensor")
_library.impl("elsewhere", elsewhere, "CompositeExplicitAutograd")
torch.library.register_fake("aten_strides_test::elsewhere", elsewhere, lib=_library)


def moved(gm: fx.GraphModule, mode: FakeTensorMode) -> fx.GraphModule:
    """The program of one rank, in which every value of the captured graph lies elsewhere."""
    Canonicalize()(gm)
    given = ir.placeholders(gm.graph)
    for node in list(gm.graph.nodes):
        if node.op == "output":
            continue
        record, val = ir.info(node), node.meta["val"]
        if not isinstance(val, Tensor):
            whole = [Layout.whole(MESH, x.shape) if isinstance(x, Tensor) else None for x in val]
            ir.set_info(node, record.at(tuple(whole)))
            continue
        ir.set_info(node, record.at(Layout.whole(MESH, tuple(val.shape))))
        users = list(node.users)
        with gm.graph.inserting_after(given[-1] if node.op == "placeholder" else node):
            made = gm.graph.call_function(torch.ops.aten_strides_test.elsewhere.default, (node,))
        made.meta["val"] = val
        ir.set_info(made, ir.Info(f"{record.name}.elsewhere", ir.info(node).value, record.origin))
        for user in users:
            user.replace_input_with(node, made)
    return Localize(MESH, mode, torch.device("cpu"))(gm)


# --- ops of torch's database


class Called(nn.Module):
    """One call of the database as a module of its tensors."""

    def __init__(self, op: Any, flat: Sequence[Any], spec: Any) -> None:
        super().__init__()
        self.op, self.flat, self.spec = op, flat, spec
        self.places = [at for at, x in enumerate(flat) if isinstance(x, Tensor)]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        flat = list(self.flat)
        for at, x in zip(self.places, tensors, strict=True):
            flat[at] = x
        args, kwargs = tree_unflatten(flat, self.spec)
        made = self.op(*args, **kwargs)
        return tuple(torch.ops.shardc.tag(x, "") for x in tree_leaves(made) if isinstance(x, Tensor))


def joint(model: nn.Module, tensors: Sequence[Tensor]) -> tuple[fx.GraphModule, FakeTensorMode]:
    """What capture makes of ``model``, Dynamo left out, which takes long."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(traceable_functions())
        with mode:
            fakes = tuple(fake_like(x, x.device) for x in tensors)
        made = aot_autograd.aot_export_joint_with_descriptors(stack, model, fakes, {}, decompositions=decompositions())
    kinds = [type(desc).__name__ for desc in made.graph_module.graph.output_node().meta["desc"]]
    memories = tuple(map(Memory, range(kinds.count("PlainAOTOutput"))))  # each output has one of its own
    names = tuple(f"x{at}" for at in range(len(tensors)))
    traced = Traced(
        made.graph_module,
        names,
        (),
        made.out_spec,
        mode,
        Reads(),
        (),
        {},
        {},
        mode,
        ("", ""),
        memories,
        {},
    )
    return traced.annotated().graph, mode


def samples(info: Any, count: int) -> Iterator[tuple[Called, list[Tensor]]]:
    """Calls of an entry, their tensors as the database has them and with dims in the opposite order."""
    dtype = next((d for d in (torch.float64, torch.complex128, torch.int64, torch.bool) if d in info.dtypes), None)
    if dtype is None:
        return
    differentiable = info.supports_autograd and dtype == torch.float64
    for sample in islice(info.sample_inputs("cpu", dtype, requires_grad=differentiable), count):
        flat, spec = tree_flatten(((sample.input, *sample.args), dict(sample.kwargs)))
        tensors = [x for x in flat if isinstance(x, Tensor)]
        if not tensors or any(x.layout != torch.strided for x in tensors):
            continue
        for x_of in (Tensor.detach, lambda x: elsewhere(x.detach())):
            yield Called(info.op, flat, spec), [x_of(x).requires_grad_(x.requires_grad) for x in tensors]


def differences(model: Called, tensors: list[Tensor]) -> list[str] | None:
    """Which results and gradients are others when values lie elsewhere; None where the call cannot be compared."""
    try:
        outputs = model(*tensors)
        gm, mode = joint(model, tensors)
    except (RuntimeError, CaptureError, DataDependentOutputException, DynamicOutputShapeException):
        return None  # not with these strides, or not under a trace
    except ValueError as error:
        if "Cannot view a tensor" not in str(error):
            raise
        return None  # nor does torch alone give a gradient at these strides
    targets = [str(node.target) for node in gm.graph.nodes]
    if any("shardc_random" in target or "rrelu" in target or "multinomial" in target for target in targets):
        return None
    generator = torch.Generator().manual_seed(0)
    tangents, feed = {}, []
    for node in ir.placeholders(gm.graph):
        role, val = ir.role(node), node.meta["val"]
        if role.kind == "tangent":
            tangents[role.index] = torch.randn(val.shape, dtype=val.dtype, generator=generator)
        feed.append(tangents[role.index] if role.kind == "tangent" else tensors[role.index].detach().contiguous())
    wanted = {("output", at): x.detach() for at, x in enumerate(outputs)}
    leaves = [at for at, x in enumerate(tensors) if x.requires_grad]
    if tangents:
        try:
            grads = torch.autograd.grad(
                [outputs[at] for at in tangents],
                [tensors[at] for at in leaves],
                [*tangents.values()],
                allow_unused=True,
            )
        except RuntimeError:
            return None  # not of this loss
        wanted |= {("grad", at): grad for at, grad in zip(leaves, grads, strict=True) if grad is not None}
    roles = [role for role, _ in ir.outputs(gm.graph)]
    with torch.no_grad():
        results = fx.Interpreter(moved(gm, mode)).run(*feed, enable_io_processing=False)
    out = []
    for role, got in zip(roles, results, strict=True):
        want = wanted.get((role.kind, role.index))
        if want is not None and got is not None:
            try:
                torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-9, equal_nan=True)
            except AssertionError as error:
                out.append(f"{role.kind} {role.index}: {str(error).splitlines()[0]}")
    return out


def check(infos: Sequence[Any], count: int) -> int:
    wrong, compared = {}, 0
    for info in infos:
        if info.name.startswith("jiterator") or info.name.split(".")[0] in LEFT_OUT:
            continue
        for model, tensors in samples(info, count):
            found = differences(model, tensors)
            compared += found is not None
            if found:
                wrong[info.name, info.variant_test_name, tuple(tuple(x.stride()) for x in tensors)] = found
    assert wrong == {}
    return compared


@pytest.mark.filterwarnings("ignore")
def test_ops_that_look_at_strides() -> None:
    assert check([info for info in op_db if info.name in LOOKING], 2) > 40


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
def test_all_ops(part: int) -> None:
    assert check(op_db[part::PARTS], 3) > 100


# --- models


class Determinants(nn.Module):
    """Matrices that are computed, behind a transpose or not: what backward makes of them depends on it."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.up, self.turned = nn.Linear(8, 16), turned
        self.mix = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        a = self.up(x).view(-1, 4, 4) + self.mix + 4 * torch.eye(4)
        a = a.mT if self.turned else a
        sign, logs = torch.linalg.slogdet(a)
        return torch.det(a), sign, logs, torch.logdet(a @ a.mT), torch.linalg.solve(a, x.view(-1, 4, 2))


class Windows(nn.Module):
    """Sliding windows that overlap, of what is computed, of a view of it, and of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.kernel = nn.Linear(8, 6), nn.Parameter(torch.randn(12))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.up(x)
        windows = torch.as_strided(h, (h.shape[0] - 1, 2, 6), (6, 6, 1))
        inner = h[1:, 2:].as_strided((3, 3), (6, 1))  # from where the view starts
        other = h.t().as_strided((6, h.shape[0]), (1, 6))
        twice = windows[:, 1].as_strided((4,), (7,), 1)
        return windows.sum(0), inner, other.sin(), twice, self.kernel.as_strided((5, 4), (2, 1)), h


class Written(nn.Module):
    """Elements of a buffer and of what is computed, written through strides."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).clone()
        h.as_strided((4,), (5,)).mul_(2)
        self.seen.as_strided((4,), (5,)).add_(h.detach().mean(0))
        h.as_strided((2, 2), (4, 2), 20).copy_(h[:2, :2] * 3)
        return h + self.seen[0]


class Rotated(nn.Module):
    """Pairs of numbers turned as complex ones."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        pairs = torch.view_as_complex(self.up(x).view(-1, 2, 4).mT.contiguous())
        turned = pairs * torch.polar(torch.ones(4, dtype=x.dtype), torch.arange(4, dtype=x.dtype))
        return torch.view_as_real(turned).flatten(1), torch.view_as_real(torch.fft.fft(turned.mT, dim=0))


MODELS = {
    "determinants": lambda: Determinants(False),
    "determinants of transposes": lambda: Determinants(True),
    "windows": Windows,
    "written through strides": Written,
    "complex pairs": Rotated,
}
FSDP_AND_TP = ({"dp": 2, "tp": 2}, shardc.fsdp("dp", threshold=0) | shardc.tp("tp", colwise=["up"], rowwise=[]))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    torch.manual_seed(0)
    trains_alike(MODELS[name](), (torch.randn(12, 8),), *FSDP_AND_TP, steps=1)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_models_on_three_ranks(name: str) -> None:
    torch.manual_seed(0)
    trains_alike(MODELS[name](), (torch.randn(12, 8),), {"dp": 3}, shardc.fsdp("dp", threshold=0), steps=2)


IMAGES = {
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "cut from a larger one": lambda x: torch.cat([x, x], 3)[..., : x.shape[3]],
    "expanded": lambda x: x[:, :1].expand(x.shape),
}


@pytest.mark.parametrize("name", IMAGES)
def test_inputs_and_parameters_that_lie_otherwise(name: str) -> None:
    """Examples, and parameters, that are not contiguous; views of the input speak of its own strides."""
    torch.manual_seed(0)
    x = IMAGES[name](torch.randn(12, 3, 6, 4))
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(24, 4))
    model[0].weight.data = model[0].weight.data.contiguous(memory_format=torch.channels_last)
    model[3].weight.data = model[3].weight.data.t().contiguous().t()
    trains_alike(model, (x,), {"dp": 3}, shardc.fsdp("dp", threshold=0), steps=1)


def test_an_input_that_is_part_of_a_larger_tensor() -> None:
    """Offsets count from the start of the memory; outside of the tensor there is nothing to read."""

    class Reads(nn.Module):
        def forward(self, x: Tensor, at: int) -> Tensor:
            return x.as_strided((2, 2), (1, 2), at) * 2

    memory = torch.arange(24.0, dtype=torch.float64)
    x = memory[8:].view(4, 4)
    sim = Simulation(shardc.compile(Reads(), Mesh(dp=2), shardc.ddp("dp"), backend="eager"))
    assert torch.equal(sim(x, 11, grad=False), Reads()(x, 11))
    with pytest.raises(CaptureError, match="reads memory"):
        sim(x, 3, grad=False)
