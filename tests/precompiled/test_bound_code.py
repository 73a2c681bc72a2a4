"""A program is one of the code that is bound where it was traced: other code is another program, whatever the files."""

from __future__ import annotations

import builtins
import math
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardc
from shardc.ir.reach import reach
from shardc.precompiled.program_key import described
from shardc.program import Program
from tests.precompiled.bound_code import OTHER_CODE, SAME_CODE, SOURCE

NAME = "shardc_bound_code"
OPEN = (nn.Linear, nn.LayerNorm, F, torch.Tensor, math, builtins)  # which changes write into


def model_of(source: str, file: str = "bound_code.py") -> Any:
    """What a start that imports ``source`` has."""
    made: Any = types.ModuleType(NAME)
    sys.modules[NAME] = made
    exec(compile(source, file, "exec"), vars(made))
    torch.manual_seed(0)
    return made.Net(), made.loss


def changed(change: tuple[str, str] | str) -> str:
    if isinstance(change, str):
        return f"{SOURCE}\n{change}\n"
    before, after = change
    assert SOURCE.count(before) >= 1, before
    return SOURCE.replace(before, after, 1)


@pytest.fixture(scope="module")
def program() -> Program:
    """What the first start compiled."""
    model, loss = model_of(SOURCE)
    module = shardc.compile(model, shardc.Mesh(dp=2), shardc.fsdp("dp"), loss=loss, backend="eager")
    made: Program = module.lower(torch.empty(4, 4))
    return made


@pytest.fixture
def as_it_was() -> Iterator[None]:
    """Puts back what a change writes into torch and Python."""
    before = [(where, dict(vars(where))) for where in OPEN]
    yield
    for where, held in before:
        for name in [*vars(where)]:
            if name not in held:
                delattr(where, name)
            elif vars(where)[name] is not held[name]:
                setattr(where, name, held[name])


def is_found(program: Program, model: nn.Module, loss: Any) -> bool:
    """As `shardc.precompiled.store.Store.find` compares."""
    return not program.guards.unlike(model, loss) and described(model, loss) == program.key.model


def test_all_that_was_traced_is_named(program: Program) -> None:
    reached = program.guards.reads.reach(*model_of(SOURCE))
    assert [where for does, where in program.guards.reads.traced if does not in reached.code_hashes] == []


@pytest.mark.usefixtures("as_it_was")
@pytest.mark.parametrize("what", OTHER_CODE)
def test_other_code_is_another_program(what: str, program: Program) -> None:
    source = changed(OTHER_CODE[what])
    model, loss = model_of(source)
    assert not is_found(program, model, loss)


@pytest.mark.usefixtures("as_it_was")
@pytest.mark.parametrize("what", SAME_CODE)
def test_the_same_code_is_found(what: str, program: Program) -> None:
    model, loss = model_of(changed(SAME_CODE[what]), "elsewhere/bound_code.py")
    assert is_found(program, model, loss)


def test_a_function_of_torch_is_the_same_after_its_first_call() -> None:
    """When a start has called ``checkpoint``, torch keeps a wrapper on it; the next start looks before its call."""

    class Net(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    vars(checkpoint.__wrapped__).pop("__dynamo_disable", None)  # type: ignore[attr-defined]
    before, after = Net(4, 4), Net(4, 4)
    digest = reach(before, None).digest
    after(torch.ones(1, 4))
    assert "__dynamo_disable" in vars(checkpoint.__wrapped__)  # type: ignore[attr-defined]
    assert reach(after, None).digest == digest


class Decorated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * 2


class Calls(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Decorated.apply(super().forward(x)).mean()  # type: ignore[no-any-return]


def test_a_backward_that_torch_wraps_is_named() -> None:
    model = Calls(4, 4)
    module = shardc.compile(model, shardc.Mesh(dp=2), shardc.fsdp("dp"), backend="eager")
    reads = module.lower(torch.empty(4, 4)).guards.reads
    hashes = reads.reach(model, None).code_hashes
    assert [where for does, where in reads.traced if does not in hashes] == []


def shown() -> str:
    """All that a start compares of a program that it has just captured."""
    model, loss = model_of(SOURCE)
    made = shardc.compile(model, shardc.Mesh(dp=2), shardc.fsdp("dp"), loss=loss, backend="eager").lower(
        torch.empty(4, 4)
    )
    return repr((made.guards.reads.traced[0][0], made.guards.values, sorted(made.guards.reached.items())))


@pytest.mark.slow
def test_another_process_sees_the_same(tmp_path: Path) -> None:
    """With another seed of hashes, elsewhere, with other modules imported before."""
    starts = [
        ({"PYTHONHASHSEED": "1"}, Path.cwd()),
        ({"PYTHONHASHSEED": "2", "OTHERS": "json xml.dom decimal torch.distributed.fsdp"}, tmp_path),
    ]
    texts = set()
    for environment, folder in starts:
        others = environment.get("OTHERS", "json").split()
        code = f"import {', '.join(others)}\nfrom tests.precompiled.test_bound_code import shown\nprint(shown())"
        paths = {"PYTHONPATH": str(Path(shardc.__file__).parents[1])}
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **paths, **environment}, cwd=folder,
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        texts.add(done.stdout)
    assert len(texts) == 1
