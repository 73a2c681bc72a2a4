"""Experts on real ranks: training equals one device, and what does not fit raises everywhere before a row is sent."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardc
from shardc.errors import InputError
from shardc.ir.mesh import Mesh
from tests.experts.models import batch, build, experts_of
from tests.models.alike import relative
from tests.ranks import device_mesh, run_ranks

EP2, DP2EP2 = Mesh(ep=2), Mesh(dp=2, ep=2)


def plan(mesh: Mesh, name: str, **way: object) -> shardc.Plan:
    return shardc.fsdp(mesh.axes) | shardc.ep("ep", experts_of(name), **way)


def trains(
    mesh: Mesh, name: str, way: dict[str, object], backend: str, dtype: torch.dtype = torch.float32, limit: float = 1e-4
) -> nn.Module:
    """Two steps of AdamW; the second has other batches, and so another routing, in the same program.

    Returns:
        The compiled module.
    """
    model = build(name, dtype)
    module = shardc.compile(build(name, dtype), device_mesh(mesh), plan(mesh, name, **way), backend=backend)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, module)]
    for rows in (4, 4):
        given = batch(rows)
        given["input_ids"] = given["input_ids"].roll(1, 1)
        loss = model(**given)["loss"]
        (made,) = (module(**module.shard_inputs(**given)[1])["loss"],)
        assert relative(made.detach(), loss.detach()) < limit
        loss.backward()
        made.backward()
        for (key, mine), theirs in zip(module.named_parameters(), model.parameters(), strict=True):
            assert relative(mine.grad.full_tensor(), theirs.grad, 1e-3) < limit * 10, key
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    held = {key: p.to_local().shape[0] for key, p in module.named_parameters() if "experts." in key and p.dim() == 3}
    assert held and set(held.values()) <= {4, 2}, f"experts are split over ep: {held}"
    return module


def counts_tokens(mesh: Mesh, way: str, rows: int = 8) -> None:
    """Every rank reads the same, which is what one device's router chooses; also of rows that ranks do not divide."""
    model, options = build("own", torch.float32), shardc.Options(uneven=True)
    module = shardc.compile(
        build("own", torch.float32),
        device_mesh(mesh),
        plan(mesh, "own", dispatch=way),
        backend="eager",
        options=options,
    )
    given = batch(rows)
    module(**module.shard_inputs(**given)[1])
    x = model.embed(given["input_ids"]).flatten(0, 1)
    expected = model.router(x).softmax(-1).topk(2).indices.flatten().bincount(minlength=8)
    (found,) = shardc.expert_tokens(module).items()
    assert found[0] == "experts" and torch.equal(found[1], expected)


def of_two_kinds(first: bool, rows: int = 8) -> dict[str, torch.Tensor]:
    """Tokens below 32, which `overflows` sends to experts 0 and 1, in the ``first`` half of rows; others half and half.

    Tokens from 32 on go to experts 4 and 5.
    """
    torch.manual_seed(1)
    ids = torch.randint(0, 32, (rows, 6))
    ids[rows // 2 if first else 0 :, ::2] += 32
    return {"input_ids": ids, "labels": ids.clone()}


def overflows(mesh: Mesh) -> None:
    """One rank sends too much: all raise the same, no parameter has changed or has a gradient, the next step trains."""
    models = []
    for _ in range(2):
        model = build("own", torch.float32)
        with torch.no_grad():
            model.router.weight.zero_()
            for expert, factor in ((0, 1.0), (1, 0.9), (4, -1.0), (5, -0.9)):
                model.router.weight[expert] = factor
            model.embed.weight.abs_()[32:] *= -1
        models.append(model)
    model = models[0]
    module = shardc.compile(
        models[1], device_mesh(mesh), plan(mesh, "own", dispatch="bounded", capacity=1.0), backend="eager"
    )
    before = {key: p.to_local().clone() for key, p in module.named_parameters()}
    loss = module(**module.shard_inputs(**of_two_kinds(first=True))[1])["loss"]
    assert loss.isnan()
    room = 48 // mesh.ranks
    with pytest.raises(InputError, match=f"experts: rank . has {2 * room} rows .* leaves room for {room}") as caught:
        loss.backward()
    with torch.autograd.detect_anomaly(check_nan=False), pytest.raises(InputError, match=f"leaves room for {room}"):
        module(**module.shard_inputs(**of_two_kinds(first=True))[1])["loss"].backward()
    messages: list[object] = [None] * mesh.ranks
    dist.all_gather_object(messages, str(caught.value))
    assert len(set(messages)) == 1
    for key, p in module.named_parameters():
        assert p.grad is None and torch.equal(p.to_local(), before[key])
    loss = module(**module.shard_inputs(**of_two_kinds(first=False))[1])["loss"]
    expected = model(**of_two_kinds(first=False))["loss"]
    assert relative(loss.detach(), expected.detach()) < 1e-4
    loss.backward()
    expected.backward()
    for (key, mine), theirs in zip(module.named_parameters(), model.parameters(), strict=True):
        assert relative(mine.grad.full_tensor(), theirs.grad, 1e-3) < 1e-3, key


def trains_from_the_store(mesh: Mesh, way: dict[str, object]) -> None:
    """By Inductor's code; a second module runs the program that the first has stored."""
    trains(mesh, "own", way, "inductor")
    (program,) = trains(mesh, "own", way, "inductor").shardc.programs.values()
    assert program.stored.startswith("found in ")


def in_low_precision(mesh: Mesh, way: dict[str, object]) -> None:
    """bf16 parameters for compute, gradients reduced in float32."""
    model = build("own", torch.float32)
    low = shardc.precision(param=torch.bfloat16, reduce=torch.float32)
    module = shardc.compile(
        build("own", torch.float32), device_mesh(mesh), plan(mesh, "own", **way) | low, backend="eager"
    )
    given = batch()
    loss = model(**given)["loss"]
    made = module(**module.shard_inputs(**given)[1])["loss"]
    assert relative(made.detach().float(), loss.detach()) < 0.03
    made.backward()
    assert all(p.grad.dtype == torch.float32 for p in module.parameters())


def sends_rows(counts: tuple[tuple[int, int], tuple[int, int]]) -> None:
    """Rows arrive by where they come from, also none, or one whose strides are odd."""
    rank = dist.get_rank()
    sends, receives = torch.tensor(counts[rank]), torch.tensor([one[rank] for one in counts])
    total, room = int(sends.sum()), 6
    rows = torch.arange(total * 3.0).view(-1, 3) + 100 * rank
    scale = torch.arange(float(max(total, 1)))[:total].as_strided((total, 1), (1, 7))
    group = dist.group.WORLD
    assert group is not None
    made = torch.ops.shardc.send_rows_coalesced([rows, scale], sends, receives, room, group.group_name)
    came, scales = (torch.ops._c10d_functional.wait_tensor(x) for x in made)
    of = [(sum(counts[peer][:rank]), counts[peer][rank], peer) for peer in range(2)]
    expected = [100.0 * peer + 3 * row for start, n, peer in of for row in range(start, start + n)]
    assert came[: len(expected), 0].tolist() == expected and came.shape == (room, 3)
    expected_scales = [float(row) for start, n, _ in of for row in range(start, start + n)]
    assert scales[: len(expected), 0].tolist() == expected_scales


def test_two_ranks() -> None:
    ways = ({"dispatch": "gather"}, {"dispatch": "send"}, {"dispatch": "bounded", "capacity": 2.0})
    run_ranks(
        2,
        *(partial(trains, EP2, "own", way, "eager") for way in ways),
        partial(trains, EP2, "qwen3-moe", {}, "eager"),
        *(partial(in_low_precision, EP2, way) for way in ways),
        partial(overflows, EP2),
        partial(trains, EP2, "own", {"dispatch": "send", "chunks": 3}, "eager"),
        *(partial(counts_tokens, EP2, way, rows) for way in ("send", "gather") for rows in (8, 5)),
        *(
            partial(sends_rows, counts)
            for counts in (((1, 2), (2, 1)), ((1, 1), (1, 0)), ((0, 3), (0, 0)), ((0, 0), (0, 0)))
        ),
    )


def test_blocks_from_the_store() -> None:
    run_ranks(2, partial(trains_from_the_store, EP2, {"dispatch": "bounded", "capacity": 2.0, "chunks": 2}))


@pytest.mark.slow
def test_lowered_by_inductor() -> None:
    ways = ({"dispatch": "gather"}, {"dispatch": "send"}, {"dispatch": "bounded", "capacity": 2.0})
    run_ranks(
        2,
        *(partial(trains, EP2, "qwen3-moe", way, "inductor") for way in ways),
        *(partial(trains, EP2, name, {}, "inductor") for name in ("gpt-oss", "sorted")),
        partial(trains, EP2, "mixtral", {"dispatch": "send"}, "inductor", torch.bfloat16, 0.05),
    )


@pytest.mark.slow
def test_three_ranks() -> None:
    """Neither eight experts nor the tokens divide."""
    run_ranks(3, *(partial(counts_tokens, Mesh(ep=3), way, 4) for way in ("send", "gather")))


@pytest.mark.slow
def test_four_ranks() -> None:
    run_ranks(
        4,
        partial(trains, DP2EP2, "own", {"dispatch": "send"}, "inductor"),
        partial(trains, DP2EP2, "qwen3-moe", {"dispatch": "gather"}, "eager"),
        partial(trains, Mesh(ep=4), "deepseek-v3", {"dispatch": "send"}, "eager"),
        partial(overflows, DP2EP2),
        *(partial(counts_tokens, DP2EP2, way) for way in ("send", "gather")),
        *(partial(counts_tokens, Mesh(ep=4), "send", rows) for rows in (5, 3)),
    )


SAVES = """
import shardc
from tests.experts.models import batch, build
module = shardc.compile(build("own"), shardc.Mesh(ep=2), shardc.ep("ep", "experts"), backend="eager")
module.lower(**batch()).save({folder!r})
"""
LOADS = """
import torch, shardc
from tests.experts.models import batch, build
loaded = shardc.load({folder!r})
plan = shardc.ep("ep", "experts")
module = shardc.compile(build("own"), shardc.Mesh(ep=2), plan, backend="eager", precompiled=loaded)
loss = shardc.Simulation(module)(**batch())["loss"]
assert abs(loss - build("own")(**batch())["loss"]) < 1e-9
"""


@pytest.mark.slow
def test_saved_programs_bring_their_experts(tmp_path: Path) -> None:
    for script in (SAVES, LOADS):
        text = script.format(folder=str(tmp_path / "program"))
        subprocess.run([sys.executable, "-c", text], check=True, cwd=Path(__file__).parents[2])
