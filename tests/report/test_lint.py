"""Lint: each rule finds what was planted for it, with its place and cost, and stays silent on a good plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import shardc
from examples.models import llama
from shardc.__main__ import main
from shardc.ir.mesh import Mesh
from shardc.report.findings import SEVERITIES, Finding, merged

WIDTH = 1024


class Pair(nn.Module):
    """Two matrices, up and down, without biases."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).sum()


def found(plan: shardc.Plan, dtype: torch.dtype = torch.float32, rows: int = 512, **axes: int) -> list[Finding]:
    with torch.device("meta"):
        model, x = Pair().to(dtype), torch.empty(rows, WIDTH, dtype=dtype, requires_grad=True)
    return shardc.compile(model, Mesh(axes), plan).lower(x).lint()


def of_rule(findings: list[Finding], rule: str) -> list[tuple[str, int]]:
    return [(f.subject, f.bytes) for f in findings if f.rule == rule]


def test_parameters_that_stay_whole() -> None:
    size = 4 * WIDTH * WIDTH * 4
    assert of_rule(found(shardc.ddp("dp"), dp=2), "whole-parameter") == [("down.weight", size), ("up.weight", size)]
    assert of_rule(found(shardc.fsdp("dp"), dp=2), "whole-parameter") == []


def test_the_entry_for_a_whole_parameter_stores_what_it_says() -> None:
    """The line of a finding, pasted behind the plan, compiles, and each rank holds as many bytes less."""
    plan = shardc.ddp("dp")
    change = next(f.change for f in found(plan, dp=2) if (f.rule, f.subject) == ("whole-parameter", "up.weight"))
    line, _, said = change.partition(" stores ")
    assert line == 'Plan(params={"up.weight": ("dp", None)})'
    peaks = []
    for each in (plan, plan | eval(line, {"Plan": shardc.Plan})):
        with torch.device("meta"):
            model, x = Pair(), torch.empty(512, WIDTH)
        owners = shardc.compile(model, Mesh(dp=2), each).lower(x).schedule().memory.by_owner()
        peaks.append(owners["parameters"])
    assert peaks[0] - peaks[1] == int(said.split()[0])


def test_advice_is_what_the_prediction_gains() -> None:
    """The line of an advice, compiled, has the predicted step that it promises; where nothing helps, there is none."""
    many = nn.Sequential(*(nn.Linear(1024, 1024, device="meta") for _ in range(24)))
    x = torch.empty(4096, 1024, device="meta")
    module = shardc.compile(many, Mesh(dp=64), shardc.fsdp("dp"), options=shardc.Options(bucket_size=0))
    program = module.lower(x)
    advices = program.advise()
    assert advices == sorted(advices, key=lambda advice: -advice.gain) and advices
    for advice in advices:
        options = eval(advice.line, {"Options": lambda **changes: shardc.Options(**{"bucket_size": 0, **changes})})
        again = shardc.compile(many, Mesh(dp=64), shardc.fsdp("dp"), options=options).lower(x).schedule()
        assert again.seconds == pytest.approx(advice.seconds, rel=1e-12)
        assert program.schedule().seconds - again.seconds == pytest.approx(advice.gain, rel=1e-9)
        assert again.memory.peak.total == advice.memory
    small = shardc.compile(Pair(), Mesh(dp=2), shardc.fsdp("dp")).lower(torch.empty(1 << 14, WIDTH, device="meta"))
    assert small.advise() == []


def test_work_that_ranks_repeat() -> None:
    """Nothing is split over tp: each product, forward and backward, is done twice."""
    names = {f.subject: f.message for f in found(shardc.fsdp("dp"), dp=2, tp=2) if f.rule == "replicated-work"}
    assert len(names) == 6 and set(names.values()) == {"done 2 times over tp, alike on different ranks"}
    plan = shardc.fsdp("dp") | shardc.tp("tp", colwise=["up"], rowwise=["down"])
    assert of_rule(found(plan, dp=2, tp=2), "replicated-work") == []


def test_a_busy_axis_across_nodes() -> None:
    """tp is major, so that it leaves the node of eight, where dp fills it."""
    plan = shardc.ddp("dp") | shardc.tp("tp", colwise=["up"], rowwise=["down"])
    crossing = [f for f in found(plan, rows=1 << 16, tp=2, dp=8) if f.rule == "axis-across-nodes"]
    assert [(f.subject, f.severity) for f in crossing] == [("tp", "high")]
    assert [f for f in found(plan, rows=1 << 16, dp=8, tp=2) if f.rule == "axis-across-nodes"] == []


def test_another_order_of_the_mesh_is_tried() -> None:
    """The order that is advised, compiled, has the step that was promised."""
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), Pair()), torch.empty(1 << 16, WIDTH)
    plan = shardc.ddp("dp") | shardc.tp("tp", colwise=["1.up"], rowwise=["1.down"])
    program = shardc.compile(model, Mesh(tp=2, dp=8), plan).lower(x)
    (advice,) = [one for one in program.advise() if one.rules == ("axis-across-nodes",)]
    assert advice.line == "Mesh(dp=8, tp=2)"
    assert shardc.compile(model, Mesh(dp=8, tp=2), plan).lower(x).schedule().seconds == pytest.approx(advice.seconds)


def test_an_axis_that_stands_in_the_way() -> None:
    exposed = [f for f in found(shardc.fsdp("dp"), rows=64, dp=8) if f.rule == "exposed-axis"]
    assert [(f.subject, f.severity) for f in exposed] == [("dp", "high")]
    assert of_rule(found(shardc.fsdp("dp"), rows=1 << 18, dp=8), "exposed-axis") == []


def test_sums_in_low_precision() -> None:
    wire = 4 * WIDTH * WIDTH * 2 * 15 // 16
    assert of_rule(found(shardc.fsdp("dp"), torch.bfloat16, dp=16), "low-precision-sum") == [("dp", 2 * wire)]
    assert of_rule(found(shardc.fsdp("dp"), torch.float32, dp=16), "low-precision-sum") == []


def test_findings_come_by_severity_and_merge_by_layer() -> None:
    findings = found(shardc.fsdp("dp"), dp=2, tp=2)
    ranks = [SEVERITIES.index(f.severity) for f in findings]
    assert ranks == sorted(ranks)
    first, second = (
        Finding(
            "repeated-gather", "low", f"layers.{n}.w", f"layers.{n}", "a.py:1", 1.0, 8, f"as %layers.{n}.v", "pin it", 3
        )
        for n in "01"
    )
    both = Finding("repeated-gather", "low", "layers.*.w", "layers.*", "a.py:1", 2.0, 16, "as %layers.*.v", "pin it", 6)
    assert merged([first, second]) == [both] and merged([first]) == [first]
    other = replace(second, message="else")
    assert merged([first, other]) == [first, other]


def test_small_messages_are_counted_once_and_by_phase() -> None:
    """What a row counts is what it is about: the collectives of one kind, axis and phase in the step that runs."""
    model, args = llama.tiny()
    plan = shardc.fsdp("dp") | llama.llama_tp("tp", sequence=True)
    program = shardc.compile(model, Mesh(dp=2, tp=2), plan).lower(*args)
    rows = [f for f in merged(program.lint()) if f.rule == "small-messages"]
    all_of_them = program.schedule().collectives
    for row in rows:
        phase = row.message.split()[1].rstrip(",")
        same = [c for c in all_of_them if f"{c.kind}({c.axis})" == row.subject and c.phase == phase]
        assert row.count == len(same) and row.bytes == sum(c.wire for c in same)
    assert {(row.subject, row.message.split(",")[0]) for row in rows} >= {
        ("all_gather(tp)", "in forward"), ("all_gather(tp)", "in backward")
    }  # fmt: skip


def test_the_command_fails_on_what_is_severe(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["lint", "examples/models/mlp.py:example", "--mesh", "dp=2", "--plan", 'ddp("dp")']
    arguments += ["--stage", "localize"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert main([*arguments, "--fail-on", "low"]) == 1
    assert capsys.readouterr().out == shown
    head, *rows = shown.splitlines()
    assert head.split() == ["severity", "rule", "count", "time", "a", "rank", "subject", "source"]
    assert max(map(len, rows)) <= 120 and any(row.startswith("exposed-axis: make dp smaller") for row in rows), shown
