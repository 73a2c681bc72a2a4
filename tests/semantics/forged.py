"""Saved programs that somebody changed, with hashes that fit: what an attacker can write."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardc

Change = Callable[[dict[str, Any], Path], None]


class Net(nn.Module):
    """With a constant that is too large for a program's text, a named structure of results and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 2)
        self.table = torch.randn(9, 9)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, scale: float = 0.5) -> dict[str, Any]:
        self.seen.add_(1)
        out = self.down(self.up(x).relu()) * scale + self.table.sum()
        return {"out": out, "parts": (out.sum(), [x + 1])}


def model() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def use(folder: Path) -> Any:
    """A step of the program in ``folder``, on all ranks in one process."""
    module = shardc.compile(model(), shardc.Mesh(dp=2), shardc.fsdp("dp"), backend="eager", precompiled=folder)
    sim = shardc.Simulation(module)
    out = sim(torch.ones(4, 4), 0.5)["out"]
    assert len(module.shardc.programs) == 1, "the saved program was not used"
    return out


def saved(folder: Path) -> Path:
    module = shardc.compile(model(), shardc.Mesh(dp=2), shardc.fsdp("dp"), backend="eager")
    module.lower(torch.ones(4, 4), 0.5).save(folder)
    for path in folder.glob("[0-9]*.txt"):
        path.unlink()  # what the passes did, for people
    return folder


def forged(original: Path, to: Path, change: Change) -> Path:
    """A copy with ``change`` made, and the hashes of what is there then."""
    shutil.copytree(original, to, symlinks=True)
    record = json.loads((to / "program.json").read_text())
    change(record, to)
    sign(record, to)
    (to / "program.json").write_text(json.dumps(record))
    return to


def sign(record: dict[str, Any], folder: Path) -> None:
    for name in record["files"]:
        if (folder / name).is_file():
            record["files"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()


def with_line(line: str, half: str = "inference") -> Change:
    """``line`` in front of the outputs of a half."""

    def change(record: dict[str, Any], folder: Path) -> None:
        text = (folder / f"{half}.txt").read_text()
        assert "\noutputs:" in text
        (folder / f"{half}.txt").write_text(text.replace("\noutputs:", f"\n  {line}\noutputs:", 1))

    return change
