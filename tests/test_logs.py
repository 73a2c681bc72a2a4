"""What is logged: why a call compiles, the seconds of its stages, its collectives, and warnings; and the switch."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import shardc
from shardc import logs
from shardc.errors import InputError, ShardcWarning
from shardc.lower import log_collectives


class Scaled(nn.Module):
    """A linear layer with a number that forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.scale = nn.Linear(8, 8), 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) * self.scale


def messages(caplog: pytest.LogCaptureFixture, topic: str) -> list[str]:
    taken = [record.getMessage() for record in caplog.records if record.name == f"shardc.{topic}"]
    caplog.clear()
    return taken


def test_misses_have_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    module = shardc.compile(Scaled(), shardc.Mesh(dp=2), shardc.fsdp("dp"))

    def lowered(*args: torch.Tensor) -> str:
        module.lower(*args)
        return messages(caplog, "cache")[0]

    with caplog.at_level(logging.INFO, logger="shardc.cache"):
        assert lowered(torch.empty(4, 8)) == "miss: the first call"
        assert lowered(torch.empty(4, 8)) == "hit: x"
        assert lowered(torch.empty(6, 8)) == "miss: x is float32[6, 8] and was float32[4, 8]"
        module.eval()
        assert lowered(torch.empty(6, 8)) == "miss: train or eval mode of 2 modules changed"
        module.scale = 3.0
        assert lowered(torch.empty(6, 8)) == "miss: model.scale is float 3.0 and was float 2.0"
        with torch.autocast("cpu"):
            assert "autocast is" in lowered(torch.empty(6, 8))


def test_stages_buckets_and_warnings(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="shardc"):
        program = shardc.compile(Scaled(), shardc.Mesh(dp=2), shardc.fsdp("dp")).lower(torch.empty(4, 8))
        halves = program.step()
        lines = messages(caplog, "stages")
        assert all(re.fullmatch(r"[\w, -]+: \d+\.\d{3} s", line) for line in lines)
        names = [line.partition(":")[0] for line in lines]
        passes = program.pipeline.names
        assert set(names) >= {"capture", "min-cut", "program", f"passes, {passes[0]}", f"passes, {passes[-1]}"}
        log_collectives(halves)
        assert messages(caplog, "buckets") == [
            "forward: 1 x all_gather over dp of 2 tensors, 144 to 144 B a rank",
            "backward: 1 x reduce_scatter over dp of 2 tensors, 288 to 288 B a rank",
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.warn("something costs", ShardcWarning, stacklevel=1)
        assert messages(caplog, "warnings") == ["something costs"]


def test_unknown_topics_raise() -> None:
    with pytest.raises(InputError) as raised:
        logs.configure("cach")
    assert str(raised.value) == "SHARDC_LOGS=cach: there is no topic 'cach'\n  fix: did you mean 'cache'?"


@pytest.mark.slow
@pytest.mark.parametrize(("switch", "topics"), [("", set()), ("cache", {"cache"}), ("all", {"cache", "stages"})])
def test_the_switch(switch: str, topics: set[str]) -> None:
    code = (
        "import shardc, torch; m = torch.nn.Linear(8, 8);"
        "shardc.compile(m, shardc.Mesh(dp=2), shardc.fsdp('dp')).lower(torch.empty(4, 8))"
    )
    environ = {**os.environ, "SHARDC_LOGS": switch, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert set(re.findall(r"^shardc\.(\w+): ", done.stderr, re.MULTILINE)) == topics
