"""The timeline of a pipeline step: its text, and a figure with a bar for each computation."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shardc.errors import InputError
from shardc.ir.schedules import COMPUTATIONS, Kind, Timeline, clock, schedule
from shardc.report.page import save
from shardc.report.stage_timeline import answer, draw, rows
from tests import golden

SECONDS = {
    Kind.FORWARD: 0.009,
    Kind.BACKWARD: 0.0199,
    Kind.BACKWARD_INPUT: 0.0147,
    Kind.BACKWARD_WEIGHT: 0.0052,
}


def timeline(name: str, ranks: int, microbatches: int, trains: bool = True) -> Timeline:
    """A step whose last stage is slower, with slow transfers."""
    lists = schedule(name, ranks, microbatches, trains=trains)
    return clock(
        lists,
        lambda kind, stage: SECONDS[kind] * ranks / lists.stages * (1 + (stage == lists.stages - 1)),
        lambda source, destination: 0.003,
    )


def text(timeline: Timeline, width: int = 120) -> str:
    return "\n".join([*answer(timeline), "", *rows(timeline, width), ""])


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_text(name: str) -> None:
    golden.check(text(timeline(name, 2, 4), 100), f"report/pipeline_{name}")


def test_text_of_forwards_of_one_rank() -> None:
    assert text(timeline("gpipe", 1, 2, trains=False), 40) == (
        "step      36.0 ms: schedule gpipe, 1 rank, 1 stage, 2 microbatches\n"
        "bubble    0.00 % of the ranks' time\n"
        "exposed   transfers of 0 per rank, 0.00 % of the step\n"
        "\n"
        "rank 0  F0--------------F1--------------\n"
        "        0                        36.0 ms\n"
        "\n"
        "F forward; digits: microbatch\n"
    )


@pytest.mark.parametrize("width", [1, 20, 60, 120])
def test_text_keeps_its_width(width: int) -> None:
    lines = [line for line in text(timeline("zb", 4, 12), width).splitlines() if line.startswith("rank")]
    assert len(lines) == 4 and all(len(line) <= max(width, 9) for line in lines)


def test_nothing_takes_no_time() -> None:
    step = clock(schedule("gpipe", 2, 2), lambda kind, stage: 0.0, lambda source, destination: 0.0)
    assert (step.seconds, step.bubble) == (0.0, 0.0)
    assert text(step, 30).splitlines()[0] == "step      0: schedule gpipe, 2 ranks, 2 stages, 2 microbatches"
    draw(step)


def test_a_bar_for_each_computation() -> None:
    step = timeline("interleaved", 2, 4)
    (axes,) = draw(step).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1"]
    bars = [path.get_extents() for spans in axes.collections for path in spans.get_paths()]
    computations = sorted((box.x0, box.x1, round(box.y0 + 0.38)) for box in bars if box.height > 0.5)
    expected = [
        (start * 1e3, end * 1e3, rank)
        for rank, row in enumerate(step.spans)
        for action, start, end in row
        if action.kind in COMPUTATIONS
    ]
    assert [pytest.approx(bar) for bar in sorted(expected)] == computations
    waits = sorted((box.x0, box.x1) for box in bars if box.height < 0.5)
    exposed = [(start * 1e3, end * 1e3) for row in step.waits for start, end in row]
    assert [pytest.approx(wait) for wait in sorted(exposed)] == waits and waits
    microbatches = sorted(label.get_text() for label in axes.texts)
    assert microbatches == sorted(str(m) for m in range(4) for _ in range(2 * 4))


def test_the_same_picture_every_time(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        save(draw(timeline("dualpipev", 2, 5)), tmp_path / name)
    first, second = ((tmp_path / name).read_bytes() for name in ("a.png", "b.png"))
    assert first == second and first.startswith(b"\x89PNG")


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib.figure", "matplotlib.colors"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match="a plot needs matplotlib, which is not installed"):
        draw(timeline("gpipe", 2, 2))
