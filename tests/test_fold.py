"""Folding: what is predicted of repeated blocks from a few of them is what is predicted of all of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from examples.models import gpt2, llama
from shardc.capture import Dtypes, find_repeats
from shardc.debug.explain_layout import explain
from shardc.errors import PlanError, ShardcWarning
from shardc.ir import graph as ir
from shardc.ir.comm_volume import collective_kind
from shardc.ir.mesh import Mesh

WIDTH = 16
FOLD = shardc.Options(fold=True)


class Layer(nn.Module):
    """A residual layer of two matrix products."""

    def __init__(self, hidden: int = 2 * WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    """Layers between two projections; ``combine`` makes one tensor of the layers' outputs."""

    def __init__(self, *layers: nn.Module, combine: Callable[[list[Tensor]], Tensor] = lambda outs: outs[-1]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.combine = combine

    def forward(self, x: Tensor) -> Tensor:
        outs = [self.first(x)]
        for layer in self.layers:
            outs.append(torch.tanh(layer(outs[-1])))
        return self.last(self.combine(outs)).sum()


def stack(layers: int, **options: Any) -> tuple[nn.Module, tuple[Tensor, ...], Any]:
    return Stack(*(Layer() for _ in range(layers)), **options), (torch.empty(8, WIDTH),), None


def llama_of(layers: int, **options: Any) -> tuple[nn.Module, tuple[Tensor, ...], Any]:
    config = llama.LlamaConfig(layers=layers, **options)
    with torch.device("meta"):
        return llama.Llama(config), llama.batch(config), llama.loss


def gpt2_of(layers: int) -> tuple[nn.Module, tuple[Tensor, ...], Any]:
    config = gpt2.GPT2Config(layers=layers)
    with torch.device("meta"):
        return gpt2.GPT2(config), gpt2.batch(config), gpt2.loss


def program(
    made: tuple[nn.Module, tuple[Tensor, ...], Any], plan: shardc.Plan, fold: bool, pieces: Any = "auto", **axes: int
) -> Any:
    model, args, loss = made
    options = replace(FOLD, fold=fold, decompose=pieces)
    return shardc.compile(model, Mesh(axes), plan, loss=loss, options=options).lower(*args)


def said(schedule: Any) -> tuple[Any, Any]:
    """All of a schedule: its record, without the notes, and its trace."""
    record = json.loads(schedule.to_json())
    record.pop("notes", None)
    return record, json.loads(schedule.to_trace())


def check(make: Callable[[], Any], plan: shardc.Plan, folds: bool, **axes: int) -> Any:
    """Compares the folded program's schedules with the whole one's; returns the folded one."""
    whole, folded = program(make(), plan, False, **axes), program(make(), plan, True, **axes)
    assert (folded.folded is not None) == folds
    for stage in ("schedule", "localize"):
        for order in ("graph", "earliest"):
            expected, found = (each.schedule("cpu", stage=stage, order=order) for each in (whole, folded))
            assert said(found) == said(expected)
    assert folded.lint("cpu") == whole.lint("cpu")
    for name in list(whole.levels)[len(whole.levels) // 3 :: 5]:
        assert replace(explain(folded, name, "cpu"), represents="") == explain(whole, name, "cpu")
    return folded


def test_lint_of_padded_inputs_folds() -> None:
    def make() -> tuple[nn.Module, tuple[Tensor, ...], Any]:
        return Stack(*(Layer() for _ in range(6))), (torch.empty(3, 4, WIDTH),), None

    whole, folded = (program(make(), shardc.fsdp("dp"), fold, dp=2) for fold in (False, True))
    assert folded.folded is not None and folded.lint("cpu") == whole.lint("cpu")


MLP_TP = shardc.tp("tp", colwise=["layers.*.up"], rowwise=["layers.*.down"])
PLANS = {
    "ddp": (lambda tp: shardc.ddp("dp"), {"dp": 2}),
    "fsdp2": (lambda tp: shardc.fsdp("dp", level=2), {"dp": 2}),
    "fsdp3": (lambda tp: shardc.fsdp("dp"), {"dp": 2}),
    "tp": (lambda tp: tp("tp"), {"tp": 2}),
    "tp+sp": (lambda tp: tp("tp", sequence=True), {"tp": 2}),
    "fsdp+tp+sp": (lambda tp: shardc.fsdp("dp") | tp("tp", sequence=True), {"dp": 2, "tp": 2}),
}
MODELS = {
    "llama": (llama_of, llama.llama_tp),
    "gpt2": (gpt2_of, gpt2.gpt2_tp),
    "stack": (stack, lambda axis, sequence=False: MLP_TP),
}
MARKS: dict[tuple[str, int, str], list[Any]] = {
    ("llama", 6, "fsdp+tp+sp"): [pytest.mark.slow],
    ("gpt2", 6, "fsdp3"): [pytest.mark.slow],
    ("stack", 8, "ddp"): [],
    ("stack", 6, "tp"): [],
}
CASES = [
    pytest.param(*case, marks=MARKS.get(case, [pytest.mark.long]), id="-".join(map(str, case)))
    for case in ((model, layers, plan) for model in MODELS for layers in (4, 6, 8) for plan in PLANS)
]


@pytest.mark.parametrize(("model", "layers", "plan"), CASES)
def test_what_is_folded_is_what_is_whole(model: str, layers: int, plan: str) -> None:
    make, tp = MODELS[model]
    said_of, axes = PLANS[plan]
    check(lambda: make(layers), said_of(tp), layers > 4, **axes)


@pytest.mark.parametrize("sequence", [pytest.param(False, marks=pytest.mark.slow), True])
def test_what_is_folded_in_pieces_is_what_is_whole(sequence: bool) -> None:
    """Pieces cross the borders of blocks; all nodes are there, and what can stand elsewhere may."""
    plan = shardc.fsdp("dp") | llama.llama_tp("tp", sequence=sequence)
    whole, folded = (program(llama_of(8), plan, fold, 2, dp=2, tp=2) for fold in (False, True))
    assert folded.folded is not None
    for one, other in zip(whole.step(), folded.step(), strict=True):
        names, expected = ([ir.info(n).name for n in x.gm.graph.nodes if n.op != "output"] for x in (other, one))
        assert sorted(names) == sorted(expected)
        sent, wanted = ([ir.info(n).name for n in x.gm.graph.nodes if collective_kind(n)] for x in (other, one))
        assert sent == wanted
    assert folded.schedule("cpu").seconds == pytest.approx(whole.schedule("cpu").seconds, rel=1e-3)


HALF = shardc.precision(param=torch.bfloat16, reduce=torch.float32)


def checkpointed_of(layers: int) -> Any:
    return llama_of(layers, checkpoint=True)


def tied_of(layers: int) -> Any:
    """Its head is its embedding."""
    made = llama_of(layers)
    made[0].head.weight = made[0].embed.weight
    return made


def llama_sp(axis: str) -> shardc.Plan:
    return llama.llama_tp(axis, sequence=True)


LOW: dict[str, tuple[Callable[[int], Any], shardc.Plan, dict[str, int]]] = {
    "fsdp": (llama_of, shardc.fsdp("dp") | HALF, {"dp": 2}),
    "fsdp of parameters alone": (llama_of, shardc.fsdp("dp") | shardc.precision(param=torch.bfloat16), {"dp": 2}),
    "hsdp": (llama_of, shardc.hsdp(shard="dp", replicate="rep") | HALF, {"rep": 2, "dp": 2}),
    "tp+sp": (llama_of, shardc.fsdp("dp") | llama_sp("tp") | HALF, {"dp": 2, "tp": 2}),
    "checkpointed": (checkpointed_of, shardc.fsdp("dp") | HALF, {"dp": 2}),
    "checkpointed, tp+sp": (checkpointed_of, shardc.fsdp("dp") | llama_sp("tp") | HALF, {"dp": 2, "tp": 2}),
    "tied": (tied_of, shardc.fsdp("dp") | HALF, {"dp": 2}),
    "uneven": (llama_of, shardc.fsdp("dp") | HALF, {"dp": 3}),
    "offloaded": (lambda layers: stack(layers), shardc.fsdp("dp") | shardc.offload("layers.*") | HALF, {"dp": 2}),
}


@pytest.mark.filterwarnings("ignore::shardc.errors.ShardcWarning")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.slow if case in ("hsdp", "checkpointed") else pytest.mark.long)
        for case in LOW
    ],
)
def test_what_is_folded_in_low_precision_is_what_is_whole(case: str) -> None:
    make, plan, axes = LOW[case]
    check(lambda: make(7), plan, True, **axes)


def test_the_graphs_are_those_of_the_whole_model() -> None:
    """All ranks step the unfolded graphs: values and gradients are the dense model's."""
    torch.manual_seed(0)
    model, _, _ = stack(7)
    model, x = model.double(), torch.randn(8, WIDTH).double()
    plan = shardc.fsdp("dp") | MLP_TP
    module = shardc.compile(model, Mesh(dp=2, tp=2), plan, backend="eager", options=FOLD)
    simulation = shardc.Simulation(module)
    value = simulation(x)
    simulation.backward()
    expected = model(x)
    expected.backward()
    assert module.lower(x).folded is not None
    torch.testing.assert_close(value, expected.detach(), rtol=1e-9, atol=1e-12)
    for name, param in model.named_parameters():
        torch.testing.assert_close(simulation.grad(name), param.grad, rtol=1e-9, atol=1e-12)


def test_says_what_is_folded() -> None:
    made = program(stack(7), shardc.ddp("dp"), True, dp=2)
    note = "layers.0 to layers.6: 7 blocks alike, analysed on 4"
    schedule = made.schedule()
    assert note in schedule.table().partition("\n\n")[0].splitlines()
    assert json.loads(schedule.to_json())["notes"] == [note]
    assert "notes" not in json.loads(program(stack(4), shardc.ddp("dp"), True, dp=2).schedule().to_json())
    shown = explain(made, "layers.4.up.weight").text().splitlines()
    assert shown[1] == "the same in each of 7 blocks alike, layers.0 to layers.6"
    assert not explain(made, "last.weight").represents
    assert explain(made, "d.layers.6.up.mm").represents == "7 blocks alike, layers.0 to layers.6"


@pytest.mark.slow
def test_values_of_blocks_that_were_not_captured_are_explained() -> None:
    plan = shardc.fsdp("dp") | llama.llama_tp("tp", sequence=True)
    whole, folded = (program(llama_of(7), plan, fold, dp=2, tp=2) for fold in (False, True))
    for name in ("layers.5.attn.wq.mm", "d.layers.4.mlp.down.mm", "d.layers.6.attn.wq.mm.1"):
        assert replace(explain(folded, name), represents="") == explain(whole, name)
    with pytest.raises(PlanError, match="after capture, layers.0 to layers.6 do not repeat node by node"):
        folded.whole("capture")


@pytest.mark.slow
def test_formulas_of_all_blocks() -> None:
    whole, folded = (program(stack(7), shardc.fsdp("dp") | MLP_TP, fold, dp=2, tp=2) for fold in (False, True))
    assert folded.costs("cpu") == whole.costs("cpu")
    assert folded.schedule("cpu").cost("dp").wire == whole.schedule("cpu").cost("dp").wire


def test_what_is_kept_whole_for_backward_is_kept_of_all_blocks() -> None:
    programs = [
        shardc.compile(stack(7)[0], Mesh(dp=2), shardc.fsdp("dp"), options=replace(FOLD, fold=fold, memory_budget=-1))
        for fold in (True, False)
    ]
    folded, whole = (module.lower(*stack(7)[1]) for module in programs)
    assert folded.folded is not None and folded.levels == whole.levels
    for stage in ("schedule", "localize"):
        assert said(folded.schedule("cpu", stage=stage)) == said(whole.schedule("cpu", stage=stage))
    module = shardc.compile(stack(7)[0], Mesh(dp=2), shardc.fsdp("dp"), options=replace(FOLD, memory_budget=1 << 12))
    with pytest.warns(ShardcWarning, match="memory_budget=4096 may treat alike blocks differently: nothing is folded"):
        assert module.lower(*stack(7)[1]).folded is None


def test_blocks_on_the_host_are_folded() -> None:
    """The moves of their gradients stand where these are made, in their block's period."""
    check(lambda: stack(6), shardc.fsdp("dp") | shardc.offload("layers.*"), True, dp=2)


@pytest.mark.parametrize(
    ("plan", "counts"),
    [
        (shardc.save(["layers.[0-5]"], on="host"), [6, 6]),
        (shardc.recompute(["layers.[0-5]"]), [6, 6]),
        (shardc.recompute(["layers.[6-9]", "layers.1[01]"]), [6, 6]),
        (shardc.recompute(["layers.[0-4]"]) | shardc.recompute(["layers.[5-9].up", "layers.1[01].up"]), [5, 7]),
        (shardc.offload(["layers.[2-7].*"]), [2, 6, 4]),
    ],
    ids=str,
)
def test_parts_of_a_run_that_the_plan_treats_differently_fold_each(plan: shardc.Plan, counts: list[int]) -> None:
    plan |= shardc.fsdp("dp")
    folded = check(lambda: stack(12), plan, True, dp=2)
    assert [run.count for run in folded.folded.repeats] == [count for count in counts if count > 4]
    whole = program(stack(12), plan, False, dp=2)
    assert folded.schedule("cpu").useful_flops == whole.schedule("cpu").useful_flops


def test_stages_show_all_blocks() -> None:
    """From propagate on. Saved values have other names in the halves; gradients stand beside their blocks in front."""

    def shown(made: Any, stage: str) -> list[str]:
        return [line for line in made.text(stage).splitlines() if not line.startswith("  saved ")]

    whole, folded = (program(stack(6), shardc.fsdp("dp"), fold, dp=2) for fold in (False, True))
    assert sorted(shown(folded, "localize")) == sorted(shown(whole, "localize"))
    for stage in ("partition", "bucket.backward", "plan_memory"):
        assert shown(folded, stage) == shown(whole, stage)
        names = [line.split()[1] for line in folded.text(stage).splitlines() if line.startswith("  saved ")]
        assert len(set(names)) == len(names)
    assert "layers.4" not in folded.text("capture")


class Settles(Stack):
    """Finds out at its first call what it computes with, as models of transformers do."""

    kind: torch.dtype | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kind is None:
            self.kind = x.dtype
        return super().forward(x)


def test_what_a_first_call_leaves_behind_hides_no_blocks() -> None:
    model = Settles(*(Layer() for _ in range(8)))
    found = find_repeats(model, (torch.empty(4, WIDTH),), {}, device=torch.device("cpu"), keep=4, dtypes=Dtypes())
    assert [each.count for each in found] == [8]


@pytest.mark.slow
def test_what_is_useful_is_counted_of_all_blocks() -> None:
    """Also attention that is split by sequence, which is cut into other ops before blocks are unfolded."""
    config = llama.LlamaConfig(layers=6)
    with torch.device("meta"):
        model, batch = llama.Llama(config), llama.batch(config)
    useful = []
    for plan in (shardc.fsdp("dp"), shardc.fsdp("dp") | shardc.cp("dp")):
        for fold in (True, False):
            module = shardc.compile(model, Mesh(dp=2), plan, loss=llama.loss, options=shardc.Options(fold=fold))
            useful.append(module.lower(*batch).schedule("h100").useful_flops)
    assert useful == [useful[0]] * 4


@pytest.mark.parametrize("momentum", [None, 0.1])
def test_batch_norms_are_compared(momentum: float | None) -> None:
    """A cumulative one weighs a batch by the value of a counter, and fake tensors have no values."""
    model = nn.Sequential(*(nn.Sequential(Layer(), nn.BatchNorm1d(WIDTH, momentum=momentum)) for _ in range(8)))
    found = find_repeats(model, (torch.empty(4, WIDTH),), {}, device=torch.device("cpu"), keep=4, dtypes=Dtypes())
    assert found.runs == ()  # each block changes buffers of its own
