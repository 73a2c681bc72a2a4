"""Whose code is told by a version; which programs stay in the store, and who makes one while others wait."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Event

import pytest
import torch
from torch import nn

import shardc
from shardc.ir import code
from shardc.precompiled import store


@pytest.mark.parametrize("near", code.VERSIONED_ROOTS)
def test_packages_beside_those_that_have_versions(near: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``torchvision`` is not torch, though its folder's name begins like torch's."""
    monkeypatch.setattr(code, "VERSIONED_ROOTS", [tmp_path / near.name, *code.VERSIONED_ROOTS])
    code.versioned_path.cache_clear()
    try:
        files = [
            tmp_path / name / "net.py" for name in (near.name, f"{near.name}zoo", f"{near.name}/site-packages/zoo")
        ]
        assert [code.is_versioned(compile("", str(file), "exec")) for file in files] == [True, False, False]
    finally:
        code.versioned_path.cache_clear()


def test_the_programs_that_were_used_last_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of other models too, so that the folder does not grow with each change of a model's code."""
    monkeypatch.setattr(store, "KEPT", 2)
    model = nn.Linear(4, 4)
    plan = shardc.fsdp("dp")
    program = shardc.compile(model, shardc.Mesh(dp=2), plan, backend="eager").lower(torch.empty(4, 4))
    stores = [
        store.Store.of(tmp_path, replace(program.key, options=f"size {size}"), shardc.Options()) for size in (1, 2, 3)
    ]
    for at, each in enumerate(stores):
        assert isinstance(each, store.Store)
        each.add(program, program.guards.reads.reach(model), (), ())
        for path in each.folder.glob(f"*/{store.MADE}"):
            os.utime(path, (at, at))  # they are as old as they come
        if at == 1:
            assert stores[0].find(model, None, lambda: program) is not None
    assert [each.find(model, None, lambda: program) is not None for each in stores] == [True, False, True]


def in_turn(folder: Path, adds: bool, waits: bool = True) -> list[str]:
    """What happens where two processes of a machine need a program, and the first that has the turn adds it or not.

    Threads stand for them: a lock is of a file that each opens for itself.
    """
    said: list[str] = []
    begun, may_end = Event(), Event()

    def maker() -> None:
        with store.Store(folder).turn():
            begun.set()
            assert may_end.wait(30)
            said.append("made")
            if adds:
                (folder / "program").mkdir()

    def other() -> None:
        assert begun.wait(30)
        with store.Store(folder).turn():
            said.append("found" if (folder / "program").exists() else "nothing found")
        may_end.set()

    with ThreadPoolExecutor() as pool:
        both = [pool.submit(maker), pool.submit(other)]
        assert begun.wait(30)
        may_end.wait(0.5 if waits else 30)  # who does not wait gets through
        may_end.set()
        for each in both:
            each.result()
    return said


def test_who_waited_finds_what_was_made(tmp_path: Path) -> None:
    assert in_turn(tmp_path / "call", adds=True) == ["made", "found"]


def test_nobody_waits_for_a_program_that_no_start_could_add(tmp_path: Path) -> None:
    assert in_turn(tmp_path / "call", adds=False) == ["made", "nothing found"]
    assert in_turn(tmp_path / "call", adds=False, waits=False) == ["nothing found", "made"]


def test_after_a_failure_the_next_try_is_as_the_first(tmp_path: Path) -> None:
    with pytest.raises(ValueError), store.Store(tmp_path / "call").turn():
        raise ValueError
    assert in_turn(tmp_path / "call", adds=True) == ["made", "found"]


def test_where_nothing_can_be_locked_each_makes_its_own(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert in_turn(tmp_path / "file" / "call", adds=False, waits=False) == ["nothing found", "made"]


def test_who_waited_in_vain_keeps_nobody_waiting(tmp_path: Path) -> None:
    """Three need a program, and the first fails: the others make it side by side."""
    begun, both = Event(), Barrier(2)

    def first() -> None:
        with store.Store(tmp_path).turn():
            begun.set()
            Event().wait(0.3)
            raise ValueError

    def other() -> None:
        assert begun.wait(30)
        with store.Store(tmp_path).turn():
            both.wait(30)

    with ThreadPoolExecutor() as pool:
        failing, *others = [pool.submit(first), pool.submit(other), pool.submit(other)]
        for each in others:
            each.result()
        assert isinstance(failing.exception(), ValueError)
