"""Programs without communication, for timing: the same shapes, no collective, and a warning that says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import shardc
from shardc import Mesh, Options, fsdp, tp
from shardc.errors import InputError, ShardcWarning
from shardc.ir import graph as ir
from shardc.ir.comm_volume import collective_kind


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 5)).double()


def program(skip: Any, direct: bool, bucket: int) -> shardc.Program:
    plan = fsdp("dp") | tp("tp", colwise=["0"], rowwise=["2"])
    options = Options(skip_comm=skip, p2p_collectives=direct, bucket_size=bucket)
    module = shardc.compile(model(), Mesh(dp=2, tp=2), plan, loss=F.cross_entropy, backend="eager", options=options)
    return module.lower(torch.empty(8, 8).double(), torch.empty(8, dtype=torch.long))


def shapes(half: fx.GraphModule) -> list[torch.Size]:
    """The shapes of the graph's results."""
    return [node.meta["val"].shape for node in ir.output_node(half.graph).args[0] if isinstance(node, fx.Node)]


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("bucket", [0, -1])
def test_the_same_shapes_and_no_collective(direct: bool, bucket: int) -> None:
    real = program(False, direct, bucket)
    with pytest.warns(ShardcWarning, match="WRONG"):
        silent = program(True, direct, bucket)
    for name in ("forward", "backward", "inference"):
        one, other = getattr(real, name), getattr(silent, name)
        assert any(collective_kind(node) for node in one.graph.nodes)
        assert not any(collective_kind(node) for node in other.graph.nodes)
        feed = [
            torch.zeros(val.shape, dtype=val.dtype) for val in (n.meta["val"] for n in ir.placeholders(other.graph))
        ]
        ran = [x.shape for x in other(*feed) if x is not None]
        assert shapes(one) == shapes(other) == ran


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize(("what", "gone"), [("gather", {"all_gather"}), ("reduce", {"reduce_scatter", "all_reduce"})])
def test_one_kind_alone(direct: bool, what: str, gone: set[str]) -> None:
    real = program(False, direct, 0)
    with pytest.warns(ShardcWarning, match=rf"skip_comm=\('{what}',\): .* WRONG"):
        silent = program((what,), direct, 0)
    for name in ("forward", "backward", "inference"):
        one, other = ([collective_kind(n) for n in getattr(p, name).graph.nodes] for p in (real, silent))
        one, other = ([kind for kind in kinds if kind is not None] for kinds in (one, other))
        assert [kind for kind in one if kind not in gone] == other
        assert shapes(getattr(real, name)) == shapes(getattr(silent, name))
    assert any(kind in gone for kind in one)


def test_an_unknown_kind() -> None:
    with pytest.raises(InputError, match="skip_comm is 'off', not True or False or a list"):
        Options(skip_comm="off")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"skip_comm\[0\] is 'gathers', not 'gather' or 'reduce'"):
        Options(skip_comm=("gathers",))  # type: ignore[arg-type]
