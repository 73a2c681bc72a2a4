"""Inputs that several ranks must pass the same: they are compared, and every rank raises where they differ."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardc
from shardc.errors import MeshError
from tests.ranks import run_ranks

TP = {"up.weight": ("tp", None), "up.bias": ("tp",), "down.weight": (None, "tp")}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: Any = 1.0) -> Tensor:
        hidden = self.up(x.to(self.up.weight.dtype).nan_to_num()).relu()
        if mask is not None:
            hidden = hidden * mask.to(hidden.dtype)
        return self.down(hidden) * scale


def compiled(mesh: dict[str, int], inputs: Any = None, **options: Any) -> Any:
    device_mesh = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    plan = shardc.Plan(params=TP if "tp" in mesh else None, inputs=inputs)
    plan = (shardc.fsdp("dp") | plan) if "dp" in mesh else plan
    return shardc.compile(Model(), device_mesh, plan, backend="eager", **options)


def loss(out: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(out, target)


def raises(call: Callable[[], Any], what: str, *fix: str) -> None:
    with pytest.raises(MeshError) as caught:
        call()
    assert caught.value.what == what, caught.value.what
    assert all(text in (caught.value.fix or "") for text in fix), caught.value.fix


OTHER = "input {!r} has other values on rank 1 than on rank 0; these differ along tp, and it is {}"


def own_batch() -> None:
    """Each rank of tp draws its own batch; the next call, of the same batch, goes on."""
    module = compiled({"tp": 2})
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    raises(lambda: module(x), OTHER.format("x", "whole on every rank"), "the same data", "inputs={'x': ...}")
    module(torch.ones(8, 4)).sum().backward()


def own_value_of(what: str) -> None:
    """One of several inputs differs: by position, by keyword, a target of the loss, a tensor without dims."""
    module = compiled({"tp": 2}, loss=loss if what == "target" else None)
    given: dict[str, Any] = {"x": torch.ones(8, 4), "mask": torch.ones(8, 8), "scale": torch.tensor(2.0)}
    target = torch.zeros(8, 4)
    (target if what == "target" else given[what]).add_(dist.get_rank())
    args = (*given.values(), target) if what == "target" else (given.pop("x"),)
    name = OTHER.format(what, "whole on every rank")
    raises(lambda: module(*args, **({} if what == "target" else given)), name)


def own_kind(dtype: torch.dtype) -> None:
    """Of any dtype; one element differs."""
    module = compiled({"tp": 2})
    x = torch.ones(7, 4).to(dtype)
    module(x)
    if dist.get_rank() == 1:
        x[6, 3] = 0
    raises(lambda: module(x), OTHER.format("x", "whole on every rank"))


def same_values() -> None:
    """What is not a number equals itself; strides do not matter; nothing to compare in what is empty."""
    module = compiled({"tp": 2})
    x = torch.full((4, 8), float("nan")) if dist.get_rank() else torch.full((8, 4), float("nan")).t()
    for given in (x.t(), x.t(), torch.ones(0, 4), torch.ones(4).expand(8, 4)):
        module(given)


def later() -> None:
    """At a later call too, of those at which ranks compare: the 4th, 8th and so on."""
    module = compiled({"tp": 2})
    x = torch.ones(8, 4)
    for _ in range(4):
        module(x).sum().backward()
    with pytest.raises(MeshError, match="other values on rank 1"):
        for _ in range(4):
            module(x + dist.get_rank()).sum().backward()


def a_dtensor() -> None:
    """It says itself where ranks hold the same."""
    module = compiled({"tp": 2})
    x, mesh = torch.ones(8, 4) + dist.get_rank(), module.shardc.spec.device_mesh
    module(DTensor.from_local(x[:4], mesh, [Shard(0)], run_check=False))
    held = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    raises(lambda: module(held), OTHER.format("x", "whole on every rank"))


def constants() -> None:
    module = compiled({"tp": 2})
    text = "ranks differ at a call of Model (module 1 of the mesh), in input 'scale': rank 0 has 2.0, rank 1 has 3.0"
    raises(lambda: module(torch.ones(8, 4), scale=2.0 + dist.get_rank()), text, "pass the same arguments")


def uneven() -> None:
    """Ranks of dp pass other numbers of rows, which those of tp share."""
    module = compiled({"dp": 2, "tp": 2}, loss=loss, options=shardc.Options(uneven=True))
    dp, tp = divmod(dist.get_rank(), 2)
    x = torch.ones(2 + dp, 4)
    module(x, x + dp)
    what = "input 'target' has other values on rank 3 than on rank 2; these differ along tp, and it is split over dp"
    raises(lambda: module(x, x + dp * tp), what)


def on_both_axes() -> None:
    """A batch that is split over dp is the same along tp."""
    module, rank = compiled({"dp": 2, "tp": 2}), dist.get_rank()
    for _ in range(3):
        module(torch.ones(4, 4) + rank // 2).sum().backward()
    x = torch.ones(4, 4) + rank // 2
    x[3, 3] += rank == 3
    raises(
        lambda: module(x),
        "input 'x' has other values on rank 3 than on rank 2; these differ along tp, and it is split over dp",
        "num_replicas=2",
        'rank=mesh.get_local_rank("dp")',
    )
    other = compiled({"dp": 2, "tp": 2}, inputs={"mask": "_, _"})
    x, mask = torch.ones(4, 4), torch.ones(1, 8) * (1 + (rank == 2))
    raises(
        lambda: other(x, mask),
        "input 'mask' has other values on rank 2 than on rank 0; these differ along dp, and it is whole on every rank",
    )


def seldom() -> None:
    """Few calls compare, by a count that all ranks share; calls that are split over all ranks never do."""
    for module, expected in ((compiled({"tp": 2}), [1, 2, 3, 4, 8, 16, 32]), (compiled({"dp": 2}), [])):
        consistency = module.shardc.spec.groups.consistency
        exchange, acts = consistency.exchange, []

        def noted(act: Any, *args: Any, exchange: Any = exchange, acts: Any = acts) -> Any:
            acts.append(act.lines[0][1])
            return exchange(act, *args)

        consistency.exchange, at = noted, []
        for call in range(1, 41):
            before = sum("inputs" in act for act in acts)
            module(torch.ones(8, 4)).sum().backward()
            at += [call] * (sum("inputs" in act for act in acts) - before)
        assert at == expected, at


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.int64], ids=str)
def test_fingerprints_tell_one_element(dtype: torch.dtype) -> None:
    from shardc.runtime.shards import fingerprint

    x = torch.ones(7, 4).to(dtype)
    other = x.clone()
    other[6, 3] = 0
    assert fingerprint(x) == fingerprint(x.t().contiguous().t()) != fingerprint(other)


@pytest.mark.slow
def test_two_ranks() -> None:
    run_ranks(
        2,
        own_batch,
        *(partial(own_value_of, what) for what in ("x", "mask", "scale", "target")),
        *(partial(own_kind, dtype) for dtype in (torch.bfloat16, torch.bool, torch.int64)),
        same_values,
        later,
        a_dtensor,
        constants,
        seldom,
    )


@pytest.mark.slow
def test_four_ranks() -> None:
    run_ranks(4, on_both_axes, uneven)
