"""Layouts are chosen, and schedules predicted, by the operations that torch counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import shardc
from shardc.cost.compute import flops_of
from shardc.custom_ops.flops import is_dense
from shardc.passes.op_calls import call_of
from shardc.rules import RULES, spec_of
from shardc.rules.proof import Sample
from tests.rules.samples import samples

DENSE = sorted({op for op in RULES if any(is_dense(sample.op) for sample in samples(op))})


def counted(sample: Sample) -> tuple[int, int]:
    """(operations by the rule, operations that torch counts when the op runs)."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        given = [torch.empty_like(x, device=sample.device) if isinstance(x, Tensor) else x for x in sample.args]
    with fake, FlopCounterMode(display=False) as counter:
        made = replace(sample, args=tuple(given)).dense()
    spec = spec_of(sample.call(made))
    assert spec is not None
    return spec.flops, counter.get_total_flops()


# What torch's counter does not know.
OTHERS = (
    "for_cpu",
    "shardc_recurrent",
    "shardc_experts",
    "shardc_attention",
    "shardc_window",
    "shardc_float8",
    "shardc_function",
    "_int_mm",
)


@pytest.mark.parametrize("op", [op for op in DENSE if not any(other in op for other in OTHERS)])
def test_a_dense_op_counts_as_in_torch(op: str) -> None:
    for sample in samples(op):
        ours, theirs = counted(sample)
        assert ours == theirs > 0, str(sample)


def test_a_scan_counts_the_products_of_all_steps() -> None:
    forward, backward = samples("shardc_function.scan")[:2]
    assert (counted(forward)[0], counted(backward)[0]) == (3 * 2 * 4**3, 3 * 2 * 2 * 4**3)


@pytest.mark.parametrize(("op", "products"), [("", 2), ("_backward", 5)])
def test_attention_on_a_cpu_counts_its_products(op: str, products: int) -> None:
    for sample in samples(f"aten._scaled_dot_product_flash_attention_for_cpu{op}"):
        ours, _ = counted(sample)
        query, key = (x.shape for x in sample.args[bool(op) :][:2])
        batch, heads, rows, width = query
        assert ours == products * 2 * batch * heads * rows * key[2] * width


@pytest.mark.parametrize(("op", "products"), [("call", 2), ("gradient", 5)])
def test_attention_of_a_sequence_counts_the_same(op: str, products: int) -> None:
    for sample in samples(f"shardc_attention.{op}"):
        query, key = (x.shape for x in sample.args[int(op == "gradient") :][:2])
        batch, heads, rows, width = query
        assert counted(sample)[0] == products * 2 * batch * heads * rows * key[2] * width


@pytest.mark.parametrize("op", ["convolve", "convolve_weight"])
def test_a_convolution_of_a_sequence_counts_as_in_torch(op: str) -> None:
    for sample in samples(f"shardc_window.{op}"):
        x, weight, before, after, dilation, groups = sample.args[int(op == "convolve_weight") :]
        with FlopCounterMode(display=False) as counter:
            F.conv1d(F.pad(x, (before, after)), weight, dilation=dilation, groups=groups)
        assert counted(sample)[0] == counter.get_total_flops() > 0


@pytest.mark.parametrize("op", ["steps", "steps_backward"])
def test_a_recurrent_layer_counts_the_product_of_each_step(op: str) -> None:
    for sample in samples(f"shardc_recurrent.{op}"):
        time, rows, _ = sample.args[0].shape
        assert counted(sample)[0] == 2 * time * rows * sample.args[2].numel()


@pytest.mark.parametrize(("op", "times"), [("call", 1), ("gradient", 2)])
def test_experts_count_the_products_of_the_rows_that_there_are(op: str, times: int) -> None:
    for sample in samples(f"shardc_experts.{op}"):
        index, params = sample.args[times], sample.args[times + 2]
        each = sum(param[0].numel() for param in params)
        assert counted(sample)[0] == times * 2 * index.numel() * each


@pytest.mark.slow
def test_an_op_that_is_not_dense_counts_nothing() -> None:
    """What it costs are the bytes that it reads and writes."""
    others = [sample for op in RULES for sample in samples(op)[:1] if not is_dense(sample.op)]
    specs = [(str(sample), spec_of(sample.call(sample.dense()))) for sample in others]
    assert [sample for sample, spec in specs if spec is not None and spec.flops] == []


class Products(nn.Module):
    """Products by many names."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 16)
        self.conv = nn.Conv2d(4, 8, 3, padding=1, groups=2)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.weight = nn.Parameter(torch.randn(4, 16, 6))

    def forward(self, x: Tensor, image: Tensor) -> Tensor:
        rows = self.linear(x)  # [4, 10, 16]
        heads = torch.einsum("bsd,bde->bse", rows, self.weight)
        scores = torch.baddbmm(torch.zeros(()), heads, heads.transpose(1, 2))
        mixed = torch.addmm(rows[0, :, :10], scores[0], scores[1])
        pictures = self.up(F.relu(self.conv(image)))
        return mixed.square().sum() + pictures.square().sum() + torch.einsum("ij,ij,ik->jk", *[mixed] * 3).sum()


def test_the_products_of_a_model_count_as_in_torch() -> None:
    torch.manual_seed(0)
    model, inputs = Products(), (torch.randn(4, 10, 8, requires_grad=True), torch.randn(2, 4, 6, 6, requires_grad=True))
    module = shardc.compile(model, shardc.Mesh(dp=1), shardc.ddp("dp"), backend="eager")
    graph = module.lower(*inputs).graph("propagate")
    with FlopCounterMode(display=False) as counter:
        model(*inputs).backward()
    dense = [node for node in graph.nodes if node.op == "call_function" and is_dense(node.target)]
    specs = [spec_of(call_of(node)) for node in dense]
    assert sum(spec.flops for spec in specs if spec is not None) == counter.get_total_flops()
    assert [spec.flops for spec in specs if spec is not None] == [flops_of(node) for node in dense]


def test_attention_is_no_dearer_than_the_products_around_it() -> None:
    """A head of 128 once counted 128 times, so that splitting attention was worth any reshard."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    q = torch.empty(1, 8, 64, 128, device="meta")
    sample = Sample(attention, (q, q, q, 0.0, True))
    spec = spec_of(sample.call([q, q[..., 0]]))
    assert spec is not None and spec.flops == 4 * 8 * 64 * 64 * 128
