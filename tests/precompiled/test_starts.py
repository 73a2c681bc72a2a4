"""What starts in processes of their own find in the store, and why a program is not there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardc
from shardc.precompiled import Store

FOUND, ADDED = "found in FOLDER/cache/shardc/programs/", "added to FOLDER/cache/shardc/programs/"
NAMED = ["a named tuple", "a typed named tuple", "a dataclass"]


def start(folder: Path, *arguments: str) -> dict[str, str]:
    """One start of ``tests.precompiled.starts``: model -> what the store says of its program, less the hashes."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"), "PYTHONHASHSEED": arguments[0]}
    done = subprocess.run(
        [sys.executable, "-m", "tests.precompiled.starts", str(folder), *arguments], env=environment,
        capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    return {what: re.sub(r"[0-9a-f]{32}(/[0-9a-f]{32})?$", "", text) for what, text in said.items()}


@pytest.mark.slow
def test_second_starts_find_what_they_run(tmp_path: Path) -> None:
    """Dataclasses and named tuples in forward too; and not where another forward was bound in the meantime."""
    first = start(tmp_path, "1")
    stored = [*NAMED, "the rank", "a model of transformers"]
    assert {what: first[what] for what in stored} == dict.fromkeys(stored, ADDED)
    assert first["a named tuple inside of a function"].startswith("not stored: the structure of the outputs cannot be")
    second = start(tmp_path, "2")
    assert {what: second[what] for what in stored} == dict.fromkeys(stored, FOUND)
    patched = start(tmp_path, "3", "patched")
    assert {what: patched[what] for what in stored} == {**dict.fromkeys(stored, FOUND), **dict.fromkeys(NAMED, ADDED)}


@torch._dynamo.assume_constant_result
def constant() -> float:
    return 2.0


class Constant(nn.Linear):
    """Keeps what a function returned while it was traced."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * constant()


@dataclass
class Given:
    """An argument with code of its own, which the model does not name."""

    x: torch.Tensor

    def halved(self) -> torch.Tensor:
        return self.x / 2


torch.export.register_dataclass(Given)


class Hidden(nn.Linear):
    """Calls a method of its argument."""

    def forward(self, x: Any) -> torch.Tensor:
        return super().forward(x.halved())


def test_why_a_program_is_not_stored(tmp_path: Path) -> None:
    def added(model: nn.Module, x: Any) -> str:
        program = shardc.compile(model, shardc.Mesh(dp=2), shardc.fsdp("dp"), backend="eager").lower(x)
        assert program.stored.startswith("not stored: only what a call")
        store = Store.of(tmp_path, program.key, shardc.Options())
        assert isinstance(store, Store)
        ops = {node.target for node in program.joint.stage_graphs["capture"].nodes if node.op == "call_function"}
        return store.add(program, program.guards.reads.reach(model), ops, ()).replace(str(tmp_path), "FOLDER")

    x = torch.empty(4, 4)
    assert re.fullmatch("added to FOLDER/[0-9a-f]{32}", added(nn.Linear(4, 4), x))
    kept = f"not stored: it keeps what {__name__}.constant returned as a constant"
    assert added(Constant(4, 4), x) == kept
    runs = r"not stored: it runs halved \(\S+test_starts.py:\d+\), which nothing that a start can look at names"
    assert re.fullmatch(runs, added(Hidden(4, 4), Given(x)))


def test_what_options_ask_for_is_not_stored(tmp_path: Path) -> None:
    module = shardc.compile(nn.Linear(4, 4), shardc.Mesh(dp=2), shardc.fsdp("dp"), backend="eager")
    program = module.lower(torch.empty(4, 4))
    options = shardc.Options(dump=tmp_path)
    said = Store.of(tmp_path, program.key, options)
    assert said == "Options(dump=...) asks for more than a stored program has"
