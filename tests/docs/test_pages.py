"""Every code block of the documentation runs, and prints what the page shows behind it."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState

from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]
PAGES = sorted(path for path in (ROOT / "docs").glob("*.md") if "```" in path.read_text())
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_there_are_pages() -> None:
    names = {
        "accelerators.md",
        "auto.md",
        "experts.md",
        "extending.md",
        "sequence.md",
        "troubleshooting.md",
        "coming_from.md",
        "plans.md",
        "looking.md",
        "training.md",
        "rules.md",
        "passes.md",
    }
    assert names <= {page.name for page in PAGES}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The environment that torchrun gives a world of one rank; a page that leaves its world behind is wrong."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    left = dist.is_initialized()
    if left:
        dist.destroy_process_group()
    assert not left, "the page leaves a process group behind"


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.slow] if page.stem == "auto" else []) for page in PAGES],
    ids=lambda page: page.stem,
)
def test_python_blocks_run_and_print_what_is_shown(page: Path, alone: None) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    text, printed = page.read_text(), ""
    blocks = list(BLOCK.finditer(text))
    assert blocks
    for block in blocks:
        kind, body = block[1], block[2]
        if kind == "python":
            line = text[: block.start(2)].count("\n")
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile("\n" * line + body, str(page), "exec"), names)
            printed = out.getvalue()
        elif kind == "text":
            if os.environ.get("SHARDC_UPDATE_GOLDEN") == "1":
                page.write_text(page.read_text().replace(block[0], f"```text\n{printed.rstrip()}\n```", 1))
            else:
                assert printed.rstrip() == body.rstrip()


def both_sides() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    page = ROOT / "docs" / "coming_from.md"
    group = mock.patch.multiple(dist, init_process_group=mock.DEFAULT, destroy_process_group=mock.DEFAULT)
    with group, contextlib.redirect_stdout(io.StringIO()):
        for kind, body in BLOCK.findall(page.read_text()):
            if kind == "python":
                exec(compile(body, str(page), "exec"), names)


def test_torch_and_shardc_agree_on_two_ranks() -> None:
    """The blocks of coming_from.md compare parameters and gradients of both sides."""
    run_ranks(2, both_sides)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_run(page: Path) -> None:
    for kind, body in BLOCK.findall(page.read_text()):
        for line in body.splitlines() if kind == "sh" else []:
            program, *arguments = shlex.split(line)
            assert program == ".venv/bin/python", line
            done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600)
            assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
            assert done.stdout.strip(), line
