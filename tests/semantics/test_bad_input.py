"""Every bad input gives an error of shardc's own that names it; nothing is changed before."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc.errors import ShardcError
from tests.ranks import run_ranks
from tests.semantics import bad_calls, bad_input
from tests.semantics.bad_input import X

TABLES = {
    name: getattr(tables, name)
    for tables, names in (
        (bad_input, ("COMPILE", "OPTIONS", "MESHES", "PLANS")),
        (bad_calls, ("CALLS", "LOSSES", "STATE", "RULES")),
    )
    for name in names
}


def check(do: Callable[..., object], error: Any, said: str, *given: Any) -> None:
    with pytest.raises(ShardcError) as caught:
        do(*given)
    assert isinstance(caught.value, error), f"{type(caught.value).__name__}: {caught.value}"
    assert re.search(said, str(caught.value)), str(caught.value)
    assert len(caught.value.what) < 1500


@pytest.mark.parametrize(("table", "what"), [(table, what) for table in TABLES for what in TABLES[table]])
def test_it_is_named(table: str, what: str) -> None:
    check(*TABLES[table][what])


@pytest.mark.parametrize("what", bad_input.FILES)
def test_a_file_is_named(what: str, tmp_path: Path) -> None:
    check(*bad_input.FILES[what], tmp_path)


# --- on ranks: what all of them pass, and what the last one alone does

PASSED: dict[str, tuple[Any, ...]] = {
    "nothing": (),
    "one too many": (X, X),
    "None": (None,),
    "a number": (3,),
    "text": ("x",),
    "a list": ([1.0],),
    "an array of numpy": (np.zeros((8, 8)),),
    "too narrow": (torch.rand(8, 7),),
    "of three dims, too narrow": (torch.rand(8, 2, 7),),
    "no dims": (torch.tensor(1.0),),
    "of one dim": (torch.rand(7),),
    "of float64": (X.double(),),
    "of bfloat16": (X.bfloat16(),),
    "of integers": (X.long(),),
    "of bools": (X > 0,),
    "complex": (X.to(torch.complex64),),
    "sparse": (X.to_sparse(),),
    "sparse rows": (X.to_sparse_csr(),),
    "quantised": (torch.quantize_per_tensor(X, 0.1, 0, torch.qint8),),
    "without values": (X.to("meta"),),
    "without rows, too narrow": (torch.rand(0, 7),),
}
# Where a rank alone cannot even say what it passes it raises by itself, as for any other error of its own.
UNSAID = ("nothing", "one too many", "None", "a number", "text", "a list", "an array of numpy", "sparse", "sparse rows",
          "quantised", "without values")  # fmt: skip


def passed_on_ranks(who: str) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    wrong = []
    for what, arguments in PASSED.items():
        if who == "one" and what in UNSAID:
            continue
        torch.manual_seed(0)
        module = shardc.compile(bad_input.Mlp(), mesh, shardc.fsdp("dp"), backend="eager")
        start = time.monotonic()
        try:
            module(*(arguments if who == "all" or dist.get_rank() == 1 else (X,)))
            wrong.append(f"{what}: no error")
        except ShardcError as error:
            if len(error.what) > 1500 or time.monotonic() - start > 60:
                wrong.append(f"{what}: {time.monotonic() - start:.0f} s, {error.what[:200]}")
        except Exception as error:
            wrong.append(f"{what}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)


def test_what_ranks_pass() -> None:
    run_ranks(2, partial(passed_on_ranks, "all"), partial(passed_on_ranks, "one"))
