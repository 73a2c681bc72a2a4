"""Files of shards: a rank that reads another one's is told so, by torch.load, and nothing is loaded."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardc
from shardc.errors import LayoutError
from tests.ranks import run_ranks


def trained(plan: Any, sizes: dict[str, int]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    module = shardc.compile(nn.Linear(4, 8), mesh, plan, loss=F.mse_loss, backend="eager")
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(2, 4), torch.zeros(2, 8)).backward()
    optimizer.step()
    return module, optimizer


def saved(folder: Path) -> None:
    """Each rank saves its own; for the next starts too."""
    module, optimizer = trained(shardc.fsdp("dp"), {"dp": dist.get_world_size()})
    states = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(states, folder / f"rank{dist.get_rank()}.pt")
    torch.save(states["model"], folder / f"model{dist.get_rank()}.pt")
    whole = module.full_state_dict(rank0_only=True)
    if dist.get_rank() == 0:
        torch.save(whole, folder / "whole.pt")
    dist.barrier()


def of_the_first(folder: Path, weights_only: bool) -> None:
    saved(folder)
    module, optimizer = trained(shardc.fsdp("dp"), {"dp": 2})
    before = module.full_state_dict()
    for file in ("rank0.pt", "model0.pt"):
        if dist.get_rank() == 0:
            torch.load(folder / file, weights_only=weights_only)
            continue
        with pytest.raises(LayoutError, match="shard 0 of 2 along dp, and rank 1 has shard 1 of 2 along dp"):
            torch.load(folder / file, weights_only=weights_only)
    own = torch.load(folder / f"rank{dist.get_rank()}.pt", weights_only=weights_only)
    module.load_state_dict(own["model"])
    optimizer.load_state_dict(own["optimizer"])
    module.load_state_dict(torch.load(folder / "whole.pt"))
    module(torch.ones(2, 4), torch.zeros(2, 8)).backward()
    optimizer.step()
    assert before.keys() == module.full_state_dict().keys()


def by_more_ranks(folder: Path) -> None:
    """The file of a rank of a smaller world is no rank's own, but for the ranks that it is of."""
    if dist.get_rank() >= 2:
        with pytest.raises(LayoutError, match="has shard none"):
            torch.load(folder / "rank0.pt", weights_only=False)


def replicas_may(folder: Path) -> None:
    """What ranks hold alike may be read from one of them."""
    module, _ = trained(shardc.ddp("dp"), {"dp": 2})
    if dist.get_rank() == 0:
        torch.save(module.state_dict(), folder / "ddp.pt")
    dist.barrier()
    module.load_state_dict(torch.load(folder / "ddp.pt"))
    module(torch.ones(2, 4), torch.zeros(2, 8))


def looked_at(folder: Path) -> None:
    """In a process without ranks, the shards can be looked at."""
    found = torch.load(folder / "model0.pt", weights_only=False)
    assert isinstance(found["weight"], DTensor) and found["weight"].shape == (8, 4)


def test_two_ranks(tmp_path: Path) -> None:
    run_ranks(
        2,
        partial(of_the_first, tmp_path, True),
        partial(of_the_first, tmp_path, False),
        partial(replicas_may, tmp_path),
    )


@pytest.mark.slow
def test_another_world(tmp_path: Path) -> None:
    run_ranks(2, partial(saved, tmp_path))
    run_ranks(3, partial(by_more_ranks, tmp_path))
