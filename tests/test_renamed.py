"""Names of earlier versions raise, and the text has the new one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import shardc
from shardc.errors import ShardcError


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (lambda: shardc.Options(chooser="exact"), "layout_solver"),
        (lambda: shardc.Options(direct=True), "p2p_collectives"),
        (lambda: shardc.Options(comm="none"), "skip_comm"),
        (lambda: shardc.Options(lower_by="blocks"), "compile_regions"),
        (lambda: shardc.Options(store=False), "program_cache"),
        (lambda: shardc.ep("ep", "*.experts", way="send"), "dispatch"),
        (lambda: shardc.ep("ep", "*.experts", bound=1.5), "capacity"),
        (lambda: shardc.cp("cp", method="heads"), "ulysses"),
        (lambda: program().graph("settle"), "hoist_grad_epilogue"),
    ],
)
def test_an_old_name(old: Callable[[], object], new: str) -> None:
    with pytest.raises(ShardcError, match=f"['\"]{new}['\"]"):
        old()


def program() -> shardc.Program:
    module = shardc.compile(torch.nn.Linear(4, 4), shardc.Mesh(dp=2), shardc.fsdp("dp"))
    return module.lower(torch.empty(4, 4))


def test_an_old_name_of_the_package() -> None:
    with pytest.raises(AttributeError, match="shardc.Found is called shardc.SearchResult now"):
        _ = shardc.Found
    with pytest.raises(AttributeError, match="module 'shardc' has no attribute 'lost'"):
        _ = shardc.lost
