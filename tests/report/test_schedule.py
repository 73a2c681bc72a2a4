"""The communication schedule: closed forms, bytes as they are run, the clock, memory, and that it never varies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from examples.models import llama
from shardc.cost import hardware
from shardc.cost.hardware import Route, price, route
from shardc.errors import MeshError, PlanError
from shardc.ir.comm_volume import KINDS, wire_elements
from shardc.ir.mesh import Mesh
from shardc.report.predicted_memory import OWNERS
from shardc.report.predicted_schedule import Schedule
from shardc.report.units import duration, size
from shardc.runtime.sim.lockstep import Lockstep, PerRank
from tests import golden

ROOT = Path(__file__).parents[2]
WIDTH = 16


class Stack(nn.Module):
    """A scale, then square layers without biases: the gradient of every layer's input is needed."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.sum()


def stack_program(plan: shardc.Plan, **axes: int) -> shardc.Program:
    return shardc.compile(Stack(), Mesh(axes), plan).lower(torch.empty(8, WIDTH))


def llama_program(plan: shardc.Plan, layers: int = 2, **axes: int) -> shardc.Program:
    config = llama.LlamaConfig(layers=layers)
    with torch.device("meta"):
        model, (tokens, targets) = llama.Llama(config), llama.batch(config)
    return shardc.compile(model, Mesh(axes), plan, loss=llama.loss).lower(tokens, targets)


@pytest.fixture(scope="module")
def composed() -> shardc.Program:
    return llama_program(shardc.fsdp("dp") | llama.llama_tp("tp"), dp=2, tp=2)


def by_tensor(schedule: Schedule, axis: str) -> dict[str, int]:
    """Wire bytes over ``axis`` by the parameter that they are for."""
    out: Counter[str] = Counter()
    for each in schedule.collectives:
        if each.axis == axis:
            out[each.cause.tensor] += each.wire
    return dict(out)


# --- closed forms


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_fsdp_moves_three_times_the_parameters(ranks: int) -> None:
    """Gathered, gathered again, scattered: 3 (p-1)/p of each layer; nothing in backward needs the scale whole."""
    schedule = stack_program(shardc.fsdp("dp"), dp=ranks).schedule(stage="localize")
    each = 4 * (ranks - 1)
    layers = {f"layers.{n}.weight": 3 * each * WIDTH * WIDTH // ranks for n in range(3)}
    moved = by_tensor(schedule, "dp")
    assert {name: moved[name] for name in (*layers, "scale")} == {**layers, "scale": 2 * each * WIDTH // ranks}


@pytest.mark.parametrize("level", [1, 2])
def test_fsdp_below_level_3_gathers_once(level: int) -> None:
    schedule = stack_program(shardc.fsdp("dp", level=level), dp=4).schedule(stage="localize")
    moved = by_tensor(schedule, "dp")
    assert [moved[f"layers.{n}.weight"] for n in range(3)] == [2 * 3 * WIDTH * WIDTH * 4 // 4] * 3


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ddp_moves_twice_the_parameters(ranks: int) -> None:
    moved = by_tensor(stack_program(shardc.ddp("dp"), dp=ranks).schedule(stage="localize"), "dp")
    expected = {f"layers.{n}.weight": 2 * (ranks - 1) * WIDTH * WIDTH * 4 // ranks for n in range(3)}
    assert {name: moved[name] for name in expected} == expected


def in_blocks(schedule: Schedule) -> list[tuple[str, int]]:
    """(kind, wire bytes) of the activations that move over tp for a block's sake, not for embedding, head or loss."""
    return [(c.kind, c.wire) for c in schedule.collectives if c.axis == "tp" and "layers" in c.cause.entry]


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [False, True])
def test_tp_moves_four_activations_a_block(sequence: bool) -> None:
    """Megatron's all-reduces; sequence parallelism splits each into a gather and a scatter: the same bytes.

    The norms then work on a part of the rows each, so the gradients of their weights are summed.
    """
    layers, ranks, dim = 1, 2, llama.LlamaConfig().dim
    activation = 8 * 16 * dim * 4
    program = llama_program(llama.llama_tp("tp", sequence=sequence), layers, tp=ranks)
    moved = in_blocks(program.schedule(stage="localize"))
    half = (ranks - 1) * activation // ranks
    if sequence:
        norms = {("all_reduce", 2 * (ranks - 1) * dim * 4 // ranks): 2 * layers + 1}
        assert Counter(moved) == {("all_gather", half): 4 * layers, ("reduce_scatter", half): 4 * layers} | norms
    else:
        assert moved == [("all_reduce", 2 * half)] * 4 * layers


# --- bytes as they are run


Counts = Counter[tuple[str, str]]


def run_counts(model: nn.Module, mesh: Mesh, plan: shardc.Plan, x: Tensor, monkeypatch: Any) -> Counts:
    """Wire bytes by (kind, axis) of the functional collectives that a simulated step calls."""
    counts: Counts = Counter()
    original = Lockstep._collective

    def counting(self: Lockstep, target: Any, args: Any, kwargs: Any) -> Any:
        kind = KINDS.get(target._opname.removesuffix("_coalesced"))
        if kind is not None:
            axes = args[-1].removeprefix("shardc:")
            ranks = prod(mesh.size(axis) for axis in axes.split(","))
            for of_each_rank in [args[0]] if isinstance(args[0], PerRank) else args[0]:
                moved = of_each_rank[0]
                counts[kind, axes] += wire_elements(kind, ranks, moved.numel()) * moved.element_size()
        return original(self, target, args, kwargs)

    monkeypatch.setattr(Lockstep, "_collective", counting)
    simulation = shardc.Simulation(shardc.compile(model, mesh, plan))
    simulation(x)
    simulation.backward()
    return counts


@pytest.mark.parametrize(
    ("plan", "axes"),
    [
        (shardc.fsdp("dp"), {"dp": 2}),
        (shardc.fsdp("dp", level=2), {"dp": 4}),
        (shardc.ddp("dp"), {"dp": 2}),
        (shardc.fsdp("dp") | shardc.tp("tp", colwise=["layers.0"], rowwise=["layers.1"]), {"dp": 2, "tp": 2}),
    ],
    ids=["fsdp", "fsdp level 2", "ddp", "fsdp and tp"],
)
def test_counts_what_a_step_moves(plan: shardc.Plan, axes: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    ran = run_counts(Stack(), Mesh(axes), plan, torch.randn(8, WIDTH), monkeypatch)
    predicted: Counts = Counter()
    for each in stack_program(plan, **axes).schedule().collectives:
        predicted[each.kind, each.axis] += each.wire
    assert predicted == ran


# --- the clock


@pytest.mark.parametrize("stage", ["localize", "schedule"])
@pytest.mark.parametrize("order", ["graph", "earliest"])
def test_a_step_is_compute_and_exposed_communication(composed: shardc.Program, order: str, stage: str) -> None:
    schedule = composed.schedule(order=order, stage=stage)
    assert schedule.seconds == pytest.approx(schedule.compute_seconds + schedule.exposed, rel=1e-9)


@pytest.mark.parametrize("stage", ["localize", "schedule"])
@pytest.mark.parametrize("order", ["graph", "earliest"])
def test_streams_run_one_thing_at_a_time(composed: shardc.Program, order: str, stage: str) -> None:
    schedule = composed.schedule(order=order, stage=stage)
    axes = dict.fromkeys(c.axis for c in schedule.collectives)
    streams = [schedule.runs, *([c for c in schedule.collectives if c.axis == axis] for axis in axes)]
    for stream in streams:
        for before, after in zip(stream, stream[1:], strict=False):
            assert before.end <= after.start


def test_starting_early_hides_communication(composed: shardc.Program) -> None:
    """On axes with bandwidth to spare the gathers hide behind compute; the bytes are the same."""
    slow = hardware.CPU
    graph = composed.schedule(slow, stage="localize")
    earliest = composed.schedule(slow, stage="localize", order="earliest")
    assert earliest.seconds < graph.seconds
    assert earliest.wire == graph.wire
    assert any(c.hidden_by for c in earliest.collectives) and not any(c.hidden_by for c in graph.collectives)


def test_useful_work_is_the_models(composed: shardc.Program) -> None:
    """Forward and backward of each matrix product, by hand: 6 operations a weight and token, and attention's."""
    config = llama.LlamaConfig()
    tokens, length = 8 * 16, 16
    block = config.dim * (2 * config.dim + 2 * config.kv_heads * config.head_size + 3 * config.hidden)
    dense = 6 * tokens * (config.layers * block + config.dim * config.vocab)
    attention = config.layers * (2 + 5) * 2 * 8 * config.heads * length * length * config.head_size
    assert composed.schedule().useful_flops * 4 == dense + attention


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::shardc.errors.ShardcWarning")
def test_work_on_filling_is_of_no_use() -> None:
    """Three sequences on eight ranks are padded to eight; the model needs the work of three."""
    config = llama.LlamaConfig(layers=5)
    with torch.device("meta"):
        model, batch = llama.Llama(config), llama.batch(config, size=3)
    useful = []
    for ranks, plan in ((1, shardc.ddp("dp")), (8, shardc.fsdp("dp"))):
        options = shardc.Options(fold=ranks > 1, verify=False)
        program = shardc.compile(model, Mesh(dp=ranks), plan, loss=llama.loss, options=options).lower(*batch)
        assert (program.folded is not None) == (ranks > 1)
        schedule = program.schedule()
        useful.append(schedule.useful_flops * ranks)
    assert useful[1] == useful[0] and schedule.flops * 8 > 2 * useful[0]


def test_buckets_and_order_change_no_bytes(composed: shardc.Program) -> None:
    cut, joint = composed.schedule(), composed.schedule(stage="localize")
    assert {axis: total.wire for axis, total in cut.totals("axis").items()} == {
        axis: total.wire for axis, total in joint.totals("axis").items()
    }
    bucket = next(c for c in cut.collectives if c.kind == "all_gather")
    assert bucket.cause.tensors == tuple(name for name, _ in llama.Llama(llama.LlamaConfig()).named_parameters())


# --- memory


class Waves(nn.Module):
    """One fused kernel between two products, whose first op alone reads the first product."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 1024, bias=False), nn.Linear(1024, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).cos().sin())


def test_a_fused_kernel_holds_what_it_reads_with_what_it_makes() -> None:
    program = shardc.compile(Waves().requires_grad_(False), Mesh(dp=2), shardc.ddp("dp")).lower(torch.empty(128, WIDTH))
    held = program.schedule("cpu", optimizer_copies=0).memory.by_owner()
    assert held["temporaries"] + held["activations"] == 2 * 64 * 1024 * 4


def test_memory_of_the_parts(composed: shardc.Program) -> None:
    schedule = composed.schedule(optimizer_copies=2)
    local = sum(p.numel() for p in llama.Llama(llama.LlamaConfig()).parameters())
    held = schedule.memory.by_owner()
    sharded = held["parameters"]
    assert local * 4 // 4 <= sharded <= local * 4 // 2  # weights over both axes, norms over dp alone
    assert held["optimizer"] == 2 * sharded
    last = dict(zip(OWNERS, schedule.memory.samples[-1].sizes, strict=True))
    assert last["gradients"] == sharded and last["activations"] == last["gathered"] == last["communication"] == 0


def test_level_3_holds_less_than_level_2_and_level_2_less_than_none() -> None:
    plans = [shardc.fsdp("dp"), shardc.fsdp("dp", level=2), shardc.ddp("dp")]
    peaks = [stack_program(plan, dp=8).schedule(stage="localize").memory.peak.total for plan in plans]
    assert peaks == sorted(peaks) and len(set(peaks)) == 3


def test_fits(composed: shardc.Program) -> None:
    schedule = composed.schedule()
    peak = schedule.memory.peak.total / 1e9
    assert (schedule.fits(), schedule.fits(peak), schedule.fits(peak * 0.999)) == (True, True, False)


# --- as text


def test_table(composed: shardc.Program) -> None:
    text = composed.schedule().table()
    golden.check(text, "report/schedule")
    assert max(map(len, text.splitlines())) <= 120


def test_answer_comes_first() -> None:
    schedule = llama_program(shardc.fsdp("dp"), dp=2).schedule(replace(hardware.H100, memory=1e5))
    head, *answer = schedule.table().partition("\n\n")[0].splitlines()
    assert head == "Llama, mesh dp=2 on h100, graph order"
    assert [line.split("  ")[0] for line in answer] == ["step", "tokens/s", "MFU", "memory"]
    assert f"{schedule.tokens_per_second:,.0f} in all, " in answer[1] and "128 tokens a step on 2 ranks" in answer[1]
    assert "does not fit: " in answer[-1] and answer[-1].endswith(" too much")
    assert stack_program(shardc.fsdp("dp"), dp=2).schedule().tokens == 0


def test_recomputed_kernels_are_apart() -> None:
    """Checkpointed blocks run their products twice: all but the outermost is recompute, and no operation is lost."""
    config = llama.LlamaConfig(layers=2, checkpoint=True)
    with torch.device("meta"):
        model, args = llama.Llama(config), llama.batch(config)
    program = shardc.compile(model, Mesh(dp=2), shardc.fsdp("dp"), loss=llama.loss).lower(*args)
    schedule = program.schedule()
    flops = Counter[str]()
    for run in schedule.runs:
        flops[schedule.phase_of(run)] += run.kernel.flops
    assert sum(flops.values()) == schedule.flops
    assert flops["backward"] >= 2 * flops["forward"] > 2 * flops["recompute"] > flops["forward"]


def test_the_tensors_at_the_peak_are_all_of_the_peak(composed: shardc.Program) -> None:
    memory = composed.schedule().memory
    by_owner = Counter[str]()
    for each in memory.tensors_at_peak:
        by_owner[each.owner] += each.bytes
    assert dict(by_owner) == {owner: size for owner, size in memory.by_owner().items() if size}
    weights = {x.name: x for x in memory.tensors_at_peak if x.owner == "parameters"}
    assert weights["layers.1.mlp.up.weight"].module == "layers.1.mlp.up"
    lines = {
        Path(x.source.rpartition(":")[0]).name
        for x in memory.tensors_at_peak
        if x.owner in ("parameters", "activations")
    }
    assert lines == {"llama.py"}


def test_programs_and_schedules_print_as_text(composed: shardc.Program) -> None:
    assert str(composed) == composed.text()
    html = composed._repr_html_()
    assert html.startswith("<details><summary>Llama on mesh dp=2 tp=2, fsdp(&quot;dp&quot;")
    assert html.count("\n") == composed.text().count("\n")
    schedule = composed.schedule()
    peak, step = size(schedule.memory.peak.total), duration(schedule.seconds)
    assert repr(schedule) == f"<Schedule dp=2 tp=2 on h100: {step} a step, {peak}, fits>"


# --- where a collective comes from


@pytest.mark.parametrize("stage", ["localize", "schedule"])
@pytest.mark.parametrize(
    "plan", [shardc.ddp("dp"), shardc.fsdp("dp"), shardc.fsdp("dp") | llama.llama_tp("tp")], ids=["ddp", "fsdp", "tp"]
)
def test_reductions_of_a_precision_plan_keep_their_cause(plan: shardc.Plan, stage: str) -> None:
    """Under a precision plan, as without one, a reduction names the parameters and the entry that ask for it."""
    axes = {"dp": 2} if "tp(" not in str(plan) else {"dp": 2, "tp": 2}
    low = plan | shardc.precision(param=torch.bfloat16, reduce=torch.float32)
    schedules = [llama_program(each, 1, **axes).schedule(stage=stage) for each in (plan, low)]
    plain, reduced = ([c for c in s.collectives if "reduce" in c.kind] for s in schedules)
    assert all(c.cause.entry for c in reduced)
    params = {name for name, _ in llama.Llama(llama.LlamaConfig(layers=1)).named_parameters()}
    of_gradients = [
        Counter(name for c in rows if c.axis == "dp" for name in c.cause.tensors if name in params)
        for rows in (plain, reduced)
    ]
    assert of_gradients[0] == of_gradients[1] == Counter(params)


def test_causes_name_parameter_module_source_and_entry(composed: shardc.Program) -> None:
    rows = composed.schedule(stage="localize").collectives
    gather = next(c for c in rows if c.kind == "all_gather" and c.cause.tensor == "layers.1.mlp.up.weight")
    assert (gather.cause.module, gather.cause.entry) == ("layers.1.mlp.up", 'fsdp("dp", level=3)')
    reduce = next(c for c in rows if c.kind == "all_reduce" and c.cause.module == "layers.0.mlp.down")
    assert reduce.cause.entry == 'tp("tp", rowwise=["layers.*.mlp.down"])'
    lines = {c.cause.source.rpartition(":")[0] for c in (gather, reduce)}
    assert lines == {str(ROOT / "examples/models/llama.py")}


# --- hardware


def test_a_mesh_on_nodes() -> None:
    mesh = Mesh(dp=4, tp=8)
    assert [route(mesh, axes, 8) for axes in (("tp",), ("dp",), ("dp", "tp"))] == [
        Route(8, 1, 8),
        Route(4, 4, 1),
        Route(32, 4, 8),
    ]
    assert route(Mesh(dp=4, tp=4), ("tp:1x2",), 8) == Route(2, 1, 2)
    assert route(Mesh(dp=2, tp=6), ("tp",), 8).nodes == 2  # the second group of six crosses


def test_prices_are_start_hops_and_bytes() -> None:
    h100 = hardware.H100
    inside = price(h100, "all_gather", Route(8, 1, 8), 900_000)
    assert (inside.algorithm, inside.link) == ("ring", "NVLink 4")
    assert inside.seconds == pytest.approx(6.6e-6 + 7 * 0.6e-6 + 900_000 / (450e9 * 0.8))
    tree = price(h100, "all_reduce", Route(1024, 128, 8), 1000)
    assert tree.algorithm == "tree"
    assert tree.seconds == pytest.approx(6.6e-6 + 2 * (7 * 5e-6 + 7 * 0.6e-6) + 1000 / (400e9 * 0.8))
    assert price(h100, "all_gather", Route(1024, 1024, 1), 1000).algorithm == "pat"
    assert price(h100, "all_reduce", Route(1, 1, 1), 0).seconds == 0


def test_bad_input_says_what(composed: shardc.Program) -> None:
    with pytest.raises(MeshError, match="no hardware is called 'h10'") as raised:
        composed.schedule("h10")
    assert raised.value.fix == "did you mean 'h100'?"
    with pytest.raises(MeshError, match="cpu is described for at most 64"):
        hardware.CPU.check(Mesh(dp=128))
    with pytest.raises(PlanError, match="unknown order 'soonest'"):
        composed.schedule(order="soonest")


# --- the same every time

PRINT = """
import shardc
from tests.report.test_schedule import stack_program
plan = shardc.fsdp("dp") | shardc.tp("tp", colwise=["layers.0"], rowwise=["layers.1"])
s = stack_program(plan, dp=2, tp=2).schedule()
print(s.table(), s.to_json(), s.to_trace(), end="")
"""


@pytest.mark.slow
def test_the_same_to_the_byte_in_another_process() -> None:
    plan = shardc.fsdp("dp") | shardc.tp("tp", colwise=["layers.0"], rowwise=["layers.1"])
    here = stack_program(plan, dp=2, tp=2).schedule()
    there = subprocess.run(
        [sys.executable, "-c", PRINT], cwd=ROOT, capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONHASHSEED": "1"},
    )  # fmt: skip
    assert there.stdout == f"{here.table()} {here.to_json()} {here.to_trace()}"


def test_the_trace_has_every_run_and_collective(composed: shardc.Program) -> None:
    schedule = composed.schedule()
    events = json.loads(schedule.to_trace())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X" and event.get("cat") != "wait"]
    tracks = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    (process,) = (event["args"]["name"] for event in events if event["name"] == "process_name")
    assert process == schedule.title and schedule.title.endswith(f"{schedule.mesh} on h100, graph order")
    counts = {axis: total.count for axis, total in schedule.totals("axis").items()}
    assert Counter(tracks[event["tid"]] for event in spans) == {"compute": len(schedule.runs), **counts}
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(schedule.seconds * 1e6)
    assert sum(event["ph"] == "C" for event in events) == len(schedule.memory.samples)


def test_the_trace_has_an_arrow_from_each_collective_to_its_wait(composed: shardc.Program) -> None:
    """It ends where the rank stands still for it, which is shown, or at the wait, behind its start and not before."""
    schedule = composed.schedule()
    events = json.loads(schedule.to_trace())["traceEvents"]
    starts, ends = ({e["id"]: e for e in events if e["ph"] == kind} for kind in "sf")
    assert starts.keys() == ends.keys() == set(range(len(schedule.transfers)))
    still = [event for event in events if event["ph"] == "X" and event.get("cat") == "wait"]
    assert len(still) == sum(c.exposed > 0 for c in schedule.transfers) > 0
    assert sum(event["dur"] for event in still) == pytest.approx(schedule.exposed * 1e6)
    kernels = sorted((run.start * 1e6, run.end * 1e6) for run in schedule.runs)
    for event in still:
        assert all(b <= event["ts"] + 1e-3 or a >= event["ts"] + event["dur"] - 1e-3 for a, b in kernels)
    for number, c in enumerate(schedule.transfers):
        assert starts[number]["ts"] == c.start * 1e6 <= ends[number]["ts"] + 1e-6
        if c.exposed:
            assert any(event["ts"] == ends[number]["ts"] for event in still)
