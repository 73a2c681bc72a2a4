"""Where results of collectives lie: lifetimes, offsets, and what the compiled code makes of both."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import shardc
from shardc.ir import graph as ir
from shardc.ir.arena import ALIGNMENT, INSIDE, KEPT, OUTSIDE, PLAN, MemoryPlan, Slot, place
from shardc.ir.emitted import uses_of
from tests import golden
from tests.passes.test_golden import MLP, TP

DIRECT = shardc.Options(p2p_collectives=True, bucket_size=0, max_in_flight=600)
BUCKETS = shardc.Options(p2p_collectives=True)  # in which small tensors share messages


def compiled(mesh: dict[str, int], plan: shardc.Plan, options: shardc.Options = DIRECT) -> shardc.Program:
    module = shardc.compile(MLP(), shardc.Mesh(mesh), plan, loss=F.mse_loss, options=options)
    return module.lower(torch.empty(16, 8), torch.empty(16, 8))


def plan_of(program: shardc.Program, stage: str) -> MemoryPlan:
    return ir.output_node(program.graph(stage)).meta[PLAN]


@pytest.mark.parametrize("half", ["", ".backward"])
@pytest.mark.parametrize(
    ("case", "mesh", "plan", "options"),
    [
        ("mlp_fsdp", {"dp": 2}, shardc.fsdp("dp"), DIRECT),
        ("mlp_fsdp_kept", {"dp": 2}, shardc.fsdp("dp", level=2), DIRECT),
        ("mlp_fsdp4_tp", {"dp": 4, "tp": 2}, shardc.fsdp("dp") | TP, DIRECT),
        ("mlp_fsdp4_buckets", {"dp": 4}, shardc.fsdp("dp"), BUCKETS),
    ],
)
def test_text(case: str, mesh: dict[str, int], plan: shardc.Plan, options: shardc.Options, half: str) -> None:
    program = compiled(mesh, plan, options)
    stage = f"plan_memory{half}"
    text = program.text(stage) + "\n" + plan_of(program, stage).text()
    golden.check(text, f"plan_memory/{case}{half.replace('.', '_')}")


def drawn(seed: int) -> Iterator[Slot]:
    draw = random.Random(seed)
    for at in range(draw.randint(0, 40)):
        start = draw.randint(0, 50)
        region = draw.choices((INSIDE, KEPT, OUTSIDE), (6, 1, 1))[0]
        yield Slot(f"x{at}", draw.choice((0, 4, 64, 100, 4096)), start, start + draw.randint(0, 20), region)


@pytest.mark.parametrize("seed", range(50))
def test_no_two_results_share_a_byte_while_both_are_in_use(seed: int) -> None:
    plan = MemoryPlan(place(drawn(seed)))
    for k, one in enumerate(plan.slots):
        assert one.offset % ALIGNMENT == 0
        for other in plan.slots[:k]:
            if one.region == other.region != OUTSIDE and (one.overlaps(other) or one.region == KEPT):
                assert one.offset + one.size <= other.offset or other.offset + other.size <= one.offset, (one, other)
    inside = MemoryPlan(tuple(slot for slot in plan.slots if slot.region == INSIDE))
    room = sum(-(-slot.size // ALIGNMENT) * ALIGNMENT for slot in inside.slots)
    assert inside.peak <= max(inside.size(), inside.peak) <= room


def test_ranges_are_used_again() -> None:
    """A chain in which one result is in use at a time needs room for one."""
    chain = [Slot(f"x{at}", 1000, 2 * at, 2 * at + 1) for at in range(10)]
    assert {slot.offset for slot in place(chain)} == {0}
    # What starts where another ends is not there before that is gone.
    touching = [Slot(f"x{at}", 1000, at, at + 1) for at in range(10)]
    assert {slot.offset for slot in place(touching)} == {0, 1024}


def test_every_use_is_inside_of_the_lifetime() -> None:
    """The order of the graph, read by itself: nobody reads a result's memory before its start or after its end."""
    for level in (1, 2, 3):
        program = compiled({"dp": 2}, shardc.fsdp("dp", level=level))
        for half in ("plan_memory", "plan_memory.backward"):
            graph, plan = program.graph(half), plan_of(program, half)
            fakes: dict[int, int] = {}  # a fake storage -> the slot
            for at, node in enumerate(graph.nodes):
                values = node.meta.get("val")
                if _numbered(node):
                    fakes.update({_storage(x): slot for x, slot in zip(values, node.args[-1], strict=True)})
                for read in node.all_input_nodes:
                    slot = fakes.get(_storage(read.meta["val"])) if isinstance(read.meta["val"], torch.Tensor) else None
                    if slot is not None:
                        assert plan.slots[slot].start <= at <= plan.slots[slot].end, f"{node} reads slot {slot}"


def _numbered(node: fx.Node) -> bool:
    return node.op == "call_function" and str(node.target).startswith("shardc.") and "coalesced" in str(node.target)


def _storage(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


EMITTED = """
    def call(self, args):
        arg0_1, arg1_1, arg2_1 = args
        args.clear()
        buf0 = torch.ops.shardc.all_gather_into_tensor_coalesced.default([arg0_1, arg1_1], 2, 'shardc:dp', [0, 1])
        buf1 = buf0[0]
        buf2 = buf0[1]
        del buf0
        del arg1_1
        torch.ops._c10d_functional.wait_tensor.default(buf1)
        buf3 = reinterpret_tensor(buf1, (4, 4), (4, 1), 0); del buf1  # reuse
        buf4 = empty_strided_cpu((4, 4), (4, 1), torch.float32)
        extern_kernels.mm(buf3, arg2_1, out=buf4)
        buf5 = torch.ops.shardc.reduce_scatter_tensor_coalesced.default([buf4], 'sum', 4, 'shardc:ep', [2, 3])
        buf6 = buf5[0]
        del buf5
        torch.ops._c10d_functional.wait_tensor.default(buf2)
        cpp_fused_0(buf3, buf2)
        del buf3
        torch.ops._c10d_functional.wait_tensor.default(buf6)
        del buf4
        return (buf6, buf2, )
"""


def test_lifetimes_in_compiled_code() -> None:
    """Names that Inductor takes over, what is returned, what only a peer's messages need."""
    uses = uses_of(EMITTED)
    lines = [line.strip() for line in EMITTED.splitlines()][2:]

    def line(text: str) -> int:
        return next(at for at, one in enumerate(lines) if one.startswith(text))

    last = line("return")
    assert uses.spans == {
        0: (line("buf0"), line("del buf3")),
        1: (line("buf0"), last),
        2: (line("buf5"), last),
        3: (line("buf5"), line("torch.ops._c10d_functional.wait_tensor.default(buf6)")),
    }
    assert uses.leaving == {1, 2}
    # What is sent is in use until the wait, whatever name for it goes before.
    assert uses.argument_ends == [last, line("torch.ops._c10d_functional.wait_tensor.default(buf1)"), last]
    slots = (Slot("a", 64, 0, 1), Slot("b", 64, 0, 1), Slot("c", 64, 2, 9, OUTSIDE), Slot("c.wire", 64, 2, 3))
    moved = MemoryPlan(slots, (("x", 1), ("y", 1), ("z", 1))).moved(uses.spans, uses.leaving, uses.argument_ends)
    assert [slot.region for slot in moved.slots] == [INSIDE, OUTSIDE, OUTSIDE, INSIDE]
    assert moved.slots[0].offset != moved.slots[3].offset, "both are in use when the second collective starts"


class Sliced(torch.nn.Module):
    """Its activation is gathered along dim 1: what arrives along dim 0 is copied to its place, and the copy is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = torch.nn.LayerNorm(8), torch.nn.Linear(8, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.norm(x))


def test_a_result_that_is_copied_to_its_place_is_let_go_of() -> None:
    plan = shardc.tp("tp", colwise=["up"]) | shardc.Plan(activations={"norm.output": "~, @tp, _"})
    module = shardc.compile(Sliced(), shardc.Mesh(tp=2), plan, options=DIRECT)
    program = module.lower(torch.empty(4, 6, 8))
    assert program.forward is not None
    forward, backward = plan_of(program, "plan_memory"), plan_of(program, "plan_memory.backward")
    assert [(slot.region, slot.saved) for slot in forward.slots] == [(INSIDE, ())] * 2, "the backward reads a copy"
    assert program.schedule("cpu").step.arena == max(forward.size(), backward.size())


def test_compiled_code_that_returns_a_copy_keeps_no_result() -> None:
    slots = (Slot("a", 64, 0, 5, KEPT, saved=("a",)), Slot("b", 64, 1, 5, KEPT, saved=("b",)))
    moved = MemoryPlan(slots).moved({0: (0, 2), 1: (1, 5)}, [1], [])
    assert [(slot.region, slot.end) for slot in moved.slots] == [(INSIDE, 2), (KEPT, 5)]
