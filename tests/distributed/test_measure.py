"""What the schedule counts is what real ranks send, collective by collective, as the profiler counts it."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

import shardc
from shardc.__main__ import main
from shardc.cli.measured import Comparison, Pair, lost_table, pairs_of
from shardc.cli.real_steps import order
from shardc.report.export import waits_of
from shardc.report.predicted_schedule import Schedule
from shardc.runtime.profile import Profiled, Ran
from tests.cli.test_cli import SMALL
from tests.report.test_schedule import stack_program

LLAMA = str(Path(__file__).parents[2] / "examples/models/llama.py")
REAL = """

def real():
    torch.manual_seed(0)
    return Mlp(), (torch.randn(16, 8), torch.randn(16, 8))
"""


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "measured_target.py").write_text(SMALL + REAL)
    monkeypatch.chdir(tmp_path)
    return "measured_target.py"


def measured(*arguments: str) -> dict[str, object]:
    """What ``measure`` writes of one plan."""
    assert main(["measure", *arguments, "--backend", "eager", "--steps", "1", "--json", "made.json"]) == 0
    (made,) = json.loads(Path("made.json").read_text())
    assert isinstance(made, dict)
    return made


def check(made: dict[str, object]) -> None:
    """The collectives, in their order, and the bytes of each are those that ran."""
    pairs = made["pairs"]
    assert isinstance(pairs, list) and pairs
    assert made["counts"] == [len(pairs), len(pairs)]
    assert [(p["ran"], p["bytes"]) for p in pairs] == [(p["kind"], p["predicted_bytes"]) for p in pairs]


@pytest.mark.slow
def test_two_ranks_send_what_is_predicted(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    made = measured(f"{target}:real", "--nproc", "2", "--plan", 'fsdp("dp")', "--loss", "loss", "--html", "made.html")
    check(made)
    # Each wait is that of a collective, and phases have all of them.
    pairs, phases = made["pairs"], made["phases"]
    assert all(p["exposed"] > 0 for p in pairs)  # type: ignore[attr-defined]
    assert [p["name"] for p in phases] == ["forward", "backward"]  # type: ignore[attr-defined]
    exposed = sum(p["exposed"] for p in pairs)  # type: ignore[attr-defined]
    assert exposed == pytest.approx(made["exposed"][1])  # type: ignore[index]
    assert sum(p["exposed"] for p in phases) == pytest.approx(exposed)  # type: ignore[attr-defined]
    page = Path("made.html").read_text()
    beside = json.loads(page.partition('id="data">')[2].partition("</script>")[0])["beside"]
    assert [bar["kind"] for bar in beside["bars"] if bar["lane"] == "dp"] == [p["ran"] for p in pairs]  # type: ignore[attr-defined]
    assert {bar["kind"] for bar in beside["bars"] if bar["lane"] == "compute"} == {"forward", "backward"}
    text = capsys.readouterr().out
    assert text.startswith("step ") and max(map(len, text.splitlines())) <= 120
    lines = text.splitlines()
    total = sum(p["bytes"] for p in made["pairs"])  # type: ignore[attr-defined]
    assert [line.split()[2:] for line in lines if line.startswith("bytes sent")] == [[str(total)] * 2 + ["+0.0%"]]


@pytest.mark.slow
def test_several_plans_take_turns(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    plans = ['fsdp("dp")', 'ddp("dp")']
    arguments = ["--nproc", "2", "--plans", *plans, "--loss", "loss", "--backend", "eager", "--steps", "3"]
    assert main(["measure", f"{target}:real", *arguments, "--json", "made.json"]) == 0
    made = json.loads(Path("made.json").read_text())
    for one in made:
        check(one)
    assert [(one["plan"], len(one["timed"])) for one in made] == [(plan, 3) for plan in plans]
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[-2:] for row in rows[3:5]] == [[str(sum(p["bytes"] for p in one["pairs"])), "equal"] for one in made]


def timed(plan: str, predicted: float, *seconds: float) -> Comparison:
    return Comparison(plan, (), (0, 0), (predicted, statistics.median(seconds)), seconds, (0, 0), (0, 0))


def test_orders_are_compared_pair_by_pair() -> None:
    fast, slow = timed("fast", 0.1, 0.100, 0.101, 0.102), timed("slow", 0.2, 0.200, 0.201, 0.202)
    assert order([slow, fast]) == ["the orders agree"]
    wrong = timed("wrong", 0.05, 0.150, 0.151, 0.152)
    assert order([slow, wrong, fast]) == [
        "fast is faster than wrong, by 50.0 ms, more than these medians may be off; predicted was slower, by 50.0 ms"
    ]
    close = timed("close", 0.09, 0.09, 0.102, 0.12)
    assert order([fast, close])[0].startswith("fast is faster than close, by 1.00 ms, not more than these medians")
    assert timed("once", 0.1, 0.1).noise == float("inf")


@pytest.mark.parametrize(
    ("cause", "text"),
    [
        ({"call": 0.03}, "its call takes 30.0 ms more than predicted"),
        ({"late": 0.03}, "another rank starts it 30.0 ms later"),
        ({"wire": 0.03, "late": 0.01}, "it is on its way for 30.0 ms more"),
        ({"beside": 0.03, "call": -0.1}, "30.0 ms less compute between call and wait"),
        ({}, "-"),
    ],
)
def test_lost_overlap_names_its_cause(cause: dict[str, float], text: str) -> None:
    common = ("dp", "layers.1.up", "forward", "all_gather", 8, 8, 0.01, 0.05)
    lost = Pair("all_gather", *common, predicted_exposed=0.0, exposed=0.04, **cause)
    hidden = Pair("reduce_scatter", *common, predicted_exposed=0.04, exposed=0.04, wire=1.0)
    unknown = Pair("all_reduce", *common, predicted_exposed=0.0)
    table = lost_table([lost, hidden, unknown], 1.0)
    assert table.rows == [("all_gather(dp)", "layers.1.up", "1", "40.0 ms", text)]
    assert lost_table([lost], 100.0).rows == []


def as_predicted(schedule: Schedule) -> tuple[list[Ran], list[tuple[float, float]], list[int]]:
    """The collectives and the waits of a step that runs as predicted; for each wait the number of its collective."""
    clock = (*schedule.clock, schedule.seconds)
    ran = [
        Ran(c.kind, c.wire, None, clock[at], c.end, clock[at + 1] - clock[at])
        for at, c in zip(schedule.step.starts, schedule.collectives, strict=True)
    ]
    waits, of, done = [], [], set[int]()
    for wait, start in waits_of(schedule.step):
        number = schedule.step.starts.index(start)
        due = clock[wait] if number in done else max(clock[wait], ran[number].end)
        waits.append((clock[wait], due))
        of.append(number)
        done.add(number)
    return ran, waits, of


def test_what_runs_as_predicted_loses_nothing_and_what_does_not_says_why() -> None:
    schedule = stack_program(shardc.fsdp("dp"), dp=2).schedule("cpu")
    ran, waits, of = as_predicted(schedule)
    latest = [x.start for x in ran]

    def compared() -> tuple[Pair, ...]:
        return pairs_of(schedule, Profiled(tuple(ran), tuple(waits), (), 0, schedule.seconds, 0), latest)

    for pair, c in zip(compared(), schedule.collectives, strict=True):
        assert [pair.call, pair.late, pair.wire, pair.beside] == pytest.approx([0, 0, 0, 0], abs=1e-12)
        assert pair.exposed == pytest.approx(c.exposed) and pair.bytes == pair.predicted_bytes == c.wire
    assert lost_table(compared(), schedule.seconds).rows == []
    # The last collective: another rank comes 10 ms later, and so it ends later.
    last = len(ran) - 1
    first = of.index(last)
    latest[last] += 0.01
    ran[last] = replace(ran[last], end=ran[last].end + 0.01)
    waits[first] = (waits[first][0], waits[first][1] + 0.01)
    assert (compared()[last].late, compared()[last].wire) == pytest.approx((0.01, 0.0))
    (row,) = lost_table(compared(), schedule.seconds).rows
    assert row[3:] == ("10.0 ms", "another rank starts it 10.0 ms later")
    # Where waits cannot be told apart, nothing is said.
    waits.pop()
    assert {pair.exposed for pair in compared()} == {None}


PLANS = {
    "ddp": 'ddp("dp")', "fsdp2": 'fsdp("dp", level=2)', "fsdp3": 'fsdp("dp")', "tp": 'llama_tp("tp")',
    "tp+sp": 'llama_tp("tp", sequence=True)',
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("plan", PLANS)
def test_a_llama_sends_what_is_predicted(
    plan: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check(measured(f"{LLAMA}:tiny", "--nproc", str(ranks), "--plan", PLANS[plan]))


@pytest.mark.long
def test_two_axes_send_what_is_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = 'fsdp("dp") | llama_tp("tp", sequence=True)'
    check(measured(f"{LLAMA}:tiny", "--nproc", "4", "--mesh", "dp=2,tp=2", "--plan", plan))


WRONG = {
    "mesh": ("the mesh dp=4 has 4 ranks, and --nproc is 2", ["--mesh", "dp=4"]),
    "axes": ("the plan has the axes dp, tp", ["--plan", 'fsdp("dp") | mlp_tp("tp")']),
    "plan": ("--plan, ", ["--plan", "fsdp(dp"]),
    "loss": ("has no loss 'los'", ["--loss", "los"]),
    "cost": ("cost model nowhere.json cannot be read", ["--cost", "nowhere.json"]),
    "axis": ("'cp'", ["--mesh", "cp=2"]),
    "none": ("--nproc and --steps are 1 or more", ["--steps", "0"]),
}


@pytest.mark.parametrize("what", WRONG)
def test_bad_input_is_one_line_and_exit_code_2(what: str, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected, arguments = WRONG[what]
    assert main(["measure", f"{target}:example", "--nproc", "2", "--plan", 'fsdp("dp")', *arguments]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith("shardc: error: ") and expected in err
