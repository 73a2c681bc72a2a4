"""`flex_attention`: score and mask functions, what they capture, and the layouts of all of it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.attention.flex_attention as flex
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

import shardc
from shardc.custom_ops import flex_ops
from shardc.errors import CaptureError
from shardc.ir.parse import parse
from shardc.ir.text import dump
from tests.higher_order.on_ranks import equal_one_device
from tests.models.alike import trains_alike
from tests.ranks import run_ranks

BATCH, HEADS, LENGTH, WIDTH = 6, 4, 12, 4
FSDP = shardc.fsdp("dp", threshold=0)
TP = FSDP | shardc.tp("tp", colwise=["q", "k", "v"], rowwise=["o"])
ELSEWHERE = torch.zeros(LENGTH, device="meta")


@pytest.fixture(autouse=True)
def _gradients_on_cpus() -> Iterator[None]:
    """Lets the oracle, torch's own eager flex attention, take gradients on a CPU: only its check refuses them."""
    with patch.object(flex, "_validate_device", lambda *_: None), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        yield


class Net(nn.Module):
    slopes: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        width = HEADS * WIDTH
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.head_bias, self.by_distance = (
            nn.Parameter(torch.randn(HEADS)),
            nn.Parameter(torch.randn(HEADS, 2 * LENGTH)),
        )
        self.register_buffer("slopes", torch.randn(HEADS))
        self.block_mask = create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu")
        self.kind, self.lazy = kind, None

    def forward(self, x: Tensor, document: Tensor) -> Tensor:
        q, k, v = (layer(x).view(-1, LENGTH, HEADS, WIDTH).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = KINDS[self.kind](self, q, k, v, document)
        return self.o(attended.transpose(1, 2).reshape(x.shape))


def causal(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def by_document(document: Tensor, window: int, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (document[batch, i] == document[batch, j]) & (i >= j) & (i - j < window)


def scored(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda net, q, k, v, document: flex_attention(q, k, v, score_mod=partial(function, net))


def masked(net: Net, q: Tensor, k: Tensor, v: Tensor, document: Tensor) -> Tensor:
    mask = partial(by_document, document, 5)
    return flex_attention(q, k, v, block_mask=create_block_mask(mask, q.shape[0], None, LENGTH, LENGTH, device="cpu"))


def mask_of_the_first_call(net: Any, q: Tensor, k: Tensor, v: Tensor, document: Tensor) -> Tensor:
    if net.lazy is None:
        net.lazy = create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu")
    return flex_attention(q, k, v, block_mask=net.lazy)


def no_keys(net: Net, q: Tensor, k: Tensor, v: Tensor, document: Tensor) -> Tensor:
    """The first query sees no key."""
    mask = create_block_mask(lambda b, h, i, j: i > j, None, None, LENGTH, LENGTH, device="cpu")
    return flex_attention(q, k, v, block_mask=mask)


def with_lse(net: Net, q: Tensor, k: Tensor, v: Tensor, document: Tensor) -> Tensor:
    out, lse = flex_attention(q, k, v, block_mask=net.block_mask, return_lse=True, scale=0.3)
    return out + lse.unsqueeze(-1)


KINDS: dict[str, Callable[..., Tensor]] = {
    "plain": lambda net, q, k, v, document: flex_attention(q, k, v),
    "slopes of heads": scored(lambda net, s, b, h, i, j: s + net.slopes[h] * (i - j)),
    "a trained bias of heads": scored(lambda net, s, b, h, i, j: s + net.head_bias[h]),
    "a trained bias by distance": scored(lambda net, s, b, h, i, j: s + net.by_distance[h, i - j + LENGTH]),
    "a capped score": scored(lambda net, s, b, h, i, j: 2 * torch.tanh(s / 2)),
    "documents in a window": masked,
    "a mask of the module": lambda net, q, k, v, document: flex_attention(q, k, v, block_mask=net.block_mask),
    "a mask that the first call makes": mask_of_the_first_call,
    "no keys": no_keys,
    "fewer heads of keys": lambda net, q, k, v, document: flex_attention(q, k[:, ::2], v[:, ::2], enable_gqa=True),
    "the log-sum-exp": with_lse,
    "a checkpoint": lambda net, q, k, v, document: checkpoint(flex_attention, q, k, v, use_reentrant=False),
}


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, LENGTH, HEADS * WIDTH, generator=generator)
    return x, torch.randint(0, 3, (BATCH, LENGTH), generator=generator).sort(-1).values


@pytest.mark.parametrize("kind", KINDS)
def test_trains_as_on_one_device(kind: str) -> None:
    torch.manual_seed(0)
    trains_alike(Net(kind), batch(), {"dp": 2, "tp": 2}, TP, steps=2)


@pytest.mark.parametrize("skips", [True, False], ids=["as on CPUs", "as on GPUs"])
@pytest.mark.parametrize("kind", ["documents in a window", "a trained bias by distance", "no keys", "the log-sum-exp"])
def test_in_several_blocks(kind: str, skips: bool) -> None:
    sizes = {"ROWS": 4, "COLUMNS": 3, "STRIP": 5, "SCORES": 1, "skips": lambda device: skips}
    with patch.multiple(flex_ops, **sizes):
        trains_alike(Net(kind), batch(), {"dp": 2}, FSDP, steps=1)


@pytest.mark.parametrize(
    ("mesh", "plan"),
    [
        ({"dp": 2}, FSDP),
        ({"dp": 3}, FSDP),
        ({"tp": 4}, shardc.tp("tp", colwise=["q", "k", "v"], rowwise=["o"])),
        ({"dp": 2, "cp": 2}, FSDP | shardc.cp("cp")),
    ],
)
@pytest.mark.parametrize("kind", ["documents in a window", "a trained bias by distance"])
def test_on_other_meshes(kind: str, mesh: dict[str, int], plan: shardc.Plan) -> None:
    torch.manual_seed(0)
    trains_alike(Net(kind), batch(), mesh, plan, steps=1)


def test_the_forward_is_that_of_torchs_kernel_as_it_is() -> None:
    net, (x, document) = Net("documents in a window").double(), batch()
    module = shardc.compile(net, shardc.Mesh(dp=2), shardc.fsdp("dp"), backend="eager")
    with torch.no_grad():
        out = shardc.Simulation(module)(x.double(), document, grad=False)
        torch.testing.assert_close(out, net(x.double(), document), rtol=1e-9, atol=1e-12)


def lowered(kind: str, mesh: shardc.Mesh, plan: shardc.Plan) -> shardc.Program:
    module = shardc.compile(Net(kind), mesh, plan, loss=lambda out: out.square().mean(), backend="eager")
    program = module.lower(*batch())
    assert isinstance(program, shardc.Program)
    return program


@pytest.mark.parametrize("kind", KINDS)
def test_batch_and_heads_are_free_and_what_functions_read_lies_with_them(kind: str) -> None:
    mesh = shardc.Mesh(dp=2, tp=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", shardc.ShardcWarning)
        warnings.filterwarnings("ignore", message="the model changes its attribute")
        program = lowered(kind, mesh, TP)
    text = program.text("collectives")
    forward = re.findall(r"%(\S+): .* = all_\w+\(", text.partition("backward:")[0])
    layers = ("q.weight", "k.weight", "v.weight", "o.weight")
    assert set(forward) - {f"{name}.full" for name in (*layers, "head_bias", "by_distance")} <= {
        "o.view.1.summed",
        "sum.summed",
        "sum.1.summed",
        "sum.2.summed",
    }, forward
    assert dump(parse(text), mesh) == text


def test_where_it_is_written_out_a_ring_is_said_not_to_apply() -> None:
    KINDS["a sum"] = lambda net, q, k, v, document: flex_attention(
        q, k, v, score_mod=lambda s, b, h, i, j: s + torch.stack([i, j]).amax()
    )
    with pytest.warns(shardc.ShardcWarning, match=r"'ring' is not applied(.|\n)*source: .*test_flex_attention.py:\d+"):
        program = lowered("a sum", shardc.Mesh(cp=2), shardc.cp("cp", method="ring"))
    assert "%bmm: f32[24,(6 2@cp),12] = bmm(" in program.text("propagate")


def bad(function: Callable[..., Tensor]) -> None:
    class Bad(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return flex_attention(q, q, q, score_mod=function)

    q = torch.randn(2, 2, LENGTH, 4)
    shardc.compile(Bad(), shardc.Mesh(dp=2), shardc.Plan(inputs=[("dp", None, None, None)])).lower(q)


def test_a_function_that_reads_a_tensor_on_another_device() -> None:
    with pytest.raises(CaptureError, match=r"two devices(.|\n)*source: .*flex_attention.py:\d+(.|\n)*fix: .*buffer"):
        bad(lambda s, b, h, i, j: s + ELSEWHERE[i])


def test_a_function_that_branches_on_values() -> None:
    with pytest.raises(CaptureError, match=r"ata-dependent branching(.|\n)*source: .*flex_attention.py:\d+"):
        bad(lambda s, b, h, i, j: s if i > j else s * 2)


def steps(found: bool) -> None:
    inputs: tuple[Any, ...] = batch()
    models = [partial(Net, kind) for kind in ("documents in a window", "a trained bias by distance")]
    with patch.object(flex, "_validate_device", lambda *_: None):
        equal_one_device(models, (inputs[0].double(), inputs[1]), ("eager", "inductor"), found)
        equal_one_device(
            models[:1], (inputs[0].double(), inputs[1]), ("inductor",), found, shardc.cp("dp", method="ring")
        )


def test_on_two_ranks_and_from_the_store(tmp_path: Path) -> None:
    run_ranks(2, partial(steps, False), programs=tmp_path)
    run_ranks(2, partial(steps, True), programs=tmp_path)
