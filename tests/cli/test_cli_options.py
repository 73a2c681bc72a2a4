"""``--option``: every field of `Options` can be given on the command line, and mistakes name it."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import shardc
from shardc.__main__ import main
from shardc.cli.target import options_of, parsed
from shardc.cost import hardware
from shardc.cost.model import CostModel
from shardc.errors import InputError
from shardc.passes import Hook


class Timer(Hook):
    """A hook that does nothing."""


class File:
    """A target whose file has these objects."""

    objects = SimpleNamespace(mine=lambda pipeline: pipeline, once=lambda *args, **kwargs: None, Timer=Timer)

    def named(self, name: str, what: str) -> Any:
        return getattr(self.objects, name)


VALUES: dict[str, tuple[str, object]] = {
    "strict": ("true", True),
    "cost": ("h200", hardware.H200),
    "layout_solver": ("exact", "exact"),
    "verify": ("False", False),
    "bucket_size": ("450 MiB", 450 << 20),
    "max_in_flight": ("1GB", 10**9),
    "memory_budget": ("-1", -1),
    "checkpoint_collectives": ("keep", "keep"),
    "overlap": ("false", False),
    "decompose": ("4", 4),
    "p2p_collectives": ("none", None),
    "skip_comm": ("gather,reduce", ("gather", "reduce")),
    "fold": ("true", True),
    "compile_regions": ("blocks", "blocks"),
    "program_cache": ("false", False),
    "uneven": ("true", True),
    "capture": ("once", File.objects.once),
    "pipeline": ("mine", File.objects.mine),
    "dump": ("out/dump", "out/dump"),
}


@pytest.mark.parametrize("name", [field.name for field in fields(shardc.Options) if field.name != "hooks"])
def test_every_option_can_be_given(name: str) -> None:
    text, value = VALUES[name]
    assert getattr(options_of(File(), [f"{name}={text}"]), name) == value


def test_hooks_and_files(tmp_path: Path) -> None:
    (hook,) = options_of(File(), ["hooks=Timer"]).hooks
    assert type(hook) is Timer
    assert options_of(File(), ["bucket_size=h100"]).bucket_size == hardware.H100
    CostModel().save(tmp_path / "cost.json")
    assert options_of(File(), [f"cost={tmp_path / 'cost.json'}"]).cost == CostModel()


def test_what_is_given_goes_before_what_a_command_has_by_default() -> None:
    assert options_of(File(), [], hardware.H100, fold=True).bucket_size == hardware.H100
    chosen = options_of(File(), ["bucket_size=0", "fold=false"], hardware.H100, fold=True)
    assert (chosen.bucket_size, chosen.fold) == (0, False)


@pytest.mark.parametrize(("text", "message"), [
    ("bucket_size", "--option bucket_size: there is no value\n  fix: write it as bucket_size=450MiB"),
    ("bucketsize=1", "--option bucketsize=1: there is no option 'bucketsize'\n  fix: did you mean 'bucket_size'?"),
])  # fmt: skip
def test_mistakes_name_the_option(text: str, message: str) -> None:
    with pytest.raises(InputError) as raised:
        parsed([text], File())
    assert str(raised.value) == message


def test_the_schedule_has_the_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["schedule", "examples/models/mlp.py:example", "--mesh", "dp=2", "--plan", 'fsdp("dp")']
    counts = []
    for size in ("0", "-1"):
        path = tmp_path / f"{size}.json"
        assert main([*command, "--option", f"bucket_size={size}", "--json", str(path)]) == 0
        counts.append(len(json.loads(path.read_text())["collectives"]))
    assert counts[0] > counts[1]
    assert main([*command, "--option", "overlap=maybe"]) == 2
    assert "overlap" in capsys.readouterr().err
