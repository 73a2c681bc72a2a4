"""Segments: what runs by stretches of a half, alike ones by one graph, is what the whole half gives."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import shardc
from shardc.errors import ShardcWarning, VerifyError
from shardc.ir import graph as ir
from shardc.ir.comm import IN_MESSAGES, WAIT
from shardc.ir.comm_volume import collective_kind
from shardc.ir.executable import FORWARD, Compiled, Half
from shardc.ir.mesh import Mesh
from shardc.ir.repeat import Segment, cut
from shardc.lower import lower
from shardc.verify.halves import in_order
from shardc.verify.subject import Subject, no_rules

WIDTH, DEPTH = 8, 12


class Tower(nn.Module):
    """Alike layers, every one of which adds a value that was made in front of them all."""

    def __init__(self, depth: int = DEPTH) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = kept = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x)) + kept
        return x.square().mean()


def halves(depth: int = DEPTH, skip: bool = True) -> list[fx.GraphModule]:
    """Forward and backward; by default with collectives that are local copies, so that they run without other ranks."""
    options: Any = {
        "p2p_collectives": True,
        "skip_comm": skip,
        "bucket_size": 0,
        "max_in_flight": 3 * WIDTH * WIDTH * 8,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShardcWarning)  # that values are wrong
        module = shardc.compile(
            Tower(depth).double(), shardc.Mesh(dp=2), shardc.fsdp("dp"), options=shardc.Options(**options)
        )
    program = module.lower(torch.empty(4, WIDTH, dtype=torch.float64))
    return [program.forward, program.backward]


def inputs(gm: fx.GraphModule) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for node in ir.placeholders(gm.graph):
        val = node.meta["val"]
        plain = torch.randn(val.shape, generator=generator, dtype=torch.float64)
        made.append(plain.to(val.dtype) if val.is_floating_point() else torch.zeros(val.shape, dtype=val.dtype))
    return made


def compiled(gm: fx.GraphModule, segments: tuple[Segment, ...]) -> Compiled:
    """As `shardc.lower.lower` puts segments together, op by op."""
    half = Half(FORWARD, gm, Mesh(dp=2))
    return Compiled(half, segments, tuple(fx.Interpreter(segment.gm).boxed_run for segment in segments), half.plan)


@pytest.mark.parametrize("half", [0, 1])
def test_segments_compute_what_the_half_does(half: int) -> None:
    gm = halves()[half]
    segments = cut(gm)
    assert len(segments) >= 4 and len({id(each.gm) for each in segments}) < len(segments)
    expected = fx.Interpreter(gm).boxed_run(inputs(gm))
    found = compiled(gm, segments)(inputs(gm))
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs) if isinstance(ours, Tensor) else ours == theirs


def test_values_of_another_block_are_noticed() -> None:
    """The comparison above tells apart what two blocks take."""
    gm = halves()[0]
    segments = list(cut(gm))
    alike = [at for at, each in enumerate(segments) if sum(each.gm is other.gm for other in segments) > 1]
    first, second = (segments[at] for at in alike[:2])
    params = {node.name for node in ir.placeholders(gm.graph, "param")}
    own = next(at for at, name in enumerate(second.takes) if name in params and name not in first.takes)
    takes = (*second.takes[:own], first.takes[own], *second.takes[own + 1 :])
    segments[alike[1]] = Segment(second.gm, takes, second.gives, second.done - {second.takes[own]}, second.slot)
    expected = fx.Interpreter(gm).boxed_run(inputs(gm))
    try:
        found = compiled(gm, tuple(segments))(inputs(gm))
    except KeyError:  # the block before was the last to take it
        return
    assert not torch.equal(found[0], expected[0])


@pytest.mark.parametrize("half", [0, 1])
def test_the_order_and_the_slots_are_those_of_the_half(half: int) -> None:
    """Segments in a row start the collectives that were certified, and count their slots from their first."""
    gm = halves(skip=False)[half]
    order, slots = [], []
    for segment in cut(gm):
        assert segment.collective == len(order)
        for node in segment.gm.graph.nodes:
            if collective_kind(node) is not None:
                order.append(node.target)
            if node.target in IN_MESSAGES:
                slots += [segment.slot + number for number in node.args[-1]]
    assert order == [node.target for node in gm.graph.nodes if collective_kind(node) is not None]
    assert slots == [n for node in gm.graph.nodes if node.target in IN_MESSAGES for n in node.args[-1]]
    assert len(slots) > 2


def test_few_alike_blocks_stay_whole() -> None:
    assert [len(cut(half)) for half in halves(depth=3)] == [1, 1]


def _wait_where_it_starts(graph: fx.Graph) -> bool:
    for wait in graph.nodes:
        if wait.target is WAIT and wait.args[0].op == "placeholder" and wait.prev.op != "placeholder":
            next(node for node in graph.nodes if node.op != "placeholder").prepend(wait)
            return True
    return False


def _take_two_values_for_each_other(graph: fx.Graph) -> bool:
    two = [node for node in graph.nodes if node.target is torch.ops.aten.mm.default][:1]
    for node in two:
        node.args = node.args[::-1]
    return bool(two)


def _leave_an_op_out(graph: fx.Graph) -> bool:
    node = next(node for node in graph.nodes if node.target is torch.ops.aten.tanh.default)
    node.replace_all_uses_with(node.args[0])
    graph.erase_node(node)
    return True


@pytest.mark.parametrize("fault", [_wait_where_it_starts, _take_two_values_for_each_other, _leave_an_op_out])
def test_segments_that_run_something_else_are_refused(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gm = halves(skip=False)[0]
    half = Half(FORWARD, gm, Mesh(dp=2))
    row = cut(gm)
    assert len(row) > 4
    subject = Subject(gm, half.mesh, no_rules)
    assert [*in_order(subject, row)] == []
    assert any(fault(segment.gm.graph) for segment in {id(each.gm): each for each in row}.values())
    monkeypatch.setattr("shardc.lower.cut", lambda gm, least: row)
    with pytest.raises(VerifyError, match="after cutting into segments: .*: the segments do not run it where it was"):
        lower(half, backend="inductor")
