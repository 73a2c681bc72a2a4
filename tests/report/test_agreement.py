"""What layouts are chosen by is what the schedule predicts: each collective, and each dense op, at the same seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import fx

import shardc
from examples.models import llama
from shardc.cost.compute import is_dense
from shardc.cost.hardware import H100, Hardware, calibrated
from shardc.cost.model import CostModel, Messages
from shardc.cost.redistribute import LOCAL, Step, steps
from shardc.ir import graph as ir
from shardc.ir import ops
from shardc.ir.comm import is_ring
from shardc.ir.comm_volume import collective_kind
from shardc.passes.lower.collectives import step_of
from shardc.passes.op_calls import Work, call_of, compute_seconds
from shardc.report.predicted_schedule import Schedule
from shardc.rules import spec_of
from shardc.rules.spec import Strategy

# Nodes of two ranks, so that the axes differ; without the least time of a kernel, which would hide what it does.
BYTES = replace(H100, name="bytes decide", node=2, kernel=0.0)
FLOPS = replace(BYTES, name="operations decide", memory_bandwidth=1e30)
# Its ranks' cores send: starting a collective takes their time too.
CORES = calibrated(CostModel(messages=Messages(1e-4, 2e-5, 3e-6, 1e-6, 1e9, 0.0), attention=0.7, launch=1e-6))
PLANS = {
    "ddp": shardc.ddp("dp"),
    "fsdp": shardc.fsdp("tp"),
    "fsdp and tp": shardc.fsdp("dp") | llama.llama_tp("tp"),
    "fsdp, tp and sequence": shardc.fsdp("dp") | llama.llama_tp("tp", sequence=True),
    "half precision": shardc.fsdp("dp") | llama.llama_tp("tp") | shardc.precision(param=torch.bfloat16),
}


def compiled(plan: shardc.Plan, hardware: Hardware) -> shardc.Program:
    config = llama.LlamaConfig(layers=1)
    with torch.device("meta"):
        model, batch = llama.Llama(config), llama.batch(config)
    options = shardc.Options(cost=hardware, bucket_size=0)
    return shardc.compile(model, shardc.Mesh(dp=2, tp=2), plan, loss=llama.loss, options=options).lower(*batch)


def chosen_steps(graph: fx.Graph, hardware: Hardware) -> Counter[tuple[Step, int]]:
    """The collectives, with bytes of an element, that the chooser prices for the reshards of ``graph``."""
    out: Counter[tuple[Step, int]] = Counter()
    for node in graph.nodes:
        if node.target is ops.reshard:
            itemsize = ir.value(node).itemsize
            found = steps(ir.layout(node.args[0]), ir.layout(node), itemsize, hardware)
            out.update((step, itemsize) for step in found if step.kind not in LOCAL)
    return out


def dense_seconds(graph: fx.Graph, hardware: Hardware) -> Iterator[tuple[str, float]]:
    """(name, seconds) of each dense op, as the chooser prices it at the layouts that were chosen."""
    for node in graph.nodes:
        if node.op == "call_function" and is_dense(node):
            call, record = call_of(node), ir.info(node)
            made = tuple(v.layout for v in record.values if v is not None and v.layout is not None)
            spec = spec_of(call)
            assert spec is not None and record.needs is not None
            yield record.name, compute_seconds(spec, Strategy(record.needs, made), Work.of(call), hardware)


def predicted(schedule: Schedule) -> dict[str, list[float]]:
    """Seconds of the kernels of each op."""
    out: dict[str, list[float]] = {}
    for run in schedule.runs:
        for at in run.kernel.ops:
            out.setdefault(ir.info(schedule.step.ops[at].node).name, []).append(run.seconds)
    return out


@pytest.mark.parametrize("stage", ["schedule", pytest.param("localize", marks=pytest.mark.slow)])
@pytest.mark.parametrize("hardware", [BYTES, FLOPS, CORES], ids=lambda hardware: hardware.name)
@pytest.mark.parametrize("plan", [*list(PLANS)[:-1], pytest.param("half precision", marks=pytest.mark.slow)])
def test_the_chooser_and_the_schedule_agree(plan: str, hardware: Hardware, stage: str) -> None:
    program = compiled(PLANS[plan], hardware)
    schedule = program.schedule(hardware, stage=stage)
    priced: Counter[tuple[Step, int]] = Counter()
    for node in program.graph("collectives").nodes:
        if collective_kind(node) is not None:
            step, itemsize = step_of(node), ir.value(node).itemsize
            priced[step, itemsize] += 1
            rows = schedule.by_node.pop(ir.info(node).name)
            for row in rows:
                messages = 0 if is_ring(row.kind, row.ranks) else row.ranks - 1
                own = hardware.start_seconds(messages)  # which the schedule has beside the wire
                assert step.seconds(itemsize, hardware) == pytest.approx(row.seconds + own, rel=1e-9), row
    assert priced == chosen_steps(program.graph("simplify"), hardware) and not schedule.by_node
    runs = predicted(schedule)
    dense = dict(dense_seconds(program.graph("propagate"), hardware))
    assert len(dense) == 26
    for name, seconds in dense.items():
        assert runs[name] == pytest.approx([seconds] * len(runs[name]), rel=1e-9), name
