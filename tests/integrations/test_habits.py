"""What people do beside training with torch alone: export, save, profile, compile, count, average, evaluate."""

from __future__ import annotations

import copy
import io
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import shardc
from shardc.errors import CaptureError
from tests.integrations.loops import PLANS, build, check_habits, close, compiled, rows, steps
from tests.ranks import run_ranks
from tests.state import assert_same


def trained(plan: str) -> tuple[nn.Module, Any]:
    """A model and a compiled one, both after the same steps."""
    source, module = build(), compiled(plan)
    x, y = rows()
    mine = module.shard_inputs(x, y)
    steps(torch.optim.AdamW(source.parameters(), 0.1), lambda: mse_loss(source(x), y))
    steps(torch.optim.AdamW(module.parameters(), 0.1), lambda: module(*mine))
    return source, module


def exports(plan: str) -> None:
    source, module = trained(plan)
    plain = build()
    plain.load_state_dict(module.full_state_dict("cpu"))
    x, _ = rows()
    program = torch.export.export(plain, (x,))
    close(program.module()(x).detach(), source(x).detach())


def test_export_of_a_plain_model_with_the_full_state_dict() -> None:
    run_ranks(2, *(partial(exports, plan) for plan in PLANS))


def to_onnx() -> None:
    source, module = trained("fsdp")
    plain = build()
    plain.load_state_dict(module.full_state_dict("cpu"))
    if dist.get_rank() == 0:
        import onnx

        x, _ = rows()
        written = io.BytesIO()
        torch.onnx.export(plain.float(), (x.float(),), written, dynamo=False)  # type: ignore[call-overload]
        held = onnx.load_from_string(written.getvalue()).graph.initializer
        whole = {at.name: torch.from_numpy(onnx.numpy_helper.to_array(at).copy()) for at in held}
        torch.testing.assert_close(whole["0.weight"], source.state_dict()["0.weight"].float())


def test_onnx_of_a_plain_model_with_the_full_state_dict() -> None:
    pytest.importorskip("onnx")
    run_ranks(2, to_onnx)


def saved_whole() -> None:
    from safetensors.torch import load_file, save_file

    source, module = trained("fsdp")
    state = module.full_state_dict(rank0_only=True)
    if dist.get_rank() == 0:
        with tempfile.TemporaryDirectory() as folder:
            torch.save(state, f"{folder}/model.pt")
            save_file(state, f"{folder}/model.safetensors")
            for read in (torch.load(f"{folder}/model.pt", weights_only=True), load_file(f"{folder}/model.safetensors")):
                plain = build()
                plain.load_state_dict(read)
                assert_same_values(plain, source)
    dist.barrier()


def assert_same_values(left: nn.Module, right: nn.Module) -> None:
    for name, value in left.state_dict().items():
        close(value, right.state_dict()[name])


def test_torch_save_and_safetensors_of_the_full_state_dict() -> None:
    run_ranks(2, saved_whole)


def saved_while_it_trains(folder: Path) -> None:
    """The state dict is copied before a step changes it."""
    source, module = trained("fsdp")
    writing: Any = dcp.async_save({"model": module.state_dict()}, checkpoint_id=folder)
    with torch.no_grad():
        for param in module.parameters():
            param.zero_()
    writing.result()
    state = {"model": module.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    module.load_state_dict(state["model"])
    assert_same(module, source)


def test_checkpoints_written_asynchronously(tmp_path: Path) -> None:
    run_ranks(
        2, partial(saved_while_it_trains, tmp_path / "checkpoint"), partial(saved_beside_steps, tmp_path / "beside")
    )


def saved_beside_steps(folder: Path) -> None:
    """The saving thread's collectives are in the world's group, and steps on CPU ranks are not."""
    source, module = build(), compiled()
    x, y = rows()
    mine = module.shard_inputs(x, y)
    theirs, ours = (torch.optim.AdamW(model.parameters(), 0.01) for model in (source, module))
    for at in range(4):
        state = {"model": module.state_dict(), "optimizer": ours.state_dict()}
        kept = copy.deepcopy(source.state_dict())
        writing: Any = dcp.async_save(state, checkpoint_id=folder / str(at))
        for _ in range(10):
            for model, optimizer in ((source, theirs), (module, ours)):
                loss = model(*mine) if model is module else mse_loss(model(x), y)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
        writing.result()
        assert_same(module, source)
        state = {"model": compiled().state_dict()}
        dcp.load(state, checkpoint_id=folder / str(at))
        for name, value in state["model"].items():
            close(value.full_tensor(), kept[name], name)


def profiled(model: nn.Module, loss: Any) -> list[float]:
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=1)
    with torch.profiler.profile(schedule=schedule, record_shapes=True, with_stack=True) as profile:
        out = []
        for _ in range(4):
            out += steps(torch.optim.SGD(model.parameters(), 0.1), loss, 1)
            profile.step()
    assert profile.key_averages().table(sort_by="cpu_time_total", row_limit=3)
    return out


def logged(model: nn.Module, loss: Any) -> list[float]:
    """What a logger reads of parameters and gradients."""
    loss().backward()
    out = []
    for param in model.parameters():
        assert param.grad is not None
        out += [param.norm().item(), param.grad.norm().item(), param.grad.abs().max().item(), param.std().item()]
    model.zero_grad()
    return out


def restored(model: nn.Module, loss: Any) -> list[float]:
    """The best values are kept, as early stopping does."""
    best = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    out = steps(optimizer, loss)
    model.load_state_dict(best)
    return [*out, loss().item()]


def accumulated(model: nn.Module, loss: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    for _ in range(2):
        for _ in range(3):
            (loss() / 3).backward()
        optimizer.step()
        optimizer.zero_grad()


def with_groups(model: nn.Module, loss: Any) -> list[float]:
    """No weight decay for biases, and a layer's own rate."""
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    others = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0, "lr": 0.01}]
    return steps(torch.optim.AdamW(groups, lr=0.1), loss)


def test_habits_around_a_loop() -> None:
    check_habits(profiled, logged, restored, accumulated, with_groups)


def counts_flops() -> None:
    """torch's counter hooks all modules, also of programs that are only captured; the schedule counts."""
    from torch.utils.flop_counter import FlopCounterMode

    module = compiled()
    with FlopCounterMode(display=False), pytest.raises(CaptureError, match="registered for all modules"):
        module(*module.shard_inputs(*rows()))


def test_the_counter_of_flops_is_refused() -> None:
    run_ranks(2, counts_flops)


def compiled_on_top() -> None:
    """torch.compile leaves the call of a compiled module as it is."""
    x, y = rows()
    source, module = build(), compiled()

    def step(x: Tensor, y: Tensor) -> Tensor:
        return module(x, y) * 2.0

    mine = module.shard_inputs(x, y)
    value = torch.compile(step, backend="eager")(*mine)
    close(value.detach(), 2 * mse_loss(source(x), y).detach())
    value.backward()
    (2 * mse_loss(source(x), y)).backward()
    assert_same(module, source, grads=True)


def test_torch_compile_around_a_step() -> None:
    run_ranks(2, compiled_on_top)


def evaluates() -> None:
    """Predictions of all rows: each rank's outputs, gathered."""
    source, module = build(), compiled(loss=None)
    x, _ = rows()
    module.eval()
    with torch.inference_mode():
        mine = module(module.shard_inputs(x))
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine.contiguous())
    close(torch.cat(parts), source(x).detach())


def test_evaluation_gathers_outputs() -> None:
    run_ranks(2, evaluates)


def loads_in_workers() -> None:
    x, y = rows()
    source, module = build(), compiled()
    loader: Any = DataLoader(TensorDataset(x, y), batch_size=4, num_workers=1, multiprocessing_context="fork")
    for (mine, targets), start in zip(shardc.batches(loader, module), (0, 4), strict=True):
        value = module(mine, targets)
        close(value.detach(), mse_loss(source(x[start : start + 4]), y[start : start + 4]).detach())


def test_a_loader_with_workers() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    run_ranks(2, loads_in_workers)
