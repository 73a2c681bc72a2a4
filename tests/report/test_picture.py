"""The picture of a schedule: each lane has its spans, memory its owners, and without matplotlib one line says so."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

import shardc
from shardc.__main__ import main
from shardc.errors import InputError
from shardc.report.page import draw
from shardc.report.predicted_memory import OWNERS
from shardc.report.predicted_schedule import Schedule
from tests.report.test_schedule import ROOT, stack_program


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    plan = shardc.fsdp("dp") | shardc.tp("tp", colwise=["layers.0"], rowwise=["layers.1"])
    return stack_program(plan, dp=2, tp=2).schedule("cpu", stage="localize")


@pytest.mark.slow
def test_a_lane_for_compute_and_each_axis(schedule: Schedule) -> None:
    time, memory = draw(schedule).axes
    lanes = [label.get_text() for label in time.get_yticklabels()]
    assert lanes == ["compute", *dict.fromkeys(c.axis for c in schedule.collectives)]
    drawn: Counter[str] = Counter()
    ends = []
    for spans in time.collections:
        boxes = [path.get_extents() for path in spans.get_paths()]
        if boxes[0].height > 0.5:  # a thin one shows what is exposed
            drawn[lanes[round(boxes[0].y0 + 0.38)]] += len(boxes)
            ends += [box.x1 for box in boxes]
    assert drawn == {"compute": len(schedule.runs), **Counter(c.axis for c in schedule.collectives)}
    expected = [*(run.end for run in schedule.runs), *(c.end for c in schedule.collectives)]
    assert sorted(ends) == pytest.approx(sorted(end * 1e3 for end in expected))
    held = {owner for sample in schedule.memory.samples for owner, n in zip(OWNERS, sample.sizes, strict=True) if n}
    assert len(memory.collections) == len(held)
    top = memory.collections[-1].get_paths()[0].get_extents().y1
    assert top == pytest.approx(schedule.memory.peak.total / 1e6)


def test_the_same_picture_every_time(schedule: Schedule, tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        schedule.plot(tmp_path / name)
    first, second = ((tmp_path / name).read_bytes() for name in ("a.png", "b.png"))
    assert first == second and first.startswith(b"\x89PNG")


def test_bad_input_says_what(schedule: Schedule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="Format 'dog' is not supported"):
        schedule.plot(tmp_path / "s.dog")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match="a plot needs matplotlib, which is not installed") as raised:
        schedule.plot(tmp_path / "s.png")
    assert raised.value.fix == "pip install 'shardc[plot]'"


@pytest.mark.slow
def test_the_command_writes_pictures_and_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = f"{ROOT / 'examples/models/mlp.py'}:example"
    files = [tmp_path / "out" / name for name in ("s.html", "s.png")]
    arguments = ["--mesh", "dp=2", "--plan", 'fsdp("dp")', "--html", str(files[0]), "--plot", str(files[1])]
    assert main(["schedule", target, *arguments]) == 0
    assert files[0].read_text().startswith("<!doctype html>") and files[1].read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.startswith("MLP, mesh dp=2 on h100, graph order\nstep ")
