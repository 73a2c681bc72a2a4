"""Comparing saved schedules: the numbers that differ, conditions, exit codes, and one line on bad input."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardc.__main__ import main
from shardc.report.export import Change, Limit

BASE = ["schedule", "examples/models/mlp.py:example", "--mesh", "dp=2", "--stage", "localize"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Schedules of one model under level 3 and level 2."""
    folder = tmp_path_factory.mktemp("schedules")
    paths = []
    for level in (3, 2):
        path = folder / f"level_{level}.json"
        assert main([*BASE, "--plan", f'fsdp("dp", level={level})', "--json", str(path)]) == 0
        paths.append(str(path))
    return paths[0], paths[1]


def test_a_schedule_does_not_differ_from_itself(saved: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", saved[0], saved[0], "--fail-if", "wire>+0"]) == 0
    assert capsys.readouterr().out == "no difference\n"


def test_fewer_gathers_move_less(saved: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", *saved, "--fail-if", "wire>+0", "--fail-if", "exposed>+0.0%"]) == 0
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line}
    assert rows["step"][0] == rows["seconds"][0] and rows["number"] == ["before", "after", "change"]
    assert rows["count.all_gather"] == ["14", "10", "-28.6%"]  # ten parameters; the weights of four are gathered again
    assert [name for name in rows if "reduce_scatter" in name] == []
    assert main(["diff", saved[1], saved[0], "--fail-if", "wire.dp>+5%"]) == 1
    assert "broken: wire.dp is" in capsys.readouterr().out


def test_a_plan_beside_another(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The answer is the first line, and the numbers are those of `diff`; then come the tables of the schedule."""
    page, saved = tmp_path / "page.html", [tmp_path / "before.json", tmp_path / "after.json"]
    others = ["--beside", 'fsdp("dp", level=2)', "--beside-mesh", "dp=4"]
    assert main([*BASE, "--plan", 'fsdp("dp")', *others, "--json", str(saved[0]), "--html", str(page)]) == 0
    text = capsys.readouterr().out
    first, before, after, _, *table = text.partition("\n\nMLP, mesh dp=2 on h100")[0].splitlines()
    assert before == 'before    mesh dp=2, fsdp("dp", level=3)' and after == 'after     mesh dp=4, fsdp("dp", level=2)'
    arguments = ["--mesh", "dp=4", "--plan", 'fsdp("dp", level=2)', "--json", str(saved[1])]
    assert main([*BASE, *arguments]) == 0
    capsys.readouterr()
    assert main(["diff", *map(str, saved)]) == 0
    assert capsys.readouterr().out.splitlines() == [first, "", *table]
    assert first.startswith("step ") and max(map(len, text.splitlines())) <= 120
    assert "Under each row" in page.read_text() and '"beside":{"title":"MLP, fsdp(' in page.read_text()


@pytest.mark.parametrize(
    ("text", "change", "broken"),
    [
        ("exposed>+5%", Change("exposed", 100, 106), True),
        ("exposed>+5%", Change("exposed", 100, 105), False),
        ("exposed>+5", Change("exposed", 100, 106), True),
        ("mfu<0.4", Change("mfu", 0.5, 0.39), True),
        ("mfu < 0.4", Change("mfu", 0.1, 0.41), False),
        ("mfu<-10%", Change("mfu", 0.5, 0.44), True),
        ("wire.dp>+5%", Change("wire.dp", 0, 1), True),
    ],
)
def test_conditions(text: str, change: Change, broken: bool) -> None:
    assert Limit.parse(text).broken(change) is broken


def test_bad_input_is_one_line(saved: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "text.json").write_text("mesh dp=2")
    cases = {
        (saved[0], str(tmp_path / "none.json")): f"{tmp_path}/none.json: No such file or directory",
        (saved[0], str(tmp_path / "list.json")): f"{tmp_path}/list.json is not a saved schedule; "
        "write one with python -m shardc schedule ... --json FILE",
        (
            *saved,
            "--fail-if",
            "exposed",
        ): "--fail-if 'exposed' is not a condition; write it as 'exposed>+5%' or 'mfu<0.4'",
    }
    for arguments, expected in cases.items():
        assert main(["diff", *arguments]) == 2
        assert capsys.readouterr().err == f"shardc: error: {expected}\n"
    assert main([*BASE, "--plan", 'fsdp("dp")', "--hardware", "h10"]) == 2
    assert capsys.readouterr().err == "shardc: error: no hardware is called 'h10'; did you mean 'h100'?\n"
    assert main([*BASE, "--mesh", "dp=128", "--plan", 'fsdp("dp")', "--hardware", "cpu"]) == 2
    assert "cpu is described for at most 64" in capsys.readouterr().err
