"""`train_step(cuda_graph=True)` on a CPU, where a log of ops stands for the graph: what it reads, when it is new."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import shardc
from shardc.errors import InputError, ShardcError, ShardcWarning
from shardc.runtime.cuda_graphs import CudaGraphs, host_read
from shardc.runtime.graphed_step import WARM, GraphedStep, recorder_of
from shardc.runtime.state import State
from tests.experts.models import Own, batch
from tests.ranks import device_mesh, run_ranks

PLAIN_LR, ROWS, WIDTH = 2.0**-6, 6, 8


class Ops(TorchDispatchMode):
    """Records the ops of a function, and repeats them on the same tensors: numbers that Python computed stay."""

    capturable = False

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[Any, ...]] = []
        self.records = self.repeats = 0

    def warm(self, function: Callable[[], Any]) -> Any:
        return function()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host reads a value"
        out = func(*args, **(kwargs or {}))
        self.log.append((func, args, kwargs or {}, out))
        return out

    def record(self, function: Callable[[], Any]) -> Callable[[], Any]:
        self.log, self.records, repeats = [], self.records + 1, 0
        with self:
            result = function()
        log = self.log

        def repeat() -> Any:
            nonlocal repeats
            repeats += 1
            self.repeats += 1
            for call in log if repeats > 1 else ():  # recording on a CPU runs them
                _again(*call)
            return result

        return repeat


def _again(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    written = [x.alias_info is not None for x in func._schema.returns]
    if any(written) and not func._schema.is_mutable:
        return  # a view
    with torch.no_grad():
        new = func(*args, **kwargs)
        for old, now in zip(*map(pytree.tree_leaves, (out, new)), strict=True) if not any(written) else ():
            if isinstance(old, Tensor):
                old.copy_(now)


class Rerun:
    """Runs the recorded function again, with the tensors that it was recorded with: for code that logs no ops."""

    capturable = False
    records = repeats = 0

    def warm(self, function: Callable[[], Any]) -> Any:
        return function()

    def record(self, function: Callable[[], Any]) -> Callable[[], Any]:
        self.records += 1

        def repeat() -> Any:
            self.repeats += 1
            return function()

        return repeat


class Net(nn.Module):
    scale: float = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, 12), nn.BatchNorm1d(12), nn.Linear(12, 3)
        self.drop = nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(F.silu(self.norm(self.first(x))))) * self.scale


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


class Side:
    """A module in training, by itself or recorded."""

    def __init__(self, mesh: DeviceMesh, recorder: Any = None, backend: str = "eager", **options: Any) -> None:
        torch.manual_seed(0)
        self.module = shardc.compile(Net().double(), mesh, shardc.fsdp("dp"), loss=F.mse_loss, backend=backend)
        self.optimizer = shardc.optim.wrap(torch.optim.AdamW, self.module, lr=PLAIN_LR, **options)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        more = {"max_norm": 0.1, "scheduler": self.scheduler}
        with patch("shardc.train.recorder_of", lambda *_: recorder):
            self.step = shardc.train_step(self.module, self.optimizer, **more, cuda_graph=recorder is not None)
        self.seen: list[Any] = []
        self.generator = torch.Generator().manual_seed(1)

    def batch(self, rows: int = ROWS) -> tuple[Tensor, Tensor]:
        shapes = ((rows, WIDTH), (rows, 3))
        x, y = (torch.randn(shape, generator=self.generator, dtype=torch.float64) for shape in shapes)
        return self.module.shard_inputs(x, y)

    def train(self, count: int, rows: int = ROWS) -> None:
        for _ in range(count):
            self.seen += [self.step(*self.batch(rows)), self.step.norm, self.optimizer.param_groups[0]["lr"]]

    def state(self) -> list[Any]:
        moments = [x for state in self.optimizer.state.values() for x in state.values()]
        grads = [x.grad for x in self.module.parameters()]
        return [*self.seen, *self.module.state_dict().values(), *moments, grads]


def alike(mesh: DeviceMesh, recorder: Any, act: Callable[[Side], None], backend: str = "eager", **options: Any) -> None:
    """All that both sides return, and come to, is equal; learning rates halve each step, random numbers differ."""
    sides = [Side(mesh, chosen, backend, **options) for chosen in (None, recorder)]
    for side in sides:
        torch.manual_seed(2)
        act(side)
    for mine, other in zip(*(side.state() for side in sides), strict=True):
        mine, other = (x.full_tensor() if hasattr(x, "full_tensor") else x for x in (mine, other))
        assert torch.equal(mine, other) if isinstance(mine, Tensor) else mine == other
    assert isinstance(sides[1].optimizer.param_groups[0]["lr"], float)


def test_repeats_are_the_steps(mesh: DeviceMesh) -> None:
    recorder = Ops()
    alike(mesh, recorder, lambda side: side.train(9))
    assert (recorder.records, recorder.repeats) == (1, 9 - WARM - 1)  # the first compiles


def other_rows(side: Side) -> None:
    for _ in range(6):
        side.train(1, rows=4)
        side.train(1)


def other_strides(side: Side) -> None:
    for _ in range(5):
        x, y = side.batch()
        side.seen.append(side.step(x.t().contiguous().t(), y))


def evaluates_a_part(side: Side) -> None:
    side.module.drop.eval()
    side.train(2)
    side.module.drop.train()


def freezes(side: Side) -> None:
    side.module.first.weight.requires_grad_(False)


def loads(side: Side) -> None:
    state = {name: torch.full_like(x, 2) for name, x in side.module.full_state_dict().items()}
    side.module.load_state_dict(state)


def loads_optimizer(side: Side) -> None:
    state = copy.deepcopy(side.optimizer.state_dict())
    side.train(1)
    side.optimizer.load_state_dict(state)


def new_rate(side: Side) -> None:
    side.optimizer.param_groups[0]["lr"] = 2.0**-3


def rate_in_a_tensor(side: Side) -> None:
    side.optimizer.param_groups[0]["lr"] = torch.tensor(2.0**-4)
    side.train(4)
    side.optimizer.param_groups[0]["lr"] = side.optimizer.param_groups[0]["lr"].item()


def new_decay(side: Side) -> None:
    side.optimizer.param_groups[0]["weight_decay"] = 0.5


def accumulates(side: Side) -> None:
    with side.module.no_sync():
        side.train(2)


def adds_a_gradient(side: Side) -> None:
    side.module(*side.batch()).backward()


def reads_another_number(side: Side) -> None:
    side.module.scale = 3.0


def new_memory(side: Side) -> None:
    for param in side.module.parameters():
        with torch.no_grad():
            param._local_tensor.set_(param._local_tensor.clone())  # type: ignore[attr-defined]


def deterministic(side: Side) -> None:
    torch.use_deterministic_algorithms(True)
    side.train(2)
    torch.use_deterministic_algorithms(False)


def new_buffer(side: Side) -> None:
    side.module.norm.running_mean = torch.ones_like(side.module.norm.running_mean)


CHANGES = [
    other_rows, other_strides, evaluates_a_part, freezes, loads, loads_optimizer, new_rate, rate_in_a_tensor, new_decay,
    accumulates, adds_a_gradient, reads_another_number, new_memory, deterministic, new_buffer,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_nothing_is_stale(change: Callable[[Side], None], mesh: DeviceMesh) -> None:
    """What changes between two steps has its effect, and steps are repeated before and behind it."""
    recorder, counts = Ops(), list[int]()

    def act(side: Side) -> None:
        side.train(7)
        counts.append(recorder.repeats)
        change(side)
        side.train(7)

    alike(mesh, recorder, act)
    assert counts[-1] == 6 - WARM and recorder.repeats > counts[-1] + 1


def test_a_hook_is_not_left_out(mesh: DeviceMesh) -> None:
    recorder, ran = Ops(), list[int]()

    def act(side: Side) -> None:
        side.train(7)
        hook = side.module.last.weight.register_post_accumulate_grad_hook(lambda _: ran.append(1))
        side.train(3)
        hook.remove()
        side.optimizer.register_step_post_hook(lambda *_: ran.append(2))
        side.train(3)

    with pytest.warns(ShardcWarning) as warned:
        alike(mesh, recorder, act)
    assert ran == [1] * 3 + [2] * 3 + [1] * 3 + [2] * 3
    assert [str(x.message) for x in warned if x.category is ShardcWarning] == [
        "a CUDA graph would leave out a hook of parameter 'last.weight': steps run without one",
        "a CUDA graph would leave out a hook of the optimizer: steps run without one",
    ]


def test_a_graph_sees_that_parameters_changed(mesh: DeviceMesh) -> None:
    side = Side(mesh, Ops())
    side.train(7)
    loss = side.module(*side.batch())
    side.train(1)
    with pytest.raises((RuntimeError, ShardcError), match="modified (in place|by an inplace operation)"):
        loss.backward()


def test_results_are_the_callers(mesh: DeviceMesh) -> None:
    side = Side(mesh, Ops())
    losses = [side.step(*side.batch()) for _ in range(9)]
    assert len({x.item() for x in losses}) == 9 and len({x.data_ptr() for x in losses}) == 9
    assert side.step.tokens_per_second() == 0  # numbers are no tokens


def test_a_step_that_cannot_be_recorded_says_why(mesh: DeviceMesh) -> None:
    class Broken(Rerun):
        def record(self, function: Callable[[], Any]) -> Callable[[], Any]:
            function()
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    side = Side(mesh, Broken())
    with pytest.raises(InputError, match="cannot be recorded as a CUDA graph: RuntimeError: operation not permitted"):
        side.train(9)
    assert not side.module.shardc.turns.paused


def test_a_step_that_fails_while_recorded_leaves_no_gradients(mesh: DeviceMesh) -> None:
    """On CUDA their kernels have not run."""

    def fails() -> None:
        raise RuntimeError("not permitted")

    side = Side(mesh, Rerun())
    with patch.object(Rerun, "record", lambda _, function: function()):
        side.train(WARM + 1)
        with patch.object(side.optimizer, "step", fails), pytest.raises(InputError, match="not permitted"):
            side.train(1)
    assert all(x.grad is None for x in side.module.parameters())


def test_graphs_share_a_pool_until_all_are_gone() -> None:
    """The allocator fails an assertion if a graph is captured in a pool whose graphs are gone."""

    class Graph:
        def replay(self) -> None: ...

    pools: list[object] = []

    def capture(_: Graph, pool: object, **__: Any) -> Any:
        pools.append(pool)
        return nullcontext()

    with (
        patch("torch.cuda.CUDAGraph", Graph),
        patch("torch.cuda.graph_pool_handle", object),
        patch("torch.cuda.graph", capture),
    ):
        recorder = CudaGraphs(torch.device("cuda"))
        graphs = [recorder.record(lambda: None) for _ in range(2)]
        graphs.clear()
        graphs.append(recorder.record(lambda: None))
    first, second, third = pools
    assert first is second is not third


# --- what is refused


def test_devices_and_optimizers(mesh: DeviceMesh) -> None:
    module = Side(mesh).module
    with pytest.raises(InputError, match="cuda_graph=True, and the module is on 'cpu', which has no CUDA graphs"):
        shardc.train_step(module, torch.optim.AdamW(module.parameters()), cuda_graph=True)
    with patch.object(State, "device", torch.device("cuda")):
        assert recorder_of(module, torch.optim.AdamW(module.parameters())).capturable
        for make, name in ((torch.optim.SGD, "SGD"), (partial(shardc.optim.wrap, torch.optim.SGD), "SGD")):
            params = module.parameters() if make is torch.optim.SGD else module
            with pytest.raises(InputError, match=f"{name} has no option capturable"):
                recorder_of(module, make(params))
        for kind in (torch.optim.RMSprop, torch.optim.Adadelta):
            assert recorder_of(module, kind(module.parameters(), foreach=True))
            assert recorder_of(module, shardc.optim.wrap(kind, module))
            for optimizer in (kind(module.parameters()), shardc.optim.wrap(kind, module, foreach=False)):
                with pytest.raises(InputError, match="without foreach reads its learning rate on the host"):
                    recorder_of(module, optimizer)
        wrapped = shardc.optim.wrap(torch.optim.AdamW, module, whole=True)
        with pytest.raises(InputError, match="updates 'first.weight' whole, on a rank that the host chooses"):
            recorder_of(module, wrapped)


def test_modules(mesh: DeviceMesh) -> None:
    optimizer = torch.optim.AdamW
    for plan, options, match in (
        (shardc.fsdp("dp") | shardc.offload("first*"), {}, "'first.(weight|bias)' is kept on the host"),
        (shardc.fsdp("dp"), {"dynamic": {"x": {0: "rows"}}}, "sizes of x are dynamic"),
    ):
        module = shardc.compile(Net(), mesh, plan, loss=F.mse_loss, backend="eager", **options)
        with patch.object(State, "device", torch.device("cuda")), pytest.raises(InputError, match=match):
            recorder_of(module, optimizer(module.parameters()))


class Plain(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, 3)


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.layer(x))
        return torch.cond(y.mean() > 0, lambda y: y.sin(), lambda y: y.cos(), (y,)).mean()


@pytest.mark.parametrize(
    ("plan", "model", "match"),
    [
        (shardc.microbatches(2), Plain, r"microbatches is not recorded as a CUDA graph(.|\n)*microbatches\(2\)"),
        (shardc.save("first", on="host"), Net, "cannot be in a CUDA graph: the host waits for its copies"),
        (shardc.Plan(), Branch, r"cannot be in a CUDA graph: the host reads which function(.|\n)*test_cuda_graph.py:"),
    ],
    ids=["microbatches", "save on the host", "cond"],
)  # fmt: skip
def test_programs_are_refused_before_anything_changes(
    plan: shardc.Plan, model: type[nn.Module], match: str, mesh: DeviceMesh
) -> None:
    loss = None if model is Branch else F.mse_loss
    module = shardc.compile(model(), mesh, shardc.fsdp("dp") | plan, loss=loss, backend="eager")
    optimizer = torch.optim.AdamW(module.parameters())
    with patch("shardc.train.recorder_of", lambda *_: Rerun()):
        step = shardc.train_step(module, optimizer, cuda_graph=True)
    before = copy.deepcopy(module.full_state_dict())
    batch = torch.randn(ROWS, WIDTH), torch.randn(ROWS, 3)
    with pytest.raises(InputError, match=match):
        step(*batch[: 1 if model is Branch else 2])
    assert all(torch.equal(x, before[name]) for name, x in module.full_state_dict().items())
    assert not optimizer.state and all(param.grad is None for param in module.parameters())
    module(*batch[: 1 if model is Branch else 2]).backward()  # without a graph it runs


BOUNDED = {"dispatch": "bounded", "capacity": 4.0}


@pytest.mark.parametrize(
    ("dispatch", "dtype", "why"),
    [
        ({"dispatch": "send"}, torch.float32, "the host reads how many rows each rank sends"),
        (BOUNDED, torch.float32, "experts outside of bfloat16 run one after another"),
        (BOUNDED, torch.bfloat16, None),
    ],
)
def test_experts(dispatch: dict[str, Any], dtype: torch.dtype, why: str | None) -> None:
    """Only those that send a fixed number of rows, and whose products are grouped, need no host."""
    plan = shardc.ep("ep", "experts", **dispatch)
    module = shardc.compile(Own().to(dtype), shardc.Mesh(ep=2), plan, backend="eager")
    read = host_read(module.lower(**batch()))
    assert (read and read[1].split(",")[0]) == why


def test_an_optimizer_that_has_loaded_a_state(mesh: DeviceMesh) -> None:
    """Counts of steps move to the device, whatever the saved options say."""
    side = Side(mesh)
    side.train(1)
    side.optimizer.load_state_dict(copy.deepcopy(side.optimizer.state_dict()))
    recorder = Ops()
    recorder.capturable = True
    with patch.object(State, "device", torch.device("meta")):
        GraphedStep(side.module, side.optimizer, side.step._update, recorder)._make_capturable()
    assert all(group["capturable"] for group in side.optimizer.param_groups)
    assert {state["step"].device.type for state in side.optimizer.state.values()} == {"meta"}


# --- on ranks


def ranks_repeat(backend: str) -> None:
    warnings.simplefilter("ignore")

    def act(side: Side) -> None:
        side.train(7)
        other_rows(side)
        loads(side)
        side.train(7)

    recorder = Rerun()
    alike(device_mesh(shardc.Mesh(dp=2)), recorder, act, backend)
    assert recorder.repeats > 8


@pytest.mark.medium
def test_on_ranks() -> None:
    run_ranks(2, partial(ranks_repeat, "eager"), partial(ranks_repeat, "inductor"))
