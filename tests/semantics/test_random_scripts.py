"""Random training scripts, store on, second starts with another forward bound: as on one device, or refused."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.semantics.random_scripts import script, verdict

PER_PART = 50
REFUSED = 0.1  # the share of scripts that may be refused where one device runs them
TIMEOUT = timedelta(seconds=20)


def check(folder: Path, seed: int, other: bool, backend: str) -> None:
    """Runs the script of ``seed`` on the ranks of this group, with a store in ``folder``; notes what comes of it."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    torch._dynamo.reset()
    drafted = script(seed, dist.get_world_size(), folder)
    what = verdict(drafted, backend, other)
    listing = "" if what in (None, "refused") else f"\n{drafted}"
    (folder / f"{seed} {other} rank {dist.get_rank()}").write_text(f"{what}{listing}")


def run(folder: Path, ranks: int, seeds: range, starts: Sequence[bool] = (False, True), backend: str = "eager") -> None:
    """Runs scripts in one start of ``ranks`` processes, and asserts that they are right, few of them by refusal.

    Args:
        starts: how often each script is compiled; whether its other forward is bound.
    """
    checks = [partial(check, folder, seed, other, backend) for seed in seeds for other in starts]
    run_ranks(ranks, *checks, programs=folder / "programs", timeout=TIMEOUT)
    verdicts = {path.name: path.read_text() for path in folder.glob("* rank *")}
    assert len(verdicts) == len(checks) * ranks
    wrong = [f"{name}: {what}" for name, what in sorted(verdicts.items()) if what not in ("None", "refused")]
    assert not wrong, "\n\n".join(wrong)
    refused = list(verdicts.values()).count("refused")
    assert refused <= 2 * ranks + REFUSED * len(verdicts), f"{refused} of {len(verdicts)} are refused"
    for name in verdicts:
        (folder / name).unlink()


def test_some_scripts(tmp_path: Path) -> None:
    run(tmp_path, 2, range(4))
    run(tmp_path, 2, range(4))  # a second start, in processes of its own


@pytest.mark.skipif("SEED" not in os.environ, reason="SEED=17 RANKS=2 runs the script of that seed")
def test_one_script(tmp_path: Path) -> None:
    seed = int(os.environ["SEED"])
    run(tmp_path, int(os.environ.get("RANKS", 2)), range(seed, seed + 1))


@pytest.mark.long
@pytest.mark.parametrize("part", range(34))
def test_on_one_rank(part: int, tmp_path: Path) -> None:
    run(tmp_path, 1, range(PER_PART * part, PER_PART * (part + 1)))


@pytest.mark.long
@pytest.mark.parametrize("part", range(6))
@pytest.mark.parametrize("ranks", [2, 3])
def test_on_ranks(ranks: int, part: int, tmp_path: Path) -> None:
    seeds = range(10_000 * ranks + 25 * part, 10_000 * ranks + 25 * (part + 1))
    run(tmp_path, ranks, seeds, [False])
    run(tmp_path, ranks, seeds, [True, False])  # another start


@pytest.mark.long
def test_through_inductor(tmp_path: Path) -> None:
    run(tmp_path, 2, range(50_000, 50_010), backend="inductor")
