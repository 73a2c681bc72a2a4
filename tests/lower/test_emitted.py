"""What Inductor emits: collectives in the schedule's order, and nothing released that is on its way."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, fx
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import shardc.runtime.groups  # noqa: F401  (implements the collectives)
from shardc.custom_ops.flops import is_dense
from shardc.errors import VerifyError
from shardc.ir.emitted import check_order, collective_at, of_graph, of_source, uses_of
from shardc.ir.executable import FORWARD, INFERENCE
from shardc.lower.inductor import _decomposed, lowered_for
from tests.lower.lowering import GROUP, lowered

aten, c10d, direct = torch.ops.aten, torch.ops._c10d_functional, torch.ops.shardc


def late_waits(x: Tensor, y: Tensor) -> list[Tensor]:
    """Three collectives of values that nothing else reads, waited for in another order behind two products."""
    (summed,) = direct.all_reduce_coalesced([x + 1], "sum", GROUP)
    moved = direct.permute_ranks(x + 2, [1, 0], GROUP)
    native = c10d.all_gather_into_tensor(x + 3, 2, GROUP)
    between = torch.mm(torch.mm(y, y), y)
    return [c10d.wait_tensor(native), c10d.wait_tensor(moved), c10d.wait_tensor(summed), between]


def emitted(inference: bool) -> tuple[fx.GraphModule, str]:
    with FakeTensorMode():
        x, y = torch.empty(64, 64), torch.empty(64, 64)
    gm = make_fx(late_waits)(x, y)
    # A cache could give the code of another version.
    with inductor_config.patch(force_disable_caches=True):
        return gm, lowered(gm, INFERENCE if inference else FORWARD).source_code


def low(x: Tensor, w: Tensor, image: Tensor, kernel: Tensor, q: Tensor) -> list[Tensor]:
    """Products, a convolution and attention with their gradients, in the dtype of what is given."""
    mixed = torch.addmm(torch.mm(x, w), x, w) + torch.mm(w.t(), x.t()).t()
    seen = aten.convolution.default(image, kernel, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    around = aten.convolution_backward.default(
        seen, image, kernel, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
    )
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu.default(q, q * 0.5, q, 0.0, True)
    back = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(q, q, q * 0.5, q, out, lse, 0.0, True)
    return [mixed, torch.bmm(q[0], q[0].mT), seen, *around[:2], out, *back]


@pytest.mark.parametrize("slow", [pytest.param(True, marks=pytest.mark.slow), False])
def test_products_of_few_bits_run_in_float32_where_the_cpu_lacks_them(
    slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardc.lower.inductor.slow_dtypes", lambda: frozenset([torch.bfloat16] if slow else []))
    generator = torch.Generator().manual_seed(0)
    shapes = [(16, 8), (8, 16), (2, 4, 8, 8), (6, 4, 3, 3), (2, 4, 8, 16)]
    given = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in given]
    gm = make_fx(low)(*fakes)
    ran = [node for node in _decomposed(gm, fakes).graph.nodes if is_dense(node.target)]
    assert {node.args[0].meta["val"].dtype for node in ran} == {torch.float32 if slow else torch.bfloat16}
    assert len(ran) == 8
    expected = low(*(x.double() for x in given))
    with inductor_config.patch(force_disable_caches=True):
        made = lowered(gm, INFERENCE)(given)
    for ours, theirs in zip(made, expected, strict=True):
        assert ours.dtype == torch.bfloat16
        assert ((ours - theirs).abs().max() / theirs.abs().max()).item() < 2**-6


def test_results_have_the_strides_that_they_were_traced_with() -> None:
    """Inductor computes convolutions with channels last; what the backward half saves of them it is compiled for."""

    def convolved(x: Tensor, weight: Tensor) -> list[Tensor]:
        y = torch.ops.aten.convolution.default(x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        return [y, y.relu()]

    with FakeTensorMode():
        gm = make_fx(convolved)(torch.empty(2, 8, 8, 8), torch.empty(16, 8, 3, 3))
    x, weight = torch.randn(2, 8, 8, 8), torch.randn(16, 8, 3, 3)
    with inductor_config.patch(force_disable_caches=True):
        made = lowered(gm, FORWARD)([x, weight])
    for result, expected in zip(made, convolved(x, weight), strict=True):
        assert result.stride() == expected.stride()
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("inference", [False, True])
def test_order_and_waits_are_kept(inference: bool) -> None:
    gm, source = emitted(inference)
    assert of_source(source) == of_graph(gm.graph)
    assert of_source(source) == [
        f"all_reduce_coalesced({GROUP})", f"permute_ranks({GROUP})", f"all_gather_into_tensor({GROUP})",
    ]  # fmt: skip
    lines = source.splitlines()
    products = [at for at, line in enumerate(lines) if "extern_kernels.mm(" in line]
    waits = [at for at, line in enumerate(lines) if "wait_tensor.default(" in line]
    assert len(products) == 2 and len(waits) == 3
    assert max(products) < min(waits), "a wait was moved in front of the compute that it should be hidden by"


@pytest.mark.parametrize("inference", [False, True])
def test_what_is_on_its_way_is_not_released(inference: bool) -> None:
    """Memory that Inductor takes for free is written over, perhaps before it was sent."""
    lines = emitted(inference)[1].splitlines()
    starts = [re.search(r"torch\.ops\.shardc\.\w+\.default\(\[?(buf\d+)", line) for line in lines]
    sent = [found.group(1) for found in starts if found]
    first_wait = next(at for at, line in enumerate(lines) if "wait_tensor.default(" in line)
    assert len(sent) == 2
    for name in sent:
        released = [line for line in lines[:first_wait] if re.search(rf"\bdel {name}\b", line)]
        assert not released, f"{name} is on its way: {released}"


def calls(x: Tensor, y: Tensor, z: Tensor) -> list[Tensor]:
    """Collectives in messages, in planned memory; one is not waited for, one was started elsewhere."""
    first, second = direct.all_gather_into_tensor_coalesced([x, y], 2, GROUP, [0, 1, 2])
    (summed,) = direct.all_reduce_coalesced([y], "sum", GROUP, [3])
    return [second, c10d.wait_tensor(first), c10d.wait_tensor(z), c10d.wait_tensor(summed)]


def test_calls_alone_are_not_given_to_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their code says of memory what Inductor's would, and what is sent is in use until what comes was waited for."""
    with FakeTensorMode():
        gm = make_fx(calls)(*(torch.empty(4, 4) for _ in range(3)))
    with inductor_config.patch(force_disable_caches=True):
        theirs = uses_of(lowered_for(gm, [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")], FORWARD)[1])
    monkeypatch.setattr("shardc.lower.lowered", None)
    source = lowered(gm, FORWARD).source_code
    assert of_source(source) == of_graph(gm.graph)
    ours = uses_of(source)
    assert (ours.results, ours.wires, set(ours.waits)) == (theirs.results, theirs.wires, set(theirs.waits))
    assert ours.results == [{1}, {0}, {-3}, {3}] and set(ours.spans) == {0, 1, 2, 3}
    at = {line.strip(): number for number, line in enumerate(source.splitlines())}
    first, _, summed = (number for line, number in at.items() if "wait_tensor" in line)
    assert first < at["del arg0"] and summed < at["del arg1"], source


def test_another_order_is_an_error() -> None:
    gm, source = emitted(inference=False)
    for old, new, said in (
        ("torch.ops.shardc.permute_ranks", "torch.ops.shardc.all_gather", r"starts all_gather\(.* as collective 1"),
        (f"'{GROUP}'", "'shardc:tp'", r"starts all_reduce_coalesced\(shardc:tp\) as collective 0"),
    ):
        with pytest.raises(VerifyError, match=said):
            check_order(gm.graph, source.replace(old, new))
    with pytest.raises(VerifyError, match="nothing more as collective 0"):
        check_order(gm.graph, "")


def test_lines_tell_their_collective() -> None:
    """The waits stand in another order than the starts; an op that is neither is in no collective."""
    _, source = emitted(False)
    lines = source.splitlines()
    found = [collective_at(lines, at + 1) for at, line in enumerate(lines) if "wait_tensor.default(" in line]
    assert found == [2, 1, 0]
    starts = [at + 1 for at, line in enumerate(lines) if of_source(line)]
    assert [collective_at(lines, at) for at in starts] == [0, 1, 2]
    (product,) = {collective_at(lines, at + 1) for at, line in enumerate(lines) if "extern_kernels.mm(" in line}
    assert product is None
