"""A program of another start is not one of other surroundings that its model reads."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.errors import CaptureError
from shardc.precompiled import Store
from tests.precompiled import surroundings


def start(folder: Path, *arguments: str) -> dict[str, str]:
    """One start: what is read -> what became of the program."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.precompiled.surroundings", str(folder), *arguments],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder)}, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    return {what: text.partition(" in ")[0].partition(" to ")[0] for what, text in said.items()}


@pytest.mark.slow
def test_each_that_is_read_is_in_the_key(tmp_path: Path) -> None:
    assert start(tmp_path) == dict.fromkeys(surroundings.READS, "added")
    assert start(tmp_path) == dict.fromkeys(surroundings.READS, "found")
    assert start(tmp_path, "other") == dict.fromkeys(surroundings.READS, "added")


def scaled(x: Tensor) -> Tensor:
    return x * 2


def scaled_back(ctx: Any, grad: Tensor) -> Tensor:
    return grad * 2


def op_of(backward: Callable[..., Any] | None = scaled_back, fake: Callable[..., Any] = torch.empty_like) -> Any:
    """An op of the user's; made again, it replaces the one before."""
    made = torch.library.custom_op("shardc_tests_stored::scaled", mutates_args=())(scaled)
    made.register_fake(lambda x: fake(x))
    if backward is not None:
        made.register_autograd(backward)
    return made


class Net(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.shardc_tests_stored.scaled(super().forward(x))
        return y


class Bound(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = OP(super().forward(x))
        return y


OP = op_of()


@pytest.mark.parametrize("kind", [Net, Bound])
def test_an_op_of_the_users_is_stored_with_its_functions(
    kind: type[nn.Linear], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as it has a rule, and that no code of its own: other programs may not call it."""
    monkeypatch.setattr(f"{__name__}.OP", op_of())
    shardc.register_rule("shardc_tests_stored::scaled", "i j -> i j")
    model = kind(4, 4)
    program = shardc.compile(model, shardc.Mesh(dp=2), shardc.fsdp("dp"), backend="eager").lower(torch.empty(4, 4))

    def store() -> Store:
        found = Store.of(tmp_path, program.key, shardc.Options())
        assert isinstance(found, Store)
        return found

    def is_found() -> bool:
        return store().find(model, None, lambda: program) is not None

    ops = {node.target for node in program.joint.stage_graphs["capture"].nodes if node.op == "call_function"}
    assert store().add(program, program.guards.reads.reach(model), ops, ()).startswith("added")
    assert is_found()
    monkeypatch.setattr(f"{__name__}.OP", op_of(backward=lambda ctx, grad: grad * 3))
    assert not is_found()
    monkeypatch.setattr(f"{__name__}.OP", op_of(fake=torch.zeros_like))
    assert not is_found()
    monkeypatch.setattr(f"{__name__}.OP", op_of())
    assert is_found()
    shardc.register_rule("shardc_tests_stored::scaled", "i j -> i j", linear="0")
    assert not is_found()
    shardc.register_rule("shardc_tests_stored::scaled", "i j -> i j", localize=lambda local: local.same())
    said = store().add(program, program.guards.reads.reach(model), ops, ())
    assert re.match("not stored: it calls shardc_tests_stored.scaled.default, an op of the user's", said)


class Draws(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.randint(0, 3)


def test_a_random_number_of_pythons_is_refused() -> None:
    """A program would keep the first."""
    module = shardc.compile(Draws(4, 4), shardc.Mesh(dp=2), shardc.fsdp("dp"), backend="eager")
    with pytest.raises(CaptureError, match=rf"random number of Python's(.|\n)*{__file__}:\d+(.|\n)*torch.randint"):
        module.lower(torch.empty(4, 4))
