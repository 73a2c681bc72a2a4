"""A split sequence on real ranks: training equals one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.nn.attention.flex_attention as flex
from torch import fx

import shardc
from shardc.custom_ops import flex_ops
from shardc.ir.mesh import Mesh
from tests.models.alike import relative
from tests.ranks import device_mesh, run_ranks
from tests.sequence.models import batch, build

METHODS = ("gather", "ring", "ulysses")


def trains(
    mesh: Mesh, name: str, method: str, backend: str, dtype: torch.dtype = torch.float32, limit: float = 1e-4,
    length: int = 8,
) -> None:  # fmt: skip
    """Two steps of SGD, of batches with padding where the model knows it."""
    model, theirs = build(name).to(dtype), build(name).to(dtype)
    plan = shardc.fsdp(mesh.axes) | shardc.cp("cp", method=method)
    module = shardc.compile(theirs, device_mesh(mesh), plan, backend=backend)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, module)]
    for turn in range(2):
        given = {key: x.roll(turn, 0) for key, x in batch(4, length, padding=name != "own").items()}
        loss = model(**given)["loss"]
        made = module(**module.shard_inputs(**given)[1])["loss"]
        assert relative(made.detach(), loss.detach()) < limit
        loss.backward()
        made.backward()
        for (key, mine), other in zip(module.named_parameters(), model.parameters(), strict=True):
            assert relative(mine.grad.full_tensor(), other.grad, 1e-3) < limit * 10, key
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def keeps(method: str) -> None:
    """What forward leaves for backward is what was predicted, and about a fourth of what one rank alone keeps."""
    from benchmarks.sequence import left_for_backward

    given, plan = batch(2, 512), shardc.cp("cp", method=method)
    found = []
    for where in (Mesh(cp=1), device_mesh(Mesh(cp=4))):
        module = shardc.compile(build("own", width=32, layers=4).float(), where, plan, backend="eager")
        memory = module.lower(**given).schedule("cpu").memory
        found.append(max(sample.sizes[4] for sample in memory.samples))
    mine = module.shard_inputs(**given)[1]
    kept = left_for_backward(module, lambda: module(**mine)["loss"])
    assert abs(kept / found[1] - 1) < 0.1, (kept, found)
    more = 1.4 if method == "ulysses" else 1.01  # what attention gives is kept as heads and as sequence
    assert found[1] < more * found[0] / 4, found


def shards_inputs() -> None:
    """Each rank's part of the sequence: one element in two, or one piece."""
    tokens = torch.arange(16).view(2, 8)
    for order, expected in (("striped", slice(None, None, 2)), ("contiguous", slice(0, 4))):
        plan = shardc.cp("cp", order=order)
        module = shardc.compile(build("own").float(), device_mesh(Mesh(cp=2)), plan, backend="eager")
        first, _ = module.shard_inputs(tokens, tokens)
        if torch.distributed.get_rank() == 0:
            assert torch.equal(first, tokens[:, expected]), order


def test_two_ranks() -> None:
    run_ranks(
        2,
        *(partial(trains, Mesh(cp=2), "own", method, "eager") for method in METHODS),
        partial(trains, Mesh(cp=2), "own", "ring", "eager", length=9),
        partial(trains, Mesh(cp=2), "own", "ring", "eager", torch.bfloat16, 0.05),
        partial(trains, Mesh(cp=2), "own", "ring", "inductor"),
        shards_inputs,
    )


@pytest.mark.slow
def test_lowered_by_inductor() -> None:
    run_ranks(
        2,
        *(partial(trains, Mesh(cp=2), "own", method, "inductor", dtype, limit)
          for method in METHODS for dtype, limit in ((torch.float32, 1e-4), (torch.bfloat16, 0.05))),
        *(partial(trains, Mesh(cp=2), "llama", method, "inductor") for method in METHODS),
    )  # fmt: skip


@pytest.mark.slow
def test_four_ranks() -> None:
    run_ranks(
        4,
        *(partial(trains, Mesh(dp=2, cp=2), "own", method, "inductor") for method in METHODS),
        partial(trains, Mesh(cp=4), "own", "ring", "eager", length=10),
        *(partial(keeps, method) for method in METHODS),
        partial(trains, Mesh(cp=4), "mistral", "ulysses", "eager"),
    )


def trains_with_documents(
    method: str, backend: str, dtype: torch.dtype = torch.float64, tolerance: float = 1e-9
) -> None:
    """Layers of `flex_attention` with one mask, whose visible blocks a rank computes once, equal one device."""
    from tests.sequence.test_flex import LENGTH, WIDTH, Layers

    torch.manual_seed(0)
    with patch.object(flex, "_validate_device", lambda *_: None):
        model = Layers(2).double()
        module = shardc.compile(
            copy.deepcopy(model).to(dtype), device_mesh(Mesh(cp=2)), shardc.cp("cp", method=method), backend=backend
        )
        x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
        document = torch.randint(0, 9, (2, LENGTH)).sort(-1).values
        loss = model(x, document).square().mean()
        loss.backward()
        out = module(*module.shard_inputs(x.to(dtype), document))
        (out.square().mean()).backward()
    for (key, mine), other in zip(module.named_parameters(), model.parameters(), strict=True):
        assert relative(mine.grad.full_tensor().double(), other.grad) < tolerance, key


def trains_by_torchs_kernel(method: str) -> None:
    """A program for CUDA calls torch's op, with positions of the rank; here this runs op by op, on a CPU."""
    ops: list[object] = []

    def by_op(gm: fx.GraphModule, inputs: object, **_: object) -> Callable[[list[object]], object]:
        ops.extend(str(node.target) for node in gm.graph.nodes)
        return lambda operands: fx.Interpreter(gm).boxed_run(operands)

    with (
        patch("shardc.rules.flex_rules.mask_op", lambda _: flex_ops.FLEX_TABLES),
        patch("shardc.lower.flex_kernel.takes", lambda *_: True),
        patch("shardc.lower.inductor.compile_fx_inner", by_op),
        patch("shardc.lower.inductor.check_order"),  # of generated code
    ):
        trains_with_documents(method, "inductor", torch.float32, 1e-5)
    assert {"flex_attention", "flex_attention_backward", "shardc_attention.flex_tables.default"} <= set(ops)
    assert not {"shardc_attention.flex.default", "shardc_attention.flex_gradient.default"} & set(ops)


@pytest.mark.medium
def test_documents_on_two_ranks() -> None:
    run_ranks(
        2,
        *(partial(trains_with_documents, method, "eager") for method in METHODS),
        partial(trains_with_documents, "gather", "inductor"),
        *(partial(trains_by_torchs_kernel, method) for method in METHODS),
    )
