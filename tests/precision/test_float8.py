"""Products in float8 on simulated ranks: the numbers of one device, whatever the mesh."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

import shardc
from shardc import Mesh, ddp, fsdp, hsdp, precision, tp
from shardc.errors import PlanError
from shardc.ir import graph as ir
from shardc.ir import ops
from shardc.ir.comm_volume import collective_kind
from tests.precision.float8 import Net, case, on_one_device

SPLIT = tp("tp", colwise=["layers.*.gate", "layers.*.up"], rowwise=["layers.*.down"])
SEQUENCE = SPLIT | shardc.Plan(activations={"layers.*": "~, @tp, _", "layers.*.norm": "~, @tp, _"})
PLANS = {
    "ddp2": (Mesh(dp=2), ddp("dp")),
    "fsdp2 level 1": (Mesh(dp=2), fsdp("dp", 1)),
    "fsdp2 level 2": (Mesh(dp=2), fsdp("dp", 2)),
    "fsdp2": (Mesh(dp=2), fsdp("dp")),
    "fsdp3": (Mesh(dp=3), fsdp("dp")),
    "tp2": (Mesh(tp=2), SPLIT),
    "tp3": (Mesh(tp=3), SPLIT),
    "tp+sp": (Mesh(tp=2), SEQUENCE),
    "fsdp+tp": (Mesh(dp=2, tp=2), fsdp("dp") | SPLIT),
    "fsdp+tp+sp": (Mesh(dp=2, tp=2), fsdp("dp") | SEQUENCE),
    "fsdp4 kept in part": (Mesh(dp=4), fsdp("dp", reshard_after_forward=2)),
    "hsdp": (Mesh(rep=2, dp=2), hsdp(shard="dp", replicate="rep")),
}


def float8(scaling: str) -> shardc.Plan:
    return precision(matmul="float8", scaling=scaling, modules="layers")


def same_step(
    mesh: Mesh,
    plan: shardc.Plan,
    scaling: str,
    parts: int = 1,
    count: int = 1,
    of: tuple[Net, Tensor, Tensor] | None = None,
) -> None:
    """Loss and gradients are those of one device that takes ``count`` microbatches, of rows from ``parts`` ranks."""
    model, x, target = of or (case(64, 96, 24) if scaling == "mxfp8" else case())
    expected, loss = on_one_device(model, scaling, lambda name: name.startswith("layers.")), torch.tensor(0.0)
    rows = torch.arange(len(x)).unflatten(0, (parts, count, -1)).transpose(0, 1).flatten(1)
    for mine in rows:
        part = F.mse_loss(expected(x[mine]), target[mine]) / count
        part.backward()
        loss = loss + part.detach()
    run = shardc.Simulation(shardc.compile(model, mesh, plan | float8(scaling), loss=F.mse_loss, backend="eager"))
    torch.testing.assert_close(run(x, target), loss, rtol=1e-9, atol=0)
    run.backward()
    grads = {name: run.grad(name) for name, _ in expected.named_parameters()}
    torch.testing.assert_close(grads, {name: p.grad for name, p in expected.named_parameters()}, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise", "mxfp8"])
@pytest.mark.parametrize("name", PLANS)
def test_a_step_is_that_of_one_device(name: str, scaling: str) -> None:
    same_step(*PLANS[name], scaling)


# --- sizes that do not divide: weights of 32 and 64, and batches of 5 rows, over three ranks

UNEVEN = {
    "fsdp": (Mesh(dp=3), fsdp("dp"), 12),
    "rows": (Mesh(dp=3), fsdp("dp"), 5),
    "tp": (Mesh(tp=3), SPLIT, 12),
    "fsdp+tp": (Mesh(dp=2, tp=3), fsdp("dp") | SPLIT, 12),
}


@pytest.mark.filterwarnings("ignore::shardc.errors.ShardcWarning")
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("name", UNEVEN)
def test_sizes_that_do_not_divide(name: str, scaling: str) -> None:
    mesh, plan, rows = UNEVEN[name]
    same_step(mesh, plan, scaling, 1, 1, case(32, 64, rows))


MICROBATCHES = {
    "fsdp": (Mesh(dp=2), fsdp("dp"), 3),
    "fsdp level 2": (Mesh(dp=2), fsdp("dp", 2), 2),
    "fsdp+tp+sp": (Mesh(dp=2, tp=2), fsdp("dp") | SEQUENCE, 2),
}


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("name", MICROBATCHES)
def test_scales_are_those_of_a_microbatch(name: str, scaling: str) -> None:
    mesh, plan, count = MICROBATCHES[name]
    same_step(mesh, plan | shardc.microbatches(count), scaling, 2, count)


def test_scales_are_those_of_a_microbatch_on_stages() -> None:
    plan = fsdp("dp", 2) | shardc.pp("pp", microbatches=2)
    same_step(Mesh(pp=2, dp=2), plan, "tensorwise", 2, 2)


def test_a_block_may_be_of_several_ranks() -> None:
    """Of 16 rows with 4 tokens, each of 4 ranks has half of a block of the sums over tokens, and of those over 64."""
    same_step(Mesh(dp=4), fsdp("dp"), "mxfp8", of=case(64, 96, 16))
    same_step(Mesh(tp=4), SPLIT, "mxfp8", of=case(64, 64, 16))


def test_blocks_of_a_microbatch() -> None:
    plan = fsdp("dp") | shardc.microbatches(2)
    same_step(Mesh(dp=2), plan, "mxfp8", 2, 2, case(64, 96, 32))
    with pytest.raises(PlanError, match="scales of blocks of 32 tokens, which microbatches cut"):
        same_step(Mesh(dp=2), plan, "mxfp8", 2, 2, case(64, 96, 16))


# --- what is sent


def program(plan: shardc.Plan, **axes: int) -> shardc.Program:
    model, x, target = case()
    module = shardc.compile(model.float(), Mesh(axes), plan, loss=F.mse_loss, backend="eager")
    return module.lower(x.float(), target.float())


def test_float8_is_gathered_and_its_maximum_is_over_the_axes_that_split_it() -> None:
    low = precision(param=torch.bfloat16)
    graph = program(fsdp("dp") | SEQUENCE | low | float8("tensorwise"), dp=2, tp=2).graph("collectives")
    values = {
        ir.info(node).name: (node, ir.value(node)) for node in graph.nodes if node.op != "output" and ir.is_tensor(node)
    }
    assert str(values["layers.0.up.weight.amax"][1]) == "f32[]{max:dp,max:tp}"
    assert str(values["layers.0.gate.view.amax"][1]) == "bf16[]{max:dp,max:tp}"
    gathers = [(name, value) for name, (node, value) in values.items() if node.target is ops.all_gather]
    matrices = [value for name, value in gathers if "layers." in name and len(value.shape) == 2]
    assert len(matrices) > 12 and all(value.itemsize == 1 for value in matrices)  # weights, activations and gradients
    assert all(value.itemsize == 2 for name, value in gathers if name.startswith("head."))


def test_weights_are_gathered_as_the_level_says_behind_one_reduction_of_their_maxima() -> None:
    again, kept = (program(fsdp("dp", level) | float8("tensorwise"), dp=2) for level in (3, 2))
    matrices = [
        [sum(value.dtype == torch.uint8 for value in ir.info(node).tensors) for node in starts]
        for starts in (gathers_in(again, "schedule"), gathers_in(again, "schedule.backward"))
    ]
    assert [sum(each) for each in matrices] == [6, 6] and all(max(each) == 6 for each in matrices)
    assert not any(ir.info(node).tensors[0].dtype == torch.uint8 for node in gathers_in(kept, "schedule.backward"))
    reductions = [node for node in again.graph("schedule").nodes if collective_kind(node) == "all_reduce"]
    assert len(ir.info(reductions[0]).tensors) == 6  # of all weights


def gathers_in(program: shardc.Program, stage: str) -> list[fx.Node]:
    return [node for node in program.graph(stage).nodes if collective_kind(node) == "all_gather"]


def test_an_entry_about_products_leaves_dtypes_as_they_are() -> None:
    low = precision(param=torch.bfloat16, reduce=torch.float32)
    plan = low | precision(matmul="float8") | precision(param=torch.float32, modules="head")
    policies = plan.precision
    assert policies.of("layers.0").param == torch.bfloat16
    assert (policies.scaled("layers.0"), policies.scaled("head")) == ("tensorwise", "")
    assert shardc.Plan.from_json(plan.to_json()) == plan
    assert eval(str(plan), {"precision": precision, "torch": torch}) == plan


# --- errors


def test_a_size_that_is_no_multiple_of_16_is_refused() -> None:
    model, x, target = case(40)
    with pytest.raises(PlanError) as caught:
        shardc.compile(model, Mesh(dp=2), fsdp("dp") | float8("rowwise"), loss=F.mse_loss).lower(x, target)
    text = str(caught.value)
    assert "'layers.0.gate.weight' has shape [96, 40]" in text and "multiples of 16" in text
    assert 'precision(modules="layers", matmul="float8", scaling="rowwise")' in text
    assert "modules='layers.0.gate'" in text and "float8.py:" in text


@pytest.mark.parametrize(
    ("sizes", "what"),
    [
        (
            (48, 96, 16),
            "'layers.0.gate.weight' has shape [96, 48], and float8 products take sizes that are multiples of 32",
        ),
        ((64, 96, 15), "the gradient of 'layers.1.down.weight' is a sum over 60 tokens"),
    ],
)
def test_what_is_no_multiple_of_a_block_is_refused(sizes: tuple[int, int, int], what: str) -> None:
    model, x, target = case(*sizes)
    with pytest.raises(PlanError, match=re.escape(what)):
        shardc.compile(model, Mesh(dp=1), ddp("dp") | float8("mxfp8"), loss=F.mse_loss).lower(x, target)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"matmul": "float4"}, "matmul is 'float4', not 'float8'"),
        ({"matmul": "float8", "scaling": "blockwise"}, "scaling is 'blockwise', not"),
        ({"scaling": "rowwise"}, "scaling='rowwise' is of float8 products"),
    ],
)
def test_other_words_are_refused(wrong: dict[str, str], text: str) -> None:
    with pytest.raises(PlanError, match=re.escape(text)):
        precision(**wrong)


def test_modules_without_linear_layers_are_refused() -> None:
    model, x, target = case()
    plan = fsdp("dp") | precision(matmul="float8", modules="layers.*.norm")
    with pytest.raises(PlanError, match="no linear layer"):
        shardc.compile(model, Mesh(dp=2), plan, loss=F.mse_loss).lower(x, target)
