"""Checkpoints with policies by op, ``checkpoint_sequential`` and the composable ``checkpoint(module)``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import shardc
from shardc.ir import graph as ir
from shardc.ir.parse import parse
from shardc.ir.text import dump
from tests.higher_order import test_functions as functions
from tests.higher_order.on_ranks import equal_one_device
from tests.models.alike import trains_alike
from tests.ranks import run_ranks

aten = torch.ops.aten
WIDTH, BATCH = 8, 12
PRODUCTS = (aten.mm.default, aten.addmm.default)
MESHES: list[tuple[dict[str, int], shardc.Plan]] = [
    ({"dp": 2}, shardc.fsdp("dp", threshold=0)),
    ({"dp": 3}, shardc.ddp("dp")),
    (
        {"dp": 2, "tp": 2},
        shardc.fsdp("dp", threshold=0) | shardc.tp("tp", colwise=["**.up"], rowwise=["**.down"]),
    ),
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)).sin())


def policy(
    saved: tuple[object, ...], others: CheckpointPolicy, _: object, op: object, *args: Any, **kwargs: Any
) -> Any:
    return CheckpointPolicy.MUST_SAVE if op in saved else others


PREFER, MUST = CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_RECOMPUTE
# ops that a policy saves, and what it says of others
POLICIES = {
    "products": (PRODUCTS, PREFER),
    "one function": ((aten.tanh.default,), MUST),
    "nothing": ((), MUST),
    "everything": ((), CheckpointPolicy.MUST_SAVE),
}


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks, self.kind = nn.Sequential(*(Block() for _ in range(4))), kind
        if kind == "composable":
            composable(self.blocks[0])
            composable(self.blocks[1], context_fn=contexts("one function"))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "sequential":
            return checkpoint_sequential(self.blocks, 2, x, use_reentrant=False)
        for block in self.blocks:
            if self.kind in CONTEXTS:
                x = checkpoint(block, x, use_reentrant=False, context_fn=CONTEXTS[self.kind](self))
            elif self.kind in POLICIES:
                x = checkpoint(block, x, use_reentrant=False, context_fn=contexts(self.kind))
            else:
                x = block(x)
        return x

    def contexts(self) -> Any:
        return contexts("one function")()


def contexts(kind: str) -> Callable[[], Any]:
    return partial(create_selective_checkpoint_contexts, partial(policy, *POLICIES[kind]))


def closure() -> Callable[[], Any]:
    saved = [aten.tanh.default]

    def tanh_alone(_: object, op: object, *args: Any, **kwargs: Any) -> Any:
        return CheckpointPolicy.MUST_SAVE if op in saved else MUST

    return lambda: create_selective_checkpoint_contexts(tanh_alone)


# forms of ``context_fn`` that save what "one function" does
CONTEXTS: dict[str, Callable[[Net], Callable[[], Any]]] = {
    "lambda": lambda net: lambda: contexts("one function")(),
    "closure": lambda net: closure(),
    "method": lambda net: net.contexts,
}
KINDS = (*POLICIES, *CONTEXTS, "sequential", "composable")


@pytest.mark.parametrize(("mesh", "plan"), MESHES)
@pytest.mark.parametrize("kind", KINDS)
def test_trains_as_on_one_device(kind: str, mesh: dict[str, int], plan: shardc.Plan) -> None:
    torch.manual_seed(0)
    trains_alike(Net(kind), (torch.randn(BATCH, WIDTH),), mesh, plan, steps=2)


@lru_cache
def compiled(kind: str) -> shardc.Program:
    module = shardc.compile(Net(kind), shardc.Mesh(dp=2), shardc.ddp("dp"), loss=lambda x: x.square().mean())
    program = module.lower(torch.empty(BATCH, WIDTH))
    assert isinstance(program, shardc.Program)
    return program


def computed_again(kind: str) -> Counter[str]:
    """How many more products, tanh and sin the backward runs than without checkpoints, where it needs all three."""
    counts = []
    for program in (compiled(kind), compiled("everything")):
        assert program.backward is not None
        names = [getattr(node.target, "_opname", "") for node in program.backward.graph.nodes]
        counts.append(Counter(name for name in names if name in ("mm", "tanh", "sin")))
    counts[0].subtract(counts[1])
    return +counts[0]


def kept(kind: str) -> set[str]:
    """What forward computes in the first block and keeps for backward."""
    program = compiled(kind)
    assert program.forward is not None
    saved = [
        x for role, x in ir.outputs(program.forward.graph) if role.kind == "saved" and isinstance(x, torch.fx.Node)
    ]
    names = {ir.info(x).name for x in saved if x.op == "call_function"}
    return {name.removeprefix("blocks.0.") for name in names if name.startswith("blocks.0.")} - {"add"}


def test_what_a_policy_saves_is_kept_and_the_rest_runs_again() -> None:
    assert kept("products") == {"up.add"} and computed_again("products") == {"tanh": 4, "sin": 4}
    for kind in ("one function", *CONTEXTS):
        assert kept(kind) == {"tanh"} and computed_again(kind) == {"sin": 4}
    assert kept("nothing") == set() and computed_again("nothing") == {"mm": 4, "tanh": 4, "sin": 4}
    assert kept("everything") == {"tanh", "sin"}


def test_a_segment_of_a_sequence_and_a_composed_module_run_again() -> None:
    assert kept("sequential") == set() and computed_again("sequential")["mm"] == 3  # the last segment is no checkpoint
    assert kept("composable") == set() and computed_again("composable")["mm"] == 1


class Repeats(functions.Net):
    """A loop or a branch in a checkpoint; torch has no such on one device."""

    def forward(self, x: Tensor) -> Tensor:
        function, h = functions.KINDS[self.kind], self.a(x)
        if not torch.compiler.is_compiling():
            return function(self, h)
        return checkpoint(function, self, h, use_reentrant=False)


@pytest.mark.parametrize("kind", ["a branch", "a long scan", "a loop by a count"])
def test_loops_and_branches_run_again(kind: str) -> None:
    torch.manual_seed(0)
    trains_alike(Repeats(kind), (torch.randn(6, 5, 4),), {"dp": 2}, functions.FSDP, steps=1)
    module = shardc.compile(Repeats(kind), shardc.Mesh(dp=2), shardc.ddp("dp"), loss=lambda x: x.sum())
    program = module.lower(torch.empty(6, 5, 4))
    assert isinstance(program, shardc.Program) and program.forward is not None and program.backward is not None
    operation = {"a branch": "cond", "a long scan": "scan", "a loop by a count": "loop_gradient"}[kind]
    ran = [getattr(node.target, "_opname", "") for node in program.backward.graph.nodes]
    assert ran.count(operation) == (2 if operation == "scan" else 1)  # the scan, and that of its gradient
    saved = [
        x for role, x in ir.outputs(program.forward.graph) if role.kind == "saved" and isinstance(x, torch.fx.Node)
    ]
    assert all(x.meta["val"].numel() <= 60 for x in saved), saved  # no value of 200 steps


def test_text_and_parse() -> None:
    mesh = shardc.Mesh(dp=2)
    gm = compiled("products").forward
    assert gm is not None
    text = dump(gm, mesh, origins=True)
    assert re.search(r"\| region \d+ \| must_save", text) and dump(parse(text), mesh, origins=True) == text


def test_a_composed_module_compiles_once() -> None:
    module = shardc.compile(Net("composable"), shardc.Mesh(dp=2), shardc.ddp("dp"), backend="eager")
    simulation = shardc.Simulation(module)
    for _ in range(3):
        simulation(torch.randn(BATCH, WIDTH))
    assert len(module.shardc.programs) == 1


def on_ranks(found: bool) -> None:
    models = [partial(Net, kind) for kind in ("products", "sequential", "composable")]
    equal_one_device(models, (torch.randn(BATCH, WIDTH, dtype=torch.float64),), ("eager",), found)


def test_on_two_ranks_and_from_the_store(tmp_path: Path) -> None:
    run_ranks(2, partial(on_ranks, False), programs=tmp_path)
    run_ranks(2, partial(on_ranks, True), programs=tmp_path)
