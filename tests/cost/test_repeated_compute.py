"""A compile warns of work that its ranks repeat, once, where it is much; and the entry that it names mends it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from examples.models import convnet, gpt2, llama
from shardc.cost.compute import LEAST, SHARE, dense, flops_of, is_dense
from shardc.ir import graph as ir
from shardc.ir.mesh import Mesh
from shardc.program import Program

WIDTH = 1024


class Pair(nn.Module):
    """Two matrices, up and down, and a head; 6 * rows * width * (8 * width + head) operations a step."""

    def __init__(self, head: int = 0) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, head, bias=False) if head else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(torch.relu(self.up(x)))).sum()


TP = shardc.tp("tp", colwise=["up"], rowwise=["down"])


def said(model: nn.Module, mesh: Mesh, plan: Any, *args: Tensor, **given: Any) -> list[str]:
    """The warnings of compiling ``model`` and lowering it twice."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = shardc.compile(model, mesh, plan, **given)
        module.lower(*args)
        module.eval().lower(*args)
    return [str(each.message) for each in caught if issubclass(each.category, shardc.ShardcWarning)]


def pair(head: int = 0, rows: int = 512) -> tuple[Pair, Tensor]:
    with torch.device("meta"):
        return Pair(head), torch.empty(rows, WIDTH, requires_grad=True)


def entry(text: str) -> shardc.Plan:
    """The plan entry that a warning names."""
    found = re.search(r"add (shardc\.[^;]*?\]?\))(,|;)", text)
    assert found is not None, text
    return eval(found[1], {"shardc": shardc})


def test_an_axis_that_nothing_uses() -> None:
    """Everything is done twice over tp: half of the operations of a rank, which are half of the model's."""
    model, x = pair()
    (text,) = said(model, Mesh(dp=2, tp=2), shardc.fsdp("dp"), x)
    operations = 6 * 512 * WIDTH * 4 * WIDTH * 2 // 2
    held = [(512 * WIDTH * 5 // 2 + 4 * WIDTH * WIDTH) * 4] * 6  # of each of six products: one side split over dp
    assert text.splitlines() == [
        f"the 2 ranks along axis 'tp' of the mesh dp=2 tp=2 compute the same: {operations / 2:.2g} of the "
        f"{operations:.2g} operations of a rank and step are wasted (50%), and {sum(held) / 2:.2g} bytes that they "
        "read and write; no op is split over it",
        '  fix: add shardc.fsdp("tp"), which splits the batch over it, or leave the axis out of the mesh; '
        "program.lint() lists the ops",
    ]
    assert said(model, Mesh(dp=2, tp=2), shardc.fsdp("dp") | entry(text), x) == []


def test_a_module_that_an_axis_leaves_out() -> None:
    model, x = pair(head=2048)
    (text,) = said(model, Mesh(dp=2, tp=2), shardc.fsdp("dp") | TP, x)
    assert "no axis splits head there" in text and 'add shardc.tp("tp", colwise=["head"])' in text
    assert said(model, Mesh(dp=2, tp=2), shardc.fsdp("dp") | TP | entry(text), x) == []


def test_heads_that_an_axis_does_not_divide() -> None:
    """Attention of two heads is done twice over on four ranks, for which q, k and v are gathered in part."""
    config = llama.LlamaConfig(512, 128, 2, heads=2, kv_heads=2, hidden=256)
    model, args = llama.build(config, "meta", size=4, length=512)
    (text,) = said(model, Mesh(tp=4), llama.llama_tp("tp"), *args)
    assert re.search(r"for which \d\S* bytes are gathered over it; no axis splits layers\.\*\.attn", text)
    assert "fix: split what goes into layers.*.attn over tp, by tp of the linears before it" in text


@pytest.mark.parametrize("head, warned", [(768, True), (128, False)])
def test_a_small_share_is_no_word(head: int, warned: bool) -> None:
    """Of head / 2 operations that are wasted of 4 * width + head."""
    share = head / 2 / (4 * WIDTH + head)
    assert (share >= SHARE) == warned
    model, x = pair(head)
    assert bool(said(model, Mesh(tp=2), TP, x)) == warned


@pytest.mark.parametrize("rows, warned", [(64, True), (32, False)])
def test_a_toy_is_no_word(rows: int, warned: bool) -> None:
    assert (6 * rows * WIDTH * 4 * WIDTH * 2 / 2 >= LEAST) == warned
    model, x = pair(rows=rows)
    assert bool(said(model, Mesh(tp=2), shardc.Plan(), x)) == warned


def test_a_plan_that_was_found_is_not_doubted() -> None:
    """What the search leaves repeated would take longer otherwise."""
    model, x = pair()
    given = shardc.Plan(params={"*": (None, None)}, inputs=[(None, None)])
    assert len(said(model, Mesh(tp=2), given, x)) == 1
    assert not [text for text in said(model, Mesh(tp=2), shardc.auto(inputs=x) | given, x) if "operations" in text]


@pytest.mark.slow
def test_folded_blocks_count_for_all() -> None:
    config = llama.LlamaConfig(512, 256, 12, heads=4, kv_heads=4, hidden=1024)
    model, args = llama.build(config, "meta", size=8, length=128)
    texts = {
        tuple(said(model, Mesh(dp=2, tp=2), shardc.fsdp("dp"), *args, options=shardc.Options(fold=fold)))
        for fold in (True, False)
    }
    ((text,),) = texts
    assert "no op is split over it" in text


def programs() -> Iterator[tuple[str, Program]]:
    for name, plan in (("tp", llama.llama_tp("tp")), ("fsdp", shardc.Plan()), ("sp", llama.llama_tp("tp", True))):
        model, args = llama.tiny()
        yield f"llama {name}", shardc.compile(model, Mesh(dp=2, tp=2), shardc.fsdp("dp") | plan).lower(*args)
    config = gpt2.GPT2Config(512, 32, 64, 2, 4)
    model, args = gpt2.GPT2(config), gpt2.batch(config, size=4, length=32)
    yield "gpt2", shardc.compile(model, Mesh(dp=2, tp=2), shardc.ddp("dp") | gpt2.gpt2_tp("tp")).lower(*args[:1])
    images = convnet.ConvNetConfig(image=32, widths=(16, 32), classes=16)
    model, args = convnet.ConvNet(images), convnet.batch(images, size=4)
    plan = shardc.fsdp("dp") | convnet.convnet_channels("tp")
    yield "convnet", shardc.compile(model, Mesh(dp=2, tp=2), plan).lower(*args[:1])


@pytest.mark.slow
def test_what_layouts_say_is_what_a_rank_computes() -> None:
    """Operations by the axes that layouts have are those of the ops at local shapes."""
    for name, program in programs():
        local: dict[str, int] = {}
        for node in program.localized.graph.nodes:
            if node.op == "call_function" and is_dense(node):
                local[ir.info(node).name] = local.get(ir.info(node).name, 0) + flops_of(node)
        found = [op for _, op in dense(program.whole("collectives"), program.mesh)]
        assert found and {op.name: op.flops for op in found} == {op.name: local[op.name] for op in found}, name
        assert sum(local.values()) == sum(op.flops for op in found), name
        assert all(prod(op.times.values()) in (1, 2, 4) for op in found)
