"""Models that another library has wrapped, compiled modules that another is given, and a forward that prints."""

from __future__ import annotations

import copy
import functools
import os
import tempfile
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardc
from shardc.errors import InputError, ShardcWarning
from tests.ranks import run_ranks

X = torch.rand(4, 6)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Talks(Net):
    def forward(self, x: Tensor) -> Tensor:
        print("called with", x.shape)
        return super().forward(x)


def wrapped(model: nn.Module) -> nn.Module:
    """As accelerate's add_hook_to_module wraps a forward."""
    inner = model.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs) * 2

    model.forward = forward
    return model


def compiled(model: nn.Module) -> Any:
    return shardc.compile(model, shardc.Mesh(dp=2), shardc.fsdp("dp"), backend="eager")


@pytest.mark.parametrize("make", [wrapped, torch.fx.symbolic_trace], ids=["wrapped", "graph"])
def test_a_model_in_another_form_runs(make: Any) -> None:
    model = make(Net())
    torch.testing.assert_close(shardc.Simulation(compiled(model))(X), model(X).detach())


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (nn.DataParallel, "is wrapped by DataParallel"),
        (torch.jit.script, "is a script of torch.jit"),
        (torch.compile, "is wrapped by torch.compile"),
        (lambda net: compiled(net), "is compiled already"),
    ],
    ids=["parallel", "script", "torch.compile", "shardc"],
)
def test_a_wrapped_model_is_refused_by_name(make: Any, what: str) -> None:
    with pytest.raises(InputError, match=f"the model .*{what}"):
        compiled(make(Net()))
    with pytest.raises(InputError, match=f"module '0'.* {what}"):
        compiled(nn.Sequential(make(Net())))


@pytest.mark.parametrize("export", [torch.export.export, torch.jit.trace], ids=["export", "trace"])
def test_an_export_of_a_compiled_module_is_refused(export: Any) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module = shardc.compile(Net(), shardc.mesh(device="cpu"), shardc.fsdp(), backend="eager")
        with pytest.raises(InputError, match=r"exported or traced(.|\n)*full_state_dict"):
            export(module, (X,))
    finally:
        dist.destroy_process_group()


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).square().mean()


def on_ranks(model: nn.Module) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    return shardc.compile(model, mesh, shardc.fsdp("dp"), backend="eager")


def with_ddp(module: nn.Module) -> None:
    DistributedDataParallel(WithLoss(module))(X)


def as_fsdp_begins(module: Any) -> None:
    module._is_fsdp_managed_module = True  # all that FullyShardedDataParallel reaches without an accelerator


def with_accelerate(module: nn.Module) -> None:
    accelerate.Accelerator(cpu=True).prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))


def with_trainer(module: nn.Module) -> None:
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(folder, use_cpu=True, max_steps=1, report_to=[], disable_tqdm=True)
        data: Any = [{"x": row, "labels": 0} for row in X]
        transformers.Trainer(model=module, args=args, train_dataset=data).train()


WRAPS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "fully_shard": (fully_shard, "fully_shard"),
    "fully_shard of a part": (lambda module: fully_shard(module.linear), "fully_shard"),
    "replicate": (replicate, "replicate"),
    "DDP": (DistributedDataParallel, "DistributedDataParallel"),
    "DDP around": (with_ddp, "DistributedDataParallel"),
    "FSDP": (as_fsdp_begins, "FullyShardedDataParallel"),
    "Accelerator": (with_accelerate, "DistributedDataParallel"),
    "Trainer": (with_trainer, "DistributedDataParallel"),
}


def refuse_all() -> None:
    rank = str(dist.get_rank())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # unused
    for name, (wrap, by) in WRAPS.items():
        module = on_ranks(Net())
        want = module(X)
        with pytest.raises(InputError, match=f"^{by} is given a compiled module(.|\\n)*shardc.integrations.accelerate"):
            wrap(module)
            raise AssertionError(f"{name} takes it")
        if name != "DDP around":  # which copies rank 0's shards at once, and is refused at the first call
            assert torch.equal(module(X), want)


def test_wrappers_of_a_compiled_module_are_refused() -> None:
    run_ranks(2, refuse_all)


def harmless() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Net(), nn.Linear(4, 2))
    around = nn.Sequential(on_ranks(plain[0]), copy.deepcopy(plain[1]))
    fully_shard(around, mesh=around[0].shardc.spec.device_mesh)
    rows = X.chunk(2)[dist.get_rank()]
    plain(X).square().mean().backward()
    around(rows).square().mean().backward()
    for mine, param in zip(around.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), param.grad)  # type: ignore[union-attr]
    module = around[0]
    compiled_again: Any = torch.compile(module)
    for wrapper in (compiled_again, nn.DataParallel(module)):
        assert torch.equal(wrapper(rows), module(rows))


def test_wrappers_that_are_harmless() -> None:
    run_ranks(2, harmless)


def test_a_print_is_left_out_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    model = Talks()
    module = compiled(model)
    with pytest.warns(ShardcWarning, match=r"test_wrapped_models\.py:\d+ prints in forward"):
        program = module.lower(X)
    assert program is not None and capsys.readouterr().out == ""
    print("still prints")
    assert capsys.readouterr().out == "still prints\n"
